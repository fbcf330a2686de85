"""The main job on the simulated GPU host, as a user does it: install, `apply`, `status`, a pod."""

import argparse

from integration.bed import wheels
from integration.bed.cache import step
from integration.bed.cluster.empty_host import EmptyHost, pod_network
from integration.bed.machine.machine_image import machines_disk
from integration.bed.machine.node import Node, Pod
from integration.bed.process import BedError
from integration.bed.vm.guest import Guest
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost


def show(guest: Guest, *argv: str, timeout: float = 300) -> None:
    """Run a command on the host and print its output."""
    print(f"\nsimulated-gpu-host# {' '.join(argv)}", flush=True)
    finished = guest.run(argv, timeout=timeout, check=False)
    print(finished.stderr + finished.stdout, end="", flush=True)
    if finished.status:
        raise SystemExit(f"{' '.join(argv)}: exit code {finished.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", action="store_true", help="begin with an empty host, which joins a real cluster")
    try:
        if parser.parse_args().join:
            demonstrate_join()
        else:
            demonstrate()
    except (BedError, OSError) as error:
        raise SystemExit(f"error: the demo failed: {error}") from None


def demonstrate() -> None:
    print(
        "This runs on a SIMULATED GPU host: real Debian, systemd, nspawn, containerd, nvidia-ctk and NVIDIA user-space "
        "files\nin an emulated machine; a stand-in kernel module and a stand-in NVML take the place of eight GPUs.\n",
        flush=True,
    )
    image, machines = host_image(wheels.dependencies()), machines_disk()
    with SimulatedHost(image, machines) as host:
        with step("install the host half"):
            install(host.guest)
        show(host.guest, "nvidia-smi", "-L")
        show(host.guest, "unbounded-agent", "plan")
        show(host.guest, "unbounded-agent", "apply")
        show(host.guest, "unbounded-agent", "status")
        node = Node(host.guest)
        with step("import the pod image into containerd"):
            node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
        for title, pod in (
            ("a pod with CDI device nvidia.com/gpu=1", Pod(("nvidia-smi", "-L"), cdi=("1",))),
            (
                "a pod with runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=2",
                Pod(("nvidia-smi", "-L"), runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "2"}),
            ),
        ):
            print(f"\n{title}: nvidia-smi -L\n{node.pod(pod).stdout}", end="", flush=True)


def demonstrate_join() -> None:
    print(
        "This runs on a SIMULATED GPU host: real Debian, systemd, nspawn, containerd, nvidia-ctk and NVIDIA user-space "
        "files\nin an emulated machine; a stand-in kernel module and a stand-in NVML take the place of eight GPUs.\n"
        "The Kubernetes cluster, its kubelet, the registries and the network between them are real.\n",
        flush=True,
    )
    with EmptyHost() as bed:
        show(bed.guest, "cat", "/etc/unbounded-agent/config.toml")
        show(bed.guest, "unbounded-agent", "preflight")
        show(bed.guest, "unbounded-agent", "up", timeout=1500)
        bed.apply(pod_network())
        bed.wait("the node is Ready", bed.nodes_are_ready)
        bed.offer_gpus()
        print(f"\nkubectl get node\n{bed.kubectl('get', 'node', '-o', 'wide')}", flush=True)
        show(bed.guest, "unbounded-agent", "status")
        print(f"\na pod with nvidia.com/gpu: 1: nvidia-smi -L\n{bed.run_gpu_pod()}", end="", flush=True)


if __name__ == "__main__":
    main()
