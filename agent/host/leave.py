"""Lets a machine drain its own node before it stops, and says what another root of the machine would not have. Lets it
pass its images to that.

The host half runs nothing in a machine: it publishes a request, and reads the answer, which is not trusted. The machine
half has the kubelet's identity, which may cordon its own Node and evict its pods (agent.machine.leave).
"""

import math
import posixpath
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

from msgspec import Struct

from agent.host.apply.driver_roots import make_way
from agent.host.apply.steps import AGAIN, publish_documents, publish_request
from agent.host.state.locks import locked
from agent.host.verify.answers import MACHINE_SAYS
from agent.model.contract import (
    NAMED,
    LeaveAnswer,
    LeaveEnd,
    LeaveRequest,
    LeaveTask,
    Lost,
    parse_leave_answer,
    render_leave_request,
)
from agent.model.errors import AgentError, DocumentError
from agent.model.facts import Absent
from agent.model.handoff import SIZE_LIMIT
from agent.model.paths import (
    MACHINED_STATE,
    drained_file,
    handoff_directory,
    images_pipe,
    leave_file,
    leave_lock_file,
    leaving_file,
)
from agent.model.text import counted, first_of, one_line, quoted
from agent.system.files import System
from agent.system.trust import read_seen

BEGIN = 30.0
"""Seconds in which a machine must begin."""
SILENT = 60.0
"""Seconds after which a machine that has begun must say that it still works."""
MARGIN = 60.0
"""Seconds in addition to a request's own limit: a last question to the API server may not be answered."""
POLL = 1.0
UNCORDON_LIMIT = 120.0
"""Seconds in which a machine that has just started must uncordon its node."""
LOOK_LIMIT = 300.0
"""Seconds for a look at all files of a root, which others read and write meanwhile."""
IMAGES_LIMIT = 900.0
"""Seconds in which a machine's images go to its candidate, while its pods run on."""
PROGRAMS_LIMIT = 180.0
"""Seconds in which a candidate must have run its node's programs."""
OTHER_END = 2.0
"""Seconds in which the other end of a broken pipe says why it failed."""
MAY_BE_CORDONED, IS_CORDONED = b"asked\n", b"drained\n"
"""What the note of a drain says of the node."""
SHOWN = 3
"""How many waiting pods a message names."""

Progress: TypeAlias = Callable[[str], None]
"""As in agent.host.reconcile."""


class CannotLeaveError(AgentError):
    """The machine cannot be asked, or cannot do what it was asked for. It has changed nothing."""


class NoAnswerError(CannotLeaveError):
    """The machine has not even begun: its image may lack the unit that would."""


def drain(machine: str, system: System, progress: Progress, limit: float) -> None:
    """Let the machine cordon its node and evict its pods, which takes `limit` seconds at most.

    Budgets are obeyed: at the limit, nothing is forced. Then, raises AgentError, and the node stays cordoned until
    `uncordon`, as the note says that this leaves. Raises CannotLeaveError if nothing was changed.
    """
    noted = system.exists(drained_file(machine))
    _refuse_stopped(machine, system)
    # First: the machine may cordon its node even if this process is killed.
    if not noted:
        system.write(drained_file(machine), MAY_BE_CORDONED, 0o600)
    try:
        _ask(machine, system, progress, LeaveTask.DRAIN, limit)
    except CannotLeaveError:
        if not noted:
            system.remove(drained_file(machine))
        raise
    # On a full disk, the cordon only counts as uncertain.
    with suppress(OSError):
        system.write(drained_file(machine), IS_CORDONED, 0o600)


def was_drained(machine: str, system: System) -> bool:
    """Return whether `uncordon` has to follow when the machine has started."""
    return system.exists(drained_file(machine))


def uncordon(machine: str, system: System, progress: Progress) -> str:
    """Let the machine end the cordon of `drain`. Return what it says, if anything. Raises AgentError if it does not.

    A cordon of somebody else stays, and while a GPU is fenced, that for the GPU does (agent.machine.node_cordon).
    """
    said = _ask(machine, system, progress, LeaveTask.UNCORDON, UNCORDON_LIMIT).message
    system.remove(drained_file(machine))
    return said


def is_cordoned(machine: str, system: System) -> bool:
    """Return whether it is certain that the machine has cordoned its node."""
    return system.read(drained_file(machine)) == IS_CORDONED


def doubt_cordon(machine: str, system: System) -> None:
    """Note that the node may have been uncordoned by hand, of which the agent learns nothing."""
    with suppress(OSError):
        system.write(drained_file(machine), MAY_BE_CORDONED, 0o600)


def evict(machine: str, gpus: Iterable[str], system: System, progress: Progress, limit: float) -> None:
    """Let the machine evict the pods that were given these GPUs, within `limit` seconds. Budgets are obeyed.

    New pods must not get the GPUs. Raises AgentError.
    """
    _ask(machine, system, progress, LeaveTask.EVICT, limit, tuple(sorted(gpus)))


