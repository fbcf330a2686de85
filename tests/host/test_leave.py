"""The host's side of a machine's drain, with machines that answer in time, late, never, or wrongly."""

import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from agent.host.leave import (
    BEGIN,
    MARGIN,
    SILENT,
    CannotLeaveError,
    clear,
    drain,
    evict,
    lines,
    parse_answer,
    pass_images,
    uncordon,
    unsaved,
    was_drained,
    what_is_lost,
)
from agent.host.state.locks import locked
from agent.model.contract import (
    LOST_LIMIT,
    LeaveAnswer,
    LeaveEnd,
    LeaveRequest,
    LeaveTask,
    Lost,
    parse_leave_request,
    render_leave_answer,
    render_leave_request,
)
from agent.model.errors import AgentError, DocumentError
from agent.model.paths import (
    MACHINED_STATE,
    candidate_of,
    drained_file,
    handoff_directory,
    images_pipe,
    leave_file,
    leave_lock_file,
    leaving_file,
)
from tests.fakes.clock import Clock
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import Host

DATA = Lost("/srv/data", 2, 3_500_000, "claim default/pv")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "host")
    host.file(f"{MACHINED_STATE}/{MACHINE}")
    host.make_directory(handoff_directory(MACHINE))
    return host


def says(host: Host, *answers: LeaveAnswer) -> Callable[[], None]:
    """Return what the machine does in each wait: it writes the next answer, with the id of the request."""
    left = [*answers]

    def answer() -> None:
        if left:
            request = parse_leave_request(host.read(leave_file(MACHINE)))
            host.write(leaving_file(MACHINE), render_leave_answer(left.pop(0)._replace(id=request.id)))

    return answer


def answer(end: LeaveEnd = LeaveEnd.DONE, seconds: float = 0.0, **facts: object) -> LeaveAnswer:
    return LeaveAnswer("", end, seconds)._replace(**facts)  # type: ignore[arg-type]


def test_a_drain_says_how_far_it_is(host: Host, clock: Clock) -> None:
    said: list[str] = []
    waits = ("default/web: The disruption budget web needs 2",)
    clock.meanwhile = says(
        host,
        answer(LeaveEnd.WORKING),
        answer(LeaveEnd.WORKING, 1.0, pods=2, waiting=waits),
        answer(LeaveEnd.WORKING, 2.0, pods=2, waiting=waits),
        answer(LeaveEnd.WORKING, 3.0, pods=1),
        answer(),
    )
    drain(MACHINE, host, said.append, 60)
    assert said == [f"machine {MACHINE}: 2 pods to leave: {waits[0]}", f"machine {MACHINE}: 1 pod to leave"]
    assert was_drained(MACHINE, host)
    assert not host.exists(leave_file(MACHINE))


def test_the_request_says_what_and_for_how_long(host: Host, clock: Clock) -> None:
    seen = []

    def look() -> None:
        assert was_drained(MACHINE, host), "the machine may cordon the node although this process is killed now"
        assert host.is_locked(leave_file(MACHINE)), "then, the machine evicts no more pods"
        seen.append(parse_leave_request(host.read(leave_file(MACHINE))))
        says(host, answer())()

    clock.meanwhile = look
    drain(MACHINE, host, print, 77)
    assert [(each.task, each.seconds) for each in seen] == [(LeaveTask.DRAIN, 77)]


def test_an_eviction_names_the_gpus_and_leaves_no_note(host: Host, clock: Clock) -> None:
    """Nothing has to be uncordoned afterwards."""
    seen, waits = [], ("default/web: The disruption budget web needs 2",)

    def look() -> None:
        seen.append(parse_leave_request(host.read(leave_file(MACHINE))))
        says(host, answer(LeaveEnd.FAILED, message="pods are left on 0000:01:00.0", pods=1, waiting=waits))()

    clock.meanwhile = look
    with pytest.raises(AgentError, match="The disruption budget web"):
        evict(MACHINE, ["0000:02:00.0", "0000:01:00.0"], host, print, 77)
    assert [(each.task, each.gpus) for each in seen] == [(LeaveTask.EVICT, ("0000:01:00.0", "0000:02:00.0"))]
    assert not was_drained(MACHINE, host)
    assert not host.exists(leave_file(MACHINE))


