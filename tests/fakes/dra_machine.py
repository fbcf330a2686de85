"""A machine whose GPUs are offered by Dynamic Resource Allocation: a tree, with the documents of both halves in it.

The service in it is real. Its kubelet is only a process in the tree, and its GPUs are only in the documents.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from agent.dra.inventory import GPU_STATES
from agent.dra.service import Service
from agent.model.contract import (
    AllocatableDevice,
    AllocatableVendor,
    DraStatus,
    GpuState,
    GpuStatus,
    parse_dra_status,
    render_allocatable,
    render_gpu_states,
)
from agent.model.errors import AgentError
from agent.model.paths import ALLOCATABLE, DRA_STATUS
from agent.system.files import READ_LIMIT, System
from agent.system.process import Completed, Runner
from tests.fakes.machine import stat
from tests.fakes.node import main_processes

NODE = "gpu-node"
KUBECONFIG = "/etc/kubernetes/kubelet.conf"
GPUS = tuple(f"0000:{number:02x}:00.0" for number in range(1, 9))
SMI_LINE = "00000000:{bus}:00.0, GPU-{bus}, Simulated GPU {memory}, {memory}, 550.163.01, 9.0\n"
MEMORY = 40960
"""MiB of each GPU, but of the first one half as much."""
JOIN_LIMIT = 20.0


def whole(address: str) -> AllocatableDevice:
    return AllocatableDevice(address, (f"nvidia.com/gpu=GPU-{address[5:7]}",))


def healthy(address: str) -> GpuStatus:
    root = f"pci0000:{'00' if address < GPUS[4] else '80'}"
    return GpuStatus(address, "nvidia", GpuState.HEALTHY, kernel_driver="nvidia", numa_node=0, pcie_root=root)


class DraMachine(System):
    """A tree with a kubelet's process, which scripts nvidia-smi."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.gpus: dict[str, GpuStatus] = {}
        self.calls: list[tuple[str, ...]] = []
        self.process = 0
        """The kubelet's process, the main process of a service; 0 if there is none."""
        self.unreadable: set[str] = set()
        """Paths of files that cannot be read for lack of file descriptors."""
        self.full: set[str] = set()
        """Paths of files that cannot be written for lack of space."""
        self.program_runner: Runner = self.answer
        """What runs programs now; a test may replace it."""
        super().__init__(lambda argv, timeout: self.program_runner(argv, timeout), str(tree))
        self._service: Service | None = None
        self.thread: threading.Thread | None = None
        self.failure: AgentError | None = None
        """What ended the service."""
        self.put("/proc/sys/kernel/hostname", "Gpu-Node\n")

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        if path in self.unreadable:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return super().read(path, limit)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        if path in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().write(path, content, mode)

    def put(self, path: str, content: str | bytes) -> None:
        """Replace a file atomically, as the halves do."""
        self.write(path, content.encode() if isinstance(content, str) else content)

    def run_kubelet(self, kubeconfig: str = "{}", process: int = os.getpid()) -> None:
        """Let a process, by default this one, be the kubelet, with this kubeconfig. Its sockets are in the tree."""
        self.process = process
        self.put(KUBECONFIG, kubeconfig)
        arguments = ("/usr/bin/kubelet", f"--kubeconfig={KUBECONFIG}", f"--root-dir={self.kubelet}")
        self.put(f"/proc/{process}/cmdline", "".join(f"{each}\0" for each in arguments))
        self.put(f"/proc/{process}/stat", stat(process, time.monotonic_ns()))
        self.put(f"/proc/{process}/cgroup", "0::/system.slice/kubelet.service\n")
        self.put(f"/proc/{process}/status", f"Name:\tkubelet\nPPid:\t1\nUid:\t0\t0\t0\t0\nNSpid:\t{process}\n")

    def drop_process(self, process: int) -> None:
        """Let a process end."""
        self.remove_tree(f"/proc/{process}")

    @property
    def kubelet(self) -> str:
        """The kubelet's directory, as a real path: sockets are not looked up below the tree."""
        return str(self.tree / "kubelet")

    def grant(self, *addresses: str) -> None:
        """Let these GPUs be granted, verified and healthy, and no others."""
        self.states(map(healthy, addresses))
        self.allocate(map(whole, addresses))

    def allocate(self, devices: Iterable[AllocatableDevice], vendor: str = "nvidia") -> None:
        """Write what the machine half writes."""
        self.put(ALLOCATABLE, render_allocatable([AllocatableVendor(vendor, tuple(devices), "", "550.163.01")]))

    def states(self, states: Iterable[GpuStatus]) -> None:
        """Write what the host half writes."""
        found = tuple(states)
        self.gpus = {each.pci_address: each for each in found}
        self.put(GPU_STATES, render_gpu_states(found))

    def change(self, state: GpuStatus) -> None:
        """Let one GPU be in another state."""
        self.states({**self.gpus, state.pci_address: state}.values())

    def start(self) -> None:
        """Run the service in a thread."""
        self._service = Service(self)
        self.thread = threading.Thread(target=self._run_service, args=(self._service,), daemon=True)
        self.thread.start()

    def _run_service(self, service: Service) -> None:
        try:
            service.run()
        except AgentError as error:
            self.failure = error

    def stop(self) -> None:
        """Stop the service, if it runs."""
        if self._service is not None and self.thread is not None:
            self._service.stop()
            self.thread.join(JOIN_LIMIT)
            assert not self.thread.is_alive(), "the service does not stop"
        self._service = self.thread = None

    @property
    def status(self) -> DraStatus:
        """What the service says."""
        try:
            return parse_dra_status(self.read(DRA_STATUS))
        except FileNotFoundError:
            return DraStatus(0.0)

    def answer(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.calls.append(argv)
        match argv:
            case ("nvidia-smi", "--version"):
                return Completed(0, b"CUDA Version        : 12.4\n", b"")
            case ("nvidia-smi", "-L"):
                return Completed(0, b"", b"")
            case ("nvidia-smi", *_):
                lines = (
                    SMI_LINE.format(bus=each[5:7], memory=MEMORY // (2 if each == GPUS[0] else 1)) for each in self.gpus
                )
                return Completed(0, "".join(lines).encode(), b"")
            case ("systemctl", "show", "--property=MainPID", *_):
                return main_processes(argv, {"kubelet.service": self.process} if self.process else {})
            case ("systemctl", "--no-block", "start", "unbounded-agent-gpu-again.service"):
                return Completed(0, b"", b"")
            case _:
                raise FileNotFoundError(json.dumps(argv))