def what_is_lost(machine: str, system: System, limit: float = LOOK_LIMIT) -> tuple[Lost, ...]:
    """Return the files of a running machine that a new root would not have, by directory or volume.

    Raises AgentError if the machine did not look at all of them, or does not know its pods' volumes.
    """
    return _ask(machine, system, lambda _: None, LeaveTask.LOOK, limit).lost


def try_programs(machine: str, system: System, progress: Progress) -> None:
    """Let a candidate run the programs of its node, such as its kubelet, without an effect.

    Raises AgentError if one does not run; NoAnswerError if its image has an agent that cannot try them.
    """
    _ask(machine, system, progress, LeaveTask.TRY_PROGRAMS, PROGRAMS_LIMIT)


def pass_images(machine: str, other: str, system: System, progress: Progress) -> None:
    """Let a machine give the images of its containers to another one, with which it shares a pipe meanwhile.

    The bytes go from one containerd to the other: this process reads none of them. Raises AgentError or OSError.
    """
    pipes = [images_pipe(each) for each in (other, machine)]
    try:
        _remove_all(pipes, system)
        system.make_pipe(*pipes)
        with _asked(other, system, progress, LeaveTask.TAKE_IMAGES, IMAGES_LIMIT) as taking:
            # A machine that waited for a reader that never comes could not be drained.
            while not taking.look() and not taking.last:
                time.sleep(POLL)
            with _asked(machine, system, progress, LeaveTask.GIVE_IMAGES, IMAGES_LIMIT) as giving:
                said = _passed(giving, taking)
        if said:
            progress(f"machine {machine}: {said}")
    finally:
        _remove_all(pipes, system)


def _passed(giving: "_Waiting", taking: "_Waiting") -> str:
    """Wait until both are done, and return what the giving machine says. Raises AgentError if one fails.

    That breaks the pipe for the other one, which fails as well: what both say is in the error, or the cause may not be.
    """
    left, failed, until = [giving, taking], list[AgentError](), math.inf
    while left and time.monotonic() < until:
        for each in tuple(left):
            try:
                if not each.look():
                    continue
            except CannotLeaveError:
                raise
            except AgentError as error:
                failed.append(error)
                until = min(until, time.monotonic() + OTHER_END)
            left.remove(each)
        if left:
            time.sleep(POLL)
    if failed:
        raise AgentError("; ".join(each.message for each in failed), failed[0].hint)
    return giving.last.message if giving.last else ""


def clear(machine: str, other: str, system: System, progress: Progress) -> None:
    """Remove what a killed command has left: its requests, and the pipe of `pass_images`. Others' requests stay."""
    for each in (machine, other):
        try:
            _remove_all([images_pipe(each)], system)
            with suppress(AgentError), locked(system, leave_lock_file(each), 0, ""):
                _withdraw(each, system, progress)
        # Nothing of this may keep a machine down.
        except OSError as error:
            progress(f"cannot remove what an interrupted command has left in machine {each}: {error}")


def _remove_all(pipes: Iterable[str], system: System) -> None:
    for path in pipes:
        make_way(path, system)
        system.remove(path)


def unsaved(lost: Iterable[Lost], given_up: Iterable[str]) -> tuple[Lost, ...]:
    """Return what is not given up by name. Pure.

    A carried directory that is in effect is a mount, which is never listed.
    """
    saved = tuple(f"{each.rstrip('/')}/" for each in given_up)
    return tuple(each for each in lost if not f"{each.path}/".startswith(saved))


def lines(lost: Iterable[Lost]) -> list[str]:
    """Return a line for each, for people. Pure."""
    return [
        f"{quoted(each.path)}: {counted(each.files, 'file')}, {each.size / 1e6:.1f} MB"
        + (f" ({each.volume})" if each.volume else "")
        for each in lost
    ]


def _refuse_stopped(machine: str, system: System) -> None:
    if not system.exists(posixpath.join(MACHINED_STATE, machine)):
        raise CannotLeaveError(f"machine {machine} does not run")
    if not system.is_directory(handoff_directory(machine), follow=False):
        raise CannotLeaveError(f"the agent has never set up machine {machine}")


def _ask(
    machine: str, system: System, progress: Progress, task: LeaveTask, limit: float, gpus: tuple[str, ...] = ()
) -> LeaveAnswer:
    """Publish a request, and return the answer when all is done. Raises AgentError."""
    with _asked(machine, system, progress, task, limit, gpus) as waiting:
        return waiting.answer()


