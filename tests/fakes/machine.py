"""A simulated machine: a tree below a temporary directory, listed device nodes, and programs that a test scripts.

The GPUs and their driver are simulated: no test here has seen silicon. The real nvidia-ctk 1.19.1 wrote
`specs/nvidia-ctk-1.19.1-simulated-nvml.json` for two GPUs of a simulated NVML and a driver root with these files.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.machine.run import HANDOFF, REPORT, run
from agent.model.conditions import Remark
from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice, GrantedFile, Handoff, Request, render_handoff
from agent.system.files import READ_LIMIT, System
from agent.system.process import Completed, TimeLimitError
from agent.vendors.nvidia.contract import (
    FABRIC_HEALTH,
    HEALTH_FIELDS,
    PAGES_PENDING,
    PERSISTENCE,
    POWER_BRAKE,
    RECOVERY_ACTION,
    UNCORRECTED,
)

SPEC = Path(__file__).parents[1] / "data" / "specs" / "nvidia-ctk-1.19.1-simulated-nvml.json"
ROOT = "/run/host-nvidia/0"
VERSION = "550.163.01"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
GPUS = ("0000:01:00.0", "0000:02:00.0")

DEVICES = (
    GrantedDevice("/dev/nvidia0", "gpu", 195, 0, GPUS[0]),
    GrantedDevice("/dev/nvidia1", "gpu", 195, 1, GPUS[1]),
    GrantedDevice("/dev/nvidiactl", "control", 195, 255),
    GrantedDevice("/dev/nvidia-modeset", "modeset", 195, 254),
    GrantedDevice("/dev/nvidia-uvm", "uvm", 234, 0),
    GrantedDevice("/dev/nvidia-uvm-tools", "uvm-tools", 234, 1),
)


def _files() -> tuple[GrantedFile, ...]:
    """Return the files of the driver root from which the recorded specification was made."""
    versioned = ("EGL_nvidia:0", "GLX_nvidia:0", "cuda:1", "nvcuvid:1", "nvidia-encode:1", "nvidia-ml:1")
    files = [GrantedFile(f"{LIBRARIES}/libcuda.so", "libcuda.so.1"), GrantedFile(f"{LIBRARIES}/libnvidia-api.so.1")]
    for name, _, number in (each.partition(":") for each in (*versioned, "nvidia-ptxjitcompiler:1")):
        files.append(GrantedFile(f"{LIBRARIES}/lib{name}.so.{VERSION}"))
        files.append(GrantedFile(f"{LIBRARIES}/lib{name}.so.{number}", f"lib{name}.so.{VERSION}"))
    files.append(GrantedFile(f"{LIBRARIES}/libnvidia-glcore.so.{VERSION}"))
    files.append(GrantedFile(f"{LIBRARIES}/vdpau/libvdpau_nvidia.so.{VERSION}"))
    files.append(GrantedFile(f"{LIBRARIES}/vdpau/libvdpau_nvidia.so.1", f"libvdpau_nvidia.so.{VERSION}"))
    files += [GrantedFile("usr/bin/nvidia-smi"), GrantedFile("usr/bin/nvidia-debugdump")]
    files.append(GrantedFile("usr/share/vulkan/icd.d/nvidia_icd.json"))
    files.append(GrantedFile("usr/share/glvnd/egl_vendor.d/10_nvidia.json"))
    return tuple(sorted(files))


REQUEST = Request("nvidia", GPUS, DEVICES, VERSION, ROOT, _files())
EMPTY = Request("nvidia", (), ())


def recorded_spec() -> dict[str, Any]:
    """Return a new copy of the recorded specification."""
    loaded: dict[str, Any] = json.loads(SPEC.read_text())
    return loaded


HEALTH = re.compile(r"help-query|\.pending|ecc\.errors")
"""In the arguments of nvidia-smi when it is asked about health."""
FINE = {
    PERSISTENCE: "Enabled",
    RECOVERY_ACTION: "None",
    UNCORRECTED: "0",
    PAGES_PENDING: "[N/A]",
    POWER_BRAKE: "Not Active",
    FABRIC_HEALTH: "N/A",
}
"""What a healthy H200 says (nvidia-smi 580.173.02); of the other fields, it says No."""
SERVES_CRI = "Type:          io.containerd.grpc.v1\nID:            cri\nPlatforms:     linux/amd64\n"
"""What `ctr plugins ls --detailed` prints of a containerd 1.7 that serves the kubelet."""

Answer = Callable[[tuple[str, ...]], Completed]
SERVICE = "0::/system.slice/kubelet.service"


def stat(number: int, started: int, name: str = "x) y (z") -> str:
    """Return the text of /proc/PID/stat, of a process whose name looks like further fields (proc_pid_stat(5))."""
    return f"{number} ({name}) S {'0 ' * 18}{started} 0 0\n"


class Machine(System):
    """A machine's file system below `tree`; a program that was not scripted fails the test."""

    def __init__(self, tree: Path) -> None:
        super().__init__(self._answer, str(tree))
        self.tree = tree
        self.calls: list[tuple[str, ...]] = []
        self.nodes: dict[str, DeviceNumber] = {}
        self.mounts: list[str] = []
        """Paths of bound nodes; one that is listed twice has two stacked mounts."""
        self.removed: list[str] = []
        """Paths of mounts whose bound node the host has removed; one entry for each mount."""
        self.programs: dict[str, Answer] = {}
        self.durations: dict[str, float] = {}
        """Seconds that programs take, by name; others take none."""
        self.before_write: Callable[[str], None] = lambda path: None
        """May raise, like a full disk or a kill."""
        self.before_link = self.after_link = self.before_write
        """The same for links."""
        self.before_read: Callable[[str], None] = lambda path: None
        """May raise, like a failing disk."""
        self.before_list: Callable[[str], None] = lambda path: None
        """May raise the kernel's error for a directory, or hang."""
        self.free = 1.0
        """Which part of each file system is free."""
        self.digests: list[str] = []
        """Paths of files of which a digest was made."""
        self.put("/proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n")
        for directory in ("/run/unbounded-agent/report", f"/{LIBRARIES}", "/usr/bin", "/etc"):
            (tree / directory.lstrip("/")).mkdir(parents=True)

    def device(self, path: str) -> DeviceNumber | None:
        # mknod(2) needs root: a listed node is an empty file in the tree.
        return None if path in self.removed else self.nodes.get(path) or super().device(path)

    def link_count(self, path: str) -> int:
        return 0 if path in self.removed else super().link_count(path)

    def device_behind(self, link: str) -> tuple[int, int] | None:
        node = self.nodes.get(self._resolve(link))
        return (node.major, node.minor) if node else super().device_behind(link)

    def is_mount(self, path: str) -> bool:
        # mount(2) needs root too.
        return path in self.mounts or super().is_mount(path)

    def some_entries(self, path: str, limit: int) -> tuple[str, ...]:
        self.before_list(path)
        return super().some_entries(path, limit)

    def entries(self, path: str) -> tuple[str, ...]:
        self.before_list(path)
        return super().entries(path)

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        self.before_read(path)
        return super().read(path, limit)

    def read_untrusted(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes, float]:
        self.before_read(path)
        return super().read_untrusted(path, limit)

    def free_share(self, path: str) -> float:
        return self.free

    def digest(self, path: str) -> str:
        self.digests.append(path)
        return super().digest(path)

    def stream(
        self,
        path: str,
        chunks: Iterable[bytes],
        mode: int = 0o644,
        *,
        durable: bool = True,
        until: ExitStack | None = None,
    ) -> None:
        self.before_write(path)
        super().stream(path, chunks, mode, durable=durable, until=until)

    def link(self, path: str, target: str) -> None:
        self.before_link(path)
        super().link(path, target)
        self.after_link(path)

    def put(self, path: str, content: str | bytes = "") -> None:
        place = self.tree / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        if place.parent.name in ("bin", "sbin"):
            place.chmod(0o755)

    def node(self, path: str, major: int, minor: int) -> None:
        self.put(path)
        self.nodes[path] = DeviceNumber(major, minor)

    def process(
        self,
        number: int,
        *arguments: str,
        cgroup: str = SERVICE,
        pids: str | None = None,
        users: str = "0\t0\t0\t0",
        parent: int = 1,
    ) -> None:
        """Start a process; one that had its id has ended."""
        path = f"/proc/{number}/stat"
        # The same in each tree, because the fault suite compares trees.
        start = int(self.read_text(path).split()[-3]) + 1 if self.exists(path) else 1000
        self.put(path, stat(number, start))
        self.put(f"/proc/{number}/cmdline", "".join(f"{each}\0" for each in arguments))
        self.put(f"/proc/{number}/cgroup", f"{cgroup}\n")
        ids = f"PPid:\t{parent}\nUid:\t{users}\nNSpid:\t{number if pids is None else pids}\n"
        self.put(f"/proc/{number}/status", f"Name:\tx\n{ids}")

    def drop(self, path: str) -> None:
        (self.tree / path.lstrip("/")).unlink()

    def program(self, name: str, answer: Answer | str, status: int = 0, stderr: str = "") -> None:
        """Script a program, found by the last part of its path: with a text, or a function of the arguments."""
        text = answer
        self.programs[name] = (
            answer if callable(answer) else lambda _: Completed(status, str(text).encode(), stderr.encode())
        )

    def hand(
        self,
        *requests: Request,
        default_runtime: bool = False,
        restart_device_plugin: bool = False,
        containerd_drop_in: str = "",
        validation_markers: bool = False,
        withdrawn: tuple[str, ...] = (),
        allocation: str = "",
    ) -> Handoff:
        """Publish a handoff."""
        flags = (default_runtime, restart_device_plugin, containerd_drop_in, validation_markers)
        handoff = Handoff("kube1", "x86_64", requests, *flags, withdrawn, allocation)
        self.put(HANDOFF, render_handoff(handoff))
        return handoff

    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.read(REPORT))
        return loaded

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Return status and reason by type, as reported."""
        return {each["type"]: (each["status"], each["reason"]) for each in self.report()["conditions"]}

    def verdict(self, kind: str) -> tuple[str, str]:
        """Run the machine half, and return a condition's status and reason."""
        run(self)
        return self.conditions()[kind]

    def message(self, kind: str) -> str:
        """Return a condition's message. Programs read its remarks as data, so they are compared with it."""
        condition = next(each for each in self.report()["conditions"] if each["type"] == kind)
        message, remarks = str(condition["message"]), condition.get("remarks", ())
        assert {each for each in Remark if each in message and kind == "CDISpecCurrent"} == {*remarks}
        return message

    def _answer(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.calls.append(argv)
        name = argv[0].rsplit("/", 1)[1] if "/" in argv[0] else argv[0]
        name = "open_nodes" if any(each.endswith("open_nodes.py") for each in argv) else name
        name = "gpu_test" if any(each.endswith("gpu_test.py") for each in argv) else name
        name = "nvidia-smi of fabric" if any("fabric.state" in each for each in argv) else name
        name = "nvidia-smi of health" if any(map(HEALTH.search, argv)) else name
        name = "nvidia-smi of links" if "nvlink" in argv or "--query-gpu=pci.bus_id,uuid" in argv else name
        assert name in self.programs, f"nobody expected {' '.join(argv)}"
        if timeout < self.durations.get(name, 0):
            raise TimeLimitError
        return self.programs[name](argv)


def hang(argv: tuple[str, ...]) -> Completed:
    """Act like a program that the runner killed."""
    raise TimeLimitError


def failing(number: int, *paths: str) -> Callable[[str], None]:
    """Return what fails with this errno, like a full disk, for paths with one of these ends."""

    def fail(path: str) -> None:
        if path.endswith(paths):
            raise OSError(number, os.strerror(number), path)

    return fail


def opening(code: int = 0, *paths: str) -> Answer:
    """Return an Answer that acts as the program that opens nodes: these nodes fail with this errno."""
    return lambda argv: Completed(
        0, "".join(f"{code if path in paths else 0} {path}\n" for path in argv[5:]).encode(), b""
    )


def without_a_gpu() -> dict[str, Any]:
    """Return the recorded specification without the second GPU."""
    fewer = recorded_spec()
    fewer["devices"] = [each for each in fewer["devices"] if not each["name"].endswith("1")]
    fewer["devices"][-1]["containerEdits"]["deviceNodes"].pop()
    return fewer


def gpu_machine(tree: Path) -> Machine:
    """Return a machine with two simulated GPUs granted, a staged driver root and all tools, before its first run."""
    machine = Machine(tree)
    for device in DEVICES:
        machine.node(device.path, device.major, device.minor)
    for file in REQUEST.files:
        path = f"{ROOT}/{file.target}"
        if file.link:
            machine.make_directory(path.rsplit("/", 1)[0])
            machine.link(path, file.link)
        else:
            machine.put(path)
    machine.put("/sys/module/nvidia/version", f"{VERSION}\n")
    machine.put("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}\n")
    for tool in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime", "containerd", "ctr"):
        machine.put(f"/usr/bin/{tool}", tool)
    machine.program("open_nodes", opening())
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, recorded_spec()))
    machine.program("ldconfig", lambda argv: ldconfig(machine, argv))
    machine.program("containerd", lambda argv: containerd(machine, argv))
    machine.program("ctr", SERVES_CRI)
    machine.program("systemctl", systemctl("active", 10))
    machine.program("nvidia-smi", smi_rows(Disabled=GPUS))
    machine.program("nvidia-smi of fabric", fabric_rows(*GPUS))
    machine.program("nvidia-smi of health", smi_health(*GPUS))
    machine.program("nvidia-smi of links", smi_links(*GPUS))
    machine.program("umount", lambda argv: umount(machine, argv))
    machine.hand(REQUEST)
    return machine


