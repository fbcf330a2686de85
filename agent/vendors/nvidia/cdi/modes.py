"""Generates CDI specifications in nvidia-ctk's other modes: for non-GPU devices, and for managing all GPUs.

The kinds are those of the toolkit's library (getClassOrDefault in pkg/nvcdi/options.go, management.go). Each kind is
passed to the command, whose default is nvidia.com/gpu in all modes.
"""

import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import AgentError, CommandError, DocumentError
from agent.model.handoff import GrantedDevice, Request
from agent.system.files import System
from agent.vendors.cdi.document import devices as devices_of
from agent.vendors.cdi.document import object_of, objects, strings
from agent.vendors.cdi.normalise import normalised
from agent.vendors.machine_vendor import CdiModes, Generated, looked_up
from agent.vendors.nvidia.cdi.command import HOOK, NVIDIA_CTK, generate_command
from agent.vendors.nvidia.cdi.complete import TRIPLET_32
from agent.vendors.nvidia.cdi.leave_out import remark_on, without_unknown
from agent.vendors.nvidia.cdi.nvidia_ctk import OLDEST, check_version, read_output
from agent.vendors.nvidia.cdi.verify import header_problems, library_problems
from agent.vendors.nvidia.cdi.verify_edits import Expectations, edits_problems

ALL = "all"
"""The device with all nodes of a mode. Mode imex also has a device for each channel."""

BLOCKED_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-sandboxutils.so.1")
"""Libraries that nvidia-ctk must not load. It would ask them for the driver's version (`New` in pkg/nvcdi/lib.go). That
would initialise the GPUs, and would hang if a GPU hangs. No mode needs the libraries, because the name of libcuda's
file contains the version too. So the search path starts with a directory of empty files with these names, which cannot
be loaded. Without the empty files, nvidia-ctk might load the libraries that the machine's loader cache lists (seen with
LD_DEBUG=libs and nvidia-ctk 1.18.0, 1.19.1 and 1.20.0)."""


class Mode(NamedTuple):
    """One mode of `nvidia-ctk cdi generate`."""

    vendor: str
    device_class: str
    kinds: frozenset[DeviceKind]
    """Kinds of the nodes that the mode covers."""
    mounts: tuple[str, ...] = ()
    """Paths, other than the driver's files, that are mounted if they exist (internal/discover/gds.go)."""
    driver_files: bool = False
    """Whether the driver's files are mounted."""
    since: tuple[int, ...] = OLDEST
    """The first version of nvidia-ctk that has the mode."""

    @property
    def kind(self) -> str:
        return f"{self.vendor}/{self.device_class}"


MODES: Mapping[str, Mode] = {
    "gds": Mode("nvidia.com", "gds", frozenset({DeviceKind.NVIDIA_FS}), ("/run/udev", "/etc/cufile.json")),
    "mofed": Mode("nvidia.com", "mofed", frozenset({DeviceKind.INFINIBAND})),
    "gdrcopy": Mode("nvidia.com", "gdrcopy", frozenset({DeviceKind.GDRCOPY})),
    "imex": Mode("nvidia.com", "imex-channel", frozenset({DeviceKind.IMEX_CHANNEL})),
    # 1.18 lists nvswitch among its modes, but exits with "unknown mode" (`New` in pkg/nvcdi/lib.go).
    "nvswitch": Mode("nvidia.com", "nvswitch", frozenset({DeviceKind.NVSWITCH}), since=(1, 19, 0)),
    "management": Mode(
        "management.nvidia.com",
        "gpu",
        frozenset(
            {
                *(DeviceKind.GPU, DeviceKind.CONTROL, DeviceKind.MODESET, DeviceKind.UVM, DeviceKind.UVM_TOOLS),
                *(DeviceKind.CAPABILITY, DeviceKind.IMEX_CHANNEL),
            }
        ),
        driver_files=True,
    ),
}


