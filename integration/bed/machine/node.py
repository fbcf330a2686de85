"""Runs commands and pods in a host's machine: commands by systemd-run on the host, pods by crictl in the machine."""

import json
import secrets
import shlex
from dataclasses import dataclass, field
from typing import Any

from integration.bed.machine.pod_images import CUDA_TEST
from integration.bed.vm.guest import Completed, Computer

MACHINE = "gpu-node"
KIND = "nvidia.com/gpu"
NAME = "test-"
"""How the names of pods begin."""

FOREIGN_USERS = 1 << 20
"""The node's user whose number root has in a pod with a user namespace of its own."""

# A whole pod takes one call into the machine, and few crictl calls: under emulation, each call takes seconds.
START = "container=$(crictl run --no-pull {handler} {directory}/container.json {directory}/pod.json)\n"
FOLLOW = """
crictl logs --follow "$container"
exit "$(crictl inspect -o go-template --template '{{.status.exitCode}}' "$container")"
"""


@dataclass(frozen=True)
class Pod:
    """The request of a pod with one container."""

    command: tuple[str, ...]
    cdi: tuple[str, ...] = ()
    """CDI devices: full names, or names of devices of KIND, such as `1` or a UUID. They go into the field of the CRI
    request into which the kubelet puts a device plugin's answer."""
    runtime: str = ""
    """The handler of its RuntimeClass."""
    environment: dict[str, str] = field(default_factory=dict)
    user: int = 0
    """User and group ID of the container's process."""
    image: str = CUDA_TEST
    apparmor: bool = False
    """Whether it asks for the runtime's default profile of AppArmor."""
    host_users: bool = True
    """Whether its users are those of the node: `hostUsers` of Kubernetes' PodSpec. Otherwise they are FOREIGN_USERS."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Directories of the node, by their paths in the container, which may only read them."""


class Node:
    """Runs commands and pods in a running machine."""

    def __init__(self, host: Computer, machine: str = MACHINE) -> None:
        self._host = host
        self.machine = machine

    def run(self, *argv: str, timeout: float = 60, check: bool = True) -> Completed:
        """Run a command in the machine, as root."""
        inside = ("systemd-run", f"--machine={self.machine}", "--pipe", "--wait", "--quiet", "--collect")
        # systemd would expand ${...} in a script before the shell sees it. systemd-run has an option against that, but
        # only since version 254.
        literally = [word.replace("$", "$$") for word in argv]
        return self._host.run((*inside, *literally), timeout=timeout, check=check)

    def shell(self, script: str, timeout: float = 60, check: bool = True) -> Completed:
        """Run a shell script in the machine."""
        return self.run("/bin/sh", "-c", script, timeout=timeout, check=check)

    def pod(self, pod: Pod, timeout: float = 120, check: bool = True) -> Completed:
        """Run a pod to its end, and return its container's status and output."""
        return self.shell(_start_script(pod) + FOLLOW, timeout, check)

    def start_pod(self, pod: Pod, timeout: float = 120) -> str:
        """Start a pod that keeps running, and return its container's ID."""
        return self.shell(_start_script(pod) + 'echo "$container"', timeout).stdout.strip()

    def remove_pods(self) -> None:
        """Remove all pods that this class has started, and their files."""
        name = NAME + 8 * "[0-9a-f]"
        self.shell(f"crictl pods --quiet --name '^{name}$' | xargs -r crictl rmp --force; rm -rf /tmp/{name}")

    def in_container(self, container: str, *argv: str, timeout: float = 60, check: bool = True) -> Completed:
        """Run a command in a running container."""
        return self.run("crictl", "exec", "--sync", container, *argv, timeout=timeout, check=check)

    def spec(self) -> dict[str, Any]:
        """Return the published CDI specification."""
        found: dict[str, Any] = json.loads(self._host.read(f"/var/lib/machines/{self.machine}/etc/cdi/nvidia.yaml"))
        return found


def _start_script(pod: Pod) -> str:
    """Return shell lines that start a pod and set $container."""
    name = f"{NAME}{secrets.token_hex(4)}"
    directory = f"/tmp/{name}"
    files = {"pod": _pod_config(name, pod.host_users), "container": _container_config(pod)}
    write = "\n".join(
        f"printf %s {shlex.quote(json.dumps(content))} > {directory}/{file}.json" for file, content in files.items()
    )
    handler = f"--runtime={pod.runtime}" if pod.runtime else ""
    return f"set -eu\nmkdir -p {directory}\n{write}\n" + START.format(directory=directory, handler=handler)


def _pod_config(name: str, host_users: bool) -> dict[str, Any]:
    # The bed has no pod network, so pods use the node's: 2 is NODE in CRI's NamespaceMode.
    options: dict[str, Any] = {"network": 2}
    if not host_users:
        # 0 is POD. A user namespace of its own may not have the node's network.
        mapping = [{"host_id": FOREIGN_USERS, "container_id": 0, "length": 1 << 16}]
        options = {"userns_options": {"mode": 0, "uids": mapping, "gids": mapping}}
    return {
        "metadata": {"name": name, "uid": name, "namespace": "default", "attempt": 0},
        "log_directory": f"/tmp/{name}",
        # runc's systemd cgroup driver needs a slice.
        "linux": {"cgroup_parent": "test.slice", "security_context": {"namespace_options": options}},
    }


def _container_config(pod: Pod) -> dict[str, Any]:
    return {
        "metadata": {"name": "main", "attempt": 0},
        "image": {"image": pod.image},
        "command": list(pod.command),
        "envs": [{"key": key, "value": value} for key, value in pod.environment.items()],
        "mounts": [{"container_path": to, "host_path": path, "readonly": True} for to, path in pod.mounts.items()],
        "CDI_devices": [{"name": name if "=" in name else f"{KIND}={name}"} for name in pod.cdi],
        "log_path": "main.log",
        "linux": {"security_context": _user(pod.user) | _profile(pod)} if pod.user or pod.apparmor else {},
    }


def _user(number: int) -> dict[str, Any]:
    return {"run_as_user": {"value": number}, "run_as_group": {"value": number}}


def _profile(pod: Pod) -> dict[str, Any]:
    # 0 is RuntimeDefault in CRI's ProfileType.
    return {"apparmor": {"profile_type": 0}} if pod.apparmor else {}
