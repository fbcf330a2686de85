"""Sources of events: real inotify below a host's tree, and udev's events by umockdev."""

import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.config.settings import DriverSettings
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.daemon.wakeups import HEARTBEAT, MANY, PERIOD, NewReports, Source, Udev, host_sources, matters
from agent.host.detach import forget
from agent.host.state.gpus import observe_gpus
from agent.host.vendors import HOST_VENDORS
from agent.model.facts import Verdict
from agent.model.paths import GPUS
from agent.system.devices import CONTROL, KernelLog
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host
from tests.fakes.udev import Event, Sent

REPORTS = "/run/unbounded-agent/machines/gpu-node/report"


@pytest.fixture
def dev(host: Host, tmp_path: Path) -> Path:
    directory = tmp_path / "host/dev"
    directory.mkdir()
    return directory


Watch = Callable[..., Source]


@pytest.fixture
def watch(host: Host) -> Iterator[Watch]:
    """Opens a source by its name, on a host without GPUs unless another one is given."""
    opened = []

    def find(name: str, host: Host = host, driver: DriverSettings | None = None) -> Source:
        sources = host_sources(host, HOST_VENDORS, lambda: driver or DriverSettings(), GpuErrors(host).receive)
        opened.append(next(each for each in sources if each.name == name))
        opened[-1].open()
        return opened[-1]

    yield find
    for each in opened:
        each.close()


@pytest.fixture
def nodes(watch: Watch, dev: Path) -> Source:
    return watch("device-nodes")


@pytest.fixture
def cache(watch: Watch, tmp_path: Path) -> Source:
    (tmp_path / "host/etc").mkdir()
    return watch("loader-cache")


def test_a_change_of_a_vendors_node_needs_a_pass(nodes: Source, dev: Path) -> None:
    node = dev / "nvidia-uvm"
    changes: dict[str, Callable[[], object]] = {
        "it comes": node.touch,
        "it has another mode": lambda: node.chmod(0o600),
        "it is renamed": lambda: node.rename(dev / "nvidia-uvm-tools"),
        "it goes": (dev / "nvidia-uvm-tools").unlink,
        "a directory comes": (dev / "dri").mkdir,
    }
    for what, change in changes.items():
        change()
        assert [nodes.needs_pass(), nodes.needs_pass()] == [True, False], what


def test_other_nodes_and_the_use_of_nodes_need_no_pass(nodes: Source, dev: Path) -> None:
    """Pods may write to the directory of MPS, of which only the appearance matters."""
    (dev / "nvidia0").touch()
    assert nodes.needs_pass()
    for number in range(100):
        (dev / f"tty{number}").touch()
        (dev / f"tty{number}").unlink()
    (dev / "nvidia0").write_bytes(b"x")
    (dev / "nvidia0").read_bytes()
    directory = dev.parent / "run/nvidia-mps"
    assert not nodes.needs_pass()
    directory.mkdir(parents=True)
    assert nodes.needs_pass()
    (directory / "control").touch()
    assert not nodes.needs_pass()


def test_directories_of_nodes_are_watched_as_they_come_and_go(nodes: Source, dev: Path) -> None:
    for _ in range(2):
        caps = dev / "nvidia-caps"
        caps.mkdir()
        assert nodes.needs_pass()
        (caps / "nvidia-cap1").touch()
        assert nodes.needs_pass()
        (caps / "nvidia-cap1").unlink()
        caps.rmdir()
        assert [nodes.needs_pass(), nodes.needs_pass()] == [True, False]
    (dev / "dri").mkdir()
    (dev / "dri/card0").touch()
    assert nodes.needs_pass(), "the pass comes after the watch, and sees both"
    (dev / "dri").rename(dev / "elsewhere")
    assert nodes.needs_pass()
    (dev / "elsewhere/card1").touch()
    assert not nodes.needs_pass(), "no longer below its name"
    (dev / "dri").mkdir()
    assert nodes.needs_pass()
    (dev / "dri/card0").touch()
    assert nodes.needs_pass()


def test_a_watched_directory_that_is_renamed_needs_a_pass(cache: Source, tmp_path: Path) -> None:
    """The event is the only one: its parent is not watched. poll(2) ends the wait only for an event."""
    directory = tmp_path / "host/etc"
    assert poll_for(cache) == []
    directory.rename(directory.with_name("elsewhere"))
    assert poll_for(cache) == [select.POLLIN]
    assert cache.needs_pass()
    directory.mkdir()
    assert cache.needs_pass()
    (directory / "ld.so.cache").touch()
    assert poll_for(cache) == [select.POLLIN]
    assert cache.needs_pass()


