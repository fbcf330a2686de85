"""Observes whether a machine's kubelet has joined its cluster."""

from agent.config.kubernetes_names import is_subdomain
from agent.model.paths import joined_file
from agent.system.files import System
from agent.system.seen import read_seen

LIMIT = 1024
"""Bytes of the largest file that is read."""


def observe_joined(machine: str, system: System) -> str:
    """Return the name of the machine's Node object; empty if its kubelet has not joined since the machine's last start.

    The name comes from a file that root in the machine can write, so it is not trusted and may be another Node's name.
    If the file does not contain a valid name, the result is empty too: `doctor` gives the name to kubectl, which would
    take a text such as `--kubeconfig=...` for an option.
    """
    found = read_seen(lambda path: system.read_untrusted(path, LIMIT), joined_file(machine))
    node = found[0].decode(errors="replace").strip() if isinstance(found, tuple) else ""
    return node if is_subdomain(node) else ""