class NvidiaModes(CdiModes):
    """The modes in MODES."""

    tools = (NVIDIA_CTK, HOOK)

    def kind(self, mode: str) -> str:
        return MODES[mode].kind if mode in MODES else ""

    def mode_request(self, mode: str, request: Request, granted: Collection[GrantedDevice]) -> Request:
        devices = tuple(device for device in granted if device.kind in MODES[mode].kinds)
        if not MODES[mode].driver_files:
            return Request(request.vendor, (), devices)
        return Request(request.vendor, (), devices, request.driver_version, request.driver_root, request.files)

    def optional_paths(self, mode: str) -> tuple[str, ...]:
        return MODES[mode].mounts

    def generate(
        self,
        system: System,
        mode: str,
        request: Request,
        directory: str,
        limit: float,
        live: Mapping[str, DeviceNumber],
    ) -> Generated:
        """Generate a specification with only the nodes in the request, and without what this release does not know.

        nvidia-ctk also lists withdrawn nodes that are still in /dev. These are left out.
        """
        check_version(system, MODES[mode].since, f"for mode {mode}")
        for library in BLOCKED_LIBRARIES:
            system.write(f"{directory}/{library}", b"")
        try:
            system.run(*mode_command(mode, request, directory), timeout=limit)
        except CommandError as error:
            raise _in_short(error) from error
        written = normalised(read_output(system, directory))
        kept = without_unknown(written, _expectations(mode, request, *looked_up(system, written, live)))
        remarks = (remark_on(kept.harmless),) if kept.harmless else ()
        paths = {device.path for device in request.devices}
        try:
            spec: object = _narrowed(kept.spec, lambda node: str(node.get("path")) in paths)
        except DocumentError:
            # `verify` reports the malformed specification.
            spec = kept.spec
        return Generated(spec, remarks, left_out=kept.left_out)

    def narrowed(self, spec: object, request: Request) -> object:
        numbers = {device.path: (device.major, device.minor) for device in request.devices}

        def granted(node: dict[str, Any]) -> bool:
            # The number must match too, because containers get the number in the specification, even if the node now
            # has another number.
            path = str(node.get("path"))
            written = (node["major"], node.get("minor", 0)) if "major" in node else numbers.get(path)
            return path in numbers and written == numbers[path] and node.get("hostPath", path) == path

        try:
            remaining = _narrowed(spec, granted)
        except DocumentError:
            return None
        return remaining if remaining["devices"] else None

    def verify(
        self, mode: str, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> tuple[str, ...]:
        try:
            expected = _expectations(mode, request, live, present)
            return tuple(_problems(MODES[mode], object_of(spec, "the specification"), request, expected))
        except DocumentError as error:
            return (error.message,)


def mode_command(mode: str, request: Request, directory: str) -> tuple[str, ...]:
    """Return the command that generates the mode's specification in `directory`.

    `directory` must already contain the empty files named BLOCKED_LIBRARIES. Raises AgentError if the mode needs the
    driver's files and none are granted.
    """
    wanted = MODES[mode]
    if wanted.driver_files and not request.driver_root:
        raise AgentError(
            f"mode {mode} needs the driver's files, but none are granted: see DriverRootStaged on the host"
        )
    # Without a driver root, files are mounted from the machine's own root. nvidia-ctk 1.18 also looks in this root for
    # the nodes of mode mofed.
    root = request.driver_root or "/"
    command = [each for each in generate_command(root, directory) if not each.startswith("--device-name-strategy=")]
    command[command.index("--mode=nvml")] = f"--mode={mode}"
    places = (directory, *(f"{root}/{each}" for each in _driver_libraries(request)))
    return (
        *command,
        *(f"--library-search-path={place}" for place in places),
        f"--vendor={wanted.vendor}",
        f"--class={wanted.device_class}",
    )


def _driver_libraries(request: Request) -> tuple[str, ...]:
    """Return libcuda's directories below the driver root. nvidia-ctk takes the driver's version from libcuda's name."""
    name = f"libcuda.so.{request.driver_version}"
    found = (posixpath.split(file.target) for file in request.files if not file.link)
    return tuple(directory for directory, each in found if each == name and TRIPLET_32 not in directory)


def _in_short(error: CommandError) -> AgentError:
    """Return the error without the command's arguments, and with only the last line of its output.

    The other lines list what nvidia-ctk has searched.
    """
    last = error.stderr.rstrip().rpartition("\n")[2]
    return AgentError(": ".join(filter(None, (NVIDIA_CTK, error.ended, last))), error.hint)


def _narrowed(spec: object, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the specification with only the wanted nodes, and only devices that have any. Raises DocumentError."""

    def with_nodes(edits: dict[str, Any]) -> dict[str, Any]:
        return edits | {"deviceNodes": [each for each in objects(edits, "deviceNodes") if wanted(each)]}

    document = object_of(spec, "the specification")
    listed = [(name, with_nodes(edits)) for name, edits in devices_of(document)]
    return document | {
        "devices": [{"name": name, "containerEdits": edits} for name, edits in listed if edits["deviceNodes"]],
        "containerEdits": with_nodes(object_of(document.get("containerEdits", {}), "containerEdits")),
    }


def _expectations(
    mode: str, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
) -> Expectations:
    return Expectations(request, live, present, MODES[mode].mounts)


def _problems(mode: Mode, document: dict[str, Any], request: Request, expected: Expectations) -> Iterator[str]:
    """Yield what is wrong with a mode's specification. `request` is from `mode_request`. Raises DocumentError."""
    yield from header_problems(document, mode.kind)
    common = object_of(document.get("containerEdits", {}), "containerEdits")
    yield from edits_problems("containerEdits", common, expected)
    if mode.driver_files:
        yield from library_problems(common, request)
    elif foreign := sorted(set(common) - {"env", "mounts"}):
        yield f"containerEdits have unexpected {', '.join(foreign)} for this mode"
    devices = devices_of(document)
    for name, edits in devices:
        yield from edits_problems(f"device {name}", edits, expected)
    served = {path for name, edits in devices if name == ALL for path in strings(edits, "deviceNodes", "path")}
    for path in sorted(device.path for device in request.devices if device.path not in served):
        yield f"device {ALL} has no node {path}"
