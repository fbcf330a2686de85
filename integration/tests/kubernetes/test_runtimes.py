"""The machine with other container runtimes than the other tests': containerd 2 with a newer runc, and crun."""

from collections.abc import Callable
from pathlib import Path

import pytest

from integration.bed.machine.containerds import debian_root
from integration.bed.machine.node import MACHINE, Node
from integration.bed.measure.versions import machine_versions
from integration.bed.vm.transfer import send_files
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

ROOT = f"/var/lib/machines/{MACHINE}"
MAIN = f"{ROOT}/etc/containerd/config.toml"
CONTAINERD_2 = ("usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr", "usr/sbin/runc")
# And the one library of it that the machine's other packages do not bring.
CRUN = ("usr/bin/crun", "usr/lib/x86_64-linux-gnu/libyajl.so.2")

RUNTIME_2 = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun'
CRUN_2 = f"""
[{RUNTIME_2}]
  runtime_type = "io.containerd.runc.v2"
  [{RUNTIME_2}.options]
    BinaryName = "/usr/bin/crun"
    SystemdCgroup = true
"""
RUNTIME_3 = 'plugins."io.containerd.cri.v1.runtime"'
IMAGES_3 = 'plugins."io.containerd.cri.v1.images"'
MAIN_3 = f"""\
# What whoever runs this node has set, in the form of containerd 2.
version = 3
[{IMAGES_3}.pinned_images]
  sandbox = "registry.invalid/pause:local"
[{IMAGES_3}.registry]
  config_path = "/etc/containerd/certs.d"
[{RUNTIME_3}.cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"
[{RUNTIME_3}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [{RUNTIME_3}.containerd.runtimes.runc.options]
    SystemdCgroup = true
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
"""
CONFIGURATION_RWM = f'[machines.{MACHINE}]\ndevice_mode = "rwm"\n'
Record = Callable[[str, object], None]


def record_versions(node: Node, record: Record) -> dict[str, str]:
    """What the machine's parts say of themselves by now."""
    versions = machine_versions(node)
    for part, version in versions.items():
        record(part, version)
    return versions


def bring(bed: Bed, root: Path, names: tuple[str, ...]) -> None:
    """Programs of a Debian suite, in place of the machine's own."""
    send_files(bed.guest, {name: (root / name).resolve() for name in names}, ROOT)


def expect_pods(node: Node, *runtimes: str) -> None:
    """GPU 1 by its CDI name under each runtime, and GPU 2 by runtimeClassName."""
    for runtime in runtimes:
        expect_gpus(probe(node, cdi=("1",), runtime=runtime), {1})
    expect_gpus(probe(node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "2"}), {2})


def test_containerd_2_with_a_newer_runc(ready: Bed, record_property: Record) -> None:
    """An upgrade in place: the settings that were written for 1.7 are replaced before containerd 2 reads them."""
    machines_own = machine_versions(ready.node)
    bring(ready, debian_root("sid"), CONTAINERD_2)
    ready.guest.write(MAIN, MAIN_3.encode())
    ready.node.run("systemctl", "restart", "containerd.service", timeout=240)
    ready.wait_ready()
    versions = record_versions(ready.node, record_property)
    assert versions["containerd"].startswith("2.")
    assert versions["runc"] != machines_own["runc"]
    assert "Server:\n  Version:  2." in ready.node.run("ctr", "version").stdout
    dump = ready.node.run("containerd", "config", "dump").stdout
    for kept in ("registry.invalid/pause:local", "/etc/containerd/certs.d", "/usr/lib/cni", "/var/lib/containerd/opt"):
        assert kept in dump, kept
    assert ready.guest.read(MAIN).decode().endswith(MAIN_3)
    expect_pods(ready.node, "", "nvidia")


def test_crun_by_a_runtime_of_the_users_and_under_nvidias(installed: Bed, record_property: Record) -> None:
    """With runc taken away nothing but crun can have run the pods. It makes device nodes itself: hence `rwm`."""
    installed.guest.write("/etc/unbounded-agent/config.toml", CONFIGURATION_RWM.encode())
    bring(installed, debian_root("trixie"), CRUN)
    installed.guest.write(MAIN, installed.guest.read(MAIN) + CRUN_2.encode())
    installed.agent("apply", timeout=400)
    node = installed.node
    record_versions(node, record_property)
    record_property("crun", node.run("crun", "--version").stdout.split()[2])
    assert '"/usr/bin/crun"' in node.run("containerd", "config", "dump").stdout
    node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    node.shell("mv /usr/sbin/runc /usr/sbin/runc.away && ! command -v runc")
    expect_pods(node, "crun")
