"""What probes, `systemctl status` and the log are told of a pass. Pure."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import TypeAlias

from agent.conditions import NOT_NEEDED_FOR_READY, Condition, ConditionType, Status
from agent.handoff import one_line
from agent.reconcile import MachineOutcome
from agent.server import VERBOSE, Page


def status_line(machines: Iterable[MachineOutcome]) -> str:
    """Each machine in a few words."""
    return "; ".join(f"{machine.name}: {_in_words(machine)}" for machine in machines)


def _in_words(machine: MachineOutcome) -> str:
    ready = _ready(machine)
    if ready is None:
        return "not evaluated"
    if ready.status is Status.TRUE:
        return "Ready"
    for each in machine.conditions:
        if each.type not in NOT_NEEDED_FOR_READY and each.status is ready.status:
            return f"not ready: {each.type} {each.reason}"
    return f"not ready: {ready.reason}"


def changes(machine: MachineOutcome, told: Mapping[ConditionType, Condition]) -> Iterator[tuple[int, str]]:
    """Log level and sentence of every condition that is not as it was told; good news at first only in sum."""
    for each in machine.conditions:
        before = told.get(each.type)
        if before is not None and (before.status, before.reason) == (each.status, each.reason):
            continue
        if before is None and each.status is Status.TRUE and each.type is not ConditionType.READY:
            continue
        level = logging.INFO if each.status is Status.TRUE else logging.WARNING
        yield level, one_line(f"{machine.name}: {each.type} is {each.status}: {each.reason}: {each.message}")


Check: TypeAlias = tuple[bool, str, str]
"""Whether it passed, its name, and why."""


def pages(
    machines: Iterable[MachineOutcome], alive: bool, not_seen: str, notes: tuple[Check, ...] = ()
) -> dict[str, Page]:
    """The health pages. `not_seen` says what is not freshly observed and why; empty when everything is.

    `notes` are listed on the verbose page of the observation and decide nothing.
    """
    loop = [(alive, "loop", "ok" if alive else "no pass has ended in time")]
    observation = [(not not_seen, "observation", not_seen or "ok"), *notes]
    found = _both("/livez", loop) | _both("/healthz", loop) | _both("/readyz", observation)
    for machine in machines:
        found |= _both(f"/readyz/machines/{machine.name}", list(_checks(machine)))
    return found


def _checks(machine: MachineOutcome) -> Iterator[Check]:
    """Ready alone decides; the others say why."""
    ready = _ready(machine)
    yield ready is not None and ready.status is Status.TRUE, ConditionType.READY, _explain(ready)
    for each in machine.conditions:
        if each.type is not ConditionType.READY:
            yield each.status is Status.TRUE, each.type, _explain(each)


def _explain(condition: Condition | None) -> str:
    return f"{condition.status} {condition.reason}: {condition.message}" if condition else "not evaluated"


def _ready(machine: MachineOutcome) -> Condition | None:
    return next((each for each in machine.conditions if each.type is ConditionType.READY), None)


def _both(path: str, checks: list[Check]) -> dict[str, Page]:
    """The short and the verbose page; the first check decides. A failed one is always explained, as Kubernetes does."""
    good = checks[0][0]
    lines = [f"[{'+' if passed else '-'}]{one_line(f'{name} {text}')}" for passed, name, text in checks]
    lines.append(f"{path[1:]} check {'passed' if good else 'failed'}")
    verbose = Page(
        HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{line}\n" for line in lines).encode()
    )
    return {path: Page(HTTPStatus.OK, b"ok\n") if good else verbose, path + VERBOSE: verbose}
