"""A bare host that becomes a node: programs that act on its tree as the real ones do, an API server, and a kubelet.

Synthetic: the image's content (its init alone), the registry's answers, systemd's and the machine's behaviour.
"""

import hashlib
import json
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent import __version__
from agent.config.settings import Config
from agent.host.provision.preflight import PROGRAMS
from agent.host.reconcile import Reconciler
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.contract import LeaveAnswer, LeaveEnd, parse_leave_request, render_leave_answer
from agent.model.facts import render_live
from agent.model.handoff import Report, parse_handoff, render_report
from agent.model.node import Link, Network, Route, Rule
from agent.model.paths import (
    MACHINED_STATE,
    handoff_file,
    joined_file,
    leave_file,
    leaving_file,
    live_file,
    machine_root,
    machine_unit,
    report_directory,
)
from agent.system.http import Answer
from agent.system.process import Completed
from tests.fakes.clearing import clear_below, clears
from tests.fakes.gpu_host import MACHINE, set_up
from tests.fakes.host import Host, ScriptedRunner
from tests.fakes.layouts import put_layout
from tests.fakes.reports import IN_MACHINE

NODE, SERVER, TOKEN = "node-1", "https://192.0.2.1:6443", "abcdef.0123456789abcdef"
CA_FILE, TOKEN_FILE = "/etc/unbounded-agent/ca.crt", "/etc/unbounded-agent/token"
REPOSITORY = "docker://registry.example.com/nodes"
NETWORK = Network((Link("eth0", ""), Link("lo", "")), (), (Rule(2, 0, 1, 255),))
CANDIDATE = f"{MACHINE}-next"
MACHINES = {machine_unit(name): name for name in (MACHINE, CANDIDATE)}
BOOT_ID = "4e6f4e6f-0000-0000-0000-000000000000"
SYSCTLS = {
    "kernel/panic": "0",
    "kernel/panic_on_oops": "0",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
    "vm/overcommit_memory": "0",
    "vm/panic_on_oom": "0",
    "net/ipv4/ip_forward": "0",
}


def wanted(unit: str) -> str:
    """Return the link by which systemd starts a unit at boot."""
    target = "multi-user.target" if unit == "machines.target" else "machines.target"
    return f"/etc/systemd/system/{target}.wants/{unit}"


class HostTools(ScriptedRunner):
    """Programs of a host. What they change, they change in its tree."""

    def __init__(self) -> None:
        super().__init__()
        self.host: NodeHost
        self.image = ["usr/lib/systemd/systemd", "usr/bin/kubelet"]
        """The programs in images."""
        self.before: Callable[[tuple[str, ...]], None] = lambda argv: None
        """Called with each program that is about to run."""

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.before(argv)
        self.calls.append(argv)
        if argv in self.answers:
            return self.answers[argv]
        if clears(argv):
            return clear_below(self.host.root, argv)
        return Completed(0, self._run(argv).encode(), b"")

    def _run(self, argv: tuple[str, ...]) -> str:  # noqa: C901
        host = self.host
        match argv:
            case ("umoci", "--version"):
                return "umoci version 0.4.7\n"
            case ("skopeo", "inspect", "--raw", *_):
                return MANIFEST
            case ("skopeo", "inspect", "--config", *_):
                return json.dumps({"architecture": "amd64", "os": "linux"})
            case ("skopeo", *words) if "copy" in words:
                put_layout(Path(words[-1].removeprefix("oci:").removesuffix(":node")))
            case ("umoci", "raw", "unpack", *_, root):
                for name in self.image:
                    program = Path(root) / name
                    program.parent.mkdir(parents=True)
                    program.write_bytes(b"")
                    program.chmod(0o755)
            case ("sync", *_) | ("systemctl", "daemon-reload"):
                pass
            case ("modprobe", "--use-blacklist", "--", module):
                host.file(f"/sys/module/{module}/refcnt", "0\n")
                if module == "br_netfilter":
                    for name in ("iptables", "ip6tables"):
                        host.file(f"/proc/sys/net/bridge/bridge-nf-call-{name}", "1\n")
            case ("modprobe", "--remove", "--", module):
                host.remove_tree(f"/sys/module/{module}")
                host.remove_tree("/proc/sys/net/bridge")
            case ("swapoff", _):
                host.file("/proc/swaps", SWAPS.splitlines()[0] + "\n")
            case ("swapon", *_):
                host.file("/proc/swaps", SWAPS)
            case ("systemctl", "enable", unit):
                host.symlink(wanted(unit), f"/usr/lib/systemd/system/{unit}")
            case ("systemctl", "disable", unit):
                # systemd 252 ignores a masked unit, and succeeds. It removes the directory only with its last link.
                if host.exists(wanted(unit)) and not host.exists(f"/etc/systemd/system/{unit}"):
                    host.remove(wanted(unit))
                    host.remove_empty_directory(posixpath.dirname(wanted(unit)))
            case ("systemctl", "start", "--no-block", unit):
                host.boot(MACHINES[unit])
            case ("systemctl", "reload", "unbounded-agent.service"):
                pass
            case ("systemctl", "stop", unit):
                assert unit in MACHINES
                host.bus.unit(unit, "inactive", stopped_at=1)
            case _:
                raise AssertionError(f"nobody expected {' '.join(argv)}")
        return ""


SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/sda2 partition 1048572 0 -2\n"
LAYER = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": f"sha256:{'c3' * 32}", "size": 1000}
MANIFEST = json.dumps({"schemaVersion": 2, "layers": [LAYER]})
DIGEST = f"sha256:{hashlib.sha256(MANIFEST.encode()).hexdigest()}"


