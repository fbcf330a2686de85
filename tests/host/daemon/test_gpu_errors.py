"""GPU errors in the kernel log: records, what is counted and kept, and what follows from it."""

import errno
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import MachineSettings
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.reconcile import Outcome
from agent.host.state.gpus import observe_gpus
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import GpuFault, Verdict
from agent.model.goal import DriverRoots
from agent.model.paths import GPUS, KERNEL_LOG_READ
from agent.system.devices import BURST, KernelLog, parse_record
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.host import grant_nvidia
from tests.fakes.facts import nvidia
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host
from tests.fakes.kernel_log import Log

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
OFF_THE_BUS = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PAGE_FAULT = "NVRM: Xid (PCI:0000:02:00): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault"


DOUBLE_BIT = "NVRM: Xid (PCI:0000:02:00): 48, pid=1, name=x"
RECOVERED = "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


class Site:
    """A host with two GPUs, its kernel log, and what was counted."""

    def __init__(self, host: Host) -> None:
        self.host, self.log, self.counted = host, Log(), Counter[tuple[str, int]]()
        # A real log is never empty.
        self.log.write("Linux version")
        for each in (FIRST, SECOND):
            self.rebind(each)

    def start(self) -> GpuErrors:
        found = GpuErrors(self.host, self._count, self.log.open)
        found.open()
        return found

    def _count(self, address: str, number: int, times: int) -> None:
        self.counted[address, number] += times

    def first_run(self) -> None:
        """Run the service as long as it takes to read one record."""
        found = self.start()
        self.log.write(PAGE_FAULT)
        found.needs_pass()
        self.save(found)
        found.close()

    def save(self, found: GpuErrors) -> None:
        found.save_position([FIRST, SECOND])

    def rebind(self, address: str) -> None:
        """Let the kernel bind a GPU's driver again: sysfs makes a new link, and does not soon reuse an inode number."""
        link = Path(self.host.root, f"sys/bus/pci/devices/{address}/driver")
        if link.is_symlink():
            # The test's file system would reuse the number that was just freed.
            link.rename(link.with_name("before"))
        self.host.symlink(f"/sys/bus/pci/devices/{address}/driver", "../../../../bus/pci/drivers/nvidia")

    def unbind(self, address: str) -> None:
        """Let the kernel take a GPU's driver away."""
        Path(self.host.root, f"sys/bus/pci/devices/{address}/driver").unlink()
        self.host.rebind(address, "")

    def interrupted(self, found: GpuErrors, how: str) -> GpuErrors:
        """Let the log be lost, or the service start again; return what follows the log from then on."""
        if how == "lost":
            self.log.failing = [errno.EIO]
            with pytest.raises(OSError, match="simulated"):
                found.needs_pass()
        if how == "restarted":
            found.close()
            return self.start()
        return found

    def lost(self) -> list[str]:
        return list(observe_gpus(self.host).lost)

    def faults(self) -> Mapping[str, GpuFault]:
        return observe_gpus(self.host).faults


@pytest.fixture
def site(gpu_host: Host) -> Iterator[Site]:
    made = Site(gpu_host)
    yield made
    made.log.close()


# ---- records


@pytest.mark.parametrize(
    ("record", "number", "text"),
    [
        (b"3,1,2,-;NVRM: x\n", 1, "NVRM: x"),
        (b"6,20,2,-,caller=T1;a;b\n SUBSYSTEM=pci\n", 20, "a;b"),
        (b"0,1,2,c;emergency", 1, "emergency"),
        # LOG_USER (1) and LOG_LOCAL7 (23): a program wrote these to /dev/kmsg.
        (b"11,1,2,-;NVRM: x\n", 1, None),
        (b"191,1,2,-;NVRM: x\n", 1, None),
        (b"8,1,2,-;NVRM: x\n", 1, None),
        (b"3,1,2,-", None, None),
        (b"x,1;NVRM: x", None, None),
        (b"3;NVRM: x", None, None),
        (b"3,x,2,-;NVRM: x", None, None),
        (b"", None, None),
    ],
)
def test_only_the_kernels_own_records_count(record: bytes, number: int | None, text: str | None) -> None:
    assert parse_record(record) == (number, text)


