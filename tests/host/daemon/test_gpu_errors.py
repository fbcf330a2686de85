"""GPU errors in the kernel log: records, NVIDIA's messages, what is counted and kept, and what follows from it."""

import errno
import itertools
import os
import re
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import MachineSettings
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.reconcile import Outcome
from agent.host.state.gpus import observe_gpus, record_lost
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import VendorFacts
from agent.model.goal import DriverRoots
from agent.model.paths import GPUS, KERNEL_LOG_READ
from agent.system.devices import BURST, KernelLog, open_kernel_log, parse_record
from agent.vendors.host_vendor import GpuError
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.devices import parse_xid
from agent.vendors.nvidia.grant import grant_nvidia
from tests.fakes.facts import address, nvidia
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
OFF_THE_BUS = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PAGE_FAULT = "NVRM: Xid (PCI:0000:02:00): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault"


class Log:
    """A simulated /dev/kmsg: each datagram is one record, like each read(2) of the real one."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._theirs.setblocking(False)
        self.opened = self._written = 0
        self.failing: list[int] = []
        """errno values that the next reads raise."""
        self._flood: list[bytes] = []

    def write(self, text: str, priority: int = 3) -> None:
        self._written += 1
        self.ours.send(f"{priority},{self._written},5140900,-;{text}\n SUBSYSTEM=pci\n".encode())

    def flood(self, records: int) -> None:
        """Write more records than a socket holds, before all that is written later."""
        for _ in range(records):
            self._written += 1
            self._flood.append(f"6,{self._written},5140900,-;usb 1-1: new device\n".encode())

    def open(self, path: str, after: int | None) -> KernelLog:
        self.opened += 1
        return KernelLog(os.dup(self._theirs.fileno()), self._read, after)

    def _read(self, descriptor: int, limit: int) -> bytes:
        if self.failing:
            raise OSError(self.failing.pop(0), "simulated")
        if self._flood:
            return self._flood.pop(0)
        return os.read(descriptor, limit)

    def close(self) -> None:
        self.ours.close()
        self._theirs.close()


@pytest.fixture
def kernel_log() -> Iterator[Log]:
    made = Log()
    # A real log is never empty.
    made.write("Linux version")
    yield made
    made.close()


@pytest.fixture
def counts() -> Counter[tuple[str, int]]:
    return Counter()


@pytest.fixture
def follow(gpu_host: Host, kernel_log: Log, counts: Counter[tuple[str, int]]) -> Callable[[], GpuErrors]:
    for each in (FIRST, SECOND):
        bind(gpu_host, each)

    def count(address: str, number: int, times: int) -> None:
        counts[address, number] += times

    return lambda: GpuErrors(gpu_host, count, kernel_log.open)


def bind(host: Host, address: str) -> None:
    """Let the kernel bind a GPU's driver again: sysfs makes a new link, and does not soon reuse an inode number."""
    link = Path(host.root, f"sys/bus/pci/devices/{address}/driver")
    if link.is_symlink():
        # The test's file system would reuse the number that was just freed.
        link.rename(link.with_name("before"))
    host.symlink(f"/sys/bus/pci/devices/{address}/driver", "../../../../bus/pci/drivers/nvidia")


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


def test_a_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"3,1,2,-;old\n")
    found = open_kernel_log(str(path))
    assert (found.behind, found.read(), found.behind, found.sequence) == (True, (), False, 1)
    with path.open("ab") as file:
        file.write(b"3,2,2,-;new\n")
    assert (found.read(), found.sequence) == (("new",), 2)
    assert found.read() == ()
    found.close()


@pytest.mark.parametrize(("after", "texts"), [(0, ("one", "three")), (1, ("three",)), (3, ()), (99, ())])
def test_a_log_is_read_from_a_record(tmp_path: Path, after: int, texts: tuple[str, ...]) -> None:
    """Records of user space have numbers too. An impossible number is forgotten once everything is read."""
    path = tmp_path / "kmsg"
    records = Log()
    for text, priority in (("one", 3), ("two", 11), ("three", 3)):
        records.write(text, priority)
    found = records.open(str(path), after)
    assert (found.behind, found.read(), found.behind) == (True, texts, False)
    assert found.sequence == max(after, 3)
    records.write("four")
    assert (found.read(), found.sequence) == (("four",), 4)
    found.close()
    records.close()


