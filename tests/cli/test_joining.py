"""`up` waits for an API server that comes late, and brings a new bootstrap token to a machine that runs already."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host.apply.steps import give_token, given_token
from agent.host.joining import JOIN_LIMIT, SERVER_LIMIT
from agent.model.paths import joined_file, machine_root, token_file
from agent.system.http import Answer
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS
from tests.fakes.node_host import NODE, TOKEN, TOKEN_FILE, NodeHost, node_host, node_reconciler

OTHER = "fedcba.fedcba9876543210"
SILENT = ConnectionRefusedError(111, "Connection refused")


class Clock:
    """A clock that only sleeping moves, and an API server that changes with the time."""

    def __init__(self, host: NodeHost) -> None:
        self.host, self.now = host, 1000.0
        self.answers_at = 0.0
        """Seconds after the start."""
        self.accepted = {TOKEN}

    def sleep(self, seconds: float) -> None:
        # In long steps: each poll of a machine is a whole pass.
        self.now += max(seconds, 50.0)
        if self.host.is_running() and self.host.reports:
            self.host.answer()
        if self.passed > self.answers_at and self.given() in self.accepted and self.host.is_running():
            self.host.write(joined_file(MACHINE), NODE.encode())

    @property
    def passed(self) -> float:
        return self.now - 1000.0

    def given(self) -> str | None:
        return given_token(MACHINE, self.host)

    def ask(self, url: str, *, method: str = "GET", ca: bytes = b"", token: str = "") -> Answer:
        if self.passed < self.answers_at:
            raise SILENT
        return Answer(200 if token in self.accepted else 401, None)


@pytest.fixture
def host(tmp_path: Path) -> NodeHost:
    host = node_host(tmp_path / "host")
    host.joins = False
    return host


@pytest.fixture
def clock(host: NodeHost, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(host)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def run(host: NodeHost, clock: Clock, *, for_programs: bool = False, ask: Callable[..., Answer] | None = None) -> int:
    form = " --json" if for_programs else ""
    return command(node_reconciler(host), f"up {MACHINE}{form}", network=host.network, ask=ask or clock.ask)


def at_start(host: NodeHost, action: Callable[[], object]) -> None:
    """Let something happen when the machine is about to start."""

    def before(argv: tuple[str, ...]) -> None:
        if argv[:2] == ("systemctl", "start"):
            action()

    host.tools.before = before


def join_and_forget(host: NodeHost, clock: Clock) -> None:
    """Let the node join, and its machine not have reported that since its last boot."""
    assert run(host, clock) == 0
    host.remove(joined_file(MACHINE))


def test_the_token_is_gone_after_the_join(host: NodeHost, clock: Clock) -> None:
    given: list[str | None] = []
    at_start(host, lambda: given.append(clock.given()))
    assert run(host, clock) == 0
    assert given == [TOKEN], "the machine started without its token"
    assert not host.exists(token_file(MACHINE))


def test_a_pass_of_the_service_takes_a_used_token_back(host: NodeHost) -> None:
    """`up` may have been killed before it could. Only root may read it."""
    give_token(MACHINE, TOKEN, host)
    assert host.mode(token_file(MACHINE)) == 0o600
    node_reconciler(host).reconcile()
    assert host.exists(token_file(MACHINE))
    host.write(joined_file(MACHINE), NODE.encode())
    node_reconciler(host).reconcile()
    assert not host.exists(token_file(MACHINE))


def test_a_server_that_comes_ten_minutes_late(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    clock.answers_at = 600.0
    made: list[float] = []
    host.tools.before = lambda argv: made.append(clock.passed) if argv[0] == "umoci" and argv[1] == "raw" else None
    assert run(host, clock) == 0
    assert made
    assert min(made) >= 600
    lines = [line for line in capsys.readouterr().err.splitlines() if "does not answer" in line]
    assert len(lines) == 1
    assert "Connection refused; this command waits at most 15 minutes for its answer" in lines[0]


def test_a_server_that_does_not_come(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    clock.answers_at = 1e9
    host.remove_file("/usr/bin/umoci")
    assert run(host, clock) == 1
    assert clock.passed == 0
    host.file("/usr/bin/umoci", executable=True)
    assert run(host, clock) == 1
    assert SERVER_LIMIT <= clock.passed < SERVER_LIMIT + 60
    assert "does not answer: Connection refused; gave up after 15 minutes" in capsys.readouterr().out
    assert not host.exists(machine_root(MACHINE))


def test_a_server_that_goes_away_while_the_node_is_made(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    at_start(host, lambda: setattr(clock, "answers_at", clock.passed + 600.0))
    assert run(host, clock) == 0
    assert clock.passed > JOIN_LIMIT
    assert "has not joined the cluster yet: https://192.0.2.1:6443 does not answer" in capsys.readouterr().err


def test_a_server_that_goes_away_for_good(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    at_start(host, lambda: setattr(clock, "answers_at", 1e9))
    assert run(host, clock) == 1
    assert SERVER_LIMIT <= clock.passed < SERVER_LIMIT + 60
    assert "then run `unbounded-agent up gpu-node` to continue" in capsys.readouterr().err
    clock.answers_at = 0.0
    assert run(host, clock) == 0


def test_a_machine_that_never_reports(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    """Its kubelet's log would say nothing."""
    host.reports = False
    assert run(host, clock) == 1
    assert "(see `unbounded-agent doctor`, then run the same command again)" in capsys.readouterr().err


