"""The real daemon in a child process, with real signals, a real notify socket and a simulated reconciler."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent.config.load import Loaded, load_config, load_or_last_good
from agent.config.settings import Config
from agent.host.daemon.loop import INTERNAL_ERROR, Daemon, Notifier, Signals, Timing
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.model.device import FileIdentity
from agent.model.facts import Absent, Seen
from agent.model.paths import SERVICE_STATE, TRIAL
from agent.system.files import System, temporary_path
from agent.system.process import host_runner
from tests.fakes import reconciler as simulated_reconciler
from tests.fakes.local_socket import ask_locally
from tests.fakes.waiting import wait_for

CHILDREN = multiprocessing.get_context("forkserver")
"""Forked from a process that has imported everything: imports took most of these tests' time."""
CHILDREN.set_forkserver_preload(["tests.fakes.reconciler"])
FAST = {"interval": 0.3, "pending": 0.1, "pending_watched": 0.1, "pending_limit": 0.6, "back_off": 0.1, "grace": 1.0}
SLOW = FAST | {"interval": 60.0}

pytestmark = pytest.mark.processes


class Service:
    """One daemon, as systemd would run it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "etc/unbounded-agent/config.toml"
        self.config.parent.mkdir(parents=True)
        self.port = free_port()
        self.configure()
        self.behave()
        self.address = f"@unbounded-agent-test-{uuid4()}"
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(f"\0{self.address[1:]}")
        self.notified: list[str] = []
        # Read at once, like systemd: the kernel queues only net.unix.max_dgram_qlen (10) datagrams.
        self.taking = threading.Thread(target=self._take_notifications, daemon=True)
        self.taking.start()
        self.child: ForkServerProcess | None = None

    def configure(self, machines: str = "[machines.gpu-node]", address: str = "") -> None:
        address = address or f"127.0.0.1:{self.port}"
        self.config.write_text(f'metrics.address = "{address}"\n{machines}\n')

    def behave(self, **behaviour: object) -> None:
        new = self.root / "behaviour.new"
        new.write_text(json.dumps(behaviour))
        new.rename(self.root / "behaviour.json")

    def change_loader_cache(self) -> None:
        """Cause one event, as ldconfig does: to write the file in place would cause two, perhaps some time apart."""
        new = self.root / "etc/ld.so.cache~"
        new.write_bytes(b"")
        new.rename(self.root / "etc/ld.so.cache")

    def start(self, timing: dict[str, float], **environment: str) -> None:
        environment |= {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": self.address}
        self.child = CHILDREN.Process(target=simulated_reconciler.main, args=(str(self.root), timing, environment))
        self.child.start()

    def up(self, timing: dict[str, float] | None = None, **environment: str) -> None:
        """Start the daemon, and wait until it is ready."""
        before = self.notifications("READY=1")
        self.start(timing or SLOW, **environment)
        wait_for(lambda: self.notifications("READY=1") > before)

    def in_pass(self, timing: dict[str, float], **behaviour: object) -> None:
        """Start the daemon, and wait until it is in a pass that does not end."""
        self.behave(**(behaviour or {"hold": True}))
        self.start(timing)
        wait_for(self.passes)

    def reload(self) -> None:
        before = self.notifications("READY=1")
        self.signal(signal.SIGHUP)
        wait_for(lambda: self.notifications("READY=1") > before)

    def next_pass(self) -> None:
        done = len(self.passes())
        self.signal(signal.SIGHUP)
        wait_for(lambda: len(self.passes()) > done)

    def signal(self, number: int) -> None:
        assert self.child is not None
        assert self.child.pid is not None
        os.kill(self.child.pid, number)

    def ended(self) -> int | None:
        """Wait until the process exits, and return its exit code as subprocess has it."""
        assert self.child is not None
        self.child.join(60)
        return self.child.exitcode

    def notifications(self, text: str) -> int:
        """Return how many notifications contained this text."""
        return sum(text in each for each in self.notified)

    def _take_notifications(self) -> None:
        while datagram := self.manager.recv(65536):
            self.notified.append(datagram.decode())

    def passes(self) -> list[float]:
        path = self.root / "passes"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def log(self) -> str:
        return (self.root / "log").read_text()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float | None:
        found = re.search(rf"^unbounded_agent_{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else None

    def statusz(self) -> dict[str, Any]:
        """Return the page on the Unix socket."""
        answer = ask_locally(self.root / "run/unbounded-agent/statusz.sock", "/statusz")
        found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return found

    def close(self) -> None:
        if self.child:
            self.child.kill()
            self.child.join()
        # An empty datagram ends the thread.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", f"\0{self.address[1:]}")
        self.taking.join()
        self.manager.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def recorded(service: Service) -> Seen[ServiceState]:
    """Return what `doctor` reads of the service."""
    return SERVICE_STATES.read_seen(SERVICE_STATE, System(host_runner, str(service.root)))


def test_the_service_is_ready_after_the_first_pass_even_if_machines_are_not(service: Service) -> None:
    """What an earlier service recorded, years ago or until it was killed in a write, is not shown as this one's."""
    system, cut = System(host_runner, str(service.root)), temporary_path(SERVICE_STATE)
    SERVICE_STATES.write(SERVICE_STATE, ServiceState(unserved="another process has the port"), system)
    system.write(cut, b'{"uns')
    service.in_pass(SLOW, hold=True, condition=("DriverLoaded", "False", "ModuleMissing", "load the module nvidia"))
    assert isinstance(recorded(service), Absent)
    assert service.notifications("READY=1") == 0
    assert service.get("/livez") == (200, "ok\n")
    assert service.get("/readyz")[0] == 503
    assert service.metric('machine_ready{machine="gpu-node"}') == 0
    service.behave()
    wait_for(lambda: service.notifications("READY=1"))
    assert recorded(service) == ServiceState()
    assert not system.exists(cut)
    assert service.notifications("STATUS=gpu-node: not ready: DriverLoaded ModuleMissing") == 1
    assert service.get("/readyz") == (200, "ok\n")
    status, body = service.get("/readyz/machines/gpu-node")
    assert status == 503
    assert "[-]Ready False ModuleMissing: DriverLoaded: load the module nvidia\n" in body
    assert body.endswith("readyz/machines/gpu-node check failed\n")
    assert service.get("/readyz/machines/other")[0] == 404


