"""Finds the Node name and the kubeconfig with which this machine's kubelet uses the API server.

Also finds programs that have a kubelet inside, and the container runtime that a kubelet uses.

The kubeconfig, and the name if `--hostname-override` sets it, are read from the arguments of the running kubelet,
because kubeadm, distributions' packages and custom scripts give the kubelet different arguments. systemd says whether
the process is a service. Processes in containers are ignored: a pod may call its process kubelet, and name a kubeconfig
that makes kubectl run a program.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, Reason, false
from agent.model.errors import CommandError
from agent.system.files import System

COMMAND_LINE_LIMIT = 1 << 20
STATUS_LIMIT = 1 << 16
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
ENDPOINT = re.compile(r"""^[^#\n]*?\bcontainerRuntimeEndpoint["']?\s*:\s*["']?([^\s"',}#]+)""", re.MULTILINE)
"""The runtime's socket in a KubeletConfiguration, which is YAML or JSON. A machine has no library that reads YAML."""
SERVICE = re.compile(r"[A-Za-z0-9:_.@\\-]+\.service")
"""The form of a service's name in a cgroup's path. It has no pattern (`*`): a container chooses its cgroup's name."""
ALL_SERVICES = "*.service"
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""The form of a Node's name that the API server requires: a subdomain of RFC 1123."""


class Process(NamedTuple):
    """A process. Its id may be used again after its end, but not with the same start, in clock ticks since the boot."""

    number: int
    started: str


class Identity(NamedTuple):
    """What a client of the API server needs to act as the kubelet."""

    node: str
    kubeconfig: str
    root: str = ROOT
    """The kubelet's directory, in which it looks for sockets of drivers (--root-dir)."""
    process: int = 0

    def is_same(self, other: "Identity") -> bool:
        """Return whether the other one is the same kubelet, even if it was started again."""
        return self._replace(process=0) == other._replace(process=0)


class Candidate(NamedTuple):
    """A process that may be a service of root: it is no other user's and in no pod."""

    process: Process
    parent: Process | None
    """None if the parent's service does not count as the process's."""
    arguments: Sequence[str]
    cgroups: Sequence[str]
    in_unit: bool
    """Whether the cgroup is of a service, or a slice; a container's ends in .scope or has no suffix (runc)."""


Wanted = Callable[[Sequence[str]], object]
"""Returns a true value for the arguments of a wanted process."""


class Kubelet:
    """This machine's kubelet. While its service runs, systemd is asked only once whether it is one."""

    def __init__(self, system: System, service: Process | None = None) -> None:
        self._system = system
        self.service = service
        """The main process of the kubelet's service: the kubelet or its parent. None if systemd has named none."""

    def find(self, kind: ConditionType) -> Identity | Condition:
        """Return the running kubelet's identity, or a condition of type `kind` that says why it is unknown.

        Raises OSError if /proc cannot be read.
        """
        programs = _programs(self._system)
        try:
            kubelet = self._running(programs)
        except CommandError as error:
            why = f"systemd does not say whether the kubelet is a service: {error}"
            return false(kind, Reason.KUBELET_NOT_RUNNING, why)
        if kubelet:
            return _identity(self._system, kubelet, kind)
        if other := _other_program(self._system, programs):
            advice = "which is not supported: make the node with `unbounded-agent up` or kubeadm"
            return false(kind, Reason.UNSUPPORTED_DISTRIBUTION, f"{other}, {advice}")
        why = "no kubelet is running as a service in this machine: see `systemctl status kubelet`"
        return false(kind, Reason.KUBELET_NOT_RUNNING, why)

    def _running(self, programs: dict[int, Sequence[str]]) -> Candidate | None:
        """Return the kubelet, and record the main process of its service; None if no kubelet is a service of root.

        If there are several, the one of the recorded service counts, then the one with the lowest process id. Raises
        CommandError if systemd gave no answer about a process, and no other process is the kubelet.
        """
        known, failure = self.service, None
        self.service = None
        found = [(known not in (each.process, each.parent), each) for each in _candidates(self._system, programs)]
        for is_new, each in sorted(found, key=lambda item: known is None or item[0]):
            try:
                service = _service(self._system, each) if known is None or is_new else known
            except CommandError as error:
                # A container can name its cgroup so that systemd refuses the name.
                failure = failure or error
                continue
            # Since its start was read, the process may have ended, and another have its id.
            if service and _process(self._system, each.process.number) == each.process:
                self.service = service
                return each
        if failure:
            self.service = known
            raise failure
        return None


def _identity(system: System, kubelet: Candidate, kind: ConditionType) -> Identity | Condition:
    arguments = kubelet.arguments
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
    return Identity(node, kubeconfig, _option(arguments, "--root-dir") or ROOT, kubelet.process.number)


def program_with_kubelet(system: System) -> str:
    """Return which program of WITH_KUBELET runs as a service of root, as part of a sentence; empty if none does.

    systemd is not asked: the sentence is for people, and nothing is done with the program. Raises OSError if /proc
    cannot be read.
    """
    return _other_program(system, _programs(system))


def other_runtime(system: System, sockets: Sequence[str]) -> str:
    """Return which program has its pods run by the runtime at one of these sockets, as part of a sentence; or "".

    A kubelet itself says which socket it uses. If it is inside another program, the socket counts if that program's
    runtime listens there. Raises OSError if /proc cannot be read.
    """
    programs = _programs(system)
    for each in _candidates(system, programs):
        if each.in_unit:
            used = _runtime_socket(system, each.arguments)
            # /var/run is a link to /run.
            if system.exists(used) and system.real_path(used) in sockets:
                return f"the kubelet (process {each.process.number}) uses the container runtime at {used}"
            return ""
    if other := _other_program(system, programs):
        return next((f"{other}, and a runtime at {path}" for path in sockets if system.listening_process(path)), "")
    return ""


def _runtime_socket(system: System, arguments: Sequence[str]) -> str:
    """Return the path of the socket by which a kubelet reaches its runtime; empty if it does not say one.

    As in the kubelet, its arguments override the files of --config-dir, and those override --config.
    """
    directory = _option(arguments, "--config-dir")
    names = sorted(system.entries(directory)) if directory and system.is_directory(directory) else []
    files = [_option(arguments, "--config"), *(f"{directory}/{name}" for name in names if name.endswith(".conf"))]
    stated = [found[1] for path in files if path and (found := ENDPOINT.search(_text(system, path)))]
    stated.append(_option(arguments, "--container-runtime-endpoint"))
    return next(filter(None, reversed(stated)), "").removeprefix("unix://")


def _programs(system: System) -> dict[int, Sequence[str]]:
    processes = sorted(int(name) for name in system.entries("/proc") if name.isdecimal())
    return {each: arguments for each in processes if (arguments := _arguments(system, each))}


def _other_program(system: System, programs: dict[int, Sequence[str]]) -> str:
    for each in _candidates(system, programs, _distribution):
        if each.in_unit:
            name, number = _distribution(each.arguments), each.process.number
            return f"{name} runs in this machine (process {number}), with a kubelet of its own inside"
    return ""


def _distribution(arguments: Sequence[str]) -> str:
    # K3s overwrites its arguments with a title, which is one argument with a space.
    words = " ".join(arguments[:2]).split() or [""]
    name = words[0].rpartition("/")[2]
    return WITH_KUBELET.get(name) or WITH_KUBELET.get(" ".join((name, *words[1:2])), "")


def _is_kubelet(arguments: Sequence[str]) -> bool:
    # The second argument selects the kubelet in a program with many names (hyperkube).
    return "kubelet" in (arguments[0].rpartition("/")[2], *arguments[1:2])


def _candidates(system: System, programs: dict[int, Sequence[str]], wanted: Wanted = _is_kubelet) -> list[Candidate]:
    found = (_candidate(system, process) for process, arguments in programs.items() if wanted(arguments))
    return [each for each in found if each and wanted(each.arguments)]


def _candidate(system: System, process: int) -> Candidate | None:
    """Return a process that may be a service of root, as far as /proc says; None if it is not, or has ended.

    It must be root's, and outside containers: in this PID namespace, and in no cgroup below kubepods (pods) or
    user.slice (users; the main process of user@0.service is root's).
    """
    # The start is read first: the caller reads it again at the end.
    started, arguments = _process(system, process), _arguments(system, process)
    lines = _text(system, f"/proc/{process}/status").splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    cgroups = _cgroups(system, process)
    # Real, effective, saved and file system user id. In a setuid root program, the real one is not 0.
    is_root, in_own_namespace = status.get("Uid") == ["0"] * 4, len(status.get("NSpid", ())) == 1
    in_pod_or_session = any("kubepods" in path or "/user.slice" in path for path in cgroups)
    if not (started and arguments and cgroups and is_root and in_own_namespace) or in_pod_or_session:
        return None
    in_unit = any(path.endswith((".service", ".slice")) for path in cgroups)
    parent = _process(system, int(status.get("PPid", ["0"])[0])) if in_unit else None
    return Candidate(started, parent, arguments, cgroups, in_unit)


def _service(system: System, candidate: Candidate) -> Process | None:
    """Return the main process of the candidate's service; None if it is not in a service. Raises CommandError.

    A kubeconfig can name a program, which kubectl would run as root. So a name proves nothing, neither the process's
    nor its cgroup's: a container with the machine's process ids can have any. The process must be the main process of
    a service, as systemd knows it, or a child of one, like the kubelets of RKE2 and k0s. A container's first process is
    a child of its shim, which is not a main process.

    The cgroups only say about which services systemd is asked first: usually one. The kubelet may have put itself into
    another cgroup (--kubelet-cgroups), so systemd is then asked about all.
    """
    parent = candidate.parent
    cgroups = [*candidate.cgroups, *(_cgroups(system, parent.number) if parent else ())]
    # The service is the nearest one: it may have cgroups of its own below (Delegate=).
    named = {next(filter(SERVICE.fullmatch, reversed(path.split("/"))), "") for path in cgroups} - {""}
    for asked in filter(None, (named, {ALL_SERVICES})):
        command = ("systemctl", "show", "--property=MainPID", "--value", "--", *sorted(asked))
        main_processes = system.run(*command, timeout=SYSTEMD_LIMIT).split()
        for each in (candidate.process, parent):
            if each and str(each.number) in main_processes and _process(system, each.number) == each:
                return each
    return None


def _arguments(system: System, process: int) -> Sequence[str]:
    try:
        line = system.read(f"/proc/{process}/cmdline", COMMAND_LINE_LIMIT)
    except OSError:
        return ()
    return tuple(each.decode(errors="surrogateescape") for each in line.split(b"\0"))


def _process(system: System, number: int) -> Process | None:
    # The name, in parentheses, may itself have parentheses. The start is the 22nd field (proc_pid_stat(5)).
    fields = _text(system, f"/proc/{number}/stat").rpartition(")")[2].split()
    return Process(number, fields[19]) if len(fields) > 19 else None


def _cgroups(system: System, process: int) -> list[str]:
    return [line.split(":", 2)[-1] for line in _text(system, f"/proc/{process}/cgroup").splitlines()]


def _text(system: System, path: str) -> str:
    try:
        return system.read(path, STATUS_LIMIT).decode(errors="replace")
    except OSError:
        return ""


def _option(arguments: Sequence[str], name: str) -> str:
    value = ""
    for index, each in enumerate(arguments):
        if each.startswith(f"{name}="):
            value = each.partition("=")[2]
        elif each == name and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value
