"""The kubelet's directory on a simulated machine: checkpoints in its formats, and real Unix sockets without servers.

A socket here only listens: the kubelet and its device plugin are simulated.
"""

import json
import os
import socket
import time
from contextlib import ExitStack

from agent.machine.kubelet import CHECKPOINT, KUBELET_SOCKET, PLUGINS
from agent.machine.run import run
from tests.fakes.machine import Machine, recorded_spec

UUIDS = tuple(each["name"] for each in recorded_spec()["devices"] if each["name"].startswith("GPU-"))
PLUGIN_SOCKET = f"{PLUGINS}/nvidia-gpu.sock"
SPEC = "/etc/cdi/nvidia.yaml"
BACKLOG = 16


def listener(machine: Machine, path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket at this path, on which somebody listens until it is closed."""
    parent, name = path.rsplit("/", 1)
    machine.make_directory(parent)
    made = socket.socket(socket.AF_UNIX, kind)
    # Through a descriptor of the directory: temporary paths are longer than sun_path.
    directory = os.open(machine.tree / parent[1:], os.O_PATH)
    made.bind(f"/proc/self/fd/{directory}/{name}")
    os.close(directory)
    if kind == socket.SOCK_STREAM:
        made.listen(BACKLOG)
    return made


class Kubelet:
    """The directory of a kubelet with one device plugin."""

    def __init__(self, machine: Machine, stack: ExitStack) -> None:
        self.machine, self._stack = machine, stack
        self.sockets: dict[str, socket.socket] = {}
        machine.make_directory(PLUGINS)

    def listen(self, path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        self.sockets[path] = self._stack.enter_context(listener(self.machine, path, kind))

    def serve(self) -> None:
        """Let kubelet and plugin run, started after the CDI specification was published, and advertise both GPUs."""
        run(self.machine)
        self.listen(KUBELET_SOCKET)
        self.listen(PLUGIN_SOCKET)
        self.advertise(gpu=list(UUIDS))

    def publish_later(self) -> None:
        """Let the CDI specification change after the plugin's start."""
        self._touch(PLUGIN_SOCKET, CHECKPOINT, SPEC)

    def begin_later(self) -> None:
        """Let the plugin start after the CDI specification's change."""
        self._touch(SPEC, PLUGIN_SOCKET, CHECKPOINT)

    def _touch(self, *paths: str) -> None:
        for path in paths:
            now = time.time_ns()
            os.utime(self.machine.tree / path[1:], ns=(now, now))

    def kill(self, path: str) -> None:
        """End the process behind a socket; the socket stays."""
        self.sockets.pop(path).close()

    def checkpoint(self, text: str | bytes) -> None:
        self.machine.put(CHECKPOINT, text)

    def advertise(self, **resources: list[str]) -> None:
        names = {f"nvidia.com/{name.replace('_', '.')}": ids for name, ids in resources.items()}
        self.checkpoint(json.dumps({"Data": {"PodDeviceEntries": None, "RegisteredDevices": names}, "Checksum": 1}))

    def condition(self) -> tuple[str, str]:
        run(self.machine)
        return self.machine.conditions()["GPUsAdvertised"]

    def message(self) -> str:
        return self.machine.message("GPUsAdvertised")
