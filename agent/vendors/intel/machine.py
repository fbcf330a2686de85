"""Intel in the machine."""

import posixpath
import re
from collections.abc import Mapping

from agent.model.device import DeviceKind
from agent.model.handoff import Request
from agent.model.pci_address import PCI_ADDRESS
from agent.vendors.drm.machine import DrmMachine
from agent.vendors.intel.device_plugin import HARMLESS_RESOURCES, RESOURCE_PREFIX

CARD = re.compile(r"(card[0-9]+)(?:-[0-9]+)?")
"""A device id of Intel's device plugin (cmd/gpu_plugin): the card's name. If pods can share cards, the share's number
follows."""


class IntelMachine(DrmMachine):
    """Intel in the machine."""

    name = "intel"
    spec_kind = "intel.com/gpu"
    mounts_links = True
    resource_prefix = RESOURCE_PREFIX
    harmless_resources = HARMLESS_RESOURCES
    plugin_sockets = "gpu.intel.com-*.sock"
    """See pkg/deviceplugin/server.go of intel-device-plugins-for-kubernetes."""
    plugin_rescans = True
    """The plugin searches for GPUs every five seconds (scanInterval of cmd/gpu_plugin)."""

    def other_names(self, request: Request) -> Mapping[str, str]:
        """Return `cardN` for each GPU. The numbers may change with each boot."""
        cards = [each for each in request.devices if each.kind == DeviceKind.DRI_CARD]
        return {each.pci_address: posixpath.basename(each.path) for each in cards}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return the PCI address of the GPU that `name` stands for; empty if `name` is not a GPU's.

        For a card that is not granted, return the card's name `cardN`: the plugin may still advertise a card that is no
        longer granted.
        """
        if PCI_ADDRESS.fullmatch(name):
            return name
        match = CARD.fullmatch(name)
        if match is None:
            return ""
        path = f"/dev/dri/{match[1]}"
        return next((each.pci_address for each in request.devices if each.path == path), match[1])
