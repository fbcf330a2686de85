"""Finds the Node name and the kubeconfig with which this machine's kubelet uses the API server.

Also finds programs that have a kubelet inside.

The kubeconfig, and the name if `--hostname-override` sets it, are read from the arguments of the running kubelet,
because kubeadm, distributions' packages and custom scripts give the kubelet different arguments. systemd says which
processes are services. Processes in containers are ignored: a pod may call its process kubelet, and name a kubeconfig
that makes kubectl run a program.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, false
from agent.model.errors import CommandError
from agent.model.reasons import Reason
from agent.system.files import System

COMMAND_LINE_LIMIT = 1 << 20
SYSTEMD_LIMIT = 10.0
"""Seconds for systemd's answer: PID 1 does not answer while it reloads its units."""
ROOT = "/var/lib/kubelet"
"""The default of --root-dir (defaultRootDir of cmd/kubelet/app/options)."""
HOST_NAME = "/proc/sys/kernel/hostname"
WITH_KUBELET = {
    "k3s agent": "K3s",
    "k3s server": "K3s",
    "k3s-agent": "K3s",
    "k3s-server": "K3s",
    "kubelite": "MicroK8s",
    "microshift run": "MicroShift",
}
"""Names of distributions of Kubernetes that run the kubelet inside another program, by the start of its command."""
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""The form of a Node's name that the API server requires: a subdomain of RFC 1123."""


class Identity(NamedTuple):
    """What a client of the API server needs to act as the kubelet."""

    node: str
    kubeconfig: str
    root: str = ROOT
    """The kubelet's directory, in which it looks for sockets of drivers (--root-dir)."""
    process: int = 0
    """The kubelet's process id."""

    def is_same(self, other: "Identity") -> bool:
        """Return whether the other one is the same kubelet, even if it was started again."""
        return self._replace(process=0) == other._replace(process=0)


def find_identity(system: System, kind: ConditionType) -> Identity | Condition:
    """Return the running kubelet's identity, or a condition of type `kind` that says why the identity is unknown.

    Raises OSError if /proc cannot be read.
    """
    try:
        found = _root_service(system, _is_kubelet)
        other = "" if found else program_with_kubelet(system)
    except CommandError as error:
        return false(
            kind,
            Reason.KUBELET_NOT_RUNNING,
            f"systemd does not say which processes are this machine's services: {error}",
        )
    if other:
        advice = "which is not supported: make the node with `unbounded-agent up` or kubeadm"
        return false(kind, Reason.UNSUPPORTED_DISTRIBUTION, f"{other}, {advice}")
    if found is None:
        return false(
            kind,
            Reason.KUBELET_NOT_RUNNING,
            "no kubelet is running as a service in this machine: see `systemctl status kubelet`",
        )
    process, arguments = found
    kubeconfig = _option(arguments, "--kubeconfig")
    if not kubeconfig.startswith("/"):
        what = f"a relative path ({kubeconfig})" if kubeconfig else "not set, so the kubelet has no API server"
        return false(kind, Reason.NO_KUBECONFIG, f"the kubelet's --kubeconfig is {what}: set it to an absolute path")
    # As in nodeutil.GetHostname of k8s.io/component-helpers, the name is trimmed and in lower case.
    name = _option(arguments, "--hostname-override") or system.read(HOST_NAME, 256).decode(errors="replace")
    node = name.strip().lower()
    if not NODE_NAME.fullmatch(node):
        advice = "correct its --hostname-override or, if that is not set, the machine's host name"
        return false(kind, Reason.BAD_NODE_NAME, f"the kubelet's node name {node[:80]!a} is not valid: {advice}")
    return Identity(node, kubeconfig, _option(arguments, "--root-dir") or ROOT, process)


def program_with_kubelet(system: System) -> str:
    """Return which program of WITH_KUBELET runs as a service of root, as part of a sentence; empty if none does.

    Raises OSError if /proc cannot be read; also CommandError.
    """
    if found := _root_service(system, lambda arguments: bool(_distribution(arguments))):
        process, arguments = found
        return f"{_distribution(arguments)} runs in this machine (process {process}), with a kubelet of its own inside"
    return ""


