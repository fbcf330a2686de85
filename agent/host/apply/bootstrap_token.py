"""Gives a machine its bootstrap token, and removes the token once the machine's kubelet has joined the cluster.

The token's file is next to the handoff, not in the machine's root file system, which the host never opens after the
machine has booted. So the host can give a new token to a running machine, whose kubelet reads the file each minute, and
no token stays in the machine.
"""

from collections.abc import Iterable

from agent.host.apply.driver_roots import make_way
from agent.host.observe.joined import observe_joined
from agent.model.facts import Absent
from agent.model.paths import joined_file, token_file
from agent.system.files import System
from agent.system.seen import read_seen

LIMIT = 1024
"""Bytes of the largest token file that is read."""


def given_token(machine: str, system: System) -> str | None:
    """Return the token that the machine has: None if it has none, an empty string if the token cannot be read."""
    found = read_seen(lambda path: system.read_untrusted(path, LIMIT)[0], token_file(machine))
    if isinstance(found, Absent):
        return None
    return found.decode(errors="replace").strip() if isinstance(found, bytes) else ""


def give_token(machine: str, token: str, system: System) -> None:
    """Write the token for a machine that has not started yet, or has a token. Raises OSError."""
    # An earlier machine of this name may have left the file that says that its kubelet has joined. With this file, the
    # next pass would remove the new token at once.
    system.remove(joined_file(machine))
    give_token_again(machine, token, system)


def give_token_again(machine: str, token: str, system: System) -> None:
    """Write the token for a running machine that has none. Raises OSError.

    Keep the file that says that the kubelet has joined (`joined_file`). The kubelet may join at this moment, and its
    machine writes that file only once per boot. The next pass then finds the file, and removes the token.
    """
    path = token_file(machine)
    make_way(path, system)
    system.write(path, f"{token}\n".encode(), 0o600)


def remove_used_tokens(nodes: Iterable[str], system: System) -> tuple[str, ...]:
    """Remove the tokens of machines that have joined. Return failures, one sentence each."""
    failures = []
    for machine in nodes:
        path = token_file(machine)
        try:
            if system.exists(path) and observe_joined(machine, system):
                make_way(path, system)
                system.remove(path)
        except OSError as error:
            failures.append(f"cannot remove the used bootstrap token {path}: {error.strerror}")
    return tuple(failures)
