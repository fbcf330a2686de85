"""Observes whether a machine's kubelet has joined its cluster."""

from agent.model.paths import joined_file
from agent.system.files import System
from agent.system.seen import read_seen

LIMIT = 1024
"""Bytes of the file that says so."""


def observe_joined(machine: str, system: System) -> str:
    """Return the name of the Node object as which the running machine has joined; empty if it has not, or not yet.

    Root in the machine can write anything there.
    """
    found = read_seen(lambda path: system.read_untrusted(path, LIMIT), joined_file(machine))
    text = found[0].decode(errors="replace").strip() if isinstance(found, tuple) else ""
    return text if text.isprintable() else ""
