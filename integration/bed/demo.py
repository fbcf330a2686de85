"""The main job on the simulated GPU host, as a user does it: install, `apply`, `status`, a pod."""

from integration.bed import wheels
from integration.bed.cache import step
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
    try:
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


if __name__ == "__main__":
    main()