def test_a_machine_that_never_begins_is_left_as_it_was(host: Host, clock: Clock) -> None:
    with pytest.raises(CannotLeaveError, match="its image may have an older agent"):
        drain(MACHINE, host, print, 600)
    assert BEGIN - 5 < clock.passed < BEGIN + 3
    assert not host.exists(drained_file(MACHINE))
    assert not host.exists(leave_file(MACHINE))


def test_a_request_that_a_machine_misses_is_written_again(host: Host, clock: Clock) -> None:
    """systemd does not watch the file while the service ends, which an earlier request has started."""
    missed = list[int | None]()

    def misses_the_first() -> None:
        missed.append(host.link_inode(leave_file(MACHINE)))
        assert host.is_locked(leave_file(MACHINE))
        if missed[-1] != missed[0]:
            says(host, answer())()

    clock.meanwhile = misses_the_first
    drain(MACHINE, host, print, 60)
    assert clock.passed < 10


def test_a_machine_that_has_just_booted_has_longer_to_begin(host: Host, clock: Clock) -> None:
    def late() -> None:
        if clock.passed > BEGIN + 60:
            says(host, answer())()

    clock.meanwhile = late
    assert uncordon(MACHINE, host, print) == ""


class LateHost(Host):
    """A host with a machine that begins when its request is being withdrawn."""

    def remove(self, path: str) -> None:
        if path == leave_file(MACHINE):
            says(self, answer(LeaveEnd.WORKING))()
        super().remove(path)


def test_a_machine_that_begins_at_the_last_moment_may_have_cordoned_its_node(tmp_path: Path, clock: Clock) -> None:
    host = LateHost(tmp_path / "host")
    host.file(f"{MACHINED_STATE}/{MACHINE}")
    host.make_directory(handoff_directory(MACHINE))
    with pytest.raises(AgentError, match="has begun too late") as error:
        drain(MACHINE, host, print, 600)
    assert not isinstance(error.value, CannotLeaveError)
    assert was_drained(MACHINE, host)


def test_the_note_of_an_earlier_drain_stays(host: Host, clock: Clock) -> None:
    clock.meanwhile = says(host, answer(LeaveEnd.FAILED, message="pods are left on node x"))
    with pytest.raises(AgentError, match="pods are left"):
        drain(MACHINE, host, print, 600)
    clock.meanwhile = says(host, answer(LeaveEnd.UNABLE))
    with pytest.raises(CannotLeaveError):
        drain(MACHINE, host, print, 600)
    assert was_drained(MACHINE, host)
    clock.meanwhile = says(host, answer(message="fine"))
    assert uncordon(MACHINE, host, print) == "fine"
    assert not was_drained(MACHINE, host)


@pytest.mark.parametrize("talks", [False, True])
def test_a_machine_that_begins_and_does_not_finish_is_not_waited_for(host: Host, clock: Clock, talks: bool) -> None:
    working = [answer(LeaveEnd.WORKING, float(number)) for number in range(1000 if talks else 1)]
    clock.meanwhile = says(host, *working)
    with pytest.raises(AgentError) as error:
        drain(MACHINE, host, print, 100)
    assert not isinstance(error.value, CannotLeaveError)
    assert abs(clock.passed - (100 + MARGIN if talks else SILENT)) < 5
    assert was_drained(MACHINE, host)


def test_an_answer_to_another_request_does_not_count(host: Host, clock: Clock) -> None:
    host.write(leaving_file(MACHINE), render_leave_answer(answer(id=secrets.token_hex(8))))
    with pytest.raises(CannotLeaveError):
        drain(MACHINE, host, print, 600)


@pytest.mark.parametrize(
    "change",
    [
        {"end": "great"},
        {"pods": -1},
        {"waiting": ["x"] * 21},
        {"message": "x" * 1001},
        {"lost": [{"path": "relative", "files": 1, "size": 1}]},
        {"lost": [{"path": "/half a pair: \ud800", "files": 1, "size": 1}]},
        {"seconds": float("nan")},
        {"lost": [{"path": "/x", "files": 1, "size": 1}] * (LOST_LIMIT + 1)},
        {"version": 2},
    ],
)
def test_an_answer_is_not_trusted(host: Host, clock: Clock, change: dict[str, object]) -> None:
    document = json.loads(render_leave_answer(answer(id="ab")))
    assert parse_answer(json.dumps(document).encode()).id == "ab"
    with pytest.raises(DocumentError):
        parse_answer(json.dumps({**document, **change}).encode())


