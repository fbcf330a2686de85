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
    """The sockets' names do not end in `.sock` (dpm/plugin.go of the library that AMD's plugin uses)."""

    def other_names(self, request: Request) -> Mapping[str, str]:
        """Return each GPU's number, by PCI address. Like `amd-ctk`, count the GPUs in the order of PCI addresses.

        A new GPU changes the numbers of the GPUs after it.
        """
        return {gpu: str(index) for index, gpu in enumerate(sorted(request.gpus))}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return `name` if it is a PCI address, which is how AMD's plugin names a GPU; otherwise an empty id.

        The names of partitions, for example, are not PCI addresses.
        """
        return name if PCI_ADDRESS.fullmatch(name) else ""
