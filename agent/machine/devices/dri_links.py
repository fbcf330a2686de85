"""Makes the links by which programs find a GPU's DRM nodes from its PCI address.

On a host, udev makes these links. In a machine no udevd runs, and binding a node does not make its link.
"""

import posixpath

from agent.machine.context import Context
from agent.model.device import dri_link
from agent.model.handoff import Request


def link_dri_nodes(context: Context, request: Request) -> None:
    """Make the links to the granted nodes, and remove the agent's other ones. Raises OSError."""
    system, notes = context.system, context.notes
    wanted = {
        link: posixpath.relpath(device.path, posixpath.dirname(link))
        for device in request.devices
        if (link := dri_link(device.kind, device.pci_address))
    }
    name = f"dri-links-{request.vendor}"
    made = notes.load(name)
    # A correct link that the agent did not make is udev's, for example if the whole of /dev/dri is bound.
    ours = {link: text for link, text in wanted.items() if made.get(link) == text or system.read_link(link) != text}
    # The links are noted before they are made, so that a killed run leaves no link that nobody removes.
    notes.save(name, {**made, **ours})
    for link in made.keys() - wanted:
        if system.read_link(link) == made[link]:
            system.remove(link)
    for link, text in ours.items():
        if system.read_link(link) != text:
            system.link(link, text)
    notes.save(name, ours)
