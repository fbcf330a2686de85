"""Runs the service that offers GPUs, as its unit does, in namespaces that take the place of a machine.

The program under test is real. The kubelet (a process of that name that passes on a test's connections), its cgroup,
nvidia-smi and systemctl are simulated.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from integration.bed.cache import REPOSITORY
from integration.bed.lifetime import Lifetime
from integration.bed.machine import kubelet_relay
from integration.bed.process import Argument
from tests.fakes.dra_machine import GPUS, MEMORY, NODE, SMI_LINE

DIRECTORIES = ("/run/unbounded-agent", "/var/lib/unbounded-agent")
"""The agent's directories. In the namespaces, the machine's directories hide those of this computer."""
KUBECONFIG = f"{DIRECTORIES[0]}/kubelet.conf"
MIG_LINES = """\
GPU 0: Simulated GPU (UUID: GPU-01)
  MIG 1g.10gb     Device  0: (UUID: MIG-00000000-0000-4000-8000-000000000007)
  MIG 3g.40gb     Device  1: (UUID: MIG-00000000-0000-4000-8000-000000000002)
"""
SCRIPT = """
set -eu
tree=$1 node=$2 python=$3 relay=$4
shift 4
echo "$node" >/proc/sys/kernel/hostname
for directory in /run/unbounded-agent /var/lib/unbounded-agent; do
    mount -t tmpfs tmpfs "${directory%/*}"
    mkdir -p "$directory" "$tree$directory"
    mount --bind "$tree$directory" "$directory"
done
mount --bind "$tree/programs" /usr/local/sbin
(exec -a kubelet "$python" -I -S "$relay" "$@") &
echo $! >"$tree/kubelet-process"
# The cgroup that a kubelet has as a service of systemd.
mount --bind "$tree/cgroup" /proc/$!/cgroup
cd /
exec "$python" -P -S -m agent.dra
"""


class DraNamespace(Lifetime):
    """The running service of the machine whose files are below `tree`. The tests write there what the service reads."""

    def __init__(self, tree: Path, kubelet: str) -> None:
        self._tree, self._kubelet = tree, kubelet
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service next to a kubelet whose kubeconfig is at KUBECONFIG."""
        (self._tree / "cgroup").write_text("0::/system.slice/kubelet.service\n")
        lines = "".join(SMI_LINE.format(bus=each[5:7], memory=MEMORY) for each in GPUS)
        cases = f"*--query-gpu=*) printf '%s' '{lines}' ;; -L) printf '%s' '{MIG_LINES}' ;;"
        self._program("nvidia-smi", f"case $* in {cases} esac")
        self._program("systemctl", f"case $1 in show) cat {self._tree}/kubelet-process ;; esac")
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        arguments: list[Argument] = [
            self._tree,
            NODE,
            sys.executable,
            kubelet_relay.__file__,
            f"--kubeconfig={KUBECONFIG}",
            f"--root-dir={self._kubelet}",
        ]
        path = f"{REPOSITORY}:{sysconfig.get_path('purelib')}"
        with (self._tree / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *namespaces, "bash", "-c", SCRIPT, "bash", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin", "PYTHONPATH": path},
            )

    def close(self) -> None:
        """Kill the service."""
        if self._process:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        """What the service has written so far."""
        return (self._tree / "log").read_text()

    @property
    def resident(self) -> float:
        """The resident memory of the service in MiB, including pages of shared files (VmRSS, proc_pid_status(5))."""
        assert self._process is not None
        parent = self._process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return resident(int(child))

    def _program(self, name: str, script: str) -> None:
        path = self._tree / "programs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


def resident(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024
