"""Finds the Node name and the kubeconfig with which this machine's kubelet uses the API server.

The kubeconfig, and the name if `--hostname-override` sets it, are read from the arguments of the running kubelet,
because kubeadm, distributions' packages and custom scripts give the kubelet different arguments. Processes in
containers are ignored: a pod may call its process kubelet, and name a kubeconfig that makes kubectl run a program.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, false
from agent.model.reasons import Reason
from agent.system.files import System

COMMAND_LINE_LIMIT = 1 << 20
ROOT = "/var/lib/kubelet"
"""The default of --root-dir (defaultRootDir of cmd/kubelet/app/options)."""
HOST_NAME = "/proc/sys/kernel/hostname"
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""The form of a Node's name that the API server requires: a subdomain of RFC 1123."""


class Identity(NamedTuple):
    """What a client of the API server needs to act as the kubelet."""

    node: str
    kubeconfig: str
    root: str = ROOT
    """The kubelet's directory, in which it looks for sockets of drivers (--root-dir)."""


def find_identity(system: System, kind: ConditionType) -> Identity | Condition:
    """Return the running kubelet's identity, or a condition of type `kind` that says why the identity is unknown.

    Raises OSError if /proc cannot be read.
    """
    arguments = _kubelet(system)
    if arguments is None:
        return false(
            kind,
            Reason.KUBELET_NOT_RUNNING,
            "no kubelet is running as a service in this machine: see `systemctl status kubelet`",
        )
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
    return Identity(node, kubeconfig, _option(arguments, "--root-dir") or ROOT)


def _kubelet(system: System) -> tuple[str, ...] | None:
    """Return the arguments of the kubelet that runs as a service of root; None if there is none.

    If there are several, the one with the lowest process id counts.
    """
    for process in sorted((name for name in system.entries("/proc") if name.isdecimal()), key=int):
        try:
            line = system.read(f"/proc/{process}/cmdline", COMMAND_LINE_LIMIT)
            arguments = tuple(each.decode(errors="surrogateescape") for each in line.split(b"\0"))
            # The second argument selects the kubelet in a program with many names (hyperkube).
            is_kubelet = arguments[0].rpartition("/")[2] == "kubelet" or arguments[1:2] == ("kubelet",)
            if is_kubelet and _is_root_service(system, process):
                return arguments
        except OSError:
            # The process has exited meanwhile.
            continue
    return None


def _is_root_service(system: System, process: str) -> bool:
    """Return whether a process runs as root in a service of this machine, outside containers.

    A kubeconfig can name a program, which kubectl would run as root. So this checks what neither a container nor
    another user can choose: user ids, PID namespace and cgroup. The cgroup of a service ends in .service or .slice, and
    is not below user.slice, which is for users. The cgroup of a pod's container ends in .scope or has no suffix (runc),
    and is below kubepods (kubelet).
    """
    status = system.read(f"/proc/{process}/status", 1 << 16).decode(errors="replace")
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
    cgroups = system.read(f"/proc/{process}/cgroup", 1 << 16).decode(errors="replace").splitlines()
    paths = [line.split(":", 2)[-1] for line in cgroups]
    in_unit = any(path.endswith((".service", ".slice")) for path in paths)
    in_pod_or_session = any("kubepods" in path or "/user.slice" in path for path in paths)
    # Real, effective, saved and file system user id. In a setuid root program, the real one is not 0.
    is_root, in_own_namespace = fields.get("Uid") == ["0"] * 4, len(fields.get("NSpid", ())) == 1
    return is_root and in_own_namespace and in_unit and not in_pod_or_session


def _option(arguments: Sequence[str], name: str) -> str:
    """Return the last value of an option, `--name=value` or `--name value`; empty if it is missing."""
    value = ""
    for index, each in enumerate(arguments):
        if each.startswith(f"{name}="):
            value = each.partition("=")[2]
        elif each == name and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value