def test_a_ready_machine_and_a_quiet_host(service: Service) -> None:
    """No udevd runs in the test's tree; the other sources work. SIGTERM ends an idle daemon at once."""
    service.up()
    assert service.notifications("STATUS=gpu-node: Ready") == 1
    assert service.get("/readyz/machines/gpu-node") == (200, "ok\n")
    assert "[+]CDISpecCurrent True" in service.get("/readyz/machines/gpu-node?verbose")[1]
    assert service.get("/healthz?verbose") == (200, "[+]loop ok\nhealthz check passed\n")
    assert service.metric('machine_ready{machine="gpu-node"}') == 1
    assert service.metric("event_to_converged_seconds_count") == 0, "the start is no event"
    assert service.metric('wakeup_source_watching{source="udev"}') == 0
    assert service.metric('wakeup_source_losses_total{source="udev"}') == 1
    assert service.log().count("<3>event source udev lost") == 1
    for source in ("commands", "device-nodes", "loader-cache", "machined", "reports"):
        assert service.metric(f'wakeup_source_watching{{source="{source}"}}') == 1
    service.change_loader_cache()
    wait_for(lambda: service.metric('wakeups_total{source="loader-cache"}') == 1)
    assert service.metric("reconcile_duration_seconds_count") == 2
    time.sleep(0.3)
    assert len(service.passes()) == 2, "the pass itself is no event"
    started = time.monotonic()
    service.signal(signal.SIGTERM)
    assert service.ended() == 0
    assert time.monotonic() - started < 30, "the interval is 60 s"
    assert service.notifications("STOPPING=1") == 1


