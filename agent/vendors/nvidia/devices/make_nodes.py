"""Makes the device nodes that NVIDIA's driver leaves to user space: the nodes of each GPU, and the shared nodes.

The driver's program nvidia-modprobe makes them if it is installed. Otherwise mknod(1) makes them, with numbers from
/proc/devices, and with mode and owner from the driver's parameters (modprobe-utils/nvidia-modprobe-utils.c).
"""

import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from agent.model.digits import whole_number
from agent.model.errors import AgentError, ApplyError
from agent.model.facts import Gpu
from agent.system.files import System
from agent.vendors.nvidia.devices.nodes import FRONTEND
from agent.vendors.proc_devices import PROC_DEVICES, parse_majors

PARAMETERS = "/proc/driver/nvidia/params"
MODESET = "/sys/module/nvidia_modeset"
NVIDIA_MODPROBE = "nvidia-modprobe"
LIMIT = 30.0
"""Seconds that one program may take."""
SETTLE = 5.0
"""Seconds to wait until the driver is bound to a newly plugged GPU."""
POLL = 0.5
"""Seconds between two checks."""


class Node(Struct, frozen=True):
    """A node that should exist."""

    path: str
    major: int
    minor: int
    option: tuple[str, ...]
    """The option with which nvidia-modprobe makes the node."""


class Parameters(Struct, frozen=True):
    """The parameters of the module nvidia for device nodes (DeviceFile...). The defaults are the driver's."""

    modify: bool = True
    """Whether user space may make and change nodes at all."""
    uid: int = 0
    gid: int = 0
    mode: int = 0o666


def make_nodes(system: System, list_gpus: Callable[[], Sequence[Gpu]], report: Callable[[str], None]) -> None:
    """Make every node that is missing, or has a stale number from before the driver was reloaded.

    If the driver's parameters forbid user space to make nodes, only report which nodes are wrong. Raises AgentError or
    OSError.
    """
    gpus = _with_minors(list_gpus)
    parameters = parse_parameters(system.read_text(PARAMETERS)) if system.exists(PARAMETERS) else Parameters()
    majors = parse_majors(system.read_text(PROC_DEVICES))
    nodes = expected_nodes(majors, gpus, modeset=system.exists(MODESET))
    missing = [each for each in nodes if not _exists(system, each)]
    if missing and not parameters.modify:
        paths = ", ".join(_paths(missing))
        report(
            f"missing, or with a stale number: {paths}; {PARAMETERS} forbids creating them (ModifyDeviceFiles: 0): use "
            "mknod, or load the module nvidia with NVreg_ModifyDeviceFiles=1"
        )
        return
    failures = []
    for node in missing:
        # This node may exist by now, because one run of nvidia-modprobe can make two nodes.
        if not _exists(system, node):
            try:
                _make(system, node, parameters)
            except AgentError as error:
                failures.append(str(error))
    made = [each for each in missing if _exists(system, each)]
    if made:
        report(f"created {', '.join(_paths(made))}")
    not_made = [each for each in missing if each not in made]
    if not_made:
        why = "; ".join(failures) or f"{NVIDIA_MODPROBE} reported no error: see `dmesg`"
        raise ApplyError(f"cannot create {', '.join(_paths(not_made))}: {why}")


def parse_parameters(text: str) -> Parameters:
    """Parse the driver's parameters: lines of `Name: number`. DeviceFileMode is decimal (nv-procfs.c)."""
    values = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if (number := whole_number(value.strip())) is not None:
            values[name.strip()] = number
    default = Parameters()
    return Parameters(
        values.get("ModifyDeviceFiles", 1) != 0,
        values.get("DeviceFileUID", default.uid),
        values.get("DeviceFileGID", default.gid),
        values.get("DeviceFileMode", default.mode) & 0o777,
    )


def expected_nodes(majors: Mapping[str, int], gpus: Sequence[Gpu], *, modeset: bool) -> list[Node]:
    """Return the nodes of the drivers registered in /proc/devices. Pure.

    The fixed minors 254 and 255 are from nv-chardev-numbers.h. `modeset` is whether the module nvidia_modeset
    is loaded.
    """
    nodes = []
    frontend = next((majors[name] for name in FRONTEND if name in majors), None)
    if frontend is not None:
        nodes.append(Node("/dev/nvidiactl", frontend, 255, ("-c", "255")))
        minors = sorted(gpu.minor for gpu in gpus if gpu.minor is not None)
        nodes += [Node(f"/dev/nvidia{minor}", frontend, minor, ("-c", str(minor))) for minor in minors]
        if modeset:
            # Before 545, modeset has no line of its own in /proc/devices.
            nodes.append(Node("/dev/nvidia-modeset", majors.get("nvidia-modeset", frontend), 254, ("-m",)))
    if "nvidia-uvm" in majors:
        uvm = majors["nvidia-uvm"]
        # With -u, the number after -c is the minor of /dev/nvidia-uvm. The same run also makes /dev/nvidia-uvm-tools.
        nodes += [Node("/dev/nvidia-uvm", uvm, 0, ("-u", "-c", "0"))]
        nodes += [Node("/dev/nvidia-uvm-tools", uvm, 1, ("-u", "-c", "0"))]
    return nodes


def _with_minors(list_gpus: Callable[[], Sequence[Gpu]]) -> Sequence[Gpu]:
    """Wait until the minor of every GPU is known, but at most SETTLE seconds. Return the GPUs.

    A GPU's minor becomes known when the driver is bound, some time after the GPU appears.
    """
    deadline = time.monotonic() + SETTLE
    while True:
        gpus = list_gpus()
        if all(gpu.minor is not None for gpu in gpus) or time.monotonic() >= deadline:
            return gpus
        time.sleep(POLL)


def _exists(system: System, node: Node) -> bool:
    """Return whether the node exists and has the right number."""
    try:
        number = system.device(node.path)
    except FileNotFoundError:
        return False
    return number is not None and (number.major, number.minor) == (node.major, node.minor)


def _make(system: System, node: Node, parameters: Parameters) -> None:
    if system.find_program(NVIDIA_MODPROBE):
        system.run(NVIDIA_MODPROBE, *node.option, timeout=LIMIT)
        return
    if system.exists(node.path):
        if system.device(node.path) is None:
            raise ApplyError(f"{node.path} is not a device", "remove it")
        # The number is wrong, because the node is from before the module was reloaded. Another driver may now have that
        # major number.
        system.remove(node.path)
    mode, numbers = f"--mode={parameters.mode:04o}", (str(node.major), str(node.minor))
    system.run("mknod", mode, node.path, "c", *numbers, timeout=LIMIT)
    if (parameters.uid, parameters.gid) != (0, 0):
        system.run("chown", f"{parameters.uid}:{parameters.gid}", node.path, timeout=LIMIT)


def _paths(nodes: Sequence[Node]) -> list[str]:
    return [node.path for node in nodes]
