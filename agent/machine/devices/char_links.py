"""Makes links to the granted nodes, named by the nodes' numbers: /dev/char/MAJOR:MINOR.

On a host, udev makes these links. In a machine no udevd runs, and nspawn makes only the links to its own nodes. Older
runc, and systemd in containers' scopes, use the links to find a device's path. `nvidia-ctk system
create-dev-char-symlinks` and the GPU Operator's validator make the same links.
"""

import posixpath

from agent.machine.context import Context
from agent.machine.devices.nodes import live_numbers
from agent.model.handoff import Request
from agent.system.journal import WARNING, say

DIRECTORY = "/dev/char"


def link_nodes(context: Context, request: Request) -> None:
    """Make missing links, and remove the agent's links to nodes that are no longer granted."""
    system, notes = context.system, context.notes
    name = f"char-links-{request.vendor}"
    made = {path: text for path, text in notes.load(name).items() if isinstance(text, str)}
    numbers = live_numbers(system, request.devices)
    wanted = {
        f"{DIRECTORY}/{number.major}:{number.minor}": posixpath.relpath(path, DIRECTORY)
        for path, number in numbers.items()
    }
    try:
        for path, text in made.items():
            if wanted.get(path) != text and system.read_link(path) == text:
                system.remove(path)
        ours = {path: text for path, text in wanted.items() if made.get(path) == text or not system.exists(path)}
        # The links are noted before they are made, so that a killed run leaves no link that nobody removes.
        notes.save(name, ours)
        for path, text in ours.items():
            if not system.exists(path):
                system.link(path, text)
    except OSError as error:
        say(WARNING, f"cannot create links in {DIRECTORY}: {error}")
