"""AMD in the machine."""

from collections.abc import Mapping

from agent.model.handoff import Request
from agent.model.pci_address import PCI_ADDRESS
from agent.vendors.drm.machine import DrmMachine


class AmdMachine(DrmMachine):
    """AMD in the machine."""

    name = "amd"
    spec_kind = "amd.com/gpu"
    rival_spec = "/var/run/cdi/amd.json"
    """Written by `amd-ctk cdi generate`."""
    resource_prefix = "amd.com/"
    plugin_sockets = "amd.com_*"
    """The names have no suffix (dpm/plugin.go of the library that AMD's plugin uses)."""

    def other_names(self, request: Request) -> Mapping[str, str]:
        """Return `amd-ctk`'s numbers of GPUs, in the order of PCI addresses: a new GPU changes the numbers after it."""
        return {gpu: str(index) for index, gpu in enumerate(sorted(request.gpus))}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return the GPU, which AMD's plugin calls by its PCI address; empty for any other id, a partition's."""
        return name if PCI_ADDRESS.fullmatch(name) else ""