@pytest.mark.parametrize(
    ("after", "texts"), [(None, ("one", "three")), (0, ("one", "three")), (1, ("three",)), (3, ()), (99, ())]
)
def test_a_log_is_read_from_its_start_or_from_a_record(after: int | None, texts: tuple[str, ...]) -> None:
    """Records of user space have numbers too. An impossible number is forgotten once everything is read."""
    records = Log()
    for text, priority in (("one", 3), ("two", 11), ("three", 3)):
        records.write(text, priority)
    found = records.open("", after)
    assert (found.behind, found.read(), found.behind) == (True, texts, False)
    assert found.sequence == max(after or 0, 3)
    records.write("four")
    assert (found.read(), found.sequence) == (("four",), 4)
    found.close()
    records.close()


def test_overwritten_records_are_counted_and_reading_goes_on(site: Site) -> None:
    found = site.log.open("", None)
    site.log.failing = [errno.EPIPE, errno.EPIPE]
    site.log.write("after")
    assert found.read() == ("Linux version", "after")
    assert found.overruns == 2
    found.close()


def test_a_kernel_that_writes_without_end_does_not_hold_up_the_reader() -> None:
    numbers = itertools.count(1)
    found = KernelLog(os.open("/dev/null", os.O_RDONLY), lambda *_: b"3,%d,2,-;again\n" % next(numbers))
    assert (len(found.read()), found.behind) == (BURST, True)
    found.close()


# ---- what is made of them


def test_errors_are_counted_logged_and_shown(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    found = site.start()
    for _ in range(3):
        site.log.write(PAGE_FAULT)
    site.log.write(OFF_THE_BUS, priority=11)
    with caplog.at_level("INFO", logger="agent.host.daemon.gpu_errors"):
        assert found.needs_pass() is False
    assert site.counted == {(SECOND, 31): 3}, "not the one that user space wrote"
    (line,) = caplog.messages
    meaning = "Xid 31: an application's access to memory that it does not have; restart the application that had it"
    assert line == f"{SECOND}: {meaning} (3 times)"
    assert caplog.records[0].levelname == "INFO"
    assert re.fullmatch(r"Xid 31: .* \(read at \S+Z\)", found.last[SECOND])
    assert found.needs_pass() is False
    assert site.counted == {(SECOND, 31): 3}


def test_series_are_bounded_by_the_hosts_devices(site: Site) -> None:
    found = site.start()
    site.log.write("NVRM: Xid (PCI:0000:77:00): 48, x")
    site.log.write("NVRM: Xid (PCI:0000:02:00): 48, x")
    found.needs_pass()
    assert site.counted == {(SECOND, 48): 1}
    Path(site.host.root, f"sys/bus/pci/devices/{SECOND}").rename(Path(site.host.root, "gone"))
    site.log.write("NVRM: Xid (PCI:0000:02:00): 79, x")
    assert found.needs_pass() is False, "without a driver there is nothing to be kept"
    assert site.counted == {(SECOND, 48): 1, (SECOND, 79): 1}


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (31, None),
        (48, Verdict.NEEDS_RESET),
        (54, Verdict.BROKEN),
        (63, Verdict.DEGRADED),
        (79, Verdict.NEEDS_REBOOT),
        (94, Verdict.DEGRADED),
        (999, None),
    ],
)
def test_an_error_with_a_verdict_is_recorded_once_and_causes_a_pass(
    site: Site, number: int, verdict: Verdict | None
) -> None:
    found = site.start()
    for expected in (verdict is not None, False):
        site.log.write(f"NVRM: Xid (PCI:0000:02:00): {number}, x")
        assert found.needs_pass() is expected
    recorded = {address: (each.reason, each.verdict) for address, each in site.faults().items()}
    assert recorded == ({SECOND: (f"Xid{number}", verdict)} if verdict else {})
    site.rebind(SECOND)
    assert site.faults() == {}


PROBE_FAILED = f"nvidia: probe of {SECOND} failed with error -1"
UNSUPPORTED = (
    f"NVRM: The NVIDIA GPU {SECOND} (PCI ID: 10de:1db5)\\x0aNVRM: installed in this system is not supported by open"
    "\\x0aNVRM: nvidia.ko because it does not include the required GPU\\x0aNVRM: System Processor (GSP)."
)


