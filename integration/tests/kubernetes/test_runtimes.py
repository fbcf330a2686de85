"""The machine with container runtimes that the other tests do not have: containerd 2 with a newer runc, and crun."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from integration.bed.machine.containerds import debian_root, runc, upstream_root
from integration.bed.machine.node import MACHINE, Node
from integration.bed.measure.versions import machine_versions
from integration.bed.tools import chosen
from integration.bed.vm.transfer import send_files
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

ROOT = f"/var/lib/machines/{MACHINE}"
MAIN = f"{ROOT}/etc/containerd/config.toml"
CONTAINERD_2 = ("usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr")
RUNC = "usr/sbin/runc"
# The libraries of crun, of different releases, that the machine's other packages lack.
CRUN = (
    "usr/bin/crun",
    *(f"usr/lib/x86_64-linux-gnu/lib{name}" for name in ("yajl.so.2", "json-c.so.5", "blake3.so.0")),
)

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
# The node administrator's settings, in the format of containerd 2.
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
    """Record the current versions of the machine's parts."""
    versions = machine_versions(node)
    for part, version in versions.items():
        record(part, version)
    return versions


def install_programs(bed: Bed, programs: Mapping[str, Path]) -> None:
    """Replace the machine's programs with others, by their paths in the machine."""
    send_files(bed.guest, {name: file.resolve() for name, file in programs.items()}, ROOT)


def newer_programs() -> dict[str, Path]:
    """Return containerd and runc of Debian unstable, or those that integration/canary has chosen."""
    containerd = upstream_root() if chosen("CONTAINERD") else debian_root("sid")
    return {
        **{name: containerd / name for name in CONTAINERD_2},
        RUNC: runc(chosen("RUNC")) if chosen("RUNC") else debian_root("sid") / RUNC,
    }


def expect_pods(node: Node, *runtimes: str) -> None:
    """Assert that pods get GPU 1 by its CDI name under each runtime, and GPU 2 by runtimeClassName."""
    for runtime in runtimes:
        expect_gpus(probe(node, cdi=("1",), runtime=runtime), {1})
    expect_gpus(probe(node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "2"}), {2})


def test_containerd_2_with_a_newer_runc(ready: Bed, record_property: Record) -> None:
    """After an upgrade in place, the settings for 1.7 are replaced before containerd 2 reads them."""
    machines_own = machine_versions(ready.node)
    install_programs(ready, newer_programs())
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


def test_crun_as_the_users_runtime_and_under_nvidias(installed: Bed, record_property: Record) -> None:
    """runc is moved away, so crun must have run the pods. crun makes device nodes itself: hence `rwm`."""
    installed.guest.write("/etc/unbounded-agent/config.toml", CONFIGURATION_RWM.encode())
    root = debian_root(chosen("CRUN") or "trixie")
    install_programs(installed, {name: root / name for name in CRUN if (root / name).exists()})
    installed.guest.write(MAIN, installed.guest.read(MAIN) + CRUN_2.encode())
    installed.agent("apply", timeout=400)
    node = installed.node
    record_versions(node, record_property)
    record_property("crun", node.run("crun", "--version").stdout.split()[2])
    # containerd 2.2 writes ' around texts, 1.7 writes ".
    assert "'/usr/bin/crun'" in node.run("containerd", "config", "dump").stdout.replace('"', "'")
    node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    # Ubuntu has it in /usr/bin, too.
    node.shell("mv /usr/sbin/runc /usr/sbin/runc.away && rm --force /usr/bin/runc && ! command -v runc")
    expect_pods(node, "crun")
