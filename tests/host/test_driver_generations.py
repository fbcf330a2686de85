"""Upgrades of the host's driver: staged ahead, switched as a whole with the module, removed when nothing uses them.

The host is the one of tests/fakes/gpu_host.py: recorded names and links, everything else synthetic.
"""

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.diff import diff
from agent.host.plan.driver_roots import collect
from agent.host.plan.goal import plan
from agent.host.reconcile import CLEANUP_INTERVALS
from agent.host.state.records import HANDED
from agent.model.conditions import ConditionType
from agent.model.facts import Absent, Broken, Facts, Library, Remembered, Seen, StagedRoot, Unseen, UserSpace
from agent.model.goal import Goal, RemoveDriverRoot, RemoveStaleStaging, StageDriverRoot
from agent.model.handoff import parse_handoff
from agent.model.paths import (
    MANIFESTS,
    REMOVED,
    STAGING,
    TREES,
    granted_file,
    handed_roots_file,
    handoff_file,
)
from agent.vendors.nvidia.places import HOST_CACHE
from tests.fakes.driver_generations import NEWER, RunnerThatClears, condition, driver_root, start_machine, upgrade
from tests.fakes.facts import FILES, VERSION, facts, library, nvidia
from tests.fakes.gpu_host import MACHINE, reconciler, set_up
from tests.fakes.host import Host
from tests.fakes.user_space import bare, put


@pytest.fixture
def host(tmp_path: Path) -> Host:
    tree = tmp_path / "host"
    return set_up(Host(tree, runner=RunnerThatClears(tree)))


CONFIG = Config(machines={MACHINE: MachineSettings()})
OLD = StagedRoot(0, "nvidia", VERSION, FILES)
NEW = StagedRoot(1, "nvidia", NEWER, tuple(replace(file, target=f"{file.target}.new") for file in FILES))


def recorded_roots(host: Host) -> tuple[int, ...]:
    path = handed_roots_file(MACHINE)
    return HANDED.parse(path, host.read(path)).indices


def test_an_upgrade_waits_for_the_module_and_then_replaces_everything(host: Host) -> None:
    """What the machine was handed before is kept until it restarts."""
    start_machine(host)
    before = host.identity(handoff_file(MACHINE))
    upgrade(host)
    outcome = reconciler(host).reconcile()
    assert outcome.failures == ()
    assert host.exists(f"{MANIFESTS}/1.json")
    assert host.identity(handoff_file(MACHINE)) == before
    assert condition(outcome, ConditionType.LIBRARIES_PRESENT).reason == "ReloadNeeded"
    staged = condition(outcome, ConditionType.DRIVER_ROOT_STAGED)
    assert staged.message == (
        f"driver {VERSION} is staged as driver root 0; driver {NEWER} is staged as driver root 1, but its kernel "
        "module is not loaded yet"
    )
    # The module is unloaded: the machine keeps its driver root, although the newest one is different.
    host.remove_file("/sys/module/nvidia/version")
    assert reconciler(host).reconcile().actions == ()
    assert driver_root(host) == "/run/host-nvidia/0"
    host.file("/sys/module/nvidia/version", f"{NEWER}\n")
    outcome = reconciler(host).reconcile()
    assert not [action for action in outcome.actions if action.kind == "stage"]
    assert driver_root(host) == "/run/host-nvidia/1"
    (request,) = parse_handoff(host.read(handoff_file(MACHINE))).requests
    assert not [file for file in request.files if VERSION in file.target]
    assert recorded_roots(host) == (0, 1)
    assert reconciler(host).reconcile().actions == ()
    assert host.exists(f"{TREES}/0/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}")
    start_machine(host)
    assert recorded_roots(host) == (1,)
    assert (host.entries(TREES), host.entries(MANIFESTS), host.entries(REMOVED)) == (("1",), ("1.json",), ())


@pytest.mark.parametrize("module", [NEWER, ""])
def test_one_failed_look_at_the_grant_takes_no_driver_root_away(host: Host, module: str) -> None:
    """Only the grant says which root the machine has, if none on disk fits the loaded module."""
    start_machine(host)
    host.remove_file("/sys/module/nvidia/version")
    if module:
        host.file("/sys/module/nvidia/version", f"{module}\n")
    upgrade(host, new="999.0")
    reconciler(host).reconcile()
    assert reconciler(host).reconcile().actions == ()
    handed = host.read(handoff_file(MACHINE))
    assert driver_root(host) == "/run/host-nvidia/0"
    path = granted_file(MACHINE)
    host.failing[path] = OSError(errno.EIO, os.strerror(errno.EIO), path)
    assert reconciler(host).reconcile().actions == ()
    assert host.read(handoff_file(MACHINE)) == handed