def _distribution(arguments: Sequence[str]) -> str:
    # K3s overwrites its arguments with a title, which is one argument with a space.
    words = " ".join(arguments[:2]).split()
    name = _base_name(words[0]) if words else ""
    return WITH_KUBELET.get(name) or WITH_KUBELET.get(" ".join((name, *words[1:2])), "")


def _is_kubelet(arguments: Sequence[str]) -> bool:
    # The second argument selects the kubelet in a program with many names (hyperkube).
    return "kubelet" in (_base_name(arguments[0]), *arguments[1:2])


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _root_service(system: System, wanted: Callable[[Sequence[str]], bool]) -> tuple[int, Sequence[str]] | None:
    """Return process id and arguments of a wanted process that runs as a service of root; None if there is none.

    If there are several, the one with the lowest process id counts. Raises CommandError.
    """
    processes = sorted(int(name) for name in system.entries("/proc") if name.isdecimal())
    named = {each: arguments for each in processes if (arguments := _arguments(system, each)) and wanted(arguments)}
    # systemd is asked only if there is a process to ask about.
    services = _main_processes(system) if named else frozenset()
    for process, arguments in named.items():
        # The arguments are read again: since systemd was asked, the process may have ended, and another have its id.
        if _is_root_service(system, process, services) and _arguments(system, process) == arguments:
            return process, arguments
    return None


def _arguments(system: System, process: int) -> Sequence[str]:
    """Return a process's arguments; none if it has ended."""
    try:
        line = system.read(f"/proc/{process}/cmdline", COMMAND_LINE_LIMIT)
    except OSError:
        return ()
    return tuple(each.decode(errors="surrogateescape") for each in line.split(b"\0"))


def _main_processes(system: System) -> frozenset[int]:
    """Return the ids of the main processes of all services, as systemd knows them. Raises CommandError."""
    shown = system.run("systemctl", "show", "--property=MainPID", "--value", "*.service", timeout=SYSTEMD_LIMIT)
    # 0 is the id for a service without a main process.
    return frozenset(int(each) for each in shown.split() if each.isdecimal()) - {0}


def _is_root_service(system: System, process: int, services: frozenset[int]) -> bool:
    """Return whether a process runs as root in a service of this machine, outside containers.

    A kubeconfig can name a program, which kubectl would run as root. So a name proves nothing, neither the process's
    nor its cgroup's: a container with the machine's process ids can have any. The process must be the main process of
    a service, as systemd knows it, or a child of one, like the kubelets of RKE2 and k0s. A container's first process is
    a child of its shim, which is not a main process.

    A child must also be in a service's cgroup, which ends in .service or .slice; a container's ends in .scope or has no
    suffix (runc). No cgroup may be below kubepods (pods) or user.slice (users; the main process of user@0.service is
    root's).
    """
    try:
        status = system.read(f"/proc/{process}/status", 1 << 16).decode(errors="replace")
        cgroups = system.read(f"/proc/{process}/cgroup", 1 << 16).decode(errors="replace").splitlines()
    except OSError:
        # The process has ended meanwhile.
        return False
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
    paths = [line.split(":", 2)[-1] for line in cgroups]
    in_unit = any(path.endswith((".service", ".slice")) for path in paths)
    in_pod_or_session = any("kubepods" in path or "/user.slice" in path for path in paths)
    # Real, effective, saved and file system user id. In a setuid root program, the real one is not 0.
    is_root, in_own_namespace = fields.get("Uid") == ["0"] * 4, len(fields.get("NSpid", ())) == 1
    is_child = in_unit and fields.get("PPid") in [[str(each)] for each in services]
    return is_root and in_own_namespace and not in_pod_or_session and (process in services or is_child)


def _option(arguments: Sequence[str], name: str) -> str:
    """Return the last value of an option, `--name=value` or `--name value`; empty if it is missing."""
    value = ""
    for index, each in enumerate(arguments):
        if each.startswith(f"{name}="):
            value = each.partition("=")[2]
        elif each == name and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value
