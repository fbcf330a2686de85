"""A small host as facts, for tests of pure functions."""

from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.goal import plan
from agent.host.verify.readiness import Case, conditions
from agent.model.conditions import Condition
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import (
    Absent,
    DeviceAllow,
    DeviceNode,
    Driver,
    Facts,
    FileState,
    Gpu,
    Library,
    LiveSettings,
    MachineFacts,
    Seen,
    StagedRoot,
    Unseen,
    UserSpace,
    VendorFacts,
)
from agent.model.goal import MachineGoal
from agent.model.handoff import Report
from agent.model.paths import machine_files

MACHINE = "gpu-node"
CONFIG = Config(machines={MACHINE: MachineSettings()})
VERSION = "550.163.01"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def library(
    target: str,
    source: str,
    *,
    link: str = "",
    size: int = 0,
    mtime_ns: int = 0,
    executable: bool = False,
    text: str = "",
) -> Library:
    return Library(target, source, link, size, mtime_ns, executable, text)


FILES = tuple(
    sorted(
        (
            library(f"{LIBRARIES}/libcuda.so.{VERSION}", f"/{LIBRARIES}/libcuda.so.{VERSION}", size=30, mtime_ns=1),
            library(f"{LIBRARIES}/libcuda.so.1", "", link=f"libcuda.so.{VERSION}"),
            library(f"{LIBRARIES}/libnvidia-ml.so.{VERSION}", f"/{LIBRARIES}/libnvidia-ml.so.{VERSION}", size=10),
            library("usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", size=5, executable=True),
        )
    )
)


def address(index: int) -> str:
    return f"0000:{index + 1:02x}:00.0"


def gpu(index: int) -> Gpu:
    return Gpu(address(index), "nvidia", "nvidia", "H100", f"GPU-00000000-0000-0000-0000-{index:012}", index)


def node(
    path: str, kind: DeviceKind, major: int, minor: int, pci_address: str = "", capability: str = ""
) -> DeviceNode:
    return DeviceNode(path, kind, DeviceNumber(major, minor), pci_address, capability)


def nodes(gpus: int) -> tuple[DeviceNode, ...]:
    per_gpu = [node(f"/dev/nvidia{index}", DeviceKind.GPU, 195, index, address(index)) for index in range(gpus)]
    render = [
        node(f"/dev/dri/renderD{128 + index}", DeviceKind.DRI_RENDER, 226, 128 + index, address(index))
        for index in range(gpus)
    ]
    return (
        *per_gpu,
        *render,
        node("/dev/nvidiactl", DeviceKind.CONTROL, 195, 255),
        node("/dev/nvidia-modeset", DeviceKind.MODESET, 195, 254),
        node("/dev/nvidia-uvm", DeviceKind.UVM, 511, 0),
        node("/dev/nvidia-uvm-tools", DeviceKind.UVM_TOOLS, 511, 1),
        node("/dev/nvidia-caps/nvidia-cap1", DeviceKind.CAPABILITY, 510, 1, capability="mig/config"),
        node("/dev/nvidia-caps/nvidia-cap2", DeviceKind.CAPABILITY, 510, 2, capability="mig/monitor"),
        node("/dev/nvidia-caps/nvidia-cap30", DeviceKind.CAPABILITY, 510, 30, address(1), "gpu1/mig/gi1/access"),
        node("/dev/nvidia-caps-imex-channels/channel0", DeviceKind.IMEX_CHANNEL, 509, 0),
        node("/dev/nvidia-nvswitchctl", DeviceKind.NVSWITCH, 508, 255),
    )


def nvidia(gpus: int = 2) -> VendorFacts:
    driver = Driver(VERSION, UserSpace(VERSION, FILES), persistence="active")
    return VendorFacts("nvidia", tuple(gpu(index) for index in range(gpus)), nodes(gpus), driver)


TEMPLATE = (DeviceAllow("/dev/net/tun", "rwm"), DeviceAllow("char-pts", "rw"))


def facts(vendor: VendorFacts | None = None, machine: str = MACHINE) -> Facts:
    """Return a host with one stopped machine, and none of our files on disk."""
    return Facts(
        architecture="x86_64",
        systemd_version=257,
        template_device_allow=TEMPLATE,
        vendors=(vendor or nvidia(),),
        machines=(MachineFacts(name=machine, root=f"/var/lib/machines/{machine}", unit_state="inactive"),),
        files={path: FileState(Absent("not there"), owned=False) for path in machine_files(machine)},
    )


def staged(root: StagedRoot, seen: Facts) -> Facts:
    return replace(seen, staged=(*seen.staged, root), next_driver_root_index=root.index + 1)


def running(seen: Facts, live: LiveSettings | None) -> Facts:
    """Return the facts with the machine running, with these settings."""
    return replace(seen, machines=(replace(seen.machines[0], unit_state="active", live=live),))


def without_second_gpu() -> VendorFacts:
    """Return nvidia() after the GPU of /dev/nvidia1 was unplugged."""
    vendor = nvidia()
    assert isinstance(vendor.devices, tuple)
    left = tuple(node for node in vendor.devices if node.pci_address != vendor.gpus[1].pci_address)
    return replace(vendor, gpus=vendor.gpus[:1], devices=left)


def at_rest(seen: Facts, config: Config = CONFIG) -> tuple[Facts, MachineGoal]:
    """Return the facts after a pass has done everything, with the machine running, and the machine's goal."""
    goal = plan(config, seen).goal
    (machine,) = goal.machines
    files = {file.path: FileState(file.content, owned=True) for file in goal.files()}
    done = replace(seen, files=files)
    for root in goal.driver_roots:
        done = staged(root, done)
    left = {"live": machine.live, "granted": machine.granted, "handed_roots": (0,)}
    done = replace(done, machines=(replace(done.machines[0], unit_state="active", **left),))
    return done, plan(config, done).goal.machines[0]


NO_REPORT = Absent("none")


def evaluated(
    settings: MachineSettings,
    goal: MachineGoal,
    seen: Facts,
    report: Seen[Report] = NO_REPORT,
    refused: str | Unseen = "",
) -> tuple[Condition, ...]:
    """Return the conditions of the goal's machine with this report."""
    machine = next(each for each in seen.machines if each.name == goal.name)
    return conditions(Case(settings, replace(machine, report=report), seen, goal, refused))