def test_overwritten_records_are_counted_and_reading_goes_on(kernel_log: Log) -> None:
    found = kernel_log.open("", None)
    kernel_log.failing = [errno.EPIPE]
    found.read()
    assert found.overruns == 0, "of what was only passed over, nothing was missed"
    kernel_log.failing = [errno.EPIPE, errno.EPIPE]
    kernel_log.write("after")
    assert found.read() == ("after",)
    assert found.overruns == 2
    found.close()


def test_a_kernel_that_writes_without_end_does_not_hold_up_the_reader() -> None:
    numbers = itertools.count(1)
    for after, given in ((0, BURST), (None, 0)):
        found = KernelLog(os.open("/dev/null", os.O_RDONLY), lambda *_: b"3,%d,2,-;again\n" % next(numbers), after)
        assert (len(found.read()), found.behind) == (given, True)
        found.close()


# ---- NVIDIA's messages


@pytest.mark.parametrize(
    ("text", "where", "number"),
    [
        (OFF_THE_BUS, FIRST, 79),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00.0", 14),
        ("NVRM: Xid (PCI:0000:CB:00): 13, pid='<unknown>', name=<unknown>, Graphics", "0000:cb:00.0", 13),
        ("NVRM: Xid (PCI:0000:07:00 GPU-I:05): 31, pid=1, name=x, Ch 8", "0000:07:00.0", 31),
        ("NVRM: Xid (PCI:00010000:07:00): 999, x", "00010000:07:00.0", 999),
    ],
)
def test_an_xid_is_read(text: str, where: str, number: int) -> None:
    error = parse_xid(text)
    assert error is not None
    assert (error.pci_address, error.number, error.lost) == (where, number, number == 79)
    assert error.meaning.startswith(f"Xid {number}: ")


@pytest.mark.parametrize(
    "text",
    [
        "usb 1-1: Product: NVRM: Xid (PCI:0000:01:00): 79, x",
        "NVRM: Xid (PCI:0000:01:00): 1000, x",
        "NVRM: Xid (PCI:0000:01): 79, x",
        "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:01:00" + " " * 100 + "): 79, x",
        " NVRM: Xid (PCI:0000:01:00): 79, x",
        "",
    ],
)
def test_other_messages_are_none(text: str) -> None:
    assert parse_xid(text) is None


def test_an_applications_fault_is_not_a_gpus() -> None:
    fault, gone = parse_xid(PAGE_FAULT), parse_xid(OFF_THE_BUS)
    assert isinstance(fault, GpuError)
    assert isinstance(gone, GpuError)
    assert (fault.from_application, gone.from_application) == (True, False)
    assert "reboot the host" in gone.meaning


# ---- what is made of them


