"""How machines see driver roots: mounted by PID 1, otherwise plain. After a crash at any step, the next pass resumes.

Simulated: PID 1, its mounts and the kernel's table of them (tests/fakes/host.py).
"""

import os
import posixpath
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.cli.doctor.host import SERVICE, diagnose_host
from agent.config.settings import Config
from agent.host.apply.driver_roots import protect, publish, remove_root
from agent.host.observe.driver_roots import STATE_IS_LINKED
from agent.host.reconcile import Outcome
from agent.model.conditions import ConditionType, Status
from agent.model.errors import AgentError, BusError
from agent.model.paths import (
    DRIVER_ROOTS_TARGET,
    HOST_NVIDIA,
    MANIFESTS,
    MOUNT_POINTS,
    NOTHING,
    REMOVED,
    STAGING,
    STATE,
    TREES,
    UNITS,
    handoff_file,
    mount_unit,
)
from tests.fakes.driver_generations import NEWER, RunnerThatClears, condition, driver_root, start_machine, upgrade
from tests.fakes.faults import Fault, FaultyHost, KilledError
from tests.fakes.gpu_host import MACHINE, VERSION, reconciler, set_up, units
from tests.fakes.host import Host

PARENT, ROOT = mount_unit(HOST_NVIDIA), mount_unit(f"{HOST_NVIDIA}/0")
WANTS = f"{UNITS}/{DRIVER_ROOTS_TARGET}.wants"
STAGED = ConditionType.DRIVER_ROOT_STAGED
LIBCUDA = f"usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"
SOURCE = f"/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.{VERSION}"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    tree = tmp_path / "host"
    return set_up(Host(tree, runner=RunnerThatClears(tree)))


@pytest.fixture
def plain(host: Host) -> Host:
    """Driver roots as the previous release left them, and as they are if the kernel has no overlay file systems."""
    host.bus.mounts.no_overlay = True
    assert reconciler(host).reconcile().failures == ()
    host.bus.mounts.no_overlay = False
    units(host, "active")
    return host


def staged(outcome: Outcome) -> tuple[Status, str]:
    found = condition(outcome, STAGED)
    return found.status, found.reason


def test_a_new_driver_root_is_mounted_before_it_is_handed_out_and_again_when_it_is_not(host: Host) -> None:
    """By a boot, or by the next pass."""
    outcome = reconciler(host).reconcile()
    assert outcome.failures == ()
    assert staged(outcome) == (Status.TRUE, "Staged")
    assert host.bus.mounts.mounted == {PARENT: HOST_NVIDIA, ROOT: f"{HOST_NVIDIA}/0"}
    assert driver_root(host) == "/run/host-nvidia/0"
    assert host.entries(WANTS) == (ROOT, PARENT)
    assert [host.read_link(f"{WANTS}/{unit}") for unit in (ROOT, PARENT)] == [f"../{ROOT}", f"../{PARENT}"]
    host.bus.mounts.boot()
    assert ROOT in host.bus.mounts.mounted, "without a pass"
    assert reconciler(host).reconcile().actions == ()
    host.bus.mounts.job("StopUnit", ROOT)
    outcome = reconciler(host).reconcile()
    assert outcome.sentences == ("mount driver root 0 (nvidia driver 550.163.01)",)
    assert staged(outcome) == (Status.TRUE, "Staged")


def test_driver_roots_cannot_be_made_writable(host: Host) -> None:
    """Without an upper layer, the kernel keeps the driver root and its parent, with the mount points, read-only."""
    reconciler(host).reconcile()
    text = {unit: host.read_text(f"{UNITS}/{unit}") for unit in (PARENT, ROOT)}
    assert f"Options=ro,nosuid,nodev,nofail,lowerdir={MOUNT_POINTS}:{NOTHING}\n" in text[PARENT]
    assert f"Options=ro,nosuid,nodev,nofail,lowerdir={TREES}/0:{NOTHING}\n" in text[ROOT]
    assert f"\nRequires={PARENT}\nAfter={PARENT}\n" in text[ROOT], "not into a directory that machines can write to"
    assert host.exists(f"{MOUNT_POINTS}/63")
    assert host.entries(NOTHING) == ()


def test_mounting_reloads_no_units(host: Host) -> None:
    units(host, "active")
    reconciler(host).reconcile()
    host.remove_tree(f"{TREES}/0")
    before = len(host.runner.calls)
    assert reconciler(host).reconcile().failures == ()
    assert driver_root(host) == "/run/host-nvidia/1"
    assert ("systemctl", "daemon-reload") not in host.runner.calls[before:]


