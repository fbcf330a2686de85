"""A vendor in the machine whose GPUs need their DRM nodes alone: this agent writes the CDI spec."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

from agent.errors import DocumentError
from agent.handoff import Request
from agent.identity import DeviceNumber, dri_link
from agent.paths import spec_file
from agent.system.files import System
from agent.vendors.cdi_document import devices, object_of, strings
from agent.vendors.drm import cdi
from agent.vendors.drm.cdi_names import device_names
from agent.vendors.machine_protocol import Generated, RuntimeHandler, Verdict

GROUP_FILE = "/etc/group"
NO_GROUP = 2**32 - 1
"""chown(2) takes it for "as it is"; greater numbers are none."""
GROUP_NUMBER = re.compile(r"[0-9]{1,10}")
"""No more digits: int() refuses what has thousands."""


class DrmMachine(ABC):
    """A MachineVendor but for what the vendor's own class adds: names, kind, and its device plug-in."""

    name: str
    spec_kind: str
    resource_prefix: str
    plugin_sockets: str
    plugin_rescans: bool
    handler: RuntimeHandler | None = None
    driver_files = False
    rival_spec = ""
    rival_units: tuple[str, ...] = ()
    data_directories: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    inputs: tuple[str, ...] = (GROUP_FILE,)
    runtime_config = ""
    kernel_paths: tuple[str, ...] = ()
    plugin_spec = ""
    mounts_links = False
    """Whether pods get the names of their nodes by PCI address as well, as from the vendor's own tool."""

    def __init__(self) -> None:
        self.spec_path = spec_file(self.name)

    @abstractmethod
    def other_names(self, request: Request) -> Mapping[str, str]:
        """What the vendor's own tool calls each GPU, by PCI address. Pure."""

    @abstractmethod
    def gpu_of(self, name: str, request: Request) -> str: ...

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        groups = parse_groups(system.read_text(GROUP_FILE)) if system.exists(GROUP_FILE) else {}
        links = {path for path in self.optional_paths(request) if system.exists(path)}
        ground = cdi.Ground(live, groups, links)
        lacking = sorted({cdi.group_of(each.kind) for each in request.devices} - groups.keys())
        remark = (
            f"this machine has no group {' and no group '.join(lacking)}: its nodes keep the number that the host's has"
        )
        spec = cdi.render(self.spec_kind, self.other_names(request), request, ground)
        return Generated(spec, (remark,) if lacking else ())

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        if not self.mounts_links:
            return ()
        links = (dri_link(each.kind, each.pci_address) for each in request.devices)
        return tuple(link for link in links if link)

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        return ()

    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        return cdi.verify(self.spec_kind, spec, request, live, present)

    def host_paths(self, spec: object) -> tuple[str, ...]:
        try:
            return tuple(
                path for _, each in devices(object_of(spec, "")) for path in strings(each, "mounts", "hostPath")
            )
        except DocumentError:
            return ()

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        """Their device plug-ins make none."""
        return ()

    def list_devices(self, system: System, directory: str) -> tuple[str, ...]:
        return tuple(
            name for each in system.entries(directory) for name in device_names(system.read_text(f"{directory}/{each}"))
        )

    def edit_runtime_config(self, text: str) -> str:
        """There is no such file."""
        return text


def parse_groups(text: str) -> dict[str, int]:
    """Numbers by name, group(5); lines that have not its form are left out."""
    groups: dict[str, int] = {}
    for line in text.splitlines():
        match line.split(":"):
            case [name, _, number, _] if name and GROUP_NUMBER.fullmatch(number) and int(number) < NO_GROUP:
                groups.setdefault(name, int(number))
    return groups
