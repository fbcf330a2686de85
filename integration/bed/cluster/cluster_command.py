"""integration/cluster: a cluster in the background, to try things on."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from integration.bed import wheels
from integration.bed.cache import step
from integration.bed.cluster.cluster import Cluster
from integration.bed.machine.machine_image import machines_disk
from integration.bed.machine.node import Node
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import CONFIGURATION, install
from integration.bed.vm.simulated_host import SimulatedHost

STATE = Path("/run/unbounded-agent-bed/cluster")
LOG = STATE / "log"
# Locked by the background process while it runs; has its process ID.
LOCK = STATE / "lock"
# Both exist once the cluster is ready.
KUBECONFIG = STATE / "kubeconfig"
KUBECTL = STATE / "kubectl"
GPUS = 8
DRA = "--dra"
"""With this option, the node offers its GPUs itself, by Dynamic Resource Allocation; no device plugin runs."""
USAGE = f"usage: integration/cluster up [{DRA}] | down | kubectl ARGUMENT..."
TRY = """
The cluster runs; its node is the machine on the SIMULATED GPU host. Try:
    integration/cluster kubectl get nodes
    integration/cluster kubectl describe node gpu-node{slices}
    integration/cluster kubectl apply -f integration/bed/cluster/manifests/gpu-test.yaml
    integration/cluster kubectl wait --for=jsonpath='{{.status.phase}}'=Succeeded --timeout=3m pod/gpu-test
    integration/cluster kubectl logs gpu-test
    integration/cluster down
"""
SLICES = """
    integration/cluster kubectl get resourceslices -o yaml
    integration/cluster kubectl get resourceclaims      # while a pod has a GPU"""


def main() -> None:
    match sys.argv[1:]:
        case ["up", *options] if options in ([], [DRA]):
            up(options)
        case ["down"]:
            down()
        case ["kubectl", *arguments]:
            if not running() or not KUBECTL.exists():
                raise SystemExit("error: no cluster runs; start one by `integration/cluster up`")
            os.execv(KUBECTL, ["kubectl", f"--kubeconfig={KUBECONFIG}", *arguments])
        case ["serve", *options]:
            serve(dra=DRA in options)
        case _:
            print(USAGE, file=sys.stderr)
            raise SystemExit(2)


def up(options: list[str]) -> None:
    """Start the background process, and show its output until the cluster is ready."""
    if running():
        raise SystemExit("The cluster runs already; `integration/cluster down` ends it.")
    shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir(parents=True, mode=0o700)
    with LOG.open("w") as log:
        argv = [sys.executable, "-m", "integration.bed.cluster.cluster_command", "serve", *options]
        # In its own session, so that the process survives the calling shell.
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    with LOG.open() as log:
        while server.poll() is None and not KUBECTL.exists():
            print(log.read(), end="", flush=True)
            time.sleep(0.2)
        print(log.read(), end="", flush=True)
    if server.returncode is not None:
        raise SystemExit(f"error: the cluster did not start; see the lines above and {LOG}")
    print(what_to_try(options))


def what_to_try(options: list[str]) -> str:
    return TRY.format(slices=SLICES if DRA in options else "")


def down() -> None:
    process = running()
    if not process:
        raise SystemExit("No cluster runs.")
    os.kill(process, signal.SIGTERM)
    with LOCK.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(STATE)


def running() -> int:
    """Return the background process's ID; 0 if there is none."""
    try:
        with LOCK.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return 0
    except FileNotFoundError:
        return 0
    except BlockingIOError:
        return int(LOCK.read_text())


def serve(*, dra: bool) -> None:
    """Set up the cluster; once it is ready, create KUBECTL. Keep the cluster until SIGTERM."""
    # SystemExit lets every context manager stop what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        image, machines = host_image(wheels.dependencies()), machines_disk()
        with SimulatedHost(image, machines) as host:
            make_ready(host, f'{CONFIGURATION}allocation = "dra"\n' if dra else CONFIGURATION)
            with Cluster(host) as cluster:
                _offer_gpus(cluster, dra=dra)
                cluster.control_plane.write_kubeconfig("admin", KUBECONFIG)
                KUBECTL.symlink_to(cluster.control_plane.binaries / "kubectl")
                while True:
                    signal.pause()


def _offer_gpus(cluster: Cluster, *, dra: bool) -> None:
    cluster.apply("runtime-class")
    if dra:
        cluster.apply("device-class-nvidia")
        with step("wait until the node offers its GPUs"):
            cluster.wait(f"{GPUS} GPUs in ResourceSlices", lambda: len(cluster.devices()) == GPUS)
    else:
        with step("deploy NVIDIA's device plugin"):
            cluster.deploy_plugin(GPUS)


def make_ready(host: SimulatedHost, configuration: str) -> None:
    """Install the agent on a host that has booted, start its machine, and import the pods' images there."""
    with step("install the host half"):
        install(host.guest, configuration)
    with step("unbounded-agent apply"):
        # Not to standard output, where a measurement prints its result.
        print(host.guest.run(["unbounded-agent", "apply"], timeout=300).stdout, file=sys.stderr, flush=True)
        host.guest.run(["systemctl", "enable", "--now", "unbounded-agent.service"], timeout=240)
    with step("import the pod images into containerd"):
        Node(host.guest).run("systemctl", "start", "simulated-pod-images.service", timeout=300)


if __name__ == "__main__":
    main()