@pytest.mark.parametrize("name", [PARENT, ROOT])
def test_a_directory_in_the_units_place_is_moved_aside(host: Host, name: str) -> None:
    reconciler(host).reconcile()
    good = host.read(f"{UNITS}/{name}")
    host.bus.mounts.job("StopUnit", ROOT)
    host.bus.mounts.job("StopUnit", PARENT)
    host.remove_file(f"{UNITS}/{name}")
    host.file(f"{UNITS}/{name}/inner", "somebody's")
    assert staged(reconciler(host).reconcile()) == (Status.TRUE, "Staged")
    assert host.read(f"{UNITS}/{name}") == good
    assert len([each for each in host.entries(UNITS) if each.startswith(f"{name}.damaged-")]) == 1


def test_a_directory_in_a_manifests_place_and_its_driver_root_are_replaced(host: Host) -> None:
    reconciler(host).reconcile()
    host.remove_file(f"{MANIFESTS}/0.json")
    host.file(f"{MANIFESTS}/0.json/inner", "somebody's")
    outcomes = [reconciler(host).reconcile() for _ in range(3)]
    assert staged(outcomes[0]) == (Status.TRUE, "Staged")
    assert (outcomes[2].actions, outcomes[2].failures, outcomes[2].facts.problems) == ((), (), ())
    assert host.is_file(f"{MANIFESTS}/1.json")
    assert not host.exists(f"{MANIFESTS}/0.json")


def test_a_failed_mount_is_reported_and_holds_up_no_settings(host: Host) -> None:
    """The parent is mounted, so nobody would see a plain directory."""
    host.bus.mounts.broken.add(ROOT)
    outcome = reconciler(host).reconcile()
    assert staged(outcome) == (Status.FALSE, "NotMounted")
    assert ROOT in condition(outcome, STAGED).message
    assert [failure for failure in outcome.failures if "driver root 0 cannot be mounted" in failure]
    assert not host.exists(handoff_file(MACHINE))
    assert host.exists(f"{UNITS}/systemd-nspawn@{MACHINE}.service.d")
    host.bus.mounts.broken.clear()
    assert staged(reconciler(host).reconcile()) == (Status.TRUE, "Staged")
    assert driver_root(host) == "/run/host-nvidia/0"


def test_a_silent_pid_1_does_not_lead_to_a_plain_directory(host: Host) -> None:
    agent = reconciler(host)
    agent.reconcile()
    host.remove_tree(f"{TREES}/0")
    facts = agent.preview()[0]
    host.make_directory(f"{TREES}/1")
    host.bus.failing = BusError("no answer")
    with pytest.raises(BusError):
        publish(facts.next_driver_root_index, host)
    assert host.exists(f"{TREES}/1")


# ---- if it cannot be mounted


def test_without_overlay_file_systems_it_is_a_plain_directory(plain: Host) -> None:
    plain.bus.mounts.no_overlay = True
    outcome = reconciler(plain).reconcile()
    assert outcome.actions == ()
    assert staged(outcome) == (Status.TRUE, "PlainCopy")
    assert driver_root(plain) == "/run/host-nvidia/0"
    assert plain.entries(TREES) == ()
    assert plain.exists(f"{HOST_NVIDIA}/0/usr/bin")
    assert not plain.exists(f"{UNITS}/{PARENT}"), "it would hide the directory after the next start of the host"
    assert plain.entries(WANTS) == ()
    plain.bus.unit(SERVICE)
    found = diagnose_host(replace(outcome.facts, vendors=()), Config(machines={}), plain).findings
    assert [each for each in found if any("modprobe overlay" in line and PARENT in line for line in each.fix)]


def test_nothing_in_a_plain_directory_is_read(plain: Host, tmp_path: Path) -> None:
    place = tmp_path / f"host{HOST_NVIDIA}/0/usr"
    place.rename(place.with_name("aside"))
    place.symlink_to("x" * 300)
    outcome = reconciler(plain).reconcile()
    assert (outcome.actions, outcome.facts.all_problems()) == ((), ())


def test_a_running_machine_always_sees_a_plain_driver_root(plain: Host) -> None:
    """A mount over its parent would hide it, so a driver root that is added now is a plain directory too."""
    plain.bus.mounts.failed.clear()
    plain.write(f"{MANIFESTS}/0.json", b"spoiled")
    outcome = reconciler(plain).reconcile()
    assert staged(outcome) == (Status.TRUE, "PlainCopy")
    assert driver_root(plain) == "/run/host-nvidia/1"
    assert plain.bus.mounts.mounted == {}
    assert plain.exists(f"{HOST_NVIDIA}/0")