def test_a_reverted_upgrade_leaves_nothing(host: Host) -> None:
    """The waiting driver root was never handed to a machine."""
    start_machine(host)
    upgrade(host)
    reconciler(host).reconcile()
    assert host.exists(f"{TREES}/1")
    upgrade(host, old=NEWER, new=VERSION)
    outcome = reconciler(host).reconcile()
    assert outcome.sentences == (f"remove driver root 1 (nvidia driver {NEWER}), which nothing uses",)
    assert host.entries(MANIFESTS) == ("0.json",)
    assert not host.exists(f"{TREES}/1")


def test_what_a_killed_pass_left_is_removed(host: Host) -> None:
    """It was killed during a removal, or before it had written the manifest."""
    start_machine(host)
    for leftover in (f"{REMOVED}/7/d", f"{STAGING}/3", f"{TREES}/1"):
        host.make_directory(leftover)
    outcome = reconciler(host).reconcile()
    assert outcome.sentences == (
        f"remove leftovers of driver roots: {STAGING}/3, {REMOVED}/7",
        "remove driver root 1 (incomplete), which nothing uses",
    )
    assert (host.entries(REMOVED), host.entries(STAGING), host.entries(TREES)) == ((), (), ("0",))


def test_a_rebuilt_driver_in_the_same_place_is_used(host: Host) -> None:
    """NixOS has each build in a directory of its own, even builds of one version."""
    bare(host)
    put(host, "/nix/store/aaa/lib", VERSION)
    host.symlink("/run/opengl-driver", "/nix/store/aaa")
    start_machine(host)
    assert driver_root(host) == "/run/host-nvidia/0"
    put(host, "/nix/store/bbb/lib", VERSION)
    put(host, "/nix/store/bbb/lib", VERSION, "libnvidia-tls")
    host.remove_file("/run/opengl-driver")
    host.symlink("/run/opengl-driver", "/nix/store/bbb")
    assert reconciler(host).reconcile().failures == ()
    assert driver_root(host) == "/run/host-nvidia/1"
    # The same version is in another place while the first place has a different one: the machine keeps its driver root.
    put(host, "/opt/nvidia/lib64", VERSION)
    put(host, "/nix/store/ccc/lib", NEWER)
    host.remove_file("/run/opengl-driver")
    host.symlink("/run/opengl-driver", "/nix/store/ccc")
    reconciler(host).reconcile()
    assert driver_root(host) == "/run/host-nvidia/1"
    host.owners["/nix"] = (0o755, 1000)
    reconciler(host).reconcile()
    assert driver_root(host) == "/run/host-nvidia/2"


# ---- facts


def seen(*staged: StagedRoot, module: Seen[str] = VERSION, **machine: object) -> Facts:
    """Return a host with NEW's files and a running machine; `machine` replaces fields of it."""
    vendor = nvidia()
    assert vendor.driver is not None
    driver = replace(vendor.driver, module_version=module, user_space=UserSpace(NEWER, NEW.files))
    found = facts(replace(vendor, driver=driver))
    fields = {"unit_state": "active", "handed_roots": (), **machine}
    running = replace(found.machines[0], **fields)
    next_index = max((root.index for root in staged), default=-1) + 1
    return replace(found, machines=(running,), staged=staged, next_driver_root_index=next_index)


def with_handoff(found: Facts, root: StagedRoot) -> Facts:
    """Return the facts as if the machine had been handed `root` before."""
    vendor = nvidia()
    assert vendor.driver is not None
    fitting = replace(vendor.driver, module_version=root.version, user_space=UserSpace(root.version, root.files))
    handoff = plan(CONFIG, replace(facts(replace(vendor, driver=fitting)), staged=(root,))).goal.machines[0]
    return replace(found, machines=(replace(found.machines[0], granted=handoff.granted),))


def removed(found: Facts) -> list[int]:
    actions = diff(plan(CONFIG, found), found).actions
    return [action.index for action in actions if isinstance(action, RemoveDriverRoot)]


def of_version(version: str, directory: str) -> tuple[Library, ...]:
    return (library(f"usr/lib/libcuda.so.{version}", f"{directory}/libcuda.so.{version}", size=30),)


