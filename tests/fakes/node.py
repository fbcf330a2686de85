"""A machine with a kubelet, and its Node object."""

import functools
import tempfile
from pathlib import Path

from agent.machine.node_condition import HOST_STATUS, NOTE, TYPE
from agent.machine.notes import Notes
from agent.model.conditions import Condition, ConditionType, Reason, true
from agent.model.contract import render_host_status
from agent.system.process import Completed
from tests.fakes.api_server import NODES, ApiServer, Object
from tests.fakes.machine import Machine, gpu_machine

NOW = 1_800_000_000.0
READY = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "the machine can run GPU workloads")
KUBELET = ("/usr/bin/kubelet", "--config=/etc/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf")
KUBECONFIG = "/etc/kubernetes/kubelet.conf"
NODE = "gpu-node"
KUBELETS_OWN = {"type": "Ready", "status": "True"}


def services_asked(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the UNITs of `systemctl show --property=MainPID --value -- UNIT...`."""
    return tuple(each for each in argv[argv.index("--value") + 1 :] if each != "--")


def main_processes(argv: tuple[str, ...], units: dict[str, int]) -> Completed:
    """Answer the same command."""
    named = services_asked(argv)
    if any(each.startswith("@") for each in named):
        return Completed(1, b"", f"Failed to get properties: Unit name {named[0]} is neither a valid".encode())
    shown = [0, *units.values()] if "*.service" in named else [units.get(each, 0) for each in named]
    return Completed(0, "\n\n".join(map(str, shown)).encode(), b"")


@functools.cache
def shared_api_server() -> ApiServer:
    """Return an API server, which runs until this process ends."""
    server = ApiServer(Path(tempfile.mkdtemp(prefix="api-")), NODE)
    server.start()
    return server


class Node(Machine):
    """A machine with a kubelet, whose Node an API server stores."""

    api: ApiServer

    def join(self) -> None:
        """Let a kubelet run, and store its Node, which nobody has changed yet."""
        self.api = shared_api_server()
        self.api.answer = None
        self.api.events.clear()
        self.api.requests.clear()
        self.register()
        self.put("/proc/sys/kernel/hostname", "GPU-Node\n")
        self.put("/usr/local/bin/kubectl")
        self.put("/etc/ca.crt", self.api.certificate.read_bytes())
        self.put(KUBECONFIG, self.api.kubeconfig())
        self.process(40, *KUBELET)
        self.services(40)

    def register(self, name: str = NODE) -> None:
        """Store a Node as a kubelet makes it."""
        status = {"conditions": [KUBELETS_OWN], "capacity": {"cpu": "2"}}
        self.api.put(f"{NODES}/{name}", {"metadata": {"name": name}, "status": status})

    @property
    def object(self) -> Object:
        """The Node without its version."""
        return {**self.api.objects[f"{NODES}/{NODE}"], "metadata": {"name": NODE}}

    @property
    def patched(self) -> list[Object]:
        """The Node after each change."""
        return [
            event["object"] for _, where, event in self.api.events[1:] if event["type"] == "MODIFIED" and where == NODES
        ]

    def services(self, *processes: int) -> None:
        """Let these be the main processes of the services that systemd has."""
        units = {self.read_text(f"/proc/{each}/cgroup").strip().rpartition("/")[2]: each for each in processes}
        other = self.programs.get("systemctl")

        def answer(argv: tuple[str, ...]) -> Completed:
            if "--property=MainPID" in argv:
                return main_processes(argv, units)
            assert other is not None, argv
            return other(argv)

        self.program("systemctl", answer)

    @property
    def asked(self) -> list[tuple[str, ...]]:
        """The services about which systemd was asked, one entry for each question."""
        return [services_asked(argv) for argv in self.calls if "--property=MainPID" in argv]

    @property
    def requests(self) -> list[tuple[str, str, str]]:
        """The requests to the API server: method, path and token."""
        return [(method, path, token) for method, path, _, token in self.api.requests]

    def publish_status(
        self, condition: Condition = READY, evaluated: float = NOW, since: float = NOW - 1000, *others: Condition
    ) -> None:
        dated = [Condition(each.type, each.status, each.reason, each.message, since) for each in (condition, *others)]
        self.put(HOST_STATUS, render_host_status(dated[0], evaluated, dated[1:]))

    def on_node(self, kind: str = TYPE) -> dict[str, str]:
        """Return our condition."""
        (condition,) = [each for each in self.object["status"]["conditions"] if each["type"] == kind]
        found: dict[str, str] = condition
        return found

    def outcome(self) -> tuple[str, str]:
        noted = Notes(self).load(NOTE)
        return noted["status"], noted["reason"]

    def outcome_message(self) -> str:
        return str(Notes(self).load(NOTE)["message"])


def joined_node(directory: Path) -> Node:
    """Return a machine with GPUs, whose kubelet has registered its Node."""
    machine = gpu_machine(directory)
    machine.__class__ = Node
    assert isinstance(machine, Node)
    machine.join()
    return machine