@pytest.mark.parametrize("state", ["inactive", "failed", "activating"])
def test_plain_driver_roots_are_replaced_once_no_machine_runs(plain: Host, state: str) -> None:
    """Nothing of them is mounted: root in a machine may have changed a file, and may still have it open."""
    with open(f"{plain.root}{HOST_NVIDIA}/0/{LIBCUDA}", "r+b") as held:
        held.write(b"evil")
        held.flush()
        plain.bus.mounts.failed.clear()
        units(plain, state)
        outcome = reconciler(plain).reconcile()
        held.write(b"evil")
    assert outcome.sentences[0] == "mount driver roots in place of plain directories: 0"
    assert (outcome.failures, staged(outcome)) == ((), (Status.TRUE, "Staged"))
    assert driver_root(plain) == "/run/host-nvidia/1"
    assert plain.bus.mounts.mounted == {PARENT: HOST_NVIDIA, mount_unit(f"{HOST_NVIDIA}/1"): f"{HOST_NVIDIA}/1"}
    assert plain.read(f"{HOST_NVIDIA}/1/{LIBCUDA}") == plain.read(SOURCE)
    assert (plain.entries(TREES), plain.entries(MANIFESTS), plain.entries(REMOVED)) == (("1",), ("1.json",), ())
    assert reconciler(plain).reconcile().actions == ()


def test_a_plain_driver_root_without_files_on_the_host_is_kept(plain: Host) -> None:
    """The loaded module's version is nowhere else; the newer one would be loaded at a boot."""
    plain.bus.mounts.failed.clear()
    upgrade(plain)
    start_machine(plain)
    units(plain, "inactive")
    outcome = reconciler(plain).reconcile()
    assert (outcome.failures, staged(outcome)) == ((), (Status.TRUE, "PlainCopy"))
    assert driver_root(plain) == "/run/host-nvidia/0"
    assert plain.exists(f"{HOST_NVIDIA}/0/{LIBCUDA}")
    plain.file("/sys/module/nvidia/version", f"{NEWER}\n")
    outcome = reconciler(plain).reconcile()
    assert (outcome.failures, staged(outcome)) == ((), (Status.TRUE, "Staged"))
    assert plain.exists(
        f"{driver_root(plain).replace('/run/host-nvidia', HOST_NVIDIA)}/{LIBCUDA.replace(VERSION, NEWER)}"
    )


def test_a_plain_driver_root_is_kept_while_no_machines_settings_can_be_planned(plain: Host) -> None:
    plain.bus.mounts.failed.clear()
    units(plain, "inactive")
    plain.failing["/proc/devices"] = PermissionError(13, "Permission denied", "/proc/devices")
    assert reconciler(plain).reconcile().actions == ()
    assert plain.exists(f"{HOST_NVIDIA}/0/{LIBCUDA}")


def test_a_failed_replacement_is_tried_only_once(plain: Host) -> None:
    plain.bus.mounts.failed.clear()
    plain.bus.mounts.no_overlay = True
    units(plain, "inactive")
    first = reconciler(plain).reconcile()
    assert [each for each in first.failures if "driver roots stay plain directories" in each]
    assert (first.actions, staged(first)) == ((), (Status.TRUE, "PlainCopy")), (
        "nor is it staged at each start of the host"
    )
    outcome = reconciler(plain).reconcile()
    assert (outcome.actions, outcome.failures, staged(outcome)) == ((), (), (Status.TRUE, "PlainCopy"))
    assert driver_root(plain) == "/run/host-nvidia/0"
    assert plain.read(f"{HOST_NVIDIA}/0/{LIBCUDA}") == plain.read(SOURCE)
    plain.bus.mounts.boot()
    assert plain.bus.mounts.failed == set(), "no unit is left that would hide it"


def test_a_link_in_the_path_is_named(plain: Host, tmp_path: Path) -> None:
    """PID 1 refuses to mount there, as if the kernel had no overlay file systems."""
    state = tmp_path / f"host{STATE}"
    state.rename(tmp_path / "host/elsewhere")
    state.symlink_to("../../elsewhere")
    outcome = reconciler(plain).reconcile()
    assert staged(outcome) == (Status.TRUE, "PlainCopy")
    (problem,) = (each for each in outcome.facts.all_problems() if each.startswith(STATE_IS_LINKED))
    assert problem.endswith(f": replace the link {STATE} with a bind mount")
    plain.bus.unit(SERVICE)
    report = diagnose_host(replace(outcome.facts, vendors=()), Config(machines={}), plain)
    assert problem in [each.evidence for each in report.findings]