@pytest.mark.parametrize("written", ["at boot", "while it runs", "while it is down", "when another driver comes"])
def test_why_a_gpu_has_no_driver_is_recorded_until_it_gets_one(site: Site, written: str) -> None:
    """The lines come when the driver is loaded, mostly before the service starts."""
    if written == "when another driver comes":
        # An upgrade, while the service is down.
        site.first_run()
    site.unbind(SECOND)
    if written == "while it is down":
        site.first_run()
    found = site.start() if written == "while it runs" else None
    for text in (UNSUPPORTED, PROBE_FAILED):
        site.log.write(text)
    counted = site.counted.copy()
    found = found or site.start()
    assert [found.needs_pass(), found.needs_pass()] == [True, False]
    fault = site.faults()[SECOND]
    assert (fault.reason, fault.verdict) == ("NeedsProprietaryDriver", Verdict.BROKEN), "the worst"
    assert site.counted == counted, "only Xids are counted"
    condition = devices_present(reconciler(site.host).run_pass())
    assert condition.reason == "GPUWithoutDriver"
    assert condition.message == f"no driver is bound to {SECOND}: {fault.meaning}", "to bind it would fail again"
    site.rebind(SECOND)
    assert SECOND not in site.faults()


def test_other_errors_from_before_the_first_start_do_not_count(site: Site) -> None:
    """A driver that has the GPU may have been loaded again since then, and one that wrote a Xid had the GPU."""
    site.unbind(SECOND)
    site.log.write(f"NVRM: GPU {FIRST}: RmInitAdapter failed! (0x62:0x65:1792)")
    site.log.write("NVRM: Xid (PCI:0000:02:00): 48, x")
    found = site.start()
    assert (found.needs_pass(), site.faults(), found.last, site.counted) == (False, {}, {}, {})


SWITCH = "0000:c1:00.0"


