"""AMD in the machine."""

from collections.abc import Mapping

from agent.handoff import Request
from agent.pci_address import PCI_ADDRESS
from agent.vendors.drm.machine import DrmMachine


class AmdMachine(DrmMachine):
    """A MachineVendor."""

    name = "amd"
    spec_kind = "amd.com/gpu"
    rival_spec = "/var/run/cdi/amd.json"
    """Of `amd-ctk cdi generate`."""
    resource_prefix = "amd.com/"
    plugin_sockets = "amd.com_*"
    """Without a suffix: dpm/plugin.go of the library that AMD's plug-in is made with."""
    plugin_rescans = False

    def other_names(self, request: Request) -> Mapping[str, str]:
        """Counted by PCI address, as `amd-ctk` does: a GPU that comes or goes changes the numbers behind it."""
        return {gpu: str(index) for index, gpu in enumerate(sorted(request.gpus))}

    def gpu_of(self, name: str, request: Request) -> str:
        """AMD's plug-in calls GPUs by their PCI addresses; what it calls otherwise are partitions of one."""
        return name if PCI_ADDRESS.fullmatch(name) else ""