# ---- removal


def test_a_driver_root_in_use_is_not_unmounted(host: Host) -> None:
    reconciler(host).reconcile()
    host.write(f"{MANIFESTS}/0.json", b"spoiled")
    host.bus.mounts.busy.add(ROOT)
    agent = reconciler(host)
    agent.reconcile()
    outcome = agent.reconcile()
    assert outcome.failures == ()
    assert [each for each in outcome.facts.problems if f"{HOST_NVIDIA}/0 cannot be unmounted" in each]
    assert host.exists(f"{TREES}/0")
    assert host.exists(f"{WANTS}/{ROOT}")
    host.bus.mounts.busy.clear()
    # By another process's pass: this one's agent tries again only after minutes.
    reconciler(host).reconcile()
    assert (host.entries(TREES), host.entries(MANIFESTS)) == (("1",), ("1.json",))
    assert host.entries(WANTS) == (mount_unit(f"{HOST_NVIDIA}/1"), PARENT)
    assert not host.exists(f"{UNITS}/{ROOT}")


# ---- killed at any step


class Killed(FaultyHost):
    """Links and units are steps too."""

    def link(self, path: str, target: str) -> None:
        if path.startswith(STAGING):
            # Nobody reads an incomplete copy.
            super().link(path, target)
        else:
            self.step(lambda: super(Killed, self).link(path, target))

    def call(
        self, service: str, path: str, method: str, *arguments: object, signature: str = "", timeout: float = 1.0
    ) -> tuple[object, ...]:
        def answer() -> tuple[object, ...]:
            return super(Killed, self).call(service, path, method, *arguments, signature=signature, timeout=timeout)

        return self.step(answer) if method.endswith("Unit") else answer()


def killed_everywhere(tmp_path: Path, prepare: str, step: int) -> tuple[Host, bool]:
    """Return a host on which `prepare` was killed before change number `step`, and whether it came that far."""
    tree = tmp_path / f"{prepare}-{step}"
    host = Killed(tree, runner=RunnerThatClears(tree))
    set_up(host)
    # Each file that is copied is a similar change: a few suffice.
    for path in Path(host.full_path(posixpath.dirname(SOURCE))).iterdir():
        if not path.name.startswith(("libcuda.so", "libnvidia-ml.so")):
            path.unlink()
    if prepare != "stage":
        host.bus.mounts.no_overlay = prepare in ("protect", "put back")
        reconciler(host).reconcile()
        host.bus.mounts.no_overlay = prepare == "put back"
        host.bus.mounts.failed.clear()
    host.fault = Fault("kill before", step)
    try:
        match prepare:
            case "stage":
                reconciler(host).reconcile()
            case "protect":
                protect((0,), host)
            case "put back":
                with suppress(AgentError):
                    protect((0,), host)
            case _:
                remove_root(0, host)
    except KilledError:
        return host, True
    finally:
        host.fault = None
        host.bus.mounts.no_overlay = False
        host.bus.mounts.failed.clear()
    return host, False


@pytest.mark.parametrize("what", ["stage", "protect", "put back", "remove"])
def test_wherever_a_pass_is_killed_the_next_one_resumes(tmp_path: Path, what: str) -> None:
    """After every second change, the host reboots. The fault suite does both after each writing call."""
    step, killed = 0, True
    while killed:
        host, killed = killed_everywhere(tmp_path, what, step)
        if step % 2:
            host.bus.mounts.boot()
        reconciler(host).reconcile()
        outcome = reconciler(host).reconcile()
        where = f"killed before change {step} of {what}"
        assert (outcome.failures, staged(outcome)) == ((), (Status.TRUE, "Staged")), where
        assert (reconciler(host).preview()[2].actions, host.entries(STAGING)) == ((), ()), where
        (index,) = host.entries(TREES)
        assert driver_root(host) == f"/run/host-nvidia/{index}", where
        assert host.entries(MANIFESTS) == (f"{index}.json",), where
        unit = mount_unit(f"{HOST_NVIDIA}/{index}")
        assert host.bus.mounts.mounted == {PARENT: HOST_NVIDIA, unit: f"{HOST_NVIDIA}/{index}"}, where
        assert host.entries(WANTS) == (unit, PARENT), where
        assert {name for name in os.listdir(f"{host.root}{UNITS}") if name.endswith(".mount")} == {unit, PARENT}, where
        step += 1
    assert step > 5