class Namespace:
    """The host's network."""

    def __init__(self) -> None:
        self.now = NETWORK
        self.removed: list[Link | Route | Rule] = []

    def observe(self) -> Network:
        return self.now

    def remove(self, leftover: Link | Route | Rule) -> None:
        self.removed.append(leftover)
        self.now = Network(
            tuple(each for each in self.now.links if each != leftover),
            tuple(each for each in self.now.routes if each != leftover),
            tuple(each for each in self.now.rules if each != leftover),
        )


class NodeHost(Host):
    """A host with a driver and two GPUs, without any machine."""

    def __init__(self, tree: Path) -> None:
        tools = HostTools()
        super().__init__(tree, runner=tools)
        self.tools, tools.host = tools, self
        self.network = Namespace()
        self.joins = True
        """Whether the kubelet of a machine that boots joins the cluster."""
        self.node_settings: dict[str, object] = {}
        """Settings of the node with which the machine boots, in addition to those of `node_reconciler`."""
        self.reports = True
        """Whether a machine that boots reports."""
        self.silent = set[ConditionType]()
        """What machines do not know of themselves."""
        self.sick: Callable[[str], bool] = lambda root: False
        """Whether a machine that boots with this root directory has a fault."""

    def boot(self, name: str = MACHINE) -> None:
        """Boot a machine, which must be complete: it answers its handoff, and makes a bridge for its pods."""
        assert self.exists(f"{machine_root(name)}/etc/kubernetes/kubelet.json"), "the root is not complete"
        outcome = node_reconciler(self, **self.node_settings).reconcile()
        (machine,) = (each for each in outcome.machines if each.name == name)
        assert machine.start_settings, "the machine's settings are not written"
        self.write(live_file(name), render_live(machine.start_settings))
        self.bus.unit(machine_unit(name), "active")
        if self.reports:
            self.answer(name)
        link = Link("cni0", "bridge")
        if link not in self.network.now.links:
            self.network.now = Network((link, *NETWORK.links), NETWORK.routes, NETWORK.rules)

    def is_running(self) -> bool:
        """Return whether the machine was booted."""
        return self.exists(live_file(MACHINE))

    def answer(self, name: str = MACHINE) -> None:
        """Report that all is well in the machine, unless it is sick."""
        status = Status.FALSE if self.sick(machine_root(name)) else Status.TRUE
        kinds = (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
        statuses = {kind: Status.UNKNOWN if kind in self.silent else status for kind in kinds}
        conditions = tuple(Condition(kind, statuses[kind], "Fine", "simulated") for kind in kinds)
        generation = parse_handoff(self.read(handoff_file(name))).generation
        report = render_report(Report(generation, conditions, (), BOOT_ID, __version__, {}))
        self.write(f"{report_directory(name)}/report.json", report)
        if self.joins and name == MACHINE:
            self.write(joined_file(name), NODE.encode())

    def ask(self, url: str, *, method: str = "GET", ca: bytes = b"", token: str = "") -> Answer:
        """Answer as the API server."""
        assert url == f"{SERVER}/api"
        return Answer(200 if token == TOKEN else 401, None)


def answers(host: NodeHost, end: LeaveEnd = LeaveEnd.DONE, **facts: Any) -> Callable[[], None]:  # noqa: ANN401
    """Let the machine and its candidate run, and return what they do while a command waits: they answer requests.

    The candidate does all that it is asked for.
    """
    for name in (MACHINE, CANDIDATE):
        host.file(f"{MACHINED_STATE}/{name}")

    def answer() -> None:
        for name in (MACHINE, CANDIDATE):
            if host.exists(leave_file(name)):
                request = parse_leave_request(host.read(leave_file(name)))
                host.runner.calls.append((request.task,))
                said = LeaveAnswer(request.id, end, 1.0, **facts)
                candidates = LeaveAnswer(request.id, LeaveEnd.DONE, 1.0)
                host.write(leaving_file(name), render_leave_answer(said if name == MACHINE else candidates))

    return answer


def node_host(tree: Path) -> NodeHost:
    """Return a host with all that `up` needs."""
    host = NodeHost(tree)
    set_up(host)
    for argv in [argv for argv in host.runner.answers if argv[0] == "systemctl"]:
        del host.runner.answers[argv]
    host.remove_tree(machine_root(MACHINE))
    for name, value in SYSCTLS.items():
        host.file(f"/proc/sys/{name}", value)
    host.file("/proc/sys/kernel/hostname", f"{NODE}\n")
    host.file("/proc/sys/kernel/osrelease", "6.12.0\n")
    host.file("/proc/swaps", SWAPS)
    host.file("/dev/sda2")
    host.file("/etc/resolv.conf", "nameserver 192.0.2.53\n")
    host.file("/proc/meminfo", "MemTotal:       16000000 kB\n")
    host.file("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n")
    for program in PROGRAMS:
        host.file(f"/usr/bin/{program}", executable=True)
    host.bus.unit("unbounded-agent.service")
    host.file(CA_FILE, "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
    host.file(TOKEN_FILE, f"{TOKEN}\n")
    host.owners[TOKEN_FILE] = (0o600, 0, 0)
    return host


def node_reconciler(host: NodeHost, /, **node: object) -> Reconciler:
    """Return a reconciler with one machine that is a node."""
    settings = {
        "server": SERVER,
        "ca_file": CA_FILE,
        "bootstrap_token": TOKEN_FILE,
        "image": {"repository": REPOSITORY},
        "kubelet": {"node_ip": "192.0.2.10"},
        **node,
    }
    return Reconciler(Config.validated({"machines": {MACHINE: {"node": settings}}}), host, host)