def poll_for(source: Source) -> list[int]:
    """Return the events that would end the service's wait now."""
    poll = select.poll()
    for descriptor, events in source.polled().items():
        poll.register(descriptor, events)
    return [events for _, events in poll.poll(0)]


def test_a_lost_event_needs_a_pass(nodes: Source, dev: Path) -> None:
    """A queue overflows with names that need no pass."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    (dev / "tty0").touch()
    for number in range(limit // 2 + 1):
        os.rename(dev / f"tty{number}", dev / f"tty{number + 1}")
    assert nodes.needs_pass()
    assert not nodes.needs_pass()
    (dev / "nvidia0").touch()
    assert nodes.needs_pass()


def test_a_replaced_or_touched_loader_cache_needs_a_pass(cache: Source, tmp_path: Path) -> None:
    etc = tmp_path / "host/etc"
    for _ in range(2):
        # ldconfig replaces the file like this.
        (etc / "ld.so.cache~").write_bytes(b"new")
        assert not cache.needs_pass()
        (etc / "ld.so.cache~").rename(etc / "ld.so.cache")
        assert cache.needs_pass()
    (etc / "ld.so.cache").touch()
    assert cache.needs_pass()
    (etc / "resolv.conf").write_text("nameserver 192.0.2.1\n")
    assert (etc / "ld.so.cache").read_bytes()
    assert not cache.needs_pass()


@pytest.mark.scenario("001")
def test_libraries_in_other_places_need_a_pass(watch: Watch, cache: Source, tmp_path: Path) -> None:
    """A directory that did not exist is watched from the next pass on; other libraries do not matter."""
    directory = tmp_path / "host/usr/local/glibc/usr/lib"
    directory.mkdir(parents=True)
    assert cache.needs_pass()
    (directory / "libssl.so.3").touch()
    assert not cache.needs_pass()
    (directory / "libcuda.so.570.211.01").touch()
    assert cache.needs_pass()
    configured = watch("loader-cache", driver=DriverSettings.validated({"root": "/srv/image"}))
    (directory / "libcuda.so.1").touch()
    (tmp_path / "host/srv/image/etc").mkdir(parents=True)
    (tmp_path / "host/srv/image/etc/ld.so.cache").touch()
    assert not configured.needs_pass(), "which may be a network's: the timer's pass looks there"


class Reports:
    """The reports of one machine, written at chosen times."""

    def __init__(self, host: Host, tree: Path) -> None:
        self.now = 1000.0
        self.reports = NewReports(host, lambda: self.now)
        self.directory = tree / REPORTS.lstrip("/")
        self.directory.mkdir(parents=True)

    def arrives(self, content: str, after: float = 60.0) -> bool:
        self.now += after
        (self.directory / "report.json").write_text(content)
        return self.reports.matters(REPORTS, "report.json")


@pytest.fixture
def reports(host: Host, tmp_path: Path) -> Reports:
    return Reports(host, tmp_path / "host")


def test_a_report_with_news_needs_a_pass(reports: Reports) -> None:
    """An invalid one does no harm."""
    assert reports.arrives("one")
    assert not reports.arrives("one"), "a heartbeat"
    assert reports.arrives("two")
    assert not reports.reports.matters(REPORTS, ".report.json.unbounded-agent-new")
    assert not reports.arrives("two", after=HEARTBEAT - 1)
    assert reports.arrives("two", after=HEARTBEAT + 1), "after a silence"
    place = reports.directory / "report.json"
    for link in (None, "", "/dev/zero"):
        place.unlink()
        if link:
            place.symlink_to(link)
        elif link is not None:
            os.mkfifo(place)
        assert reports.reports.matters(REPORTS, "report.json")
        place.unlink(missing_ok=True)
        place.touch()


def test_a_machine_cannot_keep_its_host_busy_nor_delay_another(reports: Reports, host: Host) -> None:
    """On a real host, a lower limit noticed sixteen GPUs that came one after another 15 s late."""
    assert all(reports.arrives(str(number), after=PERIOD / 32) for number in range(2 * 16))
    other = REPORTS.replace("gpu-node", "other")
    assert not reports.reports.matters(other, ""), "none yet"
    reports.now += PERIOD
    assert sum(reports.arrives(f"many {number}", after=0.1) for number in range(200)) == MANY
    assert not reports.reports.matters(REPORTS, "")
    host.write(f"{other}/report.json", b"one")
    assert reports.reports.matters(other, "report.json")
    assert reports.arrives("later", after=PERIOD)


def test_report_directories_are_found_as_machines_come(watch: Watch, host: Host) -> None:
    source = watch("reports")
    assert not source.needs_pass()
    host.make_directory(REPORTS)
    source.needs_pass()
    host.write(f"{REPORTS}/report.json", b"{}")
    assert [source.needs_pass(), source.needs_pass()] == [True, False]


def test_a_command_needs_a_pass_and_the_service_itself_does_not(watch: Watch, gpu_host: Host) -> None:
    """`gpus forget` once did not: metrics showed the lost GPU for another minute."""
    agent = reconciler(gpu_host)
    agent.reconcile()
    source = watch("commands", gpu_host)
    source.needs_pass()
    gpu_host.unplug("0000:02:00.0")
    agent.reconcile()
    assert not source.needs_pass()
    assert forget("", agent) != ("no GPU is lost: nothing to do",)
    assert source.needs_pass()
    forget("", agent)
    assert not source.needs_pass(), "nothing changed"
    Path(gpu_host.root, "run/unbounded-agent").rename(Path(gpu_host.root, "run/elsewhere"))
    Path(gpu_host.root, "run/unbounded-agent").mkdir()
    assert source.needs_pass(), "a command may have run while the old directory was watched"


def test_a_machine_that_starts_or_stops_needs_a_pass(watch: Watch, tmp_path: Path) -> None:
    """machined writes a temporary file first and renames it, and makes links by unit next to it."""
    source = watch("machined")
    assert not source.needs_pass(), "machined has not run yet"
    directory = tmp_path / "host/run/systemd/machines"
    directory.mkdir(parents=True)
    assert source.needs_pass()
    (directory / ".#gpu-nodeXzY").touch()
    (directory / "unit:systemd-nspawn@gpu-node.service").symlink_to("gpu-node")
    assert not source.needs_pass()
    (directory / ".#gpu-nodeXzY").rename(directory / "gpu-node")
    assert source.needs_pass()
    (directory / "unit:systemd-nspawn@gpu-node.service").unlink()
    assert not source.needs_pass()
    (directory / "gpu-node").unlink()
    assert source.needs_pass()


def test_without_udevd_its_source_is_an_error(host: Host) -> None:
    with pytest.raises(FileNotFoundError, match=f"udevd is not running.*{CONTROL}"):
        Udev(host, (), GpuErrors(host).receive).open()


UMOCKDEV = """\
P: /devices/pci0000:00/0000:00:01.0
E: SUBSYSTEM=pci

