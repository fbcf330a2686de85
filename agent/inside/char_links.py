"""Links to the granted nodes by their number, /dev/char/MAJOR:MINOR.

udev makes them on a host. In a machine nobody does: no udevd runs there, and nspawn makes those of its own nodes alone.
Older runc, and systemd in containers' scopes, find a device's path by them; `nvidia-ctk system
create-dev-char-symlinks` and the GPU Operator's validator make the same.
"""

import posixpath

from agent.handoff import Request
from agent.inside.devices import live_numbers
from agent.inside.journal import WARNING, say
from agent.inside.notes import Notes
from agent.system.files import System

DIRECTORY = "/dev/char"


def link_nodes(system: System, notes: Notes, request: Request) -> None:
    """Make what is missing, and remove what was made for nodes that are not granted any more; others' links stay."""
    name = f"char-links-{request.vendor}"
    made = {path: text for path, text in notes.load(name).items() if isinstance(text, str)}
    numbers = live_numbers(system, request.devices)
    wanted = {
        f"{DIRECTORY}/{number.major}:{number.minor}": posixpath.relpath(path, DIRECTORY)
        for path, number in numbers.items()
    }
    try:
        for path, text in made.items():
            if path not in wanted and system.read_link(path) == text:
                system.remove(path)
        ours = {path: text for path, text in wanted.items() if _link(system, path, text, made.get(path))}
    except OSError as error:
        say(WARNING, f"links in {DIRECTORY} cannot be made: {error}")
        return
    notes.save(name, ours)


def _link(system: System, path: str, text: str, before: str | None) -> bool:
    """Whether it is there and ours. `before`: the text of the one that was made there, if any."""
    present = system.read_link(path)
    if present == text:
        return before == text
    # Nothing, or what was made here for a node that had this number before; all else is somebody's.
    if system.exists(path) and (present is None or present != before):
        return False
    system.link(path, text)
    return True
