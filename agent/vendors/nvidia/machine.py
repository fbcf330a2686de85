"""NVIDIA in the machine: the toolkit's programs, where they write, and how a CDI spec of theirs is judged."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from agent.handoff import Request
from agent.identity import DeviceNumber
from agent.paths import spec_file
from agent.system.files import System
from agent.vendors.machine_protocol import Generated, RuntimeHandler, Verdict
from agent.vendors.nvidia import cdi, device_plugin, nvidia_ctk, sockets
from agent.vendors.nvidia.additions import in_words, with_additions
from agent.vendors.nvidia.generate_command import HOOK, NVIDIA_CTK

DATA_DIRECTORIES = (
    # Those of driver_files, which costs a start more than this does.
    "etc/OpenCL/vendors",
    "usr/share/X11/xorg.conf.d",
    "usr/share/egl/egl_external_platform.d",
    "usr/share/glvnd/egl_vendor.d",
    "usr/share/nvidia",
    "usr/share/nvidia/files.d",
    "usr/share/vulkan/explicit_layer.d",
    "usr/share/vulkan/icd.d",
    "usr/share/vulkan/implicit_layer.d",
    "usr/share/vulkansc/icd.d",
)


class NvidiaMachine:
    """A MachineVendor."""

    name = "nvidia"
    handler: RuntimeHandler | None = RuntimeHandler("nvidia", "/usr/bin/nvidia-container-runtime")
    driver_files = True
    spec_path = spec_file("nvidia")
    spec_kind = cdi.KIND
    rival_spec = nvidia_ctk.REFRESHED_SPEC
    rival_units: tuple[str, ...] = nvidia_ctk.REFRESH_UNITS
    data_directories: tuple[str, ...] = DATA_DIRECTORIES
    tools: tuple[str, ...] = (NVIDIA_CTK, HOOK)
    inputs: tuple[str, ...] = ()
    runtime_config = "/etc/nvidia-container-runtime/config.toml"
    resource_prefix = device_plugin.RESOURCE_PREFIX
    plugin_sockets = device_plugin.SOCKETS
    # Without the first, NVML was seen to say "GPU access blocked by the operating system" (systemd issue 38018).
    kernel_paths: tuple[str, ...] = ("/sys/module/nvidia", "/proc/driver/nvidia")
    plugin_spec = device_plugin.SPEC
    plugin_rescans = False

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        generated = nvidia_ctk.generate(system, request, directory)
        present = {path for path in self.optional_paths(request) if system.exists(path)}
        spec, added = with_additions(generated.spec, request, present)
        silent = sockets.lacking(request.sockets, present)
        remarks = (
            f"added what {NVIDIA_CTK} leaves out: {in_words(added)}" if added else "",
            f"no socket here yet of {', '.join(silent)}: start the daemon on the host" if silent else "",
        )
        return replace(generated, spec=spec, remarks=(*filter(None, remarks), *generated.remarks))

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        return tuple(sockets.mount_points(request.sockets))

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        return tuple(sockets.DIRECTORIES[name] for name in request.sockets if name in sockets.DIRECTORIES)

    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        return cdi.verify(spec, request, live, present)

    def host_paths(self, spec: object) -> tuple[str, ...]:
        return cdi.host_paths(spec)

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        # Only here: few machines have such a spec, and its verdict is asked for only when it may have changed.
        from agent.vendors.nvidia.plugin_spec import plugin_spec_problems

        return plugin_spec_problems(spec, own, request, live, exists)

    def list_devices(self, system: System, directory: str) -> tuple[str, ...]:
        return nvidia_ctk.list_devices(system, directory)

    def gpu_of(self, name: str, request: Request) -> str:
        return device_plugin.gpu_of(name)

    def edit_runtime_config(self, text: str) -> str:
        return nvidia_ctk.edit_runtime_config(text)