def test_what_a_machine_says_is_one_printable_line(host: Host, clock: Clock) -> None:
    clock.meanwhile = says(host, answer(LeaveEnd.FAILED, message="no\n\x1b[31m", waiting=("a\nb",)))
    with pytest.raises(AgentError, match=r"^machine gpu-node: machine says: no \\x1b\[31m: a b$"):
        drain(MACHINE, host, print, 600)


def test_only_one_command_asks_a_machine(host: Host, clock: Clock) -> None:
    with (
        locked(host, leave_lock_file(MACHINE), 0, ""),
        pytest.raises(AgentError, match="another command waits for machine"),
    ):
        what_is_lost(MACHINE, host)
    assert not host.exists(leave_file(MACHINE))


def test_a_stopped_machine_is_not_asked(host: Host, clock: Clock) -> None:
    host.remove(f"{MACHINED_STATE}/{MACHINE}")
    with pytest.raises(CannotLeaveError, match="does not run"):
        what_is_lost(MACHINE, host)
    assert clock.passed == 0


def test_what_is_lost(host: Host, clock: Clock) -> None:
    clock.meanwhile = says(host, answer(lost=(DATA, Lost("/root", 1, 5))))
    found = what_is_lost(MACHINE, host)
    assert found == (DATA, Lost("/root", 1, 5))
    assert lines(found) == [
        "/srv/data: 2 files, 3.5 MB (claim default/pv)",
        "/root: 1 file, 0.0 MB",
    ]


@pytest.mark.parametrize(
    ("given_up", "left"),
    [
        ((), ["/srv", "/srv/data"]),
        (("/srv/data/",), ["/srv"]),
        (("/srv/dat",), ["/srv", "/srv/data"]),
        (("/srv",), []),
        (("/",), []),
    ],
)
def test_what_is_not_given_up(given_up: tuple[str, ...], left: list[str]) -> None:
    found = unsaved((Lost("/srv", 1, 1), DATA), given_up)
    assert [each.path for each in found] == left


# Images for a machine's candidate.

CANDIDATE = candidate_of(MACHINE)


@pytest.fixture
def pair(host: Host) -> Host:
    """The host, on which the machine's candidate runs too."""
    host.file(f"{MACHINED_STATE}/{CANDIDATE}")
    host.make_directory(handoff_directory(CANDIDATE))
    return host


def asked(host: Host, name: str) -> LeaveTask | None:
    path = leave_file(name)
    return parse_leave_request(host.read(path)).task if host.exists(path) else None


def answers(host: Host, name: str, end: LeaveEnd, message: str = "") -> None:
    if host.exists(leave_file(name)):
        request = parse_leave_request(host.read(leave_file(name)))
        host.write(leaving_file(name), render_leave_answer(LeaveAnswer(request.id, end, 1.0, message)))


def test_images_go_through_one_pipe_that_both_machines_have(pair: Host, clock: Clock) -> None:
    said, seen = list[str](), list[tuple[LeaveTask | None, LeaveTask | None]]()

    def meanwhile() -> None:
        ours, theirs = (os.lstat(pair.full_path(images_pipe(each))) for each in (MACHINE, CANDIDATE))
        assert (ours.st_ino, ours.st_mode) == (theirs.st_ino, stat.S_IFIFO | 0o600)
        seen.append((asked(pair, CANDIDATE), asked(pair, MACHINE)))
        answers(pair, CANDIDATE, LeaveEnd.WORKING if len(seen) < 4 else LeaveEnd.DONE)
        answers(pair, MACHINE, LeaveEnd.DONE, "its candidate has 2 image names")

    clock.meanwhile = meanwhile
    pass_images(MACHINE, CANDIDATE, pair, said.append)
    assert seen[0] == (LeaveTask.TAKE_IMAGES, None), "nobody writes to a pipe that nobody reads"
    assert seen[1] == (LeaveTask.TAKE_IMAGES, LeaveTask.GIVE_IMAGES)
    assert said == [f"machine {MACHINE}: its candidate has 2 image names"]
    assert not any(pair.exists(each(name)) for each in (leave_file, images_pipe) for name in (MACHINE, CANDIDATE))


