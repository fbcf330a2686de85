"""Makes the links /dev/char/MAJOR:MINOR to the granted nodes.

On a host, udev makes these links. In a machine no udevd runs, and nspawn makes only the links to its own nodes. Older
releases of runc use the links to find a device's path, and so does systemd for the scopes of containers. The command
`nvidia-ctk system create-dev-char-symlinks` and the GPU Operator's validator make the same links.
"""

import posixpath

from agent.machine.context import Context
from agent.machine.devices.nodes import live_numbers
from agent.model.handoff import Request
from agent.system.journal import WARNING, say

DIRECTORY = "/dev/char"


def link_nodes(context: Context, request: Request) -> None:
    """Make missing links, and remove the agent's links to nodes that are no longer granted.

    Raises OSError if the note about these links cannot be read. Other errors are only logged.
    """
    system, notes = context.system, context.notes
    name = f"char-links-{request.vendor}"
    noted: dict[str, str] = notes.load(name)
    numbers = live_numbers(system, request.devices)
    wanted = {
        f"{DIRECTORY}/{number.major}:{number.minor}": posixpath.relpath(path, DIRECTORY)
        for path, number in numbers.items()
    }
    try:
        for link, target in noted.items():
            if wanted.get(link) != target and system.read_link(link) == target:
                system.remove(link)
        # A link that another program made is neither noted nor changed.
        own = {link: target for link, target in wanted.items() if noted.get(link) == target or not system.exists(link)}
        # Noted before they are made, so that links of a killed run are removed later.
        notes.save(name, own)
        for link, target in own.items():
            if not system.exists(link):
                system.link(link, target)
    except OSError as error:
        say(WARNING, f"cannot create links in {DIRECTORY}: {error}")
