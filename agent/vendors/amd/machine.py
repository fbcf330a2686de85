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
    """Without a suffix: dpm/plugin.go of the library that AMD's plugin is made with."""

    def other_names(self, request: Request) -> Mapping[str, str]:
        """Number GPUs by PCI address, as `amd-ctk` does: a GPU that comes or goes changes the numbers after it."""
        return {gpu: str(index) for index, gpu in enumerate(sorted(request.gpus))}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return the GPU: AMD's plugin calls GPUs by their PCI addresses; other ids are partitions."""
        return name if PCI_ADDRESS.fullmatch(name) else ""
