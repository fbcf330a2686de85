"""The loaded module's version and the services, on synthetic hosts."""

import errno
import os

import pytest
from msgspec.structs import replace

from agent.model.conditions import Condition, Status
from agent.model.facts import Absent, Broken, Driver, PciDevice, Seen, Unseen, UserSpace, VendorFacts
from agent.model.goal import Grant
from agent.model.handoff import FabricAnswer
from agent.vendors.host_vendor import FabricReport
from agent.vendors.nvidia.conditions import nvidia_conditions, remedies
from agent.vendors.nvidia.driver import FABRIC_UNIT, PERSISTENCE_UNIT, observe_driver, observe_module
from agent.vendors.nvidia.host import observe_nvidia
from agent.vendors.nvidia.places import HOST_CACHE
from tests.fakes.host import Host
from tests.fakes.user_space import sources

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\nGCC version: 14\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build  (x@y)  1\n"

NO_FILES = UserSpace(Absent("no driver"), ())


def test_the_modules_version(host: Host) -> None:
    """Of both flavours. sysfs comes first. Absent, broken and unseen are different facts."""
    assert isinstance(observe_module(host), Absent)
    host.file("/proc/driver/nvidia/version", "NVRM version: none\nGCC version: 14.2.0\n")
    assert isinstance(observe_module(host), Broken)
    for text, version in ((PROPRIETARY, "550.163.01"), (OPEN, "595.45.04")):
        host.file("/proc/driver/nvidia/version", text)
        assert observe_module(host) == version
    path = "/sys/module/nvidia/version"
    host.file(path, "580.178.04\n")
    assert observe_module(host) == "580.178.04"
    host.failing[path] = PermissionError(13, "Permission denied", path)
    assert isinstance(observe_module(host), Unseen)


def fabric(host: Host, unit: Seen[str]) -> Seen[str]:
    """Return what the host shows of the Fabric Manager, whose unit is in this state."""
    driver = observe_nvidia(replace(sources(host), units={FABRIC_UNIT: unit})).driver
    assert driver
    return driver.fabric


def daemons(
    fabric: Seen[str], persistence: Seen[str], gpus: tuple[str, ...] = (), answers: tuple[FabricAnswer, ...] = ()
) -> tuple[Condition, Condition]:
    """Return FabricReady and PersistenceMode."""
    facts = VendorFacts("nvidia", driver=Driver(Absent(""), NO_FILES, fabric, persistence))
    *_, ready, mode = nvidia_conditions(facts, Grant("nvidia", gpus), FabricReport(answers))
    return ready, mode


def test_only_with_nvswitch_the_fabric_managers_state_counts(host: Host) -> None:
    """The module makes its control node without hardware too, and Fabric Manager could do nothing for it."""
    host.driver("550.163.01", gpus=1)
    none = Absent("not installed")
    assert isinstance(fabric(host, "failed"), Absent)
    host.node("/dev/nvidia-nvswitchctl", 510, 255)
    assert isinstance(fabric(host, none), Absent)
    host.node("/dev/nvidia-nvswitch0", 510, 0)
    assert isinstance(fabric(host, none), Broken)
    host.remove_file("/dev/nvidia-nvswitch0")
    assert isinstance(host.pci, tuple)
    host.pci += (PciDevice("0000:80:00.0", 0x10DE, 0x068000, "nvidia-nvswitch"),)
    assert fabric(host, "failed") == "failed"
    assert isinstance(fabric(host, none), Broken)
    assert isinstance(fabric(host, Unseen("timeout")), Unseen)


def process(host: Host, pid: int, name: str, state: str = "S") -> None:
    """Add a process. The kernel cuts its name."""
    host.file(f"/proc/{pid}/comm", f"{name[:15]}\n")
    host.file(f"/proc/{pid}/stat", f"{pid} ({name[:15]}) {state} 1 1 1 0 -1 0\n")