def test_a_fatal_error_of_an_nvswitch_is_its_own(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """It is no Xid, so it is not counted as one; and no GPU is blamed, as nobody knows which ones it concerns."""
    found = site.start()
    fatal, harmless = "24007, Fatal, Link 28 sourcetrack timeout", "12028, Non-fatal, Link 32 egress error"
    site.log.write(f"nvidia-nvswitch3: SXid (PCI:{SWITCH}): {fatal}")
    assert (found.needs_pass(), found.last) == (False, {}), "there is no such device"
    site.host.symlink(f"/sys/bus/pci/devices/{SWITCH}", "../../../devices/pci0000:00/switch")
    for text, expected in ((harmless, False), (fatal, True), (fatal, False)):
        site.log.write(f"nvidia-nvswitch3: SXid (PCI:{SWITCH}): {text}")
        assert found.needs_pass() is expected
    assert {address: each.reason for address, each in site.faults().items()} == {SWITCH: "SXid24007"}
    assert site.counted == {}
    assert "all GPUs that it connects may be affected" in caplog.text


@pytest.mark.parametrize("reloaded", [False, True])
def test_an_nvswitchs_error_while_the_service_is_down_counts_unless_the_driver_was_loaded_again(
    site: Site, reloaded: bool
) -> None:
    """The service knows the bindings of GPUs only. The same module drives the switch."""
    driver = "/sys/devices/pci0000:00/switch/driver"
    site.host.symlink(f"/sys/bus/pci/devices/{SWITCH}", "../../../devices/pci0000:00/switch")
    site.host.symlink(driver, "../../../bus/pci/drivers/nvidia-nvswitch")
    site.first_run()
    site.log.write(f"nvidia-nvswitch3: SXid (PCI:{SWITCH}): 24007, Fatal, Link 28 sourcetrack timeout")
    if reloaded:
        for each in (FIRST, SECOND):
            site.rebind(each)
    assert site.start().needs_pass() is not reloaded
    assert [*site.faults()] == [SWITCH] * (not reloaded)


RECOVERY = "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from {} to {}"


def test_that_the_driver_asks_for_a_reset_is_kept_with_the_first_error(site: Site) -> None:
    found = site.start()
    found.needs_pass()
    site.log.write("NVRM: Xid (PCI:0000:02:00): 48, pid=1, An uncorrectable double bit error")
    assert found.needs_pass()
    assert (site.faults()[SECOND].reason, site.faults()[SECOND].own_word) == ("Xid48", False)
    site.log.write(RECOVERY.format("0x0 (None)", "0x1 (GPU Reset Required)"))
    assert found.needs_pass(), "the service may reset it now"
    assert (site.faults()[SECOND].reason, site.faults()[SECOND].own_word) == ("Xid48", True)
    site.log.write("NVRM: Xid (PCI:0000:02:00): 54, pid=1, power cables")
    assert found.needs_pass()
    assert (site.faults()[SECOND].reason, site.faults()[SECOND].own_word) == ("Xid54", True)


def test_a_fatal_error_before_the_driver_was_bound_again_does_not_count(site: Site) -> None:
    site.first_run()
    site.log.write(OFF_THE_BUS)
    site.rebind(FIRST)
    after = site.start()
    assert after.needs_pass() is False
    assert (site.counted[FIRST, 79], site.faults(), site.lost()) == (1, {}, [])
    site.log.write(OFF_THE_BUS)
    assert after.needs_pass() is True, "it is up to date by now"


@pytest.mark.parametrize("closed", [False, True])
def test_a_log_that_fails_or_that_somebody_else_closed_is_opened_again(site: Site, closed: bool) -> None:
    found, why = site.start(), "Bad file descriptor" if closed else "simulated"
    if closed:
        os.close(*found.polled())
    else:
        site.log.failing = [errno.EIO]
    with pytest.raises(OSError, match=why):
        found.needs_pass()
    assert (found.error, found.polled()) == (f"/dev/kmsg: {why}", {})
    site.log.write(PAGE_FAULT)
    found.needs_pass()
    assert (found.error, site.counted[SECOND, 31], site.log.opened) == ("", 1, 2)


@pytest.mark.parametrize("quiet", [False, True])
def test_messages_while_the_service_was_down_are_not_missed(site: Site, quiet: bool) -> None:
    """Even if the kernel wrote nothing during the first run; earlier messages cannot be attributed."""
    site.log.write(OFF_THE_BUS)
    if quiet:
        found = site.start()
        assert not found.needs_pass()
        site.save(found)
        found.close()
    else:
        site.first_run()
    assert (site.counted[FIRST, 79], site.lost()) == (0, [])
    site.log.write(OFF_THE_BUS)
    assert site.start().needs_pass() is True
    assert (site.counted[FIRST, 79], site.lost()) == (1, [FIRST])


def test_a_position_that_could_not_be_saved_is_saved_once_there_is_space(site: Site) -> None:
    """Even if the kernel writes nothing more: the next start would take old errors for new ones."""
    found = site.start()
    site.log.write(PAGE_FAULT)
    found.needs_pass()
    site.host.full = [KERNEL_LOG_READ]
    with pytest.raises(OSError, match="No space"):
        site.save(found)
    site.host.full = []
    site.save(found)
    assert site.host.exists(KERNEL_LOG_READ)
    site.host.remove_file(KERNEL_LOG_READ)
    site.save(found)
    assert not site.host.exists(KERNEL_LOG_READ), "an unchanged note is not written again"
    site.rebind(FIRST)
    site.save(found)
    assert site.host.exists(KERNEL_LOG_READ)


def test_an_error_of_a_gpu_whose_binding_cannot_be_read_does_not_end_the_service(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.first_run()
    site.log.write(OFF_THE_BUS)
    lstat = os.lstat

    def failing(path: str) -> os.stat_result:
        if path.endswith(f"/{FIRST}/driver"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return lstat(path)

    after = site.start()
    monkeypatch.setattr(os, "lstat", failing)
    assert after.needs_pass() is False
    assert site.counted[FIRST, 79] == 1
    assert f"cannot record the fault of GPU {FIRST}; each pass tries again: " in caplog.text


@pytest.mark.parametrize("rebound", [False, True])
def test_a_fatal_error_is_recorded_once_there_is_space(
    site: Site, caplog: pytest.LogCaptureFixture, rebound: bool
) -> None:
    """The kernel does not repeat it, and until it is recorded, pods get the GPU."""
    site.first_run()
    found, position = site.start(), site.host.read(KERNEL_LOG_READ)
    site.host.full = [GPUS]
    site.log.write(OFF_THE_BUS)
    assert [found.needs_pass(), found.needs_pass()] == [False, False]
    assert len([each for each in caplog.messages if "cannot record the fault" in each]) == 1
    site.save(found)
    assert site.host.read(KERNEL_LOG_READ) == position, "a service that starts now reads the error again"
    site.host.full = []
    if rebound:
        site.rebind(FIRST)
    assert [found.needs_pass(), found.needs_pass()] == [not rebound, False]
    expected = [] if rebound else [FIRST]
    assert (site.lost(), list(site.faults())) == (expected, expected)
    site.save(found)
    assert site.host.read(KERNEL_LOG_READ) != position


def test_a_later_error_is_not_replaced_by_one_that_is_recorded_late(site: Site) -> None:
    """In the end, the driver says that the GPU now needs nothing."""
    none, reset, reboot = "0x0 (None)", "0x1 (GPU Reset Required)", "0x2 (Node Reboot Required)"
    found = site.start()
    site.host.full = [GPUS]
    site.log.write(RECOVERY.format(none, reset))
    assert not found.needs_pass()
    since = time.time()
    site.host.full = []
    site.log.write(RECOVERY.format(reset, reboot))
    assert found.needs_pass() is True
    assert "reboot the host" in site.faults()[SECOND].meaning
    assert site.faults()[SECOND].since >= since
    site.log.write(RECOVERY.format(reboot, none))
    assert found.needs_pass() is True
    assert site.faults() == {}


@pytest.mark.parametrize("interrupted", ["", "lost", "restarted"])
def test_messages_before_the_first_run_are_skipped(site: Site, interrupted: str) -> None:
    """However many reads that takes, and whatever happens in between."""
    site.log.flood(BURST)
    site.log.write(OFF_THE_BUS)
    found = site.start()
    site.save(found)
    found = site.interrupted(found, interrupted)
    assert not found.needs_pass()
    assert (site.counted, site.lost()) == ({}, [])
    site.log.write(OFF_THE_BUS)
    assert found.needs_pass()


@pytest.mark.parametrize("interrupted", ["", "lost", "restarted"])
def test_a_pass_while_catching_up_does_not_make_old_errors_new(site: Site, interrupted: str) -> None:
    """More was written than one read returns; the rest may belong to an older binding of the driver too."""
    site.first_run()
    site.rebind(FIRST)
    site.log.flood(BURST)
    found = site.start()
    assert not found.needs_pass()
    site.save(found)
    found = site.interrupted(found, interrupted)
    site.save(found)
    site.log.write(OFF_THE_BUS)
    assert not found.needs_pass()
    assert site.lost() == []
    site.save(found)
    found.close()
    site.log.write(OFF_THE_BUS)
    assert site.start().needs_pass(), "of the binding that was kept once all was read"


@pytest.mark.parametrize("kept", [b"{", b'{"sequence": "x", "bindings": {}}'])
def test_a_damaged_note_of_the_read_position_is_ignored(site: Site, kept: bytes) -> None:
    site.host.file(KERNEL_LOG_READ, kept)
    found = site.start()
    site.log.write(OFF_THE_BUS)
    assert found.needs_pass() is True


# ---- a GPU that is lost


def devices_present(outcome: Outcome) -> Condition:
    (machine,) = outcome.machines
    return next(each for each in machine.conditions if each.type is ConditionType.DEVICES_PRESENT)


def test_a_gpu_off_the_bus_withdraws_readiness_until_its_driver_is_rebound(site: Site) -> None:
    found = site.start()
    passes = reconciler(site.host)
    before = passes.run_pass()
    assert devices_present(before).status is Status.TRUE
    site.log.write(OFF_THE_BUS)
    assert found.needs_pass() is True, "a pass is wanted"
    after = passes.run_pass()
    condition = devices_present(after)
    assert (condition.status, condition.reason) == (Status.FALSE, "GPUFallenOffBus")
    assert condition.message.startswith(f"{FIRST}: Xid 79: the GPU has fallen off the bus; ")
    assert after.machines[0].gpus == before.machines[0].gpus, "nothing is taken away: other GPUs have pods"
    again = reconciler(site.host).run_pass()
    assert devices_present(again).status is Status.FALSE, "another process knows it too"
    site.rebind(SECOND)
    assert devices_present(passes.run_pass()).status is Status.FALSE, "another GPU's driver"
    site.rebind(FIRST)
    assert devices_present(passes.run_pass()).status is Status.TRUE


def test_only_machines_that_have_the_gpu_lose_it() -> None:
    facts = nvidia(2)
    lost = replace(facts, gpus=(replace(facts.gpus[0], why_lost="gone"), facts.gpus[1]))
    for gpu, status in zip(lost.gpus, (Status.FALSE, Status.TRUE), strict=True):
        found = nvidia_conditions(lost, grant_nvidia(lost, MachineSettings(), DriverRoots(()), (gpu,)))
        assert {each.status for each in found if each.type is ConditionType.DEVICES_PRESENT} == {status}


@pytest.mark.parametrize(("last", "failed"), [(DOUBLE_BIT, True), (RECOVERED, False)])
def test_the_order_in_one_read_decides_whether_a_gpu_has_recovered(site: Site, last: str, failed: bool) -> None:
    """Equal lines are handled once: at the place of the last one, or an error after the recovery would be lost."""
    site.first_run()
    follower = site.start()
    for text in (DOUBLE_BIT, RECOVERED, last):
        site.log.write(text)
    follower.needs_pass()
    assert (SECOND in observe_gpus(site.host).faults) is failed
    follower.close()
