"""The links by which programs find a GPU's DRM nodes by its PCI address. On hosts udev makes them.

No udevd runs in a machine, and a bind brings the node alone.
"""

import posixpath

from agent.handoff import Request
from agent.identity import dri_link
from agent.inside.notes import Notes
from agent.system.files import System


def link_dri_nodes(system: System, notes: Notes, request: Request) -> None:
    """Make those of the granted nodes, and remove what was made for others. Raises OSError."""
    wanted = {
        link: posixpath.relpath(device.path, posixpath.dirname(link))
        for device in request.devices
        if (link := dri_link(device.kind, device.pci_address))
    }
    name = f"dri-links-{request.vendor}"
    made = notes.load(name)
    # A link that is there as it should be and was not made here is udev's, as where the whole of /dev/dri is bound.
    ours = {link: text for link, text in wanted.items() if made.get(link) == text or system.read_link(link) != text}
    # Noted first: of a run that is killed in between, none is left behind.
    notes.save(name, {**made, **ours})
    for link in made.keys() - wanted:
        if system.read_link(link) == made[link]:
            system.remove(link)
    for link, text in ours.items():
        if system.read_link(link) != text:
            system.link(link, text)
    notes.save(name, ours)