def smi_rows(**gpus: Iterable[str]) -> str:
    """Return nvidia-smi's answer about GPUs, given by MIG mode."""
    return "".join(f"0000{gpu}, {smi_uuid(gpu)}, {mode}\n" for mode, each in gpus.items() for gpu in each)


def fabric_rows(*gpus: str, state: str = "N/A", status: str = "N/A", persistence: str = "Disabled") -> str:
    """Return nvidia-smi's answer about the fabric of GPUs."""
    return "".join(f"0000{gpu}, {state}, {status}, {persistence}\n" for gpu in gpus)


def smi_health(*gpus: str, fields: Sequence[str] = HEALTH_FIELDS, **words: str) -> Answer:
    """Return an Answer that acts as nvidia-smi asked about the health of GPUs: all fine but for `words`.

    `words` are by the last part of the field's name. The form of the help is that of nvidia-smi 610.57.04.
    """

    def answer(argv: tuple[str, ...]) -> Completed:
        if "--help-query-gpu" in argv:
            return Completed(0, "".join(f'"{each}" or "x"\nIts meaning.\n\n' for each in fields).encode(), b"")
        asked = next(each.partition("=")[2].split(",")[1:] for each in argv if each.startswith("--query-gpu"))
        if not set(asked) <= set(fields):
            return Completed(2, b'Field "x" is not a valid field to query.\n', b"")
        index = next((int(each.partition("=")[2]) for each in argv if each.startswith("--id=")), None)
        found = [words.get(each.rpartition(".")[2], FINE.get(each, "No")) for each in asked]
        rows = [f"0000{gpu}, {', '.join(found)}\n" for gpu in (gpus if index is None else gpus[index : index + 1])]
        return Completed(0, "".join(rows).encode(), b"")

    return answer


