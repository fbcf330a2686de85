"""The machine half of a vendor whose GPUs need only device nodes. The agent itself writes the CDI specification."""

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING

from agent.model.device import DeviceNumber, dri_link
from agent.model.handoff import Request
from agent.system.files import System
from agent.vendors.cdi.document import devices, object_of
from agent.vendors.cdi.names import device_names
from agent.vendors.drm import cdi
from agent.vendors.machine_vendor import Generated, MachineVendor, Verdict

if TYPE_CHECKING:
    from agent.model.allocatable import AllocatableDevice

GROUP_FILE = "/etc/group"
NO_GROUP = 2**32 - 1
"""For chown(2), this id means "unchanged", so every group has a lower id."""
GROUP_NUMBER = re.compile(r"[0-9]{1,10}")
"""A group's id. The number of digits is limited, because int() raises ValueError for thousands of them."""


class DrmMachine(MachineVendor):
    """The base class of vendors whose GPUs need only device nodes.

    The class of each vendor adds the vendor's names and the attributes of the vendor's device plugin.
    """

    inputs = (GROUP_FILE,)
    mounts_links = False
    """Whether pods also get the links in /dev/dri/by-path. True if the vendor's own tool gives pods these links."""

    @abstractmethod
    def other_names(self, request: Request) -> Mapping[str, str]:
        """Return the names that the vendor's own tool gives to GPUs, by PCI address. Pure."""

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        groups = parse_groups(system.read_text(GROUP_FILE)) if system.exists(GROUP_FILE) else {}
        links = {path for path in self.optional_paths(request) if system.exists(path)}
        machine = cdi.MachineState(live, groups, links)
        missing = sorted({cdi.group_of(each.kind) for each in request.devices} - groups.keys())
        remark = f"this machine has no group {' and no group '.join(missing)}: the nodes keep the host's group number"
        spec = cdi.render(self.spec_kind, self.other_names(request), request, machine)
        return Generated(spec, (remark,) if missing else ())

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        if not self.mounts_links:
            return ()
        links = (dri_link(each.kind, each.pci_address) for each in request.devices)
        return tuple(link for link in links if link)

    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        return cdi.verify(self.spec_kind, spec, request, live, present)

    def list_devices(self, system: System, directory: str, timeout: float) -> tuple[str, ...]:
        return tuple(
            name for each in system.entries(directory) for name in device_names(system.read_text(f"{directory}/{each}"))
        )

    def allocatable(self, spec: object, request: Request, names: Set[str]) -> "tuple[AllocatableDevice, ...]":
        # Imported here: few machines allocate by claims.
        from agent.model.allocatable import AllocatableDevice

        listed = names & {name for name, _ in devices(object_of(spec, "the specification"))}
        # GPUs are named by PCI address, because the other names may change at a reboot.
        return tuple(
            AllocatableDevice(gpu, (f"{self.spec_kind}={gpu}",)) for gpu in sorted(request.gpus) if gpu in listed
        )


def parse_groups(text: str) -> dict[str, int]:
    """Return the ids of groups by name, from the text of group(5). Malformed lines are ignored."""
    groups: dict[str, int] = {}
    for line in text.splitlines():
        match line.split(":"):
            case [name, _, number, _] if name and GROUP_NUMBER.fullmatch(number) and int(number) < NO_GROUP:
                groups.setdefault(name, int(number))
    return groups
