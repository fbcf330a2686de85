"""Namespaces that take the place of a machine, to test the condition on its Node.

The API server, kubectl and the program under test are real. The kubelet (a process of that name that only sleeps), its
cgroup and systemctl are simulated.
"""

import json
import posixpath
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agent.dra.claims import ClaimReference, PreparedDevice, render_checkpoint
from agent.machine import leave
from agent.machine.kubelet import CHECKPOINT, PLUGINS
from agent.machine.node_condition import HOST_STATUS, NOTE
from agent.machine.notes import Notes, node_condition_set
from agent.machine.run import HANDOFF
from agent.model.conditions import Condition
from agent.model.contract import (
    Effect,
    FencedGpu,
    GpuState,
    GpuStatus,
    LeaveRequest,
    LeaveTask,
    render_gpu_states,
    render_host_status,
    render_leave_request,
)
from agent.model.handoff import Handoff, Request, render_handoff
from agent.model.paths import (
    DRA_CLAIMS,
    GPU_STATES_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    NODE_CORDON_MARK,
    RUNTIME,
    STATE,
)
from agent.system.files import System
from agent.system.process import host_runner
from integration.bed.cache import REPOSITORY

HOST_NAME = "GPU-Node"
"""A kubelet registers under this name in lower case."""
SCRIPT = """
set -eu
root=$1 kubectl=$2 python=$3 host_name=$4
shift 4
echo "$host_name" >/proc/sys/kernel/hostname
# The agent's directories; those of this computer stay hidden.
for directory in {runtime} {state}; do
    mount -t tmpfs tmpfs "${{directory%/*}}"
    mkdir "$directory"
    mount --bind "$root$directory" "$directory"
done
mkdir /var/lib/kubelet
mount --bind "$root/var/lib/kubelet" /var/lib/kubelet
mount -t tmpfs tmpfs /usr/local/sbin
touch /usr/local/sbin/kubectl
mount --bind "$kubectl" /usr/local/sbin/kubectl
exec 3>"$root/started"
(exec -a kubelet "$python" -I -S -c 'import time; print(flush=True); time.sleep(120)' "$@" >&3) &
kubelet=$!
while [ ! -s "$root/started" ]; do sleep 0.05; done
# The cgroup that a kubelet has as a service of systemd.
echo 0::/system.slice/kubelet.service >"$root/cgroup"
mount --bind "$root/cgroup" /proc/$kubelet/cgroup
printf '#!/bin/sh\necho %s\n' $kubelet >/usr/local/sbin/systemctl
chmod +x /usr/local/sbin/systemctl
status=0
cd / && "$python" -P -c "from agent.machine.{program} import main; raise SystemExit(main())" || status=$?
kill $kubelet
exit $status
"""


class NodeNamespace:
    """The files of one machine below `root`. Each run has new namespaces, as each start of the service has."""

    def __init__(self, root: Path, kubectl: Path) -> None:
        self._root, self._kubectl = root, kubectl
        self._system = System(host_runner, str(root))
        for directory in (RUNTIME, STATE, PLUGINS):
            self._system.make_directory(directory)

    def publish_status(
        self, ready: Condition, evaluated: float | None = None, fenced: tuple[FencedGpu, ...] = ()
    ) -> None:
        """Publish the host status, as the host half does."""
        now = time.time() if evaluated is None else evaluated
        self._system.write(HOST_STATUS, render_host_status(ready, now, fenced=fenced))

    def offer(self, gpu: str) -> None:
        """Grant a GPU, which the kubelet's checkpoint has from a device plugin that has just ended."""
        self.grant(gpu)
        self._system.write(CHECKPOINT, b'{"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"]}}}')

    def grant(self, gpu: str) -> None:
        """Grant a GPU."""
        request = Request("nvidia", (gpu,), ())
        self._system.write(HANDOFF, render_handoff(Handoff("gpu-node", "x86_64", (request,))))

    def boot_first(self) -> None:
        """Leave the mark that the GPU setup leaves in the first run of a boot from a new root."""
        self._system.write(NODE_CORDON_MARK, b"")

    def withdraw(self) -> None:
        """Remove the published host status."""
        self._system.remove(HOST_STATUS)

    def boot(self) -> None:
        """Remove what does not survive a boot of the machine."""
        self._system.remove_tree(f"{RUNTIME}/state")

    def give(self, gpu: str, claims: Mapping[ClaimReference, tuple[PreparedDevice, ...]]) -> None:
        """Let agent.dra have prepared these claims, and the host half keep new pods from the GPU."""
        self._system.make_directory(posixpath.dirname(DRA_CLAIMS))
        self._system.write(DRA_CLAIMS, render_checkpoint(claims))
        kept = GpuStatus(gpu, "nvidia", GpuState.DRAINING, "Detaching", "", Effect.NO_SCHEDULE)
        self._system.write(f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_STATES_NAME}", render_gpu_states([kept]))

    def leave(
        self, task: LeaveTask, *kubelet_arguments: str, seconds: float = 5.0, gpus: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Ask the machine for a task, as the host half does, and return its answer."""
        request = LeaveRequest(secrets.token_hex(8), task, seconds, gpus)
        with ExitStack() as until:
            self._system.stream(leave.REQUEST, (render_leave_request(request),), until=until)
            self.run(*kubelet_arguments, program="leave")
        answer: dict[str, Any] = json.loads(self._system.read(leave.ANSWER))
        assert answer["id"] == request.id
        return answer

    def run(self, *kubelet_arguments: str, program: str = "node_condition") -> str:
        """Run a service once next to a kubelet with these arguments; return what the service writes to stderr."""
        (self._root / "started").unlink(missing_ok=True)
        script = SCRIPT.format(runtime=shlex.quote(RUNTIME), state=shlex.quote(STATE), program=program)
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        arguments = [str(self._root), str(self._kubectl), sys.executable, HOST_NAME, *kubelet_arguments]
        finished = subprocess.run(
            [*namespaces, "bash", "-c", script, "node", *arguments],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stderr

    def reported(self) -> tuple[str, str, str]:
        """Return status, reason and message of NodeConditionSet as the machine's report would have them."""
        condition = node_condition_set(Notes(self._system))
        return condition.status, condition.reason, condition.message

    def age_notes(self, seconds: float) -> None:
        """Change the note of when the condition was last set: make that time so many seconds earlier."""
        notes = Notes(self._system)
        noted = notes.load(NOTE)
        for each in noted["conditions"].values():
            each["heartbeat"] -= seconds
        notes.save(NOTE, noted)