@pytest.mark.parametrize("unit", [Absent("not installed"), Broken("masked")])
def test_a_fabric_manager_in_a_driver_container_counts(host: Host, unit: Absent | Broken) -> None:
    """The container's script starts it, and the host has no unit, or a masked one."""
    host.driver("550.163.01", gpus=1)
    process(host, 17, "nv-fabricmanager-start")
    process(host, 18, "nv-fabricmanager", "Z")
    host.make_directory("/proc/19")
    assert isinstance(fabric(host, unit), Absent), "without NVSwitch"
    host.node("/dev/nvidia-nvswitch0", 510, 0)
    process(host, 17, "nv-fabric (x) S")
    assert isinstance(fabric(host, unit), Broken), "it has ended"
    process(host, 20, "nv-fabricmanager")
    assert fabric(host, unit) == "running"
    assert fabric(host, "failed") == "failed"
    fabric_ready, persistence = daemons("running", "running")
    assert (fabric_ready.status, fabric_ready.reason) == (Status.TRUE, "FabricManagerActive")
    assert (persistence.status, persistence.reason) == (Status.TRUE, "DaemonActive")


def test_for_a_masked_daemon_the_message_says_how_to_unmask_it() -> None:
    masked = Broken("its unit is masked; run `systemctl unmask it`")
    fabric_ready, persistence = daemons(masked, masked)
    for condition, reason, unit in (
        (fabric_ready, "FabricManagerMissing", "nvidia-fabricmanager"),
        (persistence, "DaemonNotRunning", "nvidia-persistenced"),
    ):
        assert (condition.status, condition.reason) == (Status.FALSE, reason)
        assert condition.message.endswith(f"run `systemctl unmask it`; then run `systemctl enable --now {unit}`")


def test_a_daemon_that_is_not_installed_is_installed_first() -> None:
    """NVIDIA's installer brings no unit, and Debian has it in a package of its own."""
    missing = Absent("nvidia-persistenced.service is not installed")
    _, found = daemons(missing, missing)
    assert (found.status, found.reason) == (Status.FALSE, "DaemonNotRunning")
    assert found.message.startswith("nvidia-persistenced.service is not installed: ")
    assert "install nvidia-persistenced (Ubuntu: nvidia-compute-utils-BRANCH), then run `systemctl" in found.message
    facts = VendorFacts("nvidia", driver=Driver(Absent(""), NO_FILES, persistence=missing))
    lines = remedies(found.type, found.reason, facts, frozenset())
    assert lines[0].startswith("apt install nvidia-persistenced")
    assert not [line for line in lines if "unmask" in line]


@pytest.mark.parametrize("unit", [Absent("not installed"), Broken("masked")])
@pytest.mark.parametrize(("place", "counts"), [("GPU Operator's driver container", True), (HOST_CACHE, False)])
def test_a_persistence_daemon_in_a_driver_container_counts(
    host: Host, place: str, counts: bool, unit: Absent | Broken
) -> None:
    """Elsewhere, the host's packages have the unit, and not all processes need to be searched."""
    process(host, 20, "nvidia-persistenced")
    seen = replace(sources(host), units={PERSISTENCE_UNIT: unit})
    driver = observe_driver(seen, "550.163.01", replace(NO_FILES, place_name=place), ())
    assert (driver.persistence == "running") is counts


def adapter(host: Host, name: str, vpd: str | None) -> str:
    """Add an InfiniBand adapter, with a ConnectX-7's vital product data if any. Return the data's path."""
    device = f"/sys/devices/pci0000:00/0000:0{name[-1]}:00.0"
    host.make_directory(f"{device}/infiniband/{name}")
    host.symlink(f"/sys/class/infiniband/{name}", f"../../{device.removeprefix('/sys/')}/infiniband/{name}")
    host.symlink(f"{device}/infiniband/{name}/device", "../..")
    if vpd is not None:
        host.file(f"{device}/vpd", vpd)
    return f"/sys/class/infiniband/{name}/device/vpd"