def test_a_new_token_reaches_the_running_machine(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    """From a token that is revoked before the machine's first boot: the same root file system, the same machine."""
    at_start(host, lambda: clock.accepted.discard(TOKEN))
    assert run(host, clock) == 1
    assert JOIN_LIMIT <= clock.passed < SERVER_LIMIT
    printed = "".join(capsys.readouterr())
    assert f"does not accept the bootstrap token in {TOKEN_FILE}: it is wrong, revoked or expired" in printed
    assert f"write it to {TOKEN_FILE}, then run `unbounded-agent up` again" in printed
    inode = host.link_inode(machine_root(MACHINE))

    before = clock.passed
    assert run(host, clock) == 1
    assert clock.passed == before, "a token that is not accepted is waited for"
    assert f"FAILED  token: {MACHINE}: the API server does not accept" in capsys.readouterr().out

    clock.accepted.add(OTHER)
    host.file(TOKEN_FILE, f"{OTHER}\n")
    host.runner.calls.clear()
    assert run(host, clock) == 0
    assert f"give machine {MACHINE} the bootstrap token of {TOKEN_FILE}" in capsys.readouterr().err
    assert host.link_inode(machine_root(MACHINE)) == inode
    assert not [argv for argv in host.runner.calls if argv[0] == "systemctl" and argv[-1] == UNITS[0]]
    assert not host.exists(token_file(MACHINE))


def test_a_node_that_has_joined_needs_no_token(host: NodeHost, clock: Clock) -> None:
    """Not even if the machine's report of that is lost: it is in memory, and written again at the machine's boot."""
    assert run(host, clock) == 0
    clock.accepted.clear()
    host.remove_file(TOKEN_FILE)
    assert run(host, clock) == 0
    host.joins = True
    host.tools(("systemctl", "stop", UNITS[0]), 1)
    host.remove(joined_file(MACHINE))
    assert run(host, clock) == 0
    assert host.exists(joined_file(MACHINE)), "the machine was not started"


def test_a_node_whose_certificate_has_expired_joins_again_with_a_new_token(
    host: NodeHost, clock: Clock, capsys: Capture
) -> None:
    """It was off for a year. Its kubelet then uses a bootstrap token again, but the host had removed the used one."""
    assert run(host, clock) == 0
    inode = host.link_inode(machine_root(MACHINE))
    clock.accepted = {OTHER}
    host.tools(("systemctl", "stop", UNITS[0]), 1)
    host.remove(joined_file(MACHINE))
    capsys.readouterr()
    assert run(host, clock) == 1
    printed = capsys.readouterr().err
    assert "if its certificate has expired, it needs a valid bootstrap token: the API server does not accept" in printed
    assert printed.count("does not accept") == 1, "most nodes that start need no token"
    assert f"write it to {TOKEN_FILE}, then run `unbounded-agent up` again" in printed
    host.file(TOKEN_FILE, f"{OTHER}\n")
    assert run(host, clock) == 0
    assert f"give machine {MACHINE} the bootstrap token of {TOKEN_FILE} again" in capsys.readouterr().err
    assert host.link_inode(machine_root(MACHINE)) == inode
    assert not host.exists(token_file(MACHINE))


def test_a_node_that_starts_within_a_minute_gets_no_token(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    join_and_forget(host, clock)
    given: list[str | None] = []

    def sleep(seconds: float) -> None:
        given.append(clock.given())
        clock.now += 20.0
        if len(given) == 3:
            host.write(joined_file(MACHINE), NODE.encode())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "sleep", sleep)
        assert run(host, clock) == 0
    assert given == [None] * 3


def test_a_node_that_joins_while_it_gets_a_token_again_has_joined(host: NodeHost, clock: Clock) -> None:
    """Its machine reports the join once per boot. If the host removed that report, `up` would wait in vain, and the
    token would stay."""
    join_and_forget(host, clock)
    clock.accepted, joins = set(), [NODE.encode()]

    def ask(url: str, **options: str) -> Answer:
        if options.get("token") and joins:
            host.write(joined_file(MACHINE), joins.pop())
        return Answer(200, None)

    assert run(host, clock, ask=ask) == 0
    assert host.exists(joined_file(MACHINE))
    assert not host.exists(token_file(MACHINE))


def test_a_server_that_does_not_answer_once_keeps_no_token_from_a_node(host: NodeHost, clock: Clock) -> None:
    """The node may need the token that it would have got a moment earlier or later."""
    join_and_forget(host, clock)
    tries: list[str] = []

    def ask(url: str, **options: str) -> Answer:
        if options.get("token"):
            tries.append(url)
            if len(tries) == 1:
                raise SILENT
        return clock.ask(url, token=TOKEN)

    assert run(host, clock, ask=ask) == 0
    assert len(tries) == 2


def test_a_node_without_its_token_file_waits_for_a_late_server_too(host: NodeHost, clock: Clock) -> None:
    join_and_forget(host, clock)
    host.remove_file(TOKEN_FILE)
    before = clock.passed
    clock.answers_at = before + 600.0

    def ask(url: str, **options: object) -> Answer:
        if clock.passed >= clock.answers_at:
            host.write(joined_file(MACHINE), NODE.encode())
        return clock.ask(url)

    assert run(host, clock, ask=ask) == 0
    assert clock.passed - before > JOIN_LIMIT


def test_no_secret_is_printed_while_waiting(host: NodeHost, clock: Clock, capsys: Capture) -> None:
    at_start(host, clock.accepted.clear)
    assert run(host, clock, for_programs=True) == 1
    output = capsys.readouterr()
    assert TOKEN.partition(".")[2] not in output.out + output.err
    *_, last = output.out.splitlines()
    (failure,) = json.loads(last)["failures"]
    assert "kubeadm token create" in failure