P: /devices/pci0000:00/0000:00:01.0/drm/card1
E: SUBSYSTEM=drm
E: HOTPLUG=1

P: /devices/pci0000:00/0000:00:01.0/drm/card2
E: SUBSYSTEM=drm
E: WEDGED=rebind,bus-reset

P: /devices/usb1
E: SUBSYSTEM=usb

"""
PROGRAM = """
import ctypes, select, sys
from agent.system.files import System
from agent.system.process import host_runner
from agent.host.daemon.wakeups import Udev, matters
from agent.model.facts import Verdict
from agent.model.paths import GPUS
from agent.system.devices import CONTROL, KernelLog

library = ctypes.CDLL("libumockdev.so.0")
library.umockdev_testbed_new.restype = ctypes.c_void_p
bed = ctypes.c_void_p(library.umockdev_testbed_new())
assert library.umockdev_testbed_add_from_string(bed, open(sys.argv[1], "rb").read(), None)
source = Udev(System(host_runner, sys.argv[2]), (), lambda error: print(error.pci_address, error.verdict))
source.open()

def pass_due(*events):
    for event in events:
        action, path = event.split()
        library.umockdev_testbed_uevent(bed, f"/sys{path}".encode(), action.encode())
    poll = select.poll()
    for descriptor, mask in source.polled().items():
        poll.register(descriptor, mask)
    return bool(poll.poll(200)), source.needs_pass()