def test_switches_of_the_fourth_generation_show_only_in_the_adapters_that_manage_them(host: Host) -> None:
    """As in an HGX B200. Its other adapters, for the network, are the same PCI devices."""
    host.driver("550.163.01", gpus=1)
    adapter(host, "mlx5_0", "NVIDIA ConnectX-7 \ufffd SN:MT2433 V2:MCX75310AAS-NEAT")
    adapter(host, "mlx5_1", None)
    assert isinstance(fabric(host, "failed"), Absent), "a Fabric Manager that failed is no evidence"
    adapter(host, "mlx5_2", "NVIDIA ConnectX-7 VA:MLX:MODL=C2:MN=MLNX:SMDL=SW_MNG:SKEY=1")
    assert fabric(host, "failed") == "failed"
    host.pci = ()
    assert isinstance(fabric(host, "failed"), Absent), "other GPUs need no Fabric Manager"


@pytest.mark.parametrize("error", [errno.EACCES, errno.ETIMEDOUT, errno.EIO, errno.ENODEV])
def test_an_adapter_that_cannot_be_read_is_no_evidence(host: Host, error: int) -> None:
    """Only root may read its data, and many hosts without NVSwitch have adapters."""
    host.driver("550.163.01", gpus=1)
    path = adapter(host, "mlx5_0", "")
    host.failing[path] = OSError(error, os.strerror(error), path)
    assert isinstance(fabric(host, "active"), Absent)
    del host.failing[path]
    adapter(host, "mlx5_1", "SMDL=SW_MNG")
    assert fabric(host, "active") == "active"


def test_adapters_are_read_once(host: Host) -> None:
    """Each takes milliseconds to answer."""
    host.driver("550.163.01", gpus=1)
    path = adapter(host, "mlx5_0", "SMDL=SW_MNG")
    for _ in range(3):
        assert fabric(host, "active") == "active"
        host.failing[path] = OSError(errno.EIO, "read again", path)
    adapter(host, "mlx5_1", "")
    assert isinstance(fabric(host, "active"), Absent), "another adapter: all are read again"


OFF, ON = ("False", "PersistenceDisabled"), ("True", "PersistenceEnabled")


@pytest.mark.parametrize(
    ("daemon", "said", "expected", "part"),
    [
        # Ubuntu's unit starts the daemon with --no-persistence-mode.
        ("active", ("Disabled", "Disabled"), OFF, "but not in persistence mode: 0000:01:00.0, 0000:02:00.0"),
        ("active", ("Enabled", "Disabled"), OFF, "but not in persistence mode: 0000:02:00.0;"),
        (Unseen("no answer"), ("Disabled", "Disabled"), OFF, "0000:01:00.0"),
        ("inactive", ("Disabled", "Disabled"), ("False", "DaemonNotRunning"), "unless somebody ran `nvidia-smi -pm 1`"),
        # Somebody ran `nvidia-smi -pm 1`.
        ("inactive", ("Enabled", "Enabled"), ON, "2 GPUs in persistence mode"),
        (Unseen("no answer"), ("Enabled", "Enabled"), ON, "2 GPUs"),
        ("active", ("Enabled", ""), ("True", "DaemonActive"), "; inferred: no answer from 0000:02:00.0"),
        ("active", ("N/A", "[N/A]"), ("True", "DaemonActive"), "inferred: no answer from 0000:01:00.0, 0000:02:00.0"),
        ("inactive", (), ("False", "DaemonNotRunning"), "; inferred: no answer from 0000:01:00.0"),
    ],
)
def test_the_gpus_say_whether_they_stay_initialised(
    daemon: Seen[str], said: tuple[str, ...], expected: tuple[str, str], part: str
) -> None:
    gpus = ("0000:01:00.0", "0000:02:00.0")
    answers = tuple(FabricAnswer(gpu, "N/A", "N/A", word) for gpu, word in zip(gpus, said, strict=False))
    _, found = daemons(Absent("no NVSwitch"), daemon, gpus, answers)
    assert (found.status, found.reason) == expected
    assert part in found.message
