"""Each fault of docs/troubleshooting.md is seeded on a host with a running machine, and `doctor` finds it there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli.doctor.bundle import examine
from agent.cli.doctor.machines import OFFERED, SERVICE_LOG, MachineFinding
from agent.cli.service import fixes
from agent.config.load import Loaded
from agent.model.conditions import ConditionType, Reason, Status, false, true
from agent.model.facts import PciDevice
from agent.model.handoff import FabricAnswer
from agent.model.paths import REPORT_NAME, live_file, report_directory
from tests.fakes.driver_generations import upgrade
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import Host
from tests.fakes.sound_host import ALL_OPEN, make_sound, report, start

PAGE = Path(__file__).resolve().parents[3] / "docs/troubleshooting.md"
FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
FABRIC = "nvidia-fabricmanager.service"


def module(version: str) -> Callable[[Host], None]:
    return lambda host: host.file("/sys/module/nvidia/version", f"{version}\n")


def unloaded(host: Host) -> None:
    host.remove_file("/sys/module/nvidia/version")


def nouveau(host: Host) -> None:
    unloaded(host)
    for address in (FIRST, SECOND):
        host.rebind(address, "nouveau")


def not_installed(host: Host) -> None:
    host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")


def never_installed(host: Host) -> None:
    """A module without libraries: the staged copy has another version."""
    not_installed(host)
    module("535.261.03")(host)


def fabric(state: str, load: str = "loaded") -> Callable[[Host], None]:
    def seed(host: Host) -> None:
        assert isinstance(host.pci, tuple)
        host.pci = (*host.pci, PciDevice("0000:05:00.0", 0x10DE, 0x068000, "nvidia-nvswitch"))
        host.bus.unit(FABRIC, state, load)

    return seed


def registration(status: str, state: str = "Completed") -> Callable[[Host], None]:
    answers = tuple(FabricAnswer(gpu, state, status) for gpu in (FIRST, SECOND))
    return lambda host: report(host, ALL_OPEN, fabric=answers)


def unused_node(host: Host) -> None:
    host.remove_file("/dev/nvidia1")
    del host.device_numbers["/dev/nvidia1"]


KIND = ConditionType
SEEDS: dict[tuple[ConditionType, Reason], Callable[[Host], None]] = {
    (KIND.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): unloaded,
    (KIND.DRIVER_LOADED, Reason.WRONG_DRIVER): nouveau,
    (KIND.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER): lambda host: host.rebind(SECOND, ""),
    (KIND.DEVICES_PRESENT, Reason.NODES_MISSING): unused_node,
    (KIND.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH): module("535.261.03"),
    (KIND.LIBRARIES_PRESENT, Reason.RELOAD_NEEDED): upgrade,
    (KIND.LIBRARIES_PRESENT, Reason.ONLY_STAGED): not_installed,
    (KIND.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): never_installed,
    (KIND.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING): fabric("inactive"),
    (KIND.FABRIC_READY, Reason.FABRIC_MANAGER_MISSING): fabric("inactive", "not-found"),
    (KIND.FABRIC_READY, Reason.FABRIC_NOT_REGISTERED): registration("N/A", "In Progress"),
    (KIND.FABRIC_READY, Reason.FABRIC_FAILED): registration("Insufficient Resources"),
    (KIND.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): lambda host: host.bus.unit(UNITS[1], "inactive"),
    (KIND.MACHINE_RUNNING, Reason.STOPPED): lambda host: units(host, "inactive", stopped_at=4711),
    (KIND.LIBRARIES_LINKED, Reason.NO_REPORT): lambda host: host.remove(f"{report_directory(MACHINE)}/{REPORT_NAME}"),
    (KIND.DEVICES_ALLOWED, Reason.MACHINE_RESTART_NEEDED): lambda host: host.remove(live_file(MACHINE)),
}
"""Faults of the host, and of the machine as the host sees it, by what `doctor` calls them."""
REPORTED = (
    (KIND.DEVICES_ALLOWED, Reason.NOT_PERMITTED),
    (KIND.DEVICES_ALLOWED, Reason.NOT_GIVEN),
    (KIND.DEVICES_ALLOWED, Reason.DRIVER_HIDDEN),
    (KIND.LIBRARIES_LINKED, Reason.CONFLICT),
    (KIND.CDI_SPEC_CURRENT, Reason.GENERATION_FAILED),
    (KIND.RUNTIME_CONFIGURED, Reason.READ_BACK_FAILED),
    (KIND.RUNTIME_ACTIVE, Reason.FAILED),
    (KIND.RUNTIME_ACTIVE, Reason.CRI_FAILED),
    (KIND.GPUS_ADVERTISED, Reason.NO_DEVICE_PLUGIN),
)
"""Faults that only the machine half sees, in trees of machines in tests/machine; here it reports them."""
ELSEWHERE = {Reason.FABRIC_MANAGER_STUCK, Reason.PERSISTENCE_DISABLED}
"""Needs minutes: tests/host/verify/test_flapping.py. Needs the GPUs' word: tests/vendors/nvidia/test_driver.py."""


