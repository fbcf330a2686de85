"""Hosts that differ from the other tests' host: Debian 12, Ubuntu 24.04 with its own kernel, and Debian testing.

On Debian 12, the machine's base is Debian 13, with containerd 1.7. On Ubuntu, AppArmor is on, as Ubuntu has it.
Debian testing changes from day to day: what fails there is reported, and fails no run.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from agent.model.paths import TREES, handoff_file
from integration.bed import debian, ubuntu, wheels
from integration.bed.cache import REPOSITORY
from integration.bed.drivers.host_roots import Layout, host_root
from integration.bed.machine.machine_image import machines_disk
from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure.journal import messages
from integration.bed.measure.restarts import AGENT
from integration.bed.measure.versions import host_versions
from integration.bed.tools import chosen
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import CONFIGURATION as ALL_GPUS
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import CONTROL, probe, uuids
from integration.tests.node.test_boots_whatever_is_wrong import wait_for_machine
from integration.tests.node.test_hotplug import comes_and_goes, wait_for_gpus
from integration.tests.node.test_package import PACKAGE, expect_upgrade, install_package, replace_by_package
from integration.tests.node.test_published_roots import driver_root, expect_unchangeable
from integration.tests.node.test_survives import expect_by_cdi

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

GRANTED = (1, 4)
"""Indices of granted GPUs, of eight."""
CONFIGURATION = f'[machines.{MACHINE}]\ngpus = ["0000:02:00.0", "0000:05:00.0"]\n'
UNIT = f"systemd-nspawn@{MACHINE}.service"
OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


class Kind(NamedTuple):
    """A host's layout of the driver and its suite, and the suite of the machine's base; by default the bed's."""

    layout: Layout
    suite: str
    base: str = ""


DEBIAN_12 = Kind("split", "bookworm", base=debian.SUITE)
UBUNTU = Kind("flat", ubuntu.UBUNTU)
TESTING = pytest.param(
    Kind("split", chosen("TESTING") or "testing"),
    marks=pytest.mark.xfail(reason="Debian testing changes", strict=False),
)
RELEASED = pytest.mark.parametrize("other", [DEBIAN_12, UBUNTU], ids=["debian-12", "ubuntu"], indirect=True)
ON_UBUNTU = pytest.mark.parametrize("other", [UBUNTU], ids=["ubuntu"], indirect=True)