def smi_links(*gpus: str, **counted: tuple[int, int]) -> Answer:
    """Return an Answer that acts as nvidia-smi asked about NVLinks: `counted` are the errors of the GPUs, by kind.

    Without any, they have no links. The form is that of nvidia-smi 550.163.01 with a simulated NVML.
    """

    def answer(argv: tuple[str, ...]) -> Completed:
        if "nvlink" not in argv:
            index = next((int(each.partition("=")[2]) for each in argv if each.startswith("--id=")), None)
            found = gpus if index is None else gpus[index : index + 1]
            return Completed(0, "".join(f"0000{gpu}, {smi_uuid(gpu)}\n" for gpu in found).encode(), b"")
        index = int(argv[argv.index("-i") + 1])
        lines = [f"GPU {index}: NVIDIA H100 (UUID: {smi_uuid(gpus[index])})"]
        for link in (0, 1):
            lines += [f"\t Link {link}: {kind} Errors: {errors[index] * link}" for kind, errors in counted.items()]
            lines.append("")
        return Completed(0, "\n".join(lines if counted else []).encode(), b"")

    return answer


def smi_uuid(gpu: str) -> str:
    """Return the UUID of one of GPUS in the recorded specification."""
    return f"GPU-11111111-2222-3333-4444-55555555555{GPUS.index(gpu)}"


