"""Publishes the host status to the machines that set it on their Node objects."""

from collections.abc import Collection, Mapping

from agent.host.apply.driver_roots import make_way
from agent.model.conditions import Condition
from agent.model.errors import DocumentError, reason
from agent.model.faults import in_words
from agent.model.host_status import SIZE_LIMIT, HostStatus, host_status, parse_host_status, render_host_status
from agent.model.paths import conditions_file, handoff_directory
from agent.system.files import System

FRESH = 45.0
"""Seconds until an unchanged host status is written again: less than a minute, so that every timed pass writes it."""


def publish_host_status(
    system: System, ready: Mapping[str, Condition], with_state: Collection[str], now: float
) -> tuple[str, ...]:
    """Write the host status for each machine in `ready`, and remove that of every other machine in `with_state`.

    Return failures, one sentence each.
    """
    failures = []
    for name in sorted({*with_state, *ready}):
        path = conditions_file(name)
        try:
            # A machine that never had a goal has no such directory.
            if not system.is_directory(handoff_directory(name), follow=False):
                continue
            if name in ready:
                _update(system, path, host_status(ready[name], now))
            elif system.exists(path):
                make_way(path, system)
                system.remove(path)
        except OSError as error:
            failures.append(f"cannot update {path}: {reason(error, path)}")
        except Exception as error:
            failures.append(f"cannot update {path}: {in_words(error)}")
    return tuple(failures)


def _update(system: System, path: str, status: HostStatus) -> None:
    """Write the status if it differs from that in the file, or if the file is no longer fresh."""
    try:
        # A link is not followed: root in the machine can remount the directory writable and put one there.
        before = parse_host_status(system.read_untrusted(path, SIZE_LIMIT)[0])
    except (OSError, DocumentError):
        before = None
    same = before is not None and before._replace(evaluated=status.evaluated) == status
    # The status is also written if the clock was set back.
    if before is None or not same or not 0 <= status.evaluated - before.evaluated < FRESH:
        make_way(path, system)
        system.write(path, render_host_status(status))
