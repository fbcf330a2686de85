"""Makes the device nodes that NVIDIA's driver leaves to user space, of all GPUs and those that they share.

By the driver's own nvidia-modprobe where it is installed; else with mknod(1), by the numbers of /proc/devices, and with
the mode and owner that the driver's parameters want (modprobe-utils/nvidia-modprobe-utils.c).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.errors import AgentError, ApplyError
from agent.facts import Gpu
from agent.system.files import System
from agent.vendors.nvidia.devices import FRONTEND
from agent.vendors.proc_devices import PROC_DEVICES, parse_majors

PARAMETERS = "/proc/driver/nvidia/params"
MODESET = "/sys/module/nvidia_modeset"
NVIDIA_MODPROBE = "nvidia-modprobe"
LIMIT = 30.0
"""Seconds for one program."""
SETTLE = 5.0
"""Seconds for the driver to be bound to a GPU that has just been plugged in."""
POLL = 0.5


@dataclass(frozen=True, slots=True)
class Node:
    """A node that should be there."""

    path: str
    major: int
    minor: int
    option: tuple[str, ...]
    """By which nvidia-modprobe makes it."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """DeviceFile... of the module nvidia; the defaults are the driver's."""

    modify: bool = True
    """Whether user space may make and change nodes at all."""
    uid: int = 0
    gid: int = 0
    mode: int = 0o666


def make_nodes(system: System, list_gpus: Callable[[], Sequence[Gpu]], tell: Callable[[str], None]) -> None:
    """Every node that is missing or has a number of before a reload. Raises AgentError or OSError."""
    gpus = _bound(list_gpus)
    parameters = parse_parameters(system.read_text(PARAMETERS)) if system.exists(PARAMETERS) else Parameters()
    majors = parse_majors(system.read_text(PROC_DEVICES))
    nodes = wanted(majors, gpus, modeset=system.exists(MODESET))
    missing = [each for each in nodes if not _is_there(system, each)]
    if missing and not parameters.modify:
        paths = ", ".join(_paths(missing))
        tell(f"{paths} are missing, and {PARAMETERS} forbids to make them (ModifyDeviceFiles: 0)")
        return
    failures = []
    for node in missing:
        # One option makes two of them.
        if not _is_there(system, node):
            try:
                _make(system, node, parameters)
            except AgentError as error:
                failures.append(str(error))
    made = [each for each in missing if _is_there(system, each)]
    if made:
        tell(f"made {', '.join(_paths(made))}")
    left = [each for each in missing if each not in made]
    if left:
        why = "; ".join(failures) or f"{NVIDIA_MODPROBE} said nothing: see `dmesg`"
        raise ApplyError(f"{', '.join(_paths(left))} cannot be made: {why}")


def parse_parameters(text: str) -> Parameters:
    """Lines of `Name: number`; DeviceFileMode is decimal (nv-procfs.c)."""
    values = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip().isdecimal():
            values[name.strip()] = int(value)
    default = Parameters()
    return Parameters(
        values.get("ModifyDeviceFiles", 1) != 0,
        values.get("DeviceFileUID", default.uid),
        values.get("DeviceFileGID", default.gid),
        values.get("DeviceFileMode", default.mode) & 0o777,
    )


def wanted(majors: Mapping[str, int], gpus: Sequence[Gpu], *, modeset: bool) -> list[Node]:
    """Of what is registered now; numbers as in nv-chardev-numbers.h. `modeset`: whether that module is loaded. Pure."""
    nodes = []
    front = next((majors[name] for name in FRONTEND if name in majors), None)
    if front is not None:
        nodes.append(Node("/dev/nvidiactl", front, 255, ("-c", "255")))
        minors = sorted(gpu.minor for gpu in gpus if gpu.minor is not None)
        nodes += [Node(f"/dev/nvidia{minor}", front, minor, ("-c", str(minor))) for minor in minors]
        if modeset:
            # Before 545 it has no line of its own.
            nodes.append(Node("/dev/nvidia-modeset", majors.get("nvidia-modeset", front), 254, ("-m",)))
    if "nvidia-uvm" in majors:
        uvm = majors["nvidia-uvm"]
        # With -u the number counts from the first node of nvidia-uvm; the tools' node comes with it.
        nodes += [Node("/dev/nvidia-uvm", uvm, 0, ("-u", "-c", "0"))]
        nodes += [Node("/dev/nvidia-uvm-tools", uvm, 1, ("-u", "-c", "0"))]
    return nodes


def _bound(list_gpus: Callable[[], Sequence[Gpu]]) -> Sequence[Gpu]:
    """A GPU's number is known once its driver is bound, which comes some time after the GPU itself."""
    deadline = time.monotonic() + SETTLE
    while True:
        gpus = list_gpus()
        if all(gpu.minor is not None for gpu in gpus) or time.monotonic() >= deadline:
            return gpus
        time.sleep(POLL)


def _is_there(system: System, node: Node) -> bool:
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
            raise ApplyError(f"{node.path} is no device", "remove it")
        # Of before a reload of the module, whose major number may be another device's by now.
        system.remove(node.path)
    mode, numbers = f"--mode={parameters.mode:04o}", (str(node.major), str(node.minor))
    system.run("mknod", mode, node.path, "c", *numbers, timeout=LIMIT)
    if (parameters.uid, parameters.gid) != (0, 0):
        system.run("chown", f"{parameters.uid}:{parameters.gid}", node.path, timeout=LIMIT)


def _paths(nodes: Sequence[Node]) -> list[str]:
    return [node.path for node in nodes]