@pytest.mark.parametrize(
    "behaviour", [{"hold": True}, {"stuck": "read", "seconds": 500}, {"stuck": "command", "seconds": 500}]
)
def test_sigterm_interrupts_a_pass_that_does_not_end(service: Service, behaviour: dict[str, object]) -> None:
    """A second signal does not prolong the grace period: who presses Ctrl-C again is in a hurry."""
    service.in_pass(SLOW | {"grace": 0.6}, **behaviour)
    started = time.monotonic()
    assert service.child is not None
    while service.child.is_alive() and time.monotonic() - started < 60:
        service.signal(signal.SIGTERM)
        service.child.join(0.2)
    assert service.ended() == 0
    assert 0.55 < time.monotonic() - started < 60, "its grace"
    assert service.notifications("STOPPING=1") == 1
    assert "<4>interrupted during a pass" in service.log()


def test_sigterm_lets_a_pass_end_within_the_grace_period(service: Service) -> None:
    service.in_pass(SLOW | {"grace": 60.0})
    service.signal(signal.SIGTERM)
    wait_for(lambda: service.notifications("STOPPING=1"))
    time.sleep(0.3)
    service.behave()
    assert service.ended() == 0
    assert "interrupted during a pass" not in service.log()


def test_sigterm_does_not_wait_for_a_reload_that_does_not_end(service: Service) -> None:
    """The files of the configuration may be on a disk that does not answer."""
    service.up(SLOW | {"grace": 0.2})
    service.behave(loading=120)
    service.signal(signal.SIGHUP)
    wait_for(lambda: service.notifications("RELOADING=1"))
    service.signal(signal.SIGTERM)
    assert service.ended() == 0, "not its 120 s"


def test_a_stuck_read_is_counted_named_and_does_not_stop_the_service(service: Service) -> None:
    service.in_pass(FAST, stuck="read", seconds=0.1)
    wait_for(lambda: service.metric("stuck_operations") == 1)
    wait_for(lambda: len(service.passes()) >= 4)
    assert service.metric("stuck_operations") == 1, "never piled up"
    assert "[-]stuck /proc/driver/simulated\n" in service.get("/readyz?verbose")[1]
    assert "an earlier attempt still hangs" in service.log()
    service.behave()
    wait_for(lambda: service.notifications("READY=1"))