def serving(kept: StagedRoot, directory: str, **found_in: str | tuple[str, ...]) -> bool:
    """Return whether a machine stays with `kept`, if `directory` has the same version and more files."""
    files = tuple(replace(each, size=31) for each in of_version(VERSION, directory))
    vendor = nvidia()
    assert vendor.driver is not None
    user_space = replace(vendor.driver.user_space, files=files, **found_in)
    host_driver = replace(vendor.driver, user_space=user_space)
    found = replace(with_handoff(seen(kept), kept), vendors=(replace(vendor, driver=host_driver),))
    goal = plan(CONFIG, found).goal
    assert goal.waiting_roots == ()
    new = StagedRoot(1, "nvidia", VERSION, files)
    assert plan(CONFIG, replace(found, staged=())).goal.driver_roots == (replace(new, index=1),), "it is spoiled"
    assert goal.driver_roots in ((kept,), (new,))
    return goal.driver_roots == (kept,)


GOOGLE, CONFIGURED = "Container-Optimized OS", "driver.library_directories"


@pytest.mark.parametrize(
    ("kept_in", "found_in", "directory", "stays"),
    [
        (HOST_CACHE, {"place_name": "/opt/nvidia"}, "/opt/nvidia/lib64", True),
        (HOST_CACHE, {"place_name": HOST_CACHE}, "/usr/lib", False),
        (HOST_CACHE, {"place_name": CONFIGURED, "place_key": CONFIGURED}, "/opt/lib64", False),
        ("NixOS", {"place_name": "NixOS"}, "/nix/store/bbb", False),
        ("Talos", {"place_name": "/opt/nvidia", "refused_places": (GOOGLE,)}, "/opt/lib64", True),
        # Places that are no longer trusted: refused, configured once but no longer, or unknown to this release.
        (GOOGLE, {"place_name": "/opt/nvidia", "refused_places": (GOOGLE,)}, "/opt/lib64", False),
        ("driver.root", {"place_name": "/opt/nvidia"}, "/opt/lib64", False),
        ("a later release's", {"place_name": "/opt/nvidia"}, "/opt/lib64", False),
    ],
)
def test_a_machine_changes_to_the_same_version_only_in_the_same_place(
    kept_in: str, found_in: dict[str, str | tuple[str, ...]], directory: str, stays: bool
) -> None:
    """While the module is loaded, an upgrade of the packages must not let other files of its version take over."""
    kept = StagedRoot(0, "nvidia", VERSION, of_version(VERSION, "/usr/lib64"), place=kept_in)
    assert serving(kept, directory, **found_in) is stays


def test_on_a_host_that_booted_without_the_module_the_newest_is_used() -> None:
    assert plan(CONFIG, seen(OLD, NEW, module=Absent("not loaded"))).goal.driver_roots == (NEW,)
    assert plan(CONFIG, seen(module=Absent("not loaded"))).goal.driver_roots == (replace(NEW, index=0),)


@pytest.mark.parametrize("module", [VERSION, NEWER])
def test_the_roots_of_module_and_files_are_kept_without_any_gpu(module: str) -> None:
    """They return with the GPU, and staging takes long."""
    found = seen(OLD, NEW, module=module, unit_state="inactive")
    vendor = replace(found.vendors[0], gpus=(), devices=())
    assert collect(Goal((), (), (), Remembered()), replace(found, vendors=(vendor,))) == (
        [] if module == VERSION else [RemoveDriverRoot(0, f"nvidia driver {VERSION}")]
    )


@pytest.mark.parametrize(
    ("staged", "granted", "machine", "expected"),
    [
        ((OLD, NEW), NEW, {}, [0]),
        ((OLD, NEW), NEW, {"handed_roots": (0,)}, []),
        ((OLD, NEW), NEW, {"handed_roots": (0,), "unit_state": "inactive"}, [0]),
        # No report yet, and nothing recorded: the handoff on disk counts.
        ((OLD, NEW), OLD, {}, []),
        ((OLD, NEW), NEW, {"handed_roots": Absent("no record")}, []),
        ((OLD, NEW), NEW, {"handed_roots": Unseen("permission denied")}, []),
        ((OLD, NEW), NEW, {"handed_roots": Broken("no JSON")}, []),
        ((OLD, NEW), NEW, {"handed_roots": Absent("no record"), "unit_state": Unseen("no answer")}, []),
        ((OLD, NEW), NEW, {"granted": Unseen("Input/output error")}, []),
        ((OLD, NEW), NEW, {"granted": Broken("not JSON")}, []),
    ],
)
def test_roots_that_no_machine_was_handed_since_its_start_are_removed(
    staged: tuple[StagedRoot, ...], granted: StagedRoot, machine: dict[str, object], expected: list[int]
) -> None:
    """Nothing is removed if a machine's roots are unknown. The same holds for roots whose manifest is damaged."""
    found = with_handoff(seen(*staged, module=NEWER), granted)
    found = replace(found, machines=(replace(found.machines[0], **machine),))
    assert removed(found) == expected
    assert removed(replace(found, staged=(NEW,), corrupt_roots=(0,))) == expected