@contextmanager
def _asked(
    machine: str, system: System, progress: Progress, task: LeaveTask, limit: float, gpus: tuple[str, ...] = ()
) -> Iterator["_Waiting"]:
    """Publish a request as long as the block lasts. Raises AgentError."""
    _refuse_stopped(machine, system)
    busy = f"another command waits for machine {machine}"
    with locked(system, leave_lock_file(machine), 0, busy), ExitStack() as until:
        request = LeaveRequest(secrets.token_hex(8), task, limit, gpus)
        waiting = _Waiting(machine, system, progress, request, until, time.monotonic())
        try:
            waiting.publish()
            yield waiting
        except CannotLeaveError as error:
            # The machine looks for the request after it has said that it begins: now it does not begin any longer.
            _withdraw(machine, system, progress)
            if not waiting.last and (waiting.read() or waiting.last):
                raise AgentError(f"machine {machine} has begun too late", error.hint) from error
            raise
        finally:
            # Without the request, the machine goes no further.
            _withdraw(machine, system, progress)


def _withdraw(machine: str, system: System, progress: Progress) -> None:
    for failure in publish_documents(system, leave_file, {}, (machine,)):
        progress(failure)


class _Waiting(Struct):
    """The wait for one answer."""

    machine: str
    system: System
    progress: Progress
    request: LeaveRequest
    until: ExitStack
    """Ends when nobody waits any longer."""
    asked: float
    published: float = 0.0
    heard: float = 0.0
    """When the machine last wrote another answer."""
    last: LeaveAnswer | None = None

    def publish(self) -> None:
        """Write the request, also if it is there already. Raises CannotLeaveError."""
        self.published = time.monotonic()
        document = render_leave_request(self.request)
        if failures := publish_request(self.system, leave_file, self.machine, document, self.until):
            raise CannotLeaveError("; ".join(failures))

    def answer(self) -> LeaveAnswer:
        while not (answer := self.look()):
            time.sleep(POLL)
        return answer

    def look(self) -> LeaveAnswer | None:
        """Return the answer if all is done. Raises AgentError if it failed, or is not to be expected."""
        why = self.read()
        if self.last and self.last.end is not LeaveEnd.WORKING:
            return self._ended(self.last)
        self._refuse_silence(time.monotonic(), why)
        if not self.last and time.monotonic() - self.published >= AGAIN:
            self.publish()
        return None

    def read(self) -> str:
        """Take what the machine says. Return why that is not possible, as the end of a sentence."""
        path = leaving_file(self.machine)
        found = read_seen(lambda path: self.system.read_untrusted(path, SIZE_LIMIT), path)
        if not isinstance(found, tuple):
            return "" if isinstance(found, Absent) else f": {found.why}"
        try:
            answer = parse_answer(found[0])
        except DocumentError as error:
            return f": {error}"
        if answer.id == self.request.id and answer != self.last:
            if (said := _progress(self.machine, answer)) and (not self.last or said != _progress("", self.last)):
                self.progress(f"machine {self.machine}: {said}")
            self.last, self.heard = answer, time.monotonic()
        return ""

    def _refuse_silence(self, now: float, why: str) -> None:
        see = f"see `journalctl -M {self.machine} -u unbounded-agent-leave`"
        # A machine that was drained can answer, but has just booted.
        begin = UNCORDON_LIMIT if self.request.task is LeaveTask.UNCORDON else BEGIN
        if not self.last:
            if now - self.asked > begin:
                old = "its image may have an older agent"
                raise NoAnswerError(f"machine {self.machine} has not answered for {begin:.0f} s{why}; {old}", see)
        elif now - self.heard > SILENT:
            raise AgentError(f"machine {self.machine} has said nothing for {SILENT:.0f} s{why}", see)
        elif now - self.asked > self.request.seconds + MARGIN:
            raise AgentError(f"machine {self.machine} has not finished within {now - self.asked:.0f} s{why}", see)

    def _ended(self, answer: LeaveAnswer) -> LeaveAnswer:
        if answer.end is LeaveEnd.DONE:
            return answer
        why = f"{MACHINE_SAYS}{answer.message}"
        if answer.end is LeaveEnd.UNABLE:
            raise CannotLeaveError(f"machine {self.machine}: {why}")
        waiting = f": {first_of(answer.waiting, NAMED, '; ')}" if answer.waiting else ""
        raise AgentError(f"machine {self.machine}: {why}{waiting}")


def _progress(machine: str, answer: LeaveAnswer) -> str:
    """Return how far the machine is, in words; empty if that is no news."""
    if answer.end is not LeaveEnd.WORKING or not answer.pods:
        return ""
    waiting = f": {first_of(answer.waiting, SHOWN, '; ')}" if answer.waiting else ""
    return f"{counted(answer.pods, 'pod')} to leave{waiting}"


def parse_answer(data: bytes) -> LeaveAnswer:
    """Parse a machine's answer, which is not trusted: all texts become printable. Raises DocumentError."""
    found = parse_leave_answer(data)
    waiting = tuple(one_line(each) for each in found.waiting)
    lost = tuple(each._replace(volume=one_line(each.volume)) for each in found.lost)
    return found._replace(message=one_line(found.message), waiting=waiting, lost=lost)