def umount(machine: Machine, argv: tuple[str, ...]) -> Completed:
    """Act as umount. Under the last mount is the empty file that it was mounted on."""
    path = argv[-1]
    machine.mounts.remove(path)
    if path in machine.removed:
        machine.removed.remove(path)
    if path not in machine.mounts:
        machine.nodes.pop(path, None)
    return Completed(0, b"", b"")


def nvidia_ctk(machine: Machine, argv: tuple[str, ...], spec: object, version: str = "1.19.1") -> Completed:
    """Act as nvidia-ctk: write a given specification."""
    if argv[1:] == ("--version",):
        return Completed(0, f"NVIDIA Container Toolkit CLI version {version}\ncommit: 0\n".encode(), b"")
    output = next(each.partition("=")[2] for each in argv if each.startswith("--output="))
    machine.put(output, spec if isinstance(spec, bytes) else json.dumps(spec))
    return Completed(0, b"", b"")


def ldconfig(machine: Machine, argv: tuple[str, ...]) -> Completed:
    """Act as ldconfig: its cache has all names that the library directory had at its last run."""
    names = [f"\t{name} (libc6,x86-64) => /{LIBRARIES}/{name}" for name in machine.entries(f"/{LIBRARIES}")]
    if "-p" not in argv:
        machine.put("/etc/ld.so.cache", "\n".join(names))
        return Completed(0, b"", b"")
    return Completed(0, machine.read("/etc/ld.so.cache"), b"")