@pytest.fixture
def running(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    start(gpu_host, reconciler(gpu_host))
    return gpu_host


def found(host: Host) -> tuple[MachineFinding, ...]:
    (machine,) = examine(reconciler(host)).machines
    return machine.findings


def test_what_a_machine_reports_is_found_and_nothing_else(running: Host) -> None:
    result = examine(reconciler(running))
    assert (result.sound, found(running)) == (True, ()), "a false alarm"
    for kind, reason in REPORTED:
        opened = () if kind is KIND.DEVICES_ALLOWED else (ALL_OPEN,)
        # With DriverHidden, the status is True: `doctor` knew the command, but never listed the fault.
        say = true if reason is Reason.DRIVER_HIDDEN else false
        report(running, *opened, say(kind, reason, "simulated"))
        (finding,) = found(running)
        assert (finding.conditions, finding.reason, finding.message) == ((kind,), reason, "machine says: simulated")
        assert finding.fix

    verified = true(KIND.CDI_SPEC_CURRENT, Reason.VERIFIED, "2 devices; PodsOutdated (recreate them): default/train")
    left_out = true(KIND.CDI_SPEC_CURRENT, Reason.EDITS_LEFT_OUT, "2 devices; EditsLeftOut: nvidia.yaml lacks: key x")
    delete = "kubectl -n NAMESPACE delete pod POD  # for each pod above; its controller makes it again"
    newer = "build the machine's image from a newer release of the agent; if there is none, report this line as a bug"
    for condition, remarks, named, fix in (
        (verified, ("PodsOutdated",), "default/train", delete),
        (left_out, ("EditsLeftOut", "Unknown"), "key x", newer),
    ):
        report(running, ALL_OPEN, condition._replace(remarks=remarks))
        (finding,) = found(running)
        assert (finding.status, finding.prevents_ready, finding.fix) == (Status.TRUE, False, (fix,))
        assert named in finding.message
        assert examine(reconciler(running)).sound


def test_a_fault_gets_only_the_commands_of_its_vendor(running: Host) -> None:
    """What a host finds itself, and what a machine reports."""
    assert isinstance(running.pci, tuple)
    running.pci = (*running.pci, PciDevice("0000:0a:00.0", 0x1002, 0x038000, "amdgpu"))
    reconciler(running).reconcile()
    (fix,) = (each.fix for each in found(running) if KIND.DEVICES_PRESENT in each.conditions)
    assert fix
    assert not any("nvidia" in line for line in fix)
    failed = false(KIND.DEVICES_ALLOWED, Reason.GPU_FAILED, "simulated")
    report(running, failed._replace(vendors=("amd",)))
    assert not any("gpus reset" in line for each in found(running) for line in each.fix)
    report(running, failed._replace(vendors=("nvidia",)))
    assert any("gpus reset" in line for each in found(running) for line in each.fix)


def test_a_machine_that_offers_its_gpus_itself_has_no_device_plugin(gpu_host: Host) -> None:
    make_sound(gpu_host)
    agent = reconciler(gpu_host, allocation="dra")
    start(gpu_host, agent)
    for reason in {*OFFERED, Reason.API_UNREACHABLE}:
        report(gpu_host, ALL_OPEN, false(KIND.GPUS_ADVERTISED, Reason(reason), "simulated"))
        (machine,) = examine(agent).machines
        (finding,) = machine.findings
        assert any("-u unbounded-agent-dra" in line for line in finding.fix), reason
        assert not [line for line in finding.fix if "plugin" in line or "POD" in line]


@pytest.mark.parametrize(("kind", "reason"), SEEDS, ids=lambda each: str(each))
def test_a_seeded_fault_is_found(running: Host, kind: ConditionType, reason: Reason) -> None:
    SEEDS[kind, reason](running)
    (finding,) = (each for each in found(running) if kind in each.conditions and each.reason == reason)
    assert finding.message
    assert finding.fix


def test_the_services_page_has_the_same_commands(running: Host) -> None:
    """It said what was wrong, and not what to do."""
    unloaded(running)
    agent = reconciler(running)
    shown = fixes(agent.system, Loaded(agent.config), agent.reconcile())[MACHINE][KIND.DRIVER_LOADED]
    (as_root,) = (each.fix for each in found(running) if KIND.DRIVER_LOADED in each.conditions)
    assert shown == as_root
    assert any(line.startswith("modprobe") for line in shown)


def test_a_handoff_that_cannot_be_written_is_not_blamed_on_the_machine(running: Host) -> None:
    """`status` and `doctor` said that the machine had not answered, and to look for the reason in the machine."""
    running.gpu("0000:03:00.0", 2)
    running.full = ["/var/lib/unbounded-agent"]
    assert reconciler(running).reconcile().failures
    finding = next(each for each in found(running) if each.reason == Reason.HANDOFF_PENDING)
    assert finding.message.startswith("the agent has not written the latest handoff yet")
    assert any(line.startswith(SERVICE_LOG) for line in finding.fix)


def test_permissions_that_somebody_took_are_given_again(running: Host) -> None:
    """The message says to run `apply`, and `apply` did nothing: the agent's record said that all were given."""
    agent, own = reconciler(running), [("/dev/net/tun", "rwm")]
    units(running, "active", device_allow=own)
    assert "change" not in {each.kind for each in agent.preview()[2].actions}, "the machine has no fault"
    report(running, false(KIND.DEVICES_ALLOWED, Reason.NOT_PERMITTED, "simulated"))
    (change,) = agent.reconcile().actions
    assert "permit " in change.sentence
    assert "/dev/char/195:0 rw" in change.sentence
    assert "bind" not in change.sentence
    (call,) = running.bus.changes
    assert call[0] == "SetUnitProperties"
    given: list[tuple[str, str]] = call[3][-1][1][1]  # type: ignore[index]
    assert set(own) < set(given)
    # The report is still the one from before.
    units(running, "active", device_allow=given)
    assert agent.reconcile().actions == ()


@pytest.mark.parametrize("libraries", [True, False])
def test_a_wrong_address_is_not_called_a_driver_that_is_missing(gpu_host: Host, libraries: bool) -> None:
    """DriverRootStaged said that the host has no complete driver, and to see LibrariesPresent, which was True."""
    make_sound(gpu_host)
    if not libraries:
        not_installed(gpu_host)
    (machine,) = examine(reconciler(gpu_host, gpus=["0000:09:00.0"])).machines
    staged = next(each for each in machine.findings if each.reason == Reason.NOTHING_TO_STAGE)
    assert staged.message == "the machine gets no GPU that needs a driver; see DevicesPresent"
    assert KIND.DEVICES_PRESENT in machine.findings[0].conditions


def test_a_node_that_is_there_is_not_called_missing(running: Host) -> None:
    """The major number of nvidia-uvm may change when its module is loaded again; nodes stay when it is unloaded."""
    path, command = "/dev/nvidia-uvm", "; run `nvidia-modprobe -u -c 0`"
    running.remove_file(path)
    running.node(path, 235, 0)
    assert found(running)[0].message == (
        f"{path}: is 235:0, but the driver uses 511:0; remove the node and create it again{command}"
    )
    devices = running.read_text("/proc/devices")
    running.file("/proc/devices", devices.replace("511 nvidia-uvm\n", ""))
    assert found(running)[0].message == (
        f"{path}: its driver is not loaded (nvidia-uvm is not in /proc/devices){command}"
    )
    running.remove_file(path)
    del running.device_numbers[path]
    assert found(running)[0].message == f"{path} is missing{command}"


def test_every_fault_of_the_page_is_seeded() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    words = {word for row in rows if len(row) == 4 for word in re.findall(r"`(\w+)`|\b([A-Z][A-Za-z]+)\b", row[1])}
    named = {quoted or plain for quoted, plain in words}
    seeded = {*SEEDS, *REPORTED}
    assert named & set(Reason) - {reason for _, reason in seeded} == ELSEWHERE
    assert named & set(ConditionType) - {kind for kind, _ in seeded} == set()
    assert len(named & set(Reason)) > 15, "the page was not read"