@pytest.fixture(scope="module", params=[DEBIAN_12, UBUNTU, TESTING], ids=["debian-12", "ubuntu", "debian-testing"])
def other(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A host with its driver and the installed agent, configured with the addresses of two of the eight GPUs."""
    kind: Kind = request.param
    python = (host_root(kind.layout, kind.suite) / "usr/bin/python3").readlink().name.removeprefix("python")
    image = host_image(wheels.dependencies(python), layout=kind.layout, suite=kind.suite)
    with SimulatedHost(image, machines_disk(kind.base), memory_mib=3072) as host:
        install(host.guest, CONFIGURATION)
        yield Bed(host)


@pytest.fixture(autouse=True)
def versions(other: Bed, record_property: Callable[[str, object], None]) -> None:
    """Record the host's versions in the test's result."""
    for part, version in host_versions(other.guest).items():
        record_property(part, version)


def staged_libraries(bed: Bed) -> set[str]:
    """Return the driver-versioned library files in the machine's handoff, as paths in the driver root."""
    handoff: dict[str, Any] = json.loads(bed.guest.read(handoff_file(MACHINE)))
    (granted,) = handoff["requests"]
    suffix = f".so.{granted['driver_version']}"
    return {file["target"] for file in granted["files"] if file["target"].endswith(suffix)}


def test_apply_makes_the_machine_ready_and_a_pod_sees_its_gpu(other: Bed) -> None:
    """One command suffices, as on the host of the other tests. The specification has every staged library."""
    other.agent("apply", timeout=400)
    conditions = other.conditions()
    assert {kind for kind, each in conditions.items() if each["status"] == "False"} <= {"PersistenceMode"}
    assert conditions["Ready"]["status"] == "True"
    staged = staged_libraries(other)
    spec = other.node.spec()
    mounted = {mount["containerPath"].lstrip("/") for mount in spec["containerEdits"]["mounts"]}
    assert staged
    assert staged <= mounted
    other.node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    found = probe(other.node, cdi=("1",))
    assert {path for path, result in found["open"].items() if result == "OK"} == {*CONTROL, f"/dev/nvidia{GRANTED[1]}"}
    assert set(found["load"]) == {"libcuda.so.1", "libnvidia-ml.so.1"}
    assert all("path" in result for result in found["load"].values()), found["load"]


def test_the_unit_allows_only_its_templates_devices_and_the_granted_ones(other: Bed) -> None:
    """systemd 252's template differs from 257's (no /dev/fuse). The drop-in repeats the host's own, without disks."""
    template = other.run("systemctl", "cat", "systemd-nspawn@.service").stdout
    wanted = re.findall(r"^DeviceAllow=(\S.*)$", template, re.MULTILINE)
    effective = other.run("systemctl", "show", UNIT, "--property=DeviceAllow", "--value").stdout
    allowed = effective.splitlines()
    kept = {entry for entry in wanted if "loop" not in entry and "mapper" not in entry and "blkext" not in entry}
    assert 2 <= len(kept) < len(wanted)
    assert set(wanted) & set(allowed) == kept, effective
    gpus = {f"/dev/char/195:{index} rw" for index in range(8)} & set(allowed)
    assert gpus == {f"/dev/char/195:{index} rw" for index in GRANTED}, effective
    for index in GRANTED:
        other.node.run("python3", "-c", OPEN, f"/dev/nvidia{index}")
    made = other.node.run("mknod", "/dev/nvidia0", "c", "195", "0", check=False)
    assert "Operation not permitted" in made.stderr


def test_the_service_adopts_the_running_machine(other: Bed) -> None:
    """A start of the service and a daemon-reload restart nothing, and pods still open their GPUs afterwards."""
    started = other.run("systemctl", "show", UNIT, "--property=ActiveEnterTimestampMonotonic").stdout
    other.run("systemctl", "enable", "--now", "unbounded-agent.service", timeout=240)
    other.wait_served()
    other.run("systemctl", "daemon-reload")
    assert other.run("systemctl", "show", UNIT, "--property=ActiveEnterTimestampMonotonic").stdout == started
    listing = uuids(other.node.run("nvidia-smi", "-L").stdout)
    assert len(listing) == len(GRANTED)
    found = probe(other.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": listing[0]})
    assert {path for path, result in found["open"].items() if result == "OK"} == {*CONTROL, f"/dev/nvidia{GRANTED[0]}"}
    other.wait_ready(60)


@RELEASED
def test_a_gpu_comes_and_goes(other: Bed, measured: Callable[[str, object], None]) -> None:
    """systemd 252 changes a running machine's devices as 257 does. First, the configuration adds the six other GPUs."""
    started = other.starts()
    other.guest.write("/etc/unbounded-agent/config.toml", ALL_GPUS.encode())
    other.run("systemctl", "reload", "unbounded-agent.service")
    wait_for_gpus(other, 8)
    assert other.restarted(started) == "nothing"
    comes_and_goes(other, measured)


@RELEASED
def test_the_package_replaces_the_checkout_and_is_upgraded(other: Bed) -> None:
    """Only the service restarts, with the distribution's own Python."""
    before = other.starts()
    replace_by_package(other)
    assert other.restarted(before) == AGENT
    for version in ("1.1", "1.0"):
        expect_upgrade(other, version)
    assert other.restarted(before) == AGENT


@RELEASED
def test_the_machine_starts_with_its_host(other: Bed) -> None:
    """The unit that prepares a machine knows the GPUs before the machine starts."""
    other.run("machinectl", "enable", MACHINE)
    other.run("sync")
    other.host.reboot(timeout=600)
    wait_for_machine(other)
    other.wait_served()
    assert "warning" not in messages(other.run, f"unbounded-agent-prepare@{MACHINE}").lower()
    expect_by_cdi(other)


@ON_UBUNTU
def test_pods_under_apparmor(other: Bed) -> None:
    """What docs/security.md says of pods with and without a profile, of other users, and of user namespaces."""
    gpu = f"/dev/nvidia{GRANTED[1]}"
    node = other.node
    plain = node.pod(Pod(("cat", "/proc/self/attr/current"), cdi=("1",)))
    # Ubuntu has a profile of this mode for runc, only to let it make user namespaces.
    assert plain.stdout.strip() in ("unconfined", "runc (unconfined)")
    refused = node.pod(Pod(("true",), apparmor=True), check=False)
    assert refused.status != 0
    assert "apparmor is not supported" in refused.stderr
    assert probe(node, cdi=("1",), user=1000)["open"][gpu] == "OK"
    # A pod with a user namespace of its own needs a network of its own.
    conflist = (REPOSITORY / "integration/bed/cluster/cluster_files/etc/cni/net.d/10-bed.conflist").read_bytes()
    other.guest.write(f"/var/lib/machines/{MACHINE}/etc/cni/net.d/10-bed.conflist", conflist)
    own = node.pod(Pod(("true",), host_users=False), check=False)
    assert own.status != 0
    assert re.search(r'error mounting .*"proc.*: operation not permitted', own.stderr), own.stderr


@ON_UBUNTU
def test_a_pod_ends_within_its_grace_period(other: Bed) -> None:
    """AppArmor forbids no signal of the runtime: the container ends by itself, and is not killed."""
    container = other.node.start_pod(Pod(("sh", "-c", "trap 'exit 7' TERM; sleep infinity & wait"), cdi=("1",)))
    other.node.run("crictl", "stop", "--timeout=60", container, timeout=120)
    shown = json.loads(other.node.run("crictl", "inspect", container).stdout)
    assert shown["status"]["exitCode"] == 7


@ON_UBUNTU
def test_apparmor_is_on_and_denies_nothing(other: Bed) -> None:
    """Ubuntu's profiles are loaded, and programs without privileges may not use namespaces of users."""
    assert other.run("cat", "/sys/module/apparmor/parameters/enabled").stdout.strip() == "Y"
    assert other.run("cat", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns").stdout.strip() == "1"
    assert other.run("sh", "-c", "wc -l < /sys/kernel/security/apparmor/profiles").stdout.strip() != "0"
    denied = other.run("sh", "-c", "journalctl -k --no-pager | grep 'apparmor=.DENIED' || true").stdout
    assert denied == ""


@RELEASED
def test_a_running_machine_gets_a_driver_root_that_it_cannot_change(other: Bed) -> None:
    """systemd 252 starts a unit that it has never read without a daemon-reload.

    One of the attacks leaves the machine without its driver root.
    """
    started = other.starts()
    other.run("rm", "-r", f"{TREES}/0")
    other.agent("apply", timeout=400)
    other.wait_ready()
    assert driver_root(other) == "1"
    assert other.restarted(started) == "nothing"
    expect_unchangeable(other, "1")


@RELEASED
def test_purge_leaves_a_stopped_host_as_it_was(other: Bed) -> None:
    """The last test on this host. While the machine runs, the purge takes nothing that it needs."""
    # The bed's own; a purge leaves everything to an installation from a checkout.
    other.run("rm", "--recursive", "/opt/unbounded-agent")
    refused = other.run("dpkg", "--purge", PACKAGE, timeout=300)
    assert f"the machine {MACHINE} is running" in refused.stdout + refused.stderr
    other.node.run("true")
    install_package(other, "1.0")
    other.run("machinectl", "terminate", MACHINE)
    other.run("sh", "-c", f"while systemctl is-active --quiet {UNIT}; do sleep 1; done", timeout=180)
    other.run("dpkg", "--purge", PACKAGE, timeout=300)
    left = other.run("sh", "-c", "ls -d /etc/systemd/nspawn/*.nspawn /etc/systemd/system/systemd-nspawn@*.d "
                     "/var/lib/unbounded-agent /run/unbounded-agent 2>/dev/null || true").stdout  # fmt: skip
    assert left == ""
    assert "unbounded-agent" not in other.run("findmnt", "--noheadings", "--output", "TARGET").stdout