def containerd(machine: Machine, argv: tuple[str, ...], version: str = "v1.7.24") -> Completed:
    """Act as containerd: its dump is the main file with the CRI table of the file that it imports last (1.x)."""
    import fnmatch
    import tomllib

    import tomlkit

    if argv[1:] == ("--version",):
        return Completed(0, f"containerd github.com/containerd/containerd {version} 0\n".encode(), b"")
    document = tomllib.loads(machine.read_text(argv[2]))
    for pattern in document.get("imports", []):
        directory, _, name = pattern.rpartition("/")
        entries = machine.entries(directory) if machine.is_directory(directory) else ()
        for entry in fnmatch.filter(entries, name):
            imported = tomllib.loads(machine.read_text(f"{directory}/{entry}"))
            document.setdefault("plugins", {}).update(imported.get("plugins", {}))
    return Completed(0, tomlkit.dumps(document).encode(), b"")


def systemctl(
    state: str,
    started: int,
    substate: str = "running",
    load: str = "loaded",
    main_process: int = 0,
    job: int = 0,
) -> Answer:
    """Return an Answer that acts as systemctl and knows only containerd.service."""
    text = f"LoadState={load}\nActiveState={state}\nSubState={substate}\nExecMainStartTimestampMonotonic={started}\n"
    # systemctl prints no line for a unit without a job.
    text += f"MainPID={main_process}\n" + (f"Job={job}\n" if job else "")
    return lambda argv: Completed(0, text.encode() if argv[1] == "show" else b"", b"")


def settle(machine: Machine) -> None:
    """Run, start containerd again with its new configuration, and run once more."""
    run(machine)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    run(machine)
    machine.calls.clear()


def recorded_syncs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each fsync appends its path; a temporary file counts as the file that it replaces."""
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(machine.tree))
        synced.append(re.sub(r"/\.([^/]+)\.unbounded-agent-new$", r"/\1", path))

    monkeypatch.setattr(os, "fsync", fsync)
    return synced
