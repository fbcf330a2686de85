"""One fault as `unbounded-agent doctor` describes it."""

from msgspec import Struct


class Finding(Struct, frozen=True):
    """A fault with its cause, the evidence for it, and what fixes it."""

    cause: str
    """A sentence without a full stop."""
    evidence: str = ""
    """What was observed: a file with its content, or what a program printed."""
    fix: tuple[str, ...] = ()
    """Commands in the order in which to run them, some with a comment after `  #`; or sentences."""
