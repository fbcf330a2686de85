"""Metrics of a host with eight GPUs and one machine, each with samples: for counts, documents and a simulated fleet."""

from agent.host.daemon.health import View
from agent.host.daemon.metrics import Metrics
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import MachineOutcome, Outcome
from agent.model.conditions import Reason, Status
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import (
    DeviceNode,
    Driver,
    Facts,
    Gpu,
    GpuFacts,
    GpuFault,
    GpuTest,
    HostCheck,
    MachineFacts,
    StagedRoot,
    UserSpace,
    VendorFacts,
    Verdict,
)
from agent.model.handoff import Repair
from tests.fakes.facts import library
from tests.fakes.reconciler import conditions

MACHINE = "gpu-node"
VERSION = "0.1.0"
DRIVER = "550.163.01"
SOURCES = ("udev", "device-nodes", "loader-cache", "machined", "reports", "commands", "kernel-log")
"""Names of all sources of events."""
ADDRESSES = tuple(f"0000:{slot:02x}:00.0" for slot in range(0x18, 0x20))
SHARED = (DeviceKind.CONTROL, DeviceKind.UVM, DeviceKind.UVM_TOOLS, DeviceKind.MODESET, DeviceKind.NVSWITCH)
"""Kinds of nodes that all GPUs share."""


def facts(now: float = 1.7e9, host: int = 0, model: str = "NVIDIA H100 80GB HBM3") -> Facts:
    """Return the facts of a host whose GPUs have UUIDs of their own. One GPU has had a fatal error."""
    gpus = tuple(
        Gpu(address, "nvidia", "nvidia", model, f"GPU-{host:08x}-0000-4000-8000-{minor:012x}", minor)
        for minor, address in enumerate(ADDRESSES)
    )
    own = [
        DeviceNode(f"/dev/nvidia{gpu.minor}", DeviceKind.GPU, DeviceNumber(195, gpu.minor or 0), gpu.pci_address)
        for gpu in gpus
    ]
    shared = [DeviceNode(f"/dev/{kind}", kind, DeviceNumber(511, minor)) for minor, kind in enumerate(SHARED)]
    fault = GpuFault("Xid48", "a double-bit ECC error", now, Verdict.NEEDS_RESET, now)
    root = StagedRoot(0, "nvidia", DRIVER, (library("usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1", size=512 << 20),))
    return Facts(
        architecture="x86_64",
        systemd_version=252,
        template_device_allow=(),
        vendors=(VendorFacts("nvidia", gpus, (*own, *shared), Driver(DRIVER, UserSpace(DRIVER, ()))),),
        machines=(MachineFacts(name=MACHINE, root="/", unit_state="active"),),
        staged=(root,),
        gpus=GpuFacts(faults={ADDRESSES[7]: fault}, tests=dict.fromkeys(ADDRESSES, GpuTest("passed", now))),
        checks=(HostCheck("DiskHealthy", Status.TRUE, Reason.CHECK_PASSED, "90 % free", now),),
        state_free=20 << 30,
    )


def view(now: float = 1.7e9, observed: Facts | None = None, version: str = VERSION) -> View:
    """Return the view of a ready host; without other facts, those of `facts`."""
    machine = MachineOutcome(
        MACHINE,
        conditions(now=now),
        gpus=ADDRESSES,
        expected=len(ADDRESSES),
        advertised=len(ADDRESSES),
        agent_version=version,
        reported=now,
        repairs=dict.fromkeys(Repair, 0),
    )
    return View(
        version,
        (machine,),
        Outcome(observed or facts(now), (machine,), finished=now),
        observed=now,
        config_loaded=now,
        wakeups=tuple(Tally(name, watching=True) for name in SOURCES),
        discarded={"conditions.json": 0},
    )


def metrics(view: View) -> Metrics:
    """Return the metrics of a service that has made one pass, and seen one error of each GPU."""
    found = Metrics()
    if view.outcome:
        found.passed(view.outcome, 0.2)
    for address in ADDRESSES:
        found.gpu_error(address, 63, 1)
    return found
