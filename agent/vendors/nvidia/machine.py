"""NVIDIA in the machine: generates CDI specifications with the toolkit's programs, and verifies them."""

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING

from agent.model.device import DeviceNumber
from agent.model.handoff import FabricAnswer, Request
from agent.system.files import System
from agent.vendors.machine_vendor import CdiModes, Generated, MachineVendor, Marker, RuntimeHandler
from agent.vendors.nvidia import device_plugin, sockets
from agent.vendors.nvidia.cdi import nvidia_ctk
from agent.vendors.nvidia.cdi import verify as cdi
from agent.vendors.nvidia.cdi.command import HOOK, NVIDIA_CTK
from agent.vendors.nvidia.cdi.complete import in_words, with_additions
from agent.vendors.nvidia.cdi.runtime_config import RUNTIME_SETTINGS, edit_runtime_config
from agent.vendors.nvidia.fabric_states import is_settled
from agent.vendors.nvidia.user_space.file_groups import DATA_DIRECTORIES

if TYPE_CHECKING:
    from agent.model.allocatable import AllocatableDevice


class NvidiaMachine(MachineVendor):
    """NVIDIA in the machine."""

    name = "nvidia"
    handler = RuntimeHandler("nvidia", "/usr/bin/nvidia-container-runtime")
    driver_files = True
    spec_kind = cdi.KIND
    rival_spec = nvidia_ctk.REFRESHED_SPEC
    rival_units = nvidia_ctk.REFRESH_UNITS
    data_directories = DATA_DIRECTORIES
    tools = (NVIDIA_CTK, HOOK)
    runtime_config = "/etc/nvidia-container-runtime/config.toml"
    runtime_settings = RUNTIME_SETTINGS
    resource_prefix = device_plugin.RESOURCE_PREFIX
    harmless_resources = device_plugin.HARMLESS_RESOURCES
    plugin_sockets = device_plugin.SOCKETS
    # Without the first path, NVML may report "GPU access blocked by the operating system" (systemd issue 38018).
    kernel_paths = ("/sys/module/nvidia", "/proc/driver/nvidia")
    plugin_spec = device_plugin.SPEC

    verify = staticmethod(cdi.verify)
    list_devices = staticmethod(nvidia_ctk.list_devices)
    edit_runtime_config = staticmethod(edit_runtime_config)

    @property
    def cdi_modes(self) -> CdiModes:
        # Imported here: few machines request a mode, and imports take most of the time of a run that changes nothing.
        from agent.vendors.nvidia.cdi.modes import NvidiaModes

        return NvidiaModes()

    @property
    def markers(self) -> tuple[Marker, ...]:
        from agent.vendors.nvidia.validation_markers import MARKERS

        return MARKERS

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        generated = nvidia_ctk.generate(system, request, directory, live)
        present = {path for path in self.optional_paths(request) if system.exists(path)}
        spec, added = with_additions(generated.spec, request, present)
        without_socket = sockets.missing_daemons(request.sockets, present)
        remarks = (
            f"added what {NVIDIA_CTK} leaves out: {in_words(added)}" if added else "",
            f"no socket of {', '.join(without_socket)} yet: start the daemon on the host" if without_socket else "",
        )
        return generated._replace(spec=spec, remarks=(*filter(None, remarks), *generated.remarks))

    def query_fabric(self, system: System, request: Request) -> tuple[FabricAnswer, ...]:
        # Imported here: the GPUs are asked only after something has changed.
        from agent.vendors.nvidia.nvidia_smi import query_fabric

        return query_fabric(system, request.gpus) if request.driver_root else ()

    def fabric_settled(self, request: Request, answers: tuple[FabricAnswer, ...]) -> bool:
        return is_settled(request.gpus, answers)

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        return tuple(sockets.mount_points(request.sockets))

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        return tuple(sockets.DIRECTORIES[name] for name in request.sockets if name in sockets.DIRECTORIES)

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        # Imported here: few machines have such a specification, and it is verified only if it may have changed.
        from agent.vendors.nvidia.cdi.plugin_spec import plugin_spec_problems

        return plugin_spec_problems(spec, own, request, live, exists)

    def allocatable(self, spec: object, request: Request, names: Set[str]) -> "tuple[AllocatableDevice, ...]":
        # Imported here: few machines allocate by claims.
        from agent.vendors.nvidia.cdi.allocatable import allocatable

        return allocatable(spec, request, names)

    def gpu_of(self, name: str, request: Request) -> str:
        return device_plugin.gpu_of(name)
