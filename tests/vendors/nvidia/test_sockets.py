"""Sockets of the driver's daemons: only if configured, from the host's /run into the machine and the specification."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.config.settings import MachineSettings
from agent.host.apply.steps import change_devices
from agent.model.facts import LiveSettings, ServiceDirectory
from agent.model.goal import ChangeDevices, DriverRoots
from agent.vendors.nvidia.host import grant_nvidia, observe_nvidia
from agent.vendors.nvidia.nvidia_ctk import with_additions
from agent.vendors.nvidia.verify import verify
from tests.fakes.cdi_specs import LIVE, PRESENT
from tests.fakes.host import Host
from tests.fakes.machine import REQUEST, gpu_machine, recorded_spec
from tests.fakes.user_space import sources

PERSISTENCED = "/run/nvidia-persistenced"
ALL = ("persistenced", "fabricmanager", "mps")
WITH_SOCKETS = REQUEST._replace(sockets=ALL)
THERE = frozenset({f"{PERSISTENCED}/socket", "/run/nvidia-fabricmanager/socket", "/run/nvidia-mps"})


@pytest.fixture
def daemons(host: Host) -> Host:
    host.load("debian-13-driver-550")
    host.driver("550.163.01", gpus=1)
    host.file(f"{PERSISTENCED}/socket")
    host.file("/run/nvidia-mps/control")
    return host


def granted(host: Host, *names: Any) -> tuple[tuple[str, ...], tuple[ServiceDirectory, ...]]:  # noqa: ANN401
    settings = MachineSettings.validated({"sockets": list(names)})
    facts = observe_nvidia(sources(host))
    grant = grant_nvidia(facts, settings, DriverRoots(()), facts.gpus)
    return grant.services, grant.directories


def test_only_running_daemons_that_are_configured_are_bound(daemons: Host) -> None:
    """A bind without a source would keep the machine from starting.
    The directory of MPS is there, but its clients could fill the host's /run: it is not a mount point.
    """
    inode = daemons.identity(PERSISTENCED).inode
    services, directories = granted(daemons, *ALL)
    assert services == ALL
    assert directories == (ServiceDirectory("persistenced", PERSISTENCED, inode),)
    assert granted(daemons) == ((), ())
    daemons.file("/srv/secret/socket")
    daemons.symlink("/run/nvidia-fabricmanager", "/srv/secret")
    assert granted(daemons, "fabricmanager")[1] == ()


def test_a_recreated_directory_is_bound_in_the_running_machine(host: Host) -> None:
    before = LiveSettings("", (), {PERSISTENCED: "ro:7", "/run/nvidia-mps": "rw:8"})
    after = replace(before, nodes={PERSISTENCED: "ro:9", "/run/nvidia-mps": "rw:10"})
    change_devices(ChangeDevices("m", before, after, ()), host)
    assert host.bus.changes == [
        ("BindMountMachine", "m", PERSISTENCED, PERSISTENCED, True, True),
        ("BindMountMachine", "m", "/run/nvidia-mps", "/run/nvidia-mps", False, True),
    ]


def mounts(spec: object) -> dict[str, Any]:
    assert isinstance(spec, dict)
    found = {each["hostPath"]: each for each in spec["containerEdits"]["mounts"]}
    return {path: each for path, each in found.items() if not path.startswith("/run/host-nvidia/")}


def test_pods_get_the_sockets_that_are_in_the_machine() -> None:
    spec, _ = with_additions(recorded_spec(), WITH_SOCKETS, THERE)
    options = ["nosuid", "nodev", "rbind", "rprivate", "noexec"]
    targets = {path: "/tmp/nvidia-mps" if path == "/run/nvidia-mps" else path for path in THERE}
    assert mounts(spec) == {
        path: {"hostPath": path, "containerPath": target, "options": options} for path, target in targets.items()
    }
    assert verify(spec, WITH_SOCKETS, LIVE, PRESENT | THERE).problems == ()
    problems = verify(spec, REQUEST, LIVE, PRESENT | THERE).problems
    assert any(f"'{PERSISTENCED}/socket', which is not a file" in each for each in problems), problems
    gone = verify(spec, WITH_SOCKETS, LIVE, PRESENT | (THERE - {"/run/nvidia-mps"})).problems
    assert gone == ("containerEdits: mount of /run/nvidia-mps, which does not exist",)
    mounts(spec)["/run/nvidia-mps"]["containerPath"] = "/usr/bin"
    assert len(verify(spec, WITH_SOCKETS, LIVE, PRESENT | THERE).problems) == 1


def test_a_machine_follows_sockets_that_come_and_go(tmp_path: Path) -> None:
    machine = gpu_machine(tmp_path / "machine")
    machine.hand(REQUEST._replace(sockets=("persistenced",)))
    for there in (False, True, False):
        if there:
            machine.put(f"{PERSISTENCED}/socket")
        else:
            machine.remove(f"{PERSISTENCED}/socket")
        assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
        assert ("no socket of persistenced yet" in machine.message("CDISpecCurrent")) is not there
        assert (f"{PERSISTENCED}/socket" in machine.read_text("/etc/cdi/nvidia.yaml")) is there