def test_nothing_is_removed_while_the_driver_is_unseen() -> None:
    found = with_handoff(seen(OLD, NEW, module=NEWER), NEW)
    (vendor,) = found.vendors
    assert vendor.driver is not None
    for unseen in (
        replace(vendor, driver=replace(vendor.driver, user_space=UserSpace(NEWER, Unseen("time limit")))),
        replace(vendor, driver=replace(vendor.driver, user_space=UserSpace(NEWER, Broken("half unpacked")))),
        replace(vendor, driver=replace(vendor.driver, module_version=Unseen("time limit"))),
        replace(vendor, devices=Unseen("time limit")),
    ):
        assert removed(replace(found, vendors=(unseen,))) == []


def test_a_failed_removal_is_a_problem_but_not_a_failure(host: Host) -> None:
    """Otherwise each pass would fail and the next one retry at once; an attempt may take a minute."""
    assert isinstance(host.runner, RunnerThatClears)
    agent = reconciler(host)
    agent.reconcile()
    host.write(f"{MANIFESTS}/0.json", b"spoiled")
    host.runner.clearing_fails = True
    first = agent.reconcile()
    assert parse_handoff(host.read(handoff_file(MACHINE))).requests[0].driver_root == "/run/host-nvidia/1"
    second = agent.reconcile()
    assert second.failures == first.failures == ()
    assert [each for each in second.facts.all_problems() if "Input/output error" in each]
    calls = host.runner.clearings
    third = agent.reconcile()
    assert third.facts.all_problems() == second.facts.all_problems(), "told once"
    assert host.runner.clearings == calls, "not tried again at once"
    # Another process's pass does not know of the failure; nor does this one when the time is over.
    host.runner.clearing_fails = False
    agent.failed_cleanups = {
        each: (again - CLEANUP_INTERVALS[type(each)], why) for each, (again, why) in agent.failed_cleanups.items()
    }
    assert agent.reconcile().facts.all_problems() == ()
    assert not host.exists(f"{TREES}/0")
    assert host.entries(REMOVED) == ()


def test_attack_a_tree_in_the_way_holds_up_no_pass_for_long(host: Host) -> None:
    """Root in a machine can put a tree of any size in our files' place. A later pass continues where one stopped."""
    assert isinstance(host.runner, RunnerThatClears)
    agent = reconciler(host)
    agent.reconcile()
    for number in range(3):
        host.write(f"{REMOVED}/machines-{MACHINE}-handoff/{number}", b"")
    host.runner.per_second = 1.0
    for left in (2, 1, 0):
        host.runner.clearing_seconds = 0.0
        assert agent.reconcile().failures == ()
        assert host.runner.clearing_seconds <= 1.0
        assert len(list(Path(f"{host.root}{REMOVED}").rglob("[0-9]"))) == left
        agent.failed_cleanups = {
            each: (again - CLEANUP_INTERVALS[type(each)], why) for each, (again, why) in agent.failed_cleanups.items()
        }
    agent.reconcile()
    assert host.entries(REMOVED) == ()


def test_staging_removes_its_own_leftovers_and_comes_after_the_others() -> None:
    """If removed roots fill the disk, staging fails as long as they are there."""
    path, removed = f"{STAGING}/1", f"{REMOVED}/0"
    found = with_handoff(replace(seen(OLD), stale_staging=(path, removed)), OLD)
    kinds = (RemoveStaleStaging, StageDriverRoot)
    first, second = (each for each in diff(plan(CONFIG, found), found).actions if isinstance(each, kinds))
    assert first == RemoveStaleStaging((removed,))
    assert isinstance(second, StageDriverRoot)
    done = replace(found, staged=(OLD, NEW))
    assert RemoveStaleStaging((path, removed)) in diff(plan(CONFIG, done), done).actions


def test_a_damaged_record_of_handed_roots_is_ignored(host: Host) -> None:
    """Then nothing is removed until the machine's next start, which begins a new record."""
    start_machine(host)
    host.write(handed_roots_file(MACHINE), b"")
    upgrade(host)
    host.file("/sys/module/nvidia/version", f"{NEWER}\n")
    reconciler(host).reconcile()
    assert reconciler(host).reconcile().actions == ()
    assert host.exists(f"{TREES}/0")
    start_machine(host)
    assert not host.exists(f"{TREES}/0")