@pytest.mark.parametrize("fails", [MACHINE, CANDIDATE])
def test_a_machine_that_fails_keeps_the_other_one_not_waiting(pair: Host, clock: Clock, fails: str) -> None:
    def meanwhile() -> None:
        for name in (CANDIDATE, MACHINE):
            late = name == CANDIDATE and not asked(pair, MACHINE)
            answers(pair, name, LeaveEnd.FAILED if name == fails and not late else LeaveEnd.WORKING, "the disk is full")

    clock.meanwhile = meanwhile
    with pytest.raises(AgentError, match="the disk is full"):
        pass_images(MACHINE, CANDIDATE, pair, print)
    assert clock.passed < 5
    assert not any(pair.exists(each(name)) for each in (leave_file, images_pipe) for name in (MACHINE, CANDIDATE))


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("first", [MACHINE, CANDIDATE])
def test_the_cause_is_told_whichever_end_of_the_pipe_is_heard_first(
    pair: Host, clock: Clock, first: str, later: int
) -> None:
    """A pipe that breaks ends both, at the same moment or one after the other."""
    seen = list[float]()

    def meanwhile() -> None:
        if asked(pair, MACHINE):
            seen.append(clock.passed)
        for name in (CANDIDATE, MACHINE):
            failed = seen and clock.passed >= seen[0] + (0 if name == first else later)
            answers(pair, name, LeaveEnd.FAILED if failed else LeaveEnd.WORKING, f"why {name}")

    clock.meanwhile = meanwhile
    with pytest.raises(AgentError) as error:
        pass_images(MACHINE, CANDIDATE, pair, print)
    assert all(f"machine {each}: machine says: why {each}" in error.value.message for each in (MACHINE, CANDIDATE))
    assert not later or error.value.message.startswith(f"machine {first}: ")
    assert clock.passed < 6


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_killed_command_has_left_is_removed(pair: Host, busy: bool) -> None:
    """But not what another command waits for now."""
    ours, said = [each(name) for each in (leave_file, images_pipe) for name in (MACHINE, CANDIDATE)], list[str]()
    pair.make_pipe(*(images_pipe(each) for each in (MACHINE, CANDIDATE)))
    for name in (MACHINE, CANDIDATE):
        pair.write(leave_file(name), render_leave_request(LeaveRequest("ab", LeaveTask.GIVE_IMAGES, 900.0)))
    with locked(pair, leave_lock_file(MACHINE), 0, "") if busy else nullcontext():
        clear(MACHINE, CANDIDATE, pair, said.append)
    assert [each for each in ours if pair.exists(each)] == ([leave_file(MACHINE)] if busy else [])
    assert said == []


def test_a_candidate_that_takes_nothing_leaves_the_machine_alone(pair: Host, clock: Clock) -> None:
    clock.meanwhile = lambda: answers(pair, MACHINE, LeaveEnd.DONE)
    with pytest.raises(CannotLeaveError, match=f"machine {CANDIDATE} has not answered"):
        pass_images(MACHINE, CANDIDATE, pair, print)
    assert not pair.exists(leaving_file(MACHINE))


def test_what_a_machine_put_in_the_place_of_the_pipe_makes_way(pair: Host, clock: Clock) -> None:
    pair.file(f"{images_pipe(MACHINE)}/planted")
    pair.symlink(images_pipe(CANDIDATE), "/etc/shadow")
    pair.file("/etc/shadow", "secret")

    def meanwhile() -> None:
        for name in (CANDIDATE, MACHINE):
            answers(pair, name, LeaveEnd.DONE)

    clock.meanwhile = meanwhile
    pass_images(MACHINE, CANDIDATE, pair, print)
    assert pair.read("/etc/shadow") == b"secret"
