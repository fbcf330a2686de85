"""Makes the links in /dev/dri/by-path, by which programs find a GPU's DRM nodes from its PCI address.

On a host, udev makes these links. In a machine no udevd runs, and binding a node does not make its link.
"""

import posixpath

from agent.machine.context import Context
from agent.model.device import dri_link
from agent.model.handoff import Request


def link_dri_nodes(context: Context, request: Request) -> None:
    """Make the links to the granted nodes, and remove the agent's links to other nodes. Raises OSError."""
    system, notes = context.system, context.notes
    wanted = {
        link: posixpath.relpath(device.path, posixpath.dirname(link))
        for device in request.devices
        if (link := dri_link(device.kind, device.pci_address))
    }
    name = f"dri-links-{request.vendor}"
    noted = notes.load(name)
    # A correct link that is not noted was made by the host's udev: all of /dev/dri may be bound into the machine. Such
    # a link is not noted now either, so the agent never removes it.
    own = {
        link: target for link, target in wanted.items() if noted.get(link) == target or system.read_link(link) != target
    }
    # Noted before they are made, so that links of a killed run are removed later.
    notes.save(name, {**noted, **own})
    for link in noted.keys() - wanted:
        if system.read_link(link) == noted[link]:
            system.remove(link)
    for link, target in own.items():
        if system.read_link(link) != target:
            system.link(link, target)
    notes.save(name, own)