gpu = "/devices/pci0000:00/0000:00:01.0"
print("gpu", pass_due(f"add {gpu}"))
print("nothing", pass_due())
print("connector", pass_due(f"change {gpu}/drm/card1"))
print("card", pass_due(f"add {gpu}/drm/card1"))
print("both", pass_due(f"change {gpu}/drm/card1", f"remove {gpu}/drm/card1", f"remove {gpu}"), pass_due())
print("other subsystem", pass_due("add /devices/usb1"))
print("wedged", pass_due(f"change {gpu}", f"change {gpu}/drm/card2"), pass_due())
source.close()
"""


@pytest.mark.processes
def test_udevs_events_need_a_pass_except_those_of_monitors(host: Host, tmp_path: Path) -> None:
    """libudev is real; umockdev simulates the devices and udevd (Debian package umockdev)."""
    host.make_directory("/run/udev")
    (tmp_path / "host/run/udev/control").touch()
    (tmp_path / "devices").write_text(UMOCKDEV)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "devices"), str(tmp_path / "host")]
    done = subprocess.run(
        ["umockdev-wrapper", *program], capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[4]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "gpu (True, True)",
        "nothing (False, False)",
        "connector (True, False)",
        "card (True, True)",
        "both (True, True) (False, False)",
        "other subsystem (False, False)",
        "0000:00:01.0 needs-reset",
        "wedged (True, True) (False, False)",
    ]


@pytest.mark.parametrize(
    ("event", "needs_pass"),
    [
        (Event("drivers", "add", "/bus/pci/drivers/nvidia"), True),
        (Event("drivers", "add", "/bus/usb/drivers/hub"), False),
        (Event("module", "remove", "/module/nvidia_uvm"), True),
        (Event("module", "add", "/module/nf_tables"), False),
        (Event("pci", "unbind", "/devices/pci0000:00/0000:00:01.0"), True),
    ],
)
def test_which_events_of_udev_need_a_pass(event: Event, needs_pass: bool) -> None:
    assert matters(event, ("nvidia*",)) is needs_pass


@pytest.mark.parametrize("why", [OSError(errno.ENOBUFS, "No buffer space available"), OSError("Error while polling")])
def test_an_overflow_is_a_loss_like_any_error_of_the_monitor(why: OSError, host: Host) -> None:
    """A lost source is opened again at once, and that needs a pass."""

    class Broken:
        """A simulation of pyudev's monitor."""

        def fileno(self) -> int:
            return 0

        def poll(self, timeout: float) -> Event | None:
            raise why

    host.write(CONTROL, b"")
    source = Udev(host, (), GpuErrors(host).receive, Broken)
    source.open()
    with pytest.raises(OSError, match=str(why.args[-1])):
        source.needs_pass()


def empty_log(path: str, after: int | None) -> KernelLog:
    return KernelLog(os.open(os.devnull, os.O_RDONLY), lambda *_: b"", after)


WEDGED_GPU = "0000:01:00.0"
CARD = f"/devices/pci0000:00/0000:00:01.0/{WEDGED_GPU}/drm/card0"


@pytest.mark.parametrize(
    ("methods", "verdict"),
    [
        ("none", None),
        ("rebind", Verdict.NEEDS_RESET),
        ("rebind,bus-reset", Verdict.NEEDS_RESET),
        ("bus-reset", Verdict.NEEDS_RESET),
        ("vendor-specific", Verdict.BROKEN),
        ("cold-reset", Verdict.NEEDS_REBOOT),
        ("unknown", Verdict.NEEDS_REBOOT),
        ("a-later-method", Verdict.NEEDS_REBOOT),
    ],
)
def test_a_wedged_gpu_is_recorded_whatever_comes_before_and_after(
    gpu_host: Host, caplog: pytest.LogCaptureFixture, methods: str, verdict: Verdict | None
) -> None:
    """On a full disk, it is tried again: the event is not repeated. For a GPU that has recovered, a line is enough."""
    gpu_host.symlink(f"/sys/bus/pci/devices/{WEDGED_GPU}/driver", "../../../../bus/pci/drivers/xe")
    gpu_host.write(CONTROL, b"")
    follower = GpuErrors(gpu_host, open_log=empty_log)
    others = [Event("pci", "change", f"/devices/pci0000:00/0000:00:0{each}.0") for each in (1, 2)]
    came = [others[0], Event("drm", "change", CARD, {"WEDGED": methods}), others[1]]
    source = Udev(gpu_host, (), follower.receive, lambda: Sent(came))
    source.open()
    gpu_host.full = [GPUS]
    with caplog.at_level("INFO"):
        assert [source.needs_pass(), source.needs_pass()] == [True, False]
    assert f"{WEDGED_GPU}: " in caplog.text
    assert not follower.needs_pass()
    gpu_host.full = []
    assert follower.needs_pass() is (verdict is not None)
    found = {address: (each.reason, each.verdict) for address, each in observe_gpus(gpu_host).faults.items()}
    assert found == ({WEDGED_GPU: ("Wedged", verdict)} if verdict else {})


def test_events_of_other_nodes_say_nothing_of_a_gpu(gpu_host: Host) -> None:
    gpu_host.write(CONTROL, b"")
    paths = ("/devices/platform/vgem/drm/card0", f"{CARD}/card0-DP-1", CARD)
    events = [Event("drm", "change", path, {} if path == CARD else {"WEDGED": "rebind"}) for path in paths]
    follower = GpuErrors(gpu_host)
    source = Udev(gpu_host, (), follower.receive, lambda: Sent(events))
    source.open()
    assert source.needs_pass()
    assert follower.last == {}
