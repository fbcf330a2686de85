"""A simulated machine for the machine half's scenarios: its GPUs, driver and containerd change."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.machine import node_condition
from agent.machine.run import run
from agent.model.errors import AgentError
from agent.model.handoff import GrantedFile, Request
from agent.model.paths import MACHINE_STATE
from agent.system.process import Completed
from integration.faults_suite.interception import Watch
from integration.faults_suite.trees import normal, snapshot, temporary
from tests.fakes.machine import GPUS, LIBRARIES, REQUEST, ROOT, VERSION, Machine, gpu_machine, nvidia_ctk, systemctl

RUNS = 3
"""Runs of the machine half: one that the path unit starts, and two that the timer starts."""
READS = ("-p", "show", "--version", "dump", "list", "get", "plugins")
READERS = ("nvidia-smi", "open_nodes")
COMPARED = ("granted-", "char-links-", "withdrawn")
"""How the names of the compared notes begin. Other notes only save work, and contain times and inode numbers."""


class MachineWorld:
    """A machine, with the System through which the agent sees it."""

    def __init__(self, machine: Machine, spec: Callable[[], dict[str, Any]]) -> None:
        self.machine, self.tree = machine, machine.tree
        self.watch = Watch("/nowhere")
        self.spec = spec
        self.started = 10
        """When containerd started, in microseconds of CLOCK_MONOTONIC."""
        self.restarts = 0
        self.last: dict[str, tuple[str, str]] = {}
        self.errors: list[str] = []
        """Exceptions that ended runs."""
        self.false_conditions: set[tuple[str, str, str]] = set()
        """Type, reason and message of conditions that were False."""
        machine._runner = self._run
        machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, self._generated(argv)))
        machine.program("systemctl", self._systemctl)

    def _run(self, argv: tuple[str, ...], timeout: float) -> Completed:
        reads = any(word in argv for word in READS) or any(name in word for name in READERS for word in argv)
        (self.watch.before_read if reads else self.watch.before_write)("run", " ".join(argv)[:120])
        with self.watch.pause():
            return self.machine._answer(argv, timeout)

    def _systemctl(self, argv: tuple[str, ...]) -> Completed:
        if "try-restart" in argv:
            self.restarts += 1
            self.started = time.monotonic_ns() // 1000
        return systemctl("active", self.started)(argv)

    def _generated(self, argv: tuple[str, ...]) -> dict[str, Any]:
        """Return nvidia-ctk's output for the current nodes. It leaves out a device if one of its nodes is missing."""
        spec = self.spec()
        nodes = {*self.machine.nodes}
        root = next((each.partition("=")[2] for each in argv if each.startswith("--driver-root=")), ROOT)
        kept = []
        for device in spec["devices"]:
            edits = device["containerEdits"]
            present = [each for each in edits.get("deviceNodes", []) if each["path"] in nodes]
            if device["name"] == "all" or present == edits.get("deviceNodes", []):
                edits["deviceNodes"] = [self._numbered(each) for each in present]
                kept.append(device)
        spec["devices"] = kept
        if root == ROOT:
            return spec
        names = self.machine.entries(f"{root}/{LIBRARIES}")
        library = next(name for name in names if name.startswith("libcuda.so.") and name.count(".") > 2)
        text = json.dumps(spec).replace(ROOT, root).replace(VERSION, library.removeprefix("libcuda.so."))
        moved: dict[str, Any] = json.loads(text)
        return moved

    def _numbered(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return a node with the number that it has in the machine: in the recording, all nodes have the number 1:3."""
        number = self.machine.nodes[node["path"]]
        now = {"major": number.major, "minor": number.minor, "fileMode": number.mode}
        return {key: now.get(key, value) for key, value in node.items()}

    def settle(self) -> None:
        """Run the machine half. An exception that ends a run goes to the journal, and the next run follows."""
        for _ in range(RUNS):
            try:
                run(self.machine)
            except (AgentError, OSError) as error:
                self.errors.append(str(error))
            else:
                self._read_report()

    def _read_report(self) -> None:
        with self.watch.pause():
            conditions = self.machine.report()["conditions"]
        self.last = {each["type"]: (each["status"], each["reason"]) for each in conditions}
        self.false_conditions |= {
            (each["type"], each["reason"], each["message"]) for each in conditions if each["status"] == "False"
        }

    def update_node(self) -> None:
        """Run the unit that sets the condition on the Node."""
        for _ in range(RUNS):
            try:
                node_condition.run(self.machine)
            except (AgentError, OSError) as error:
                self.errors.append(str(error))

    def faults(self) -> list[str]:
        return temporary(self.tree)

    def rights(self) -> set[str]:
        """Return the devices that pods can request, and the driver's files that are linked."""
        links = {each.name for each in (self.tree / LIBRARIES).glob("*") if each.is_symlink()}
        spec = self.tree / "etc/cdi/nvidia.yaml"
        devices = json.loads(spec.read_text())["devices"] if spec.is_file() else []
        return links | {device["name"] for device in devices}

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Return status and reason by type, from the last run."""
        return self.last

    def state(self) -> dict[str, str]:
        found = snapshot(self.tree)
        for path in [*found]:
            name = path.removeprefix(f"{MACHINE_STATE}/")
            if name != path and not name.startswith(COMPARED):
                del found[path]
        found["mounts"] = " ".join(sorted(self.machine.mounts))
        found["restarts of containerd"] = str(self.restarts)
        found["the Node"] = normal(json.dumps(getattr(self.machine, "object", None), sort_keys=True).encode())
        return found


def one_gpu() -> Request:
    """Return a request for only the first of the two GPUs."""
    devices = tuple(each for each in REQUEST.devices if each.pci_address != GPUS[1])
    return Request("nvidia", GPUS[:1], devices, VERSION, ROOT, REQUEST.files)


def stage(machine: Machine, version: str, root: str) -> Request:
    """Put another driver into its own driver root, load it, and return the request for it."""
    files = tuple(
        GrantedFile(each.target.replace(VERSION, version), each.link.replace(VERSION, version))
        for each in REQUEST.files
    )
    for file in files:
        path = f"{root}/{file.target}"
        if file.link:
            machine.make_directory(path.rsplit("/", 1)[0])
            machine.link(path, file.link)
        else:
            machine.put(path)
    load(machine, version)
    return Request("nvidia", GPUS, REQUEST.devices, version, root, files)


def load(machine: Machine, version: str) -> None:
    """Load the kernel module of that version."""
    machine.put("/sys/module/nvidia/version", f"{version}\n")
    machine.put("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}\n")


def begin(directory: Path, spec: Callable[[], dict[str, Any]]) -> MachineWorld:
    """Return a machine before its first run, with the nodes that nspawn has bound."""
    world = MachineWorld(gpu_machine(directory / "machine"), spec)
    world.machine.mounts += [each.path for each in REQUEST.devices]
    return world