def test_errors_are_counted_logged_and_shown(
    follow: Callable[[], GpuErrors],
    kernel_log: Log,
    counts: Counter[tuple[str, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = follow()
    for _ in range(3):
        kernel_log.write(PAGE_FAULT)
    kernel_log.write(OFF_THE_BUS, priority=11)
    with caplog.at_level("INFO", logger="agent.host.daemon.gpu_errors"):
        assert found.read() is False
    assert counts == {(SECOND, 31): 3}, "not the one that user space wrote"
    (line,) = caplog.messages
    assert line == f"{SECOND}: Xid 31: an application's access to memory that it does not have (3 times)"
    assert caplog.records[0].levelname == "INFO"
    assert re.fullmatch(r"Xid 31: .* \(read at \S+Z\)", found.last[SECOND])
    assert found.read() is False
    assert counts == {(SECOND, 31): 3}


def test_series_are_bounded_by_the_hosts_devices(
    follow: Callable[[], GpuErrors], kernel_log: Log, counts: Counter[tuple[str, int]], gpu_host: Host
) -> None:
    found = follow()
    kernel_log.write("NVRM: Xid (PCI:0000:77:00): 48, x")
    kernel_log.write("NVRM: Xid (PCI:0000:02:00): 48, x")
    found.read()
    assert counts == {(SECOND, 48): 1}
    Path(gpu_host.root, f"sys/bus/pci/devices/{SECOND}").rename(Path(gpu_host.root, "gone"))
    kernel_log.write("NVRM: Xid (PCI:0000:02:00): 79, x")
    assert found.read() is False, "without a driver there is nothing to be kept"
    assert counts == {(SECOND, 48): 1, (SECOND, 79): 1}


@pytest.mark.parametrize(
    ("number", "fatal"), [(31, False), (48, True), (63, False), (79, True), (94, False), (119, True), (140, True)]
)
def test_a_fatal_error_is_recorded_once_and_causes_a_pass(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host, number: int, fatal: bool
) -> None:
    """Only these keep new pods from the GPU: a program's error says nothing about it."""
    found = follow()
    for expected in (fatal, fatal and number == 79):
        kernel_log.write(f"NVRM: Xid (PCI:0000:02:00): {number}, x")
        assert found.read() is expected
    faults = observe_gpus(gpu_host).faults
    assert {address: each.reason for address, each in faults.items()} == ({SECOND: f"Xid{number}"} if fatal else {})
    bind(gpu_host, SECOND)
    assert observe_gpus(gpu_host).faults == {}


RECOVERY = "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from {} to {}"


@pytest.mark.parametrize(
    ("action", "advice", "fatal"),
    [
        ("0x0 (None)", "no recovery", False),
        ("0x1 (GPU Reset Required)", "reset the GPU", True),
        ("0x2 (Node Reboot Required)", "reboot the host", True),
        ("0x3 (Drain P2P)", "peer-to-peer", False),
        ("0x4 (Drain and Reset)", "reset the GPU", True),
        ("0x5 (Recover IMEX Domain)", "IMEX domain", False),
        ("0x6 (Another Action)", "see NVIDIA's Xid catalogue", False),
    ],
)
def test_the_drivers_verdict_decides_about_the_gpu(action: str, advice: str, fatal: bool) -> None:
    error = parse_xid(RECOVERY.format("0x0 (None)", action))
    assert error is not None
    assert advice in error.meaning
    assert error.fault == ("Xid154" if fatal else "")


def test_a_verdict_that_gets_worse_replaces_the_one_before(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host
) -> None:
    """The last one, that the driver needs nothing now, does not prove that the GPU is well."""
    none, reset, reboot = "0x0 (None)", "0x1 (GPU Reset Required)", "0x2 (Node Reboot Required)"
    found = follow()
    for before, after, news in ((none, reset, True), (reset, reboot, True), (reboot, none, False)):
        kernel_log.write(RECOVERY.format(before, after))
        assert found.read() is news
    assert "reboot the host" in observe_gpus(gpu_host).faults[SECOND].meaning


def test_a_fatal_error_before_the_driver_was_bound_again_does_not_count(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host
) -> None:
    listen_for_a_while(follow, kernel_log)
    kernel_log.write("NVRM: Xid (PCI:0000:02:00): 48, x")
    bind(gpu_host, SECOND)
    assert follow().read() is False
    assert observe_gpus(gpu_host).faults == {}


def test_a_failing_log_is_reported_once_and_opened_again(
    follow: Callable[[], GpuErrors],
    kernel_log: Log,
    counts: Counter[tuple[str, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = follow()
    kernel_log.failing = [errno.EIO]
    assert found.read() is False
    assert (found.error, found.polled()) == ("/dev/kmsg: simulated", {})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    kernel_log.write(PAGE_FAULT)
    found.read()
    assert (found.error, counts[SECOND, 31], kernel_log.opened) == ("", 1, 2)


def test_a_log_whose_descriptor_somebody_else_closed_is_opened_again(
    follow: Callable[[], GpuErrors], kernel_log: Log, counts: Counter[tuple[str, int]]
) -> None:
    found = follow()
    (descriptor,) = found.polled()
    os.close(descriptor)
    assert found.read() is False
    assert found.error == "/dev/kmsg: Bad file descriptor"
    kernel_log.write(PAGE_FAULT)
    found.read()
    assert (found.error, counts[SECOND, 31], kernel_log.opened) == ("", 1, 2)


def test_a_host_without_a_kernel_log_is_served(gpu_host: Host, caplog: pytest.LogCaptureFixture) -> None:
    found = GpuErrors(gpu_host)
    assert [found.read(), found.read()] == [False, False]
    assert found.error == "/dev/kmsg: No such file or directory"
    assert len(caplog.messages) == 1


def listen_for_a_while(follow: Callable[[], GpuErrors], kernel_log: Log) -> None:
    """Run the service as long as it takes to read one record."""
    found = follow()
    kernel_log.write(PAGE_FAULT)
    found.read()
    found.save_position([FIRST, SECOND])
    found.close()


def test_messages_while_the_service_was_down_are_not_missed(
    follow: Callable[[], GpuErrors], kernel_log: Log, counts: Counter[tuple[str, int]], gpu_host: Host
) -> None:
    listen_for_a_while(follow, kernel_log)
    kernel_log.write(OFF_THE_BUS)
    after = follow()
    assert after.read() is True
    assert counts == {(SECOND, 31): 1, (FIRST, 79): 1}
    assert list(observe_gpus(gpu_host).lost) == [FIRST]


def test_an_unchanged_note_is_not_written_again(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host
) -> None:
    found = follow()
    kernel_log.write(PAGE_FAULT)
    found.read()
    found.save_position([FIRST, SECOND])
    gpu_host.remove_file(KERNEL_LOG_READ)
    found.save_position([FIRST, SECOND])
    assert not gpu_host.exists(KERNEL_LOG_READ)
    bind(gpu_host, FIRST)
    found.save_position([FIRST, SECOND])
    assert gpu_host.exists(KERNEL_LOG_READ)


def test_a_position_that_could_not_be_saved_is_saved_once_there_is_space(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the kernel writes nothing more. Otherwise the next start would take old errors for new ones."""
    found = follow()
    kernel_log.write(PAGE_FAULT)
    found.read()
    gpu_host.full = [KERNEL_LOG_READ]
    for _ in range(2):
        found.save_position([FIRST, SECOND])
    assert len([each for each in caplog.messages if "cannot save the read position" in each]) == 1
    gpu_host.full = []
    found.save_position([FIRST, SECOND])
    assert gpu_host.exists(KERNEL_LOG_READ)


def test_a_binding_that_cannot_be_read_does_not_end_the_service(
    follow: Callable[[], GpuErrors], kernel_log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    found = follow()
    kernel_log.write(PAGE_FAULT)
    found.read()
    found.save_position(["x" * 300])
    assert "cannot save the read position of /dev/kmsg; each pass tries again: " in caplog.text


def test_an_error_of_a_gpu_whose_binding_cannot_be_read_does_not_end_the_service(
    follow: Callable[[], GpuErrors],
    kernel_log: Log,
    counts: Counter[tuple[str, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen_for_a_while(follow, kernel_log)
    kernel_log.write(OFF_THE_BUS)
    lstat = os.lstat

    def failing(path: str) -> os.stat_result:
        if path.endswith(f"/{FIRST}/driver"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return lstat(path)

    after = follow()
    monkeypatch.setattr(os, "lstat", failing)
    assert after.read() is False
    assert counts[FIRST, 79] == 1
    assert f"cannot record the fault of GPU {FIRST}; each pass tries again: " in caplog.text


@pytest.mark.parametrize("rebound", [False, True])
def test_a_fatal_error_is_recorded_once_there_is_space(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host, caplog: pytest.LogCaptureFixture, rebound: bool
) -> None:
    """The kernel does not repeat it, and until it is recorded, pods get the GPU."""
    listen_for_a_while(follow, kernel_log)
    found, position = follow(), gpu_host.read(KERNEL_LOG_READ)
    gpu_host.full = [GPUS]
    kernel_log.write(OFF_THE_BUS)
    assert [found.read(), found.read()] == [False, False]
    assert len([each for each in caplog.messages if "cannot record the fault" in each]) == 1
    found.save_position([FIRST, SECOND])
    assert gpu_host.read(KERNEL_LOG_READ) == position, "a service that starts now reads the error again"
    gpu_host.full = []
    if rebound:
        bind(gpu_host, FIRST)
    assert [found.read(), found.read()] == [not rebound, False]
    expected = [] if rebound else [FIRST]
    assert (list(observe_gpus(gpu_host).lost), list(observe_gpus(gpu_host).faults)) == (expected, expected)
    found.save_position([FIRST, SECOND])
    assert gpu_host.read(KERNEL_LOG_READ) != position


def test_a_later_error_is_not_replaced_by_one_that_is_recorded_late(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host
) -> None:
    found = follow()
    gpu_host.full = [GPUS]
    kernel_log.write(RECOVERY.format("0x0 (None)", "0x1 (GPU Reset Required)"))
    assert not found.needs_pass()
    since = time.time()
    gpu_host.full = []
    kernel_log.write(RECOVERY.format("0x1 (GPU Reset Required)", "0x2 (Node Reboot Required)"))
    assert found.needs_pass()
    found.read()
    assert "reboot the host" in observe_gpus(gpu_host).faults[SECOND].meaning
    assert observe_gpus(gpu_host).faults[SECOND].since >= since


def test_a_gpu_whose_driver_was_rebound_meanwhile_is_not_lost(
    follow: Callable[[], GpuErrors], kernel_log: Log, counts: Counter[tuple[str, int]], gpu_host: Host
) -> None:
    listen_for_a_while(follow, kernel_log)
    kernel_log.write(OFF_THE_BUS)
    bind(gpu_host, FIRST)
    after = follow()
    assert after.read() is False
    assert (counts[FIRST, 79], observe_gpus(gpu_host).lost) == (1, {})
    kernel_log.write(OFF_THE_BUS)
    assert after.read() is True, "it is up to date by now"


def test_after_a_quiet_first_run_nothing_is_missed(
    follow: Callable[[], GpuErrors], kernel_log: Log, counts: Counter[tuple[str, int]], gpu_host: Host
) -> None:
    """The kernel writes nothing during the first run; earlier messages cannot be attributed."""
    kernel_log.write(OFF_THE_BUS)
    found = follow()
    assert not found.read()
    found.save_position([FIRST, SECOND])
    found.close()
    assert (counts, observe_gpus(gpu_host).lost) == ({}, {})
    kernel_log.write(OFF_THE_BUS)
    assert follow().read()
    assert list(observe_gpus(gpu_host).lost) == [FIRST]


@pytest.mark.parametrize("interrupted", [None, "lost", "restarted"])
def test_messages_before_the_first_run_are_skipped(
    follow: Callable[[], GpuErrors],
    kernel_log: Log,
    counts: Counter[tuple[str, int]],
    gpu_host: Host,
    interrupted: str | None,
) -> None:
    """However many reads that takes, and whatever happens in between."""
    kernel_log.flood(BURST)
    kernel_log.write(OFF_THE_BUS)
    found = follow()
    found.save_position([FIRST, SECOND])
    if interrupted == "lost":
        kernel_log.failing = [errno.EIO]
        found.read()
    if interrupted == "restarted":
        found.close()
        found = follow()
    assert not found.read()
    assert (counts, observe_gpus(gpu_host).lost) == ({}, {})
    kernel_log.write(OFF_THE_BUS)
    assert found.read()


@pytest.mark.parametrize("interrupted", [None, "lost", "restarted"])
def test_a_pass_while_catching_up_does_not_make_old_errors_new(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host, interrupted: str | None
) -> None:
    """More was written than one read returns; the rest may belong to an older binding of the driver too."""
    listen_for_a_while(follow, kernel_log)
    bind(gpu_host, FIRST)
    kernel_log.flood(BURST)
    found = follow()
    assert not found.read()
    if interrupted == "lost":
        kernel_log.failing = [errno.EIO]
        found.read()
    found.save_position([FIRST, SECOND])
    if interrupted == "restarted":
        found.close()
        found = follow()
    kernel_log.write(OFF_THE_BUS)
    assert not found.read()
    assert observe_gpus(gpu_host).lost == {}
    found.save_position([FIRST, SECOND])
    found.close()
    kernel_log.write(OFF_THE_BUS)
    assert follow().read(), "of the binding that was kept once all was read"


@pytest.mark.parametrize("kept", [b"", b"{", b'{"sequence": "x", "bindings": {}}'])
def test_a_damaged_note_of_the_read_position_is_ignored(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host, kept: bytes
) -> None:
    gpu_host.file(KERNEL_LOG_READ, kept)
    found = follow()
    kernel_log.write(OFF_THE_BUS)
    assert found.read() is True


# ---- a GPU that is lost


def devices_present(outcome: Outcome) -> Condition:
    (machine,) = outcome.machines
    return next(each for each in machine.conditions if each.type is ConditionType.DEVICES_PRESENT)


def test_a_gpu_off_the_bus_withdraws_readiness_until_its_driver_is_rebound(
    follow: Callable[[], GpuErrors], kernel_log: Log, gpu_host: Host
) -> None:
    found = follow()
    passes = reconciler(gpu_host)
    before = passes.run_pass()
    assert devices_present(before).status is Status.TRUE
    kernel_log.write(OFF_THE_BUS)
    assert found.read() is True, "a pass is wanted"
    after = passes.run_pass()
    condition = devices_present(after)
    assert (condition.status, condition.reason) == (Status.FALSE, "GPUFallenOffBus")
    assert condition.message.startswith(f"{FIRST}: Xid 79: the GPU has fallen off the bus; ")
    assert after.machines[0].gpus == before.machines[0].gpus, "nothing is taken away: other GPUs have pods"
    again = reconciler(gpu_host).run_pass()
    assert devices_present(again).status is Status.FALSE, "another process knows it too"
    bind(gpu_host, SECOND)
    assert devices_present(passes.run_pass()).status is Status.FALSE, "another GPU's driver"
    bind(gpu_host, FIRST)
    assert devices_present(passes.run_pass()).status is Status.TRUE


def test_only_a_lost_gpu_needs_a_pass(follow: Callable[[], GpuErrors], kernel_log: Log) -> None:
    """It is a source of wake-ups, and the poller handles its loss."""
    found = follow()
    assert list(found.polled().values()) == [select.POLLIN]
    kernel_log.write(PAGE_FAULT)
    assert not found.needs_pass()
    kernel_log.write(OFF_THE_BUS)
    assert found.needs_pass()
    kernel_log.failing = [errno.EIO]
    with pytest.raises(OSError, match="/dev/kmsg: simulated"):
        found.needs_pass()
    found.open()
    assert found.polled()


def test_only_machines_that_have_the_gpu_lose_it() -> None:
    facts = nvidia(2)
    lost = VendorFacts("nvidia", (replace(facts.gpus[0], why_lost="gone"), facts.gpus[1]), facts.devices, facts.driver)

    def devices(gpus: str) -> Status:
        wanted = tuple(gpu for gpu in lost.gpus if gpu.pci_address == gpus)
        grant = grant_nvidia(lost, MachineSettings(), DriverRoots(()), wanted)
        return next(
            each.status for each in nvidia_conditions(lost, grant) if each.type is ConditionType.DEVICES_PRESENT
        )

    assert (devices(address(0)), devices(address(1))) == (Status.FALSE, Status.TRUE)


def test_a_damaged_note_of_lost_gpus_is_ignored(gpu_host: Host) -> None:
    bind(gpu_host, FIRST)
    assert record_lost(gpu_host, FIRST, "gone")
    assert observe_gpus(gpu_host).lost == {FIRST: "gone"}
    gpu_host.file(GPUS, b"{")
    assert observe_gpus(gpu_host).lost == {}
    assert record_lost(gpu_host, FIRST, "gone"), "it is written anew"