def test_errors_of_gpus_are_followed(service: Service) -> None:
    """/dev/kmsg is simulated by a plain file; each read returns what was appended."""
    log = service.root / "dev/kmsg"
    log.parent.mkdir()
    log.write_bytes(b"3,1,1,-;NVRM: Xid (PCI:0000:01:00): 48, before the start\n")
    (service.root / "sys/bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    service.up(FAST)
    with log.open("ab") as file:
        file.write(b"3,2,2,-;NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=x\n")
    wait_for(lambda: service.metric('gpu_xid_errors_total{gpu="0000:01:00.0",xid="31"}') == 1)
    assert service.get("/metrics")[1].count("gpu_xid_errors_total{") == 1
    status, body = service.get("/readyz?verbose")
    assert status == 200
    assert "[+]kernel-log ok\n[+]gpu 0000:01:00.0 Xid 31: " in body


def test_only_passes_and_steps_are_signs_of_life(service: Service) -> None:
    service.behave(steps=["write /etc/x (1 bytes)", "stage driver", *[""] * 50])
    service.up()
    wait_for(lambda: service.notified[-1] == "WATCHDOG=1" or service.notified[-1] == "READY=1")
    notifications = [each for each in service.notified if "WATCHDOG=1" in each]
    assert notifications[1] == "WATCHDOG=1\nEXTEND_TIMEOUT_USEC=120000000"
    assert 4 <= len(notifications) < 10, "begin, two steps, end; parts of a step at most once a second"
    assert service.notifications("STATUS=stage driver") == 1
    assert "<6>stage driver" in service.log()
    assert "" not in service.log().splitlines(), "as an empty sentence would be logged"


def test_sighup_reads_the_configuration_again(service: Service) -> None:
    """An unavailable address keeps no other setting out.

    Commands, and machines that start, work with the new configuration: the service would undo what they do.
    """
    service.up()
    service.configure("[machines.gpu-node]\n[machines.second]")
    service.reload()
    (reloading,) = [text for text in service.notified if "RELOADING=1" in text]
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", reloading)
    assert service.get("/readyz/machines/second") == (200, "ok\n")
    assert service.metric('config_reloads_total{result="ok"}') == 1
    old = service.port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service.configure("[machines.second]", address)
        service.reload()
    assert service.get("/livez") == (200, "ok\n"), "at the former address"
    assert 'machine="gpu-node"' not in service.get("/metrics")[1], "series go with their machine"
    assert service.metric("config_last_reload_successful") == 0
    assert f"metrics.address: cannot listen on {address}" in service.log()
    service.port = int(address.rpartition(":")[2])
    service.reload()
    assert service.metric("config_last_reload_successful") == 1
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", old))


def test_a_bad_configuration_does_not_keep_out_what_another_process_put_in_force(service: Service) -> None:
    """Machines that start use the last good configuration. With an older one, the service would undo what they do."""
    service.up()
    service.configure("[machines.gpu-node]\n[machines.second]")
    load_or_last_good(System(host_runner, str(service.root)))
    service.change_loader_cache()
    # The timer would cause a pass only after 54 s.
    wait_for(lambda: service.notifications("READY=1") == 2, 30)
    assert service.get("/readyz/machines/second") == (200, "ok\n")
    service.configure("[machines.gpu-node]\n[machines.second]\nspeed = 9")
    service.reload()
    assert service.get("/readyz/machines/second") == (200, "ok\n")
    assert service.metric("config_last_reload_successful") == 0


REJECTED = "<3>configuration rejected, using the last good one: /etc/unbounded-agent/config.toml: machines.gpu-node"


def test_a_bad_configuration_is_kept_out_and_counted(service: Service) -> None:
    """At a start too: the last good one is used."""
    service.up()
    service.configure("[machines.gpu-node]\nspeed = 9")
    service.reload()
    assert service.log().count(f"{REJECTED}.speed") == 1
    assert service.metric("config_last_reload_successful") == 0
    assert service.metric('config_reloads_total{result="failed"}') == 1
    assert service.metric('machine_ready{machine="gpu-node"}') == 1
    service.signal(signal.SIGTERM)
    assert service.ended() == 0
    service.up()
    assert service.metric('machine_ready{machine="gpu-node"}') == 1
    assert service.metric("config_last_reload_successful") == 0
    assert service.log().count(f"{REJECTED}.speed") == 2
    service.configure()
    service.reload()
    assert service.metric("config_last_reload_successful") == 1


def test_a_taken_port_at_start_is_reported_and_retried_while_gpus_are_managed(service: Service) -> None:
    """A pod on the host's network can take the port while the agent is down."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", service.port))
        taken.listen()
        service.up(FAST)
        wait_for(lambda: len(service.passes()) >= 3)
        what = f"configuration key metrics.address: cannot listen on 127.0.0.1:{service.port}: Address already in use"
        what += f" by a process of user {os.getuid()}, which answers Prometheus instead"
        assert service.notifications(f"STATUS=no metrics: {what}; gpu-node: Ready") >= 1
        assert recorded(service) == ServiceState(unserved=what)
        assert service.log().count("cannot listen") == 1, "the same failure is logged once"
        assert re.search(
            f"^<3>cannot serve metrics .* {re.escape(what)} .*configure another address", service.log(), re.MULTILINE
        )
    wait_for(lambda: f"<6>serving http://127.0.0.1:{service.port}/metrics" in service.log())
    assert service.get("/readyz") == (200, "ok\n")
    wait_for(lambda: service.notified[-1] == "WATCHDOG=1" and service.notified[-2] == "STATUS=gpu-node: Ready")


def test_a_second_agent_says_so_and_does_nothing_until_the_first_is_killed(service: Service) -> None:
    service.up()
    first, done = service.child, len(service.passes())
    service.start(SLOW)
    assert service.ended() == 1
    assert "another unbounded-agent already serves this host" in service.log()
    assert len(service.passes()) == done
    service.child = first
    service.signal(signal.SIGKILL)
    service.ended()
    service.up()


def test_the_time_from_an_event_to_the_machines_report_is_measured(service: Service) -> None:
    """A pass that awaits a report, or one that failed, does not end the time."""
    converged = "event_to_converged_seconds_count"
    service.up(SLOW | {"pending_limit": 60.0})
    service.behave(pending=True)
    service.change_loader_cache()
    wait_for(lambda: len(service.passes()) >= 3)
    service.behave(failures=["simulated"])
    wait_for(lambda: service.metric('reconcile_total{result="partial"}'))
    assert service.metric(converged) == 0
    service.behave(error="simulated")
    wait_for(lambda: service.metric('machine_ready{machine="gpu-node"}') == 0)
    assert service.metric(converged) == 0
    service.behave()
    wait_for(lambda: service.metric(converged) == 1)
    taken = service.metric("event_to_converged_seconds_sum")
    assert taken is not None
    assert taken >= service.passes()[-1] - service.passes()[1]


def test_attack_hundreds_of_connections_delay_no_pass(service: Service) -> None:
    """Each connection costs its peer a socket, and the service no more than its few threads."""
    strange = (b"GET /metrics HTTP/1.0\r\n", b"", b"POST / HTTP/1.0\r\n\r\n", b"\xff" * 9000)
    service.up()
    with ExitStack() as stack:
        for number in range(400):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=30))
            with suppress(ConnectionError):
                peer.sendall(strange[number % len(strange)])
        started = time.monotonic()
        service.change_loader_cache()
        wait_for(lambda: len(service.passes()) == 2, 10)
        assert service.passes()[-1] - started < 5
        assert service.get("/livez") == (200, "ok\n")
        assert service.child is not None
        assert len(os.listdir(f"/proc/{service.child.pid}/task")) < 50


def test_statusz_is_only_on_the_unix_socket_and_has_the_last_passes(service: Service) -> None:
    """A failed step is logged once, tried again soon, and named in the line for systemctl."""
    service.up()
    wait_for(lambda: [each["trigger"] for each in service.statusz()["passes"]] == ["start"])
    service.behave(failures=["cannot write /a: simulated"])
    service.change_loader_cache()
    wait_for(lambda: len(service.passes()) >= 4)
    wait_for(lambda: service.statusz()["passes"][0]["failures"] == ["cannot write /a: simulated"])
    assert service.log().count("<3>cannot write /a: simulated") == 1
    status = "STATUS=the last pass had a failure: cannot write /a: simulated; gpu-node: Ready"
    wait_for(lambda: service.notifications(status) >= 1)
    wait_for(lambda: recorded(service) == ServiceState(failed="cannot write /a: simulated"))
    service.behave(error="simulated")
    wait_for(lambda: service.statusz()["whyNotObserved"] == "the last pass failed: simulated")
    wait_for(lambda: recorded(service) == ServiceState(unfinished="simulated"))
    assert service.statusz()["machines"]["gpu-node"]["gpus"]
    assert service.get("/statusz")[0] == 404
    service.behave()
    wait_for(lambda: "<6>recovered: the last pass had no failure" in service.log())


def test_pending_machines_are_checked_soon_but_not_forever(service: Service) -> None:
    service.behave(pending=True)
    service.start(SLOW)
    wait_for(lambda: len(service.passes()) >= 3)
    wait_for(lambda: time.monotonic() - service.passes()[-1] > 0.4)
    before = len(service.passes())
    assert 3 <= before <= 8
    service.change_loader_cache()
    wait_for(lambda: service.metric("event_to_converged_seconds_count") == 1)
    service.configure("[machines.gpu-node]\n[machines.other]")
    service.reload()
    wait_for(lambda: len(service.passes()) >= before + 4)


def test_a_failing_pass_backs_off_and_withdraws_readiness(service: Service) -> None:
    """After an unexpected error too: a restart would fail the same way. The log has its traceback once."""
    service.up()
    assert service.metric('machine_ready{machine="gpu-node"}') == 1
    service.behave(error="cannot observe: time limit")
    service.signal(signal.SIGHUP)
    wait_for(lambda: service.metric('machine_ready{machine="gpu-node"}') == 0)
    stale = 'machine_condition{condition="DriverLoaded",machine="gpu-node",reason="StaleEvidence",status="Unknown"}'
    assert service.metric(stale) == 1
    assert service.get("/readyz")[0] == 503
    assert service.get("/livez") == (200, "ok\n")
    wait_for(lambda: len(service.passes()) >= 5)
    gaps = [after - before for before, after in itertools.pairwise(service.passes()[1:])]
    assert all(gap >= 0.9 * least for gap, least in zip(gaps, (0.1, 0.2, 0.4), strict=False))
    assert service.log().count("cannot observe") == 1, "the same failure is logged once"
    assert (service.metric('reconcile_total{result="failed"}') or 0) >= 3
    service.behave(bug="maximum recursion depth exceeded")
    service.next_pass()
    service.next_pass()
    wait_for(lambda: "Traceback" in service.log())
    assert service.get("/readyz")[0] == 503
    assert service.log().count("the last pass failed: RecursionError: maximum recursion depth exceeded") == 1
    assert service.log().count("Traceback (most recent call last)") == 1
    service.behave()
    service.signal(signal.SIGHUP)
    wait_for(lambda: service.metric('machine_ready{machine="gpu-node"}') == 1)


def on_trial(service: Service) -> None:
    mark = service.root / TRIAL.strip("/")
    mark.parent.mkdir(parents=True)
    mark.touch()


def test_an_internal_error_ends_a_release_on_trial(service: Service) -> None:
    on_trial(service)
    service.up()
    service.behave(bug="no attribute")
    service.signal(signal.SIGHUP)
    assert service.ended() == INTERNAL_ERROR


def test_internal_errors_at_all_machines_at_the_start_end_a_release_on_trial(service: Service) -> None:
    service.configure("[machines.gpu-node]\n[machines.second]")
    on_trial(service)
    service.behave(faulty=["gpu-node", "second"])
    service.start(SLOW)
    assert service.ended() == INTERNAL_ERROR
    assert not service.notifications("READY=1")


FOREIGN: dict[str, dict[str, object]] = {
    "a GPU has failed": {"condition": ("GPUsHealthy", "False", "GPUFailed", "a GPU has failed")},
    "a GPU's driver does not answer": {"stuck": "read", "seconds": 0.1},
    "GPUs cannot be listed": {"unseen": True},
    "the API server has no Node": {"condition": ("GPUsAdvertised", "False", "GPUsMissing", "no answer")},
    "the disk is full": {"failures": ["cannot write /etc/systemd/nspawn/a.nspawn: No space left on device"]},
    "the system bus does not answer": {"error": "cannot observe: the bus does not answer"},
    "machines report what nobody expected": {"faulty": ["gpu-node", "second"]},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_others_cause_ends_no_release_on_trial(service: Service, what: str) -> None:
    service.configure("[machines.gpu-node]\n[machines.second]")
    on_trial(service)
    service.up(FAST)
    service.behave(**FOREIGN[what])
    service.next_pass()
    service.next_pass()
    service.signal(signal.SIGTERM)
    assert service.ended() == 0


def test_an_internal_error_at_one_of_two_machines_ends_no_release_on_trial(service: Service) -> None:
    service.configure("[machines.gpu-node]\n[machines.second]")
    on_trial(service)
    service.behave(faulty=["second"])
    service.up()
    service.signal(signal.SIGTERM)
    assert service.ended() == 0


def test_an_invalid_configuration_ends_no_release_on_trial(service: Service) -> None:
    on_trial(service)
    service.up()
    service.config.write_text("[machines.gpu-node]\ngpu = 1\n")
    service.signal(signal.SIGHUP)
    wait_for(lambda: "gpu: unknown key" in service.log())
    service.signal(signal.SIGTERM)
    assert service.ended() == 0


def test_a_page_that_cannot_be_made_costs_only_that_page(service: Service) -> None:
    """No date has so many digits, so pages that show it cannot be made. The log has each traceback once."""
    service.behave(changed=1e20)
    service.up(FAST)
    wait_for(lambda: len(service.passes()) >= 3)
    wait_for(lambda: service.get("/readyz")[0] == 200)
    assert service.metric('machine_ready{machine="gpu-node"}') == 1
    assert service.get("/") == (500, "cannot make the page /: see `journalctl -u unbounded-agent`\n")
    for page in ("/", "/statusz", "/statusz for a time without passes"):
        assert service.log().count(f"<3>cannot make the page {page}: ") == 1
    assert service.log().count("Traceback (most recent call last)") == 3
    # This kernel log does not exist. A known error needs no traceback.
    missing = "<3>cannot follow GPU errors; each pass tries again: /dev/kmsg: No such file or directory"
    assert service.log().count(missing) == 1
    service.behave()
    wait_for(lambda: service.get("/")[0] == 200)


def test_a_hanging_pass_makes_evidence_stale_and_the_loop_not_alive(service: Service) -> None:
    """Nothing of the loop runs then: the request itself finds that the time is over."""
    service.up(FAST)
    service.behave(hold=True)
    wait_for(lambda: service.get("/livez")[0] == 503)
    assert service.metric('machine_ready{machine="gpu-node"}') == 0
    assert service.get("/readyz/machines/gpu-node")[0] == 503
    assert service.metric("host_pci_gpus") is None


@contextmanager
def daemon(root: Path, load: Callable[[], Loaded] | None = None, **timing: float) -> Iterator[Daemon]:
    """Yield a daemon in this process, whose loop does not run."""
    system = System(host_runner, str(root))
    system.make_directory("/run/unbounded-agent")
    made = Daemon(
        load or (lambda: Loaded(load_config(system))),
        lambda loaded, progress: simulated_reconciler.SimulatedReconciler(loaded, progress, root),
        Notifier(""),
        Timing(**timing),
        system,
    )
    yield made
    made.local.stop()


class Late(Signals):
    """SIGTERM comes at the start of each pass."""

    def drain(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        super().drain()


def loop_until_sigterm(root: Path) -> None:
    """Run the loop in this process."""
    with daemon(root) as found:
        found.loop(Late(Notifier(""), 60.0))


def test_sigterm_just_before_a_pass_is_not_delayed_by_it(service: Service) -> None:
    service.child = CHILDREN.Process(target=loop_until_sigterm, args=(service.root,))
    service.child.start()
    assert service.ended() == 0
    assert service.passes() == []


def pass_at_the_limit(root: Path) -> None:
    with daemon(root, pending_limit=0.2) as found:
        found.work("start", Signals(Notifier(""), 60.0))
        time.sleep(0.3)
        sys.exit(found.next_pass()[0] != "pending")


def test_a_machine_that_was_pending_in_a_pass_gets_the_next_one_soon(service: Service) -> None:
    """Its limit may end right after the pass: then nothing had converged, and the next pass came a minute later."""
    service.behave(pending=True)
    service.child = CHILDREN.Process(target=pass_at_the_limit, args=(service.root,))
    service.child.start()
    assert service.ended() == 0


@pytest.mark.parametrize(("watchdog", "longest"), [("", 66), ("120000000", 60)])
def test_passes_by_timer_have_jitter_and_a_pause_of_a_minute_is_within_the_watchdogs_time(
    service: Service, monkeypatch: pytest.MonkeyPatch, watchdog: str, longest: float
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", watchdog)
    with daemon(service.root) as found:
        delays = [found.next_pass()[1] for _ in range(1000)]
    assert max(delays) < longest
    assert max(delays) > 1.15 * min(delays)


def test_a_last_good_configuration_that_could_not_be_replaced_stays_out(service: Service) -> None:
    """It is older than the one in use, which could not be saved (a file system that is read-only)."""
    there, saved = (FileIdentity(inode, 1, 1, 1, executable=False) for inode in (1, 2))
    older, newer, same = (Config.validated({"machines": {name: {}}}) for name in ("gpu-node", "second", "gpu-node"))
    loads = iter(
        [
            Loaded(newer, before=there),
            Loaded(older, "wrong", before=there),
            Loaded(older, "x", before=saved),
            Loaded(same, "x", before=saved),
        ]
    )
    with daemon(service.root, lambda: next(loads)) as found:
        found.reload()
        assert found.loaded.config == newer
        found.reload()
        assert found.loaded.config == older, "another process has saved it meanwhile"
        read = found.view.config_loaded
        found.reload()
        assert (found.view.config_loaded, found.view.config_good) == (read, False), "a bad one does not count as read"
        assert found.loaded.config is older


def test_the_watchdogs_abort_leaves_stacks(service: Service) -> None:
    service.in_pass(SLOW)
    service.signal(signal.SIGABRT)
    assert service.ended() == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in service.log()
    assert "run_pass" in service.log()


def test_each_change_of_a_condition_is_logged_once(service: Service) -> None:
    service.start(FAST | {"interval": 0.1})
    wait_for(lambda: len(service.passes()) >= 2)
    service.behave(condition=("FabricReady", "False", "FabricManagerFailed", "evil\n<0>line \x1b[31m"))
    seen = len(service.passes())
    wait_for(lambda: len(service.passes()) >= seen + 3)
    log = service.log()
    assert log.count("<6>gpu-node: Ready is True") == 1
    assert log.count("<4>gpu-node: FabricReady is False: FabricManagerFailed: evil <0>line \\x1b[31m\n") == 1
    assert log.count("<4>gpu-node: Ready is False: FabricManagerFailed") == 1
    assert "DriverLoaded" not in log
    service.behave()
    wait_for(lambda: "<6>gpu-node: FabricReady is True" in service.log())


def test_a_failed_observation_keeps_readyz_false(service: Service) -> None:
    service.behave(unseen=True)
    service.up()
    assert service.get("/readyz") == (
        503,
        "[-]observation nvidia devices: /dev: time limit\n[-]kernel-log /dev/kmsg: No such file or directory\n"
        "readyz check failed\n",
    )
    assert service.metric('reconcile_total{result="partial"}') == 1
    assert service.metric("observation_last_success_timestamp_seconds") is None


def test_what_a_reset_or_a_test_waits_for_is_logged_once(service: Service) -> None:
    service.behave(waits=["0000:01:00.0: its reset waits: simulated"])
    service.up()
    service.next_pass()
    assert service.log().count("0000:01:00.0: its reset waits: simulated") == 1
    service.behave(waits=7)
    service.next_pass()
    wait_for(lambda: "cannot begin resets and tests of GPUs" in service.log())
    assert service.get("/readyz")[0] == 200, "passes go on"
