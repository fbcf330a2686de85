"""`driver upgrade`: a whole host with a node, on which apt, dpkg, modprobe and daemons are simulated."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli.doctor.host import faults_in_brief
from agent.host.driver_upgrade import left_to_do
from agent.host.state.locks import detach_lock
from agent.model.errors import AgentError
from agent.model.paths import DRIVER_PACKAGES, DRIVER_UPGRADE, STATE
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.detach_site import Interrupted
from tests.fakes.driver_packages import DAEMON, LIBRARIES, MODULES, NEW, OLD, UNITS, DriverHost
from tests.fakes.node_host import node_host, node_reconciler
from tests.fakes.processes import process

UPGRADE = "driver upgrade --kubeconfig=/root/.kube/config"
LOADED = ["nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm"]
AS_BEFORE = (OLD, OLD, {OLD}, LOADED, [*UNITS[:2]], True)
UPGRADED = (NEW, NEW, {NEW}, LOADED, [*UNITS[:2]], True)
STOP = ["cordon", "drain", "stop systemd-nspawn@gpu-node.service", f"stop {UNITS[1]}", f"stop {UNITS[0]}"]
UNLOAD = ["unload nvidia_drm", "unload nvidia_modeset", "unload nvidia_uvm", "unload nvidia"]
LOAD = ["load nvidia", "load nvidia_uvm", "load nvidia_modeset", "load nvidia_drm"]
START = [f"start {UNITS[0]}", f"start {UNITS[1]}", "start systemd-nspawn@gpu-node.service", "uncordon"]


def downloads(version: str, directory: str) -> list[str]:
    return [f"download {name}={version}-1 to {directory}" for name in (LIBRARIES, DAEMON, MODULES)]


FETCH = [*downloads(OLD, "old"), *downloads(NEW, "new")]


class Site:
    """The host, and its commands."""

    def __init__(self, tree: Path) -> None:
        self.host = node_host(tree)
        self.messages: list[str] = []
        assert command(node_reconciler(self.host), "up", network=self.host.network, ask=self.host.ask) == 0
        self.driver = DriverHost(self.host)

    def upgrade(self, options: str = "") -> int:
        agent = node_reconciler(self.host)
        agent.progress = self.messages.append
        return command(agent, f"{UPGRADE} {options}")

    def is_finished(self) -> bool:
        return not self.host.exists(DRIVER_UPGRADE) and not self.host.exists(DRIVER_PACKAGES)


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    return Site(tmp_path / "host")


def test_nothing_of_the_driver_changes_before_the_drain(site: Site, capsys: Capture) -> None:
    capsys.readouterr()
    assert site.upgrade() == 0
    plan, _, said = capsys.readouterr().out.rstrip().rpartition("\n")
    assert f"driver {OLD} -> {NEW}: 3 packages: libcuda1 {OLD}-1 -> {NEW}-1" in plan
    assert f"driver {NEW} runs in place of {OLD}" in said or f"driver {NEW} runs in place of {OLD}" in plan
    assert site.driver.changes == [*FETCH, *STOP, *UNLOAD, f"install {NEW}", *LOAD, *START]
    assert site.driver.state() == UPGRADED
    assert site.is_finished()


def test_a_dry_run_changes_nothing(site: Site, capsys: Capture) -> None:
    site.host.capability("gpu0/mig/gi1/access", 12)
    site.host.capability("gpu0/mig/gi1/ci0/access", 13)
    assert site.upgrade("--dry-run") == 0
    shown = capsys.readouterr().out
    assert "the partitions of 0000:01:00.0 are lost" in shown
    assert "would drain and stop machine gpu-node" in shown
    assert f"would stop {UNITS[1]}, {UNITS[0]}" in shown
    assert "would unload nvidia_drm, nvidia_modeset, nvidia_uvm, nvidia" in shown
    assert site.driver.changes == []
    assert site.driver.state() == AS_BEFORE


def test_there_is_nothing_to_do(site: Site, capsys: Capture) -> None:
    del site.driver.sources[NEW]
    assert site.upgrade() == 0
    assert f"driver {OLD}: there is nothing to upgrade" in capsys.readouterr().out
    assert site.driver.changes == []


def use_force(driver: DriverHost) -> None:
    process(driver.tree, 901, opened=("/dev/nvidia1",), command=b"train", group="/user.slice/x.scope")


@pytest.mark.parametrize(
    ("wrong", "options", "words"),
    [
        (lambda it: it.sources[OLD].remove(MODULES), "", "there would be no way back"),
        (lambda it: it.sources[NEW].remove(DAEMON), "", "only works with a module of its version"),
        (lambda it: it.held.add(DAEMON), "", f"run `apt-mark unhold {DAEMON}`"),
        (lambda it: it.removes.append("cuda"), "", "apt would remove cuda"),
        (lambda it: it.contents.update({NEW: ["libcuda.so.{}"]}), "", f"do not have libnvidia-ml.so.{NEW}"),
        (lambda it: it.host.free_of.update({STATE: 1 << 20}), "", f"{STATE}: 64 MiB may be needed for driver"),
        (lambda it: it.host.free_of.update({"/usr": 1 << 20}), "", "/usr: 64 MiB may be needed for driver"),
        (lambda it: it.have.update({MODULES: (OLD, "half-configured")}), "", "not completely installed"),
        (lambda it: it.have.update(dict.fromkeys(it.have, ("1", "installed"))), "", f"package has the version {OLD}"),
        (lambda it: None, "--to 1.2", "no package source has the driver's packages in 1.2"),
        (lambda it: it.host.remove_tree("/sys/module/nvidia"), "", "is not loaded"),
        (use_force, "", "PID 901 (train): /dev/nvidia1"),
        (lambda it: None, "--next-boot", "then no GPU computes until the boot"),
        (lambda it: it.fails.update({"apt-get --simulate": "E: held broken packages"}), "", "run it to see why"),
    ],
)  # fmt: skip
def test_it_refuses_before_it_changes_anything(
    site: Site, wrong: Callable[[DriverHost], object], options: str, words: str
) -> None:
    wrong(site.driver)
    before = site.driver.state()
    with pytest.raises(AgentError) as error:
        site.upgrade(options)
    assert words in str(error.value)
    assert [each for each in site.driver.changes if not each.startswith("download")] == []
    assert site.driver.state() == before
    assert not site.host.exists(DRIVER_UPGRADE)


BRANCHES = [f"download {each}-550={OLD}-1 to old" for each in ("libcuda1", "nvidia-fabricmanager", MODULES)]
BRANCHES += [f"download {each}-580={NEW}-1 to new" for each in ("libcuda1", "nvidia-fabricmanager", MODULES)]


def test_another_branch_has_other_names(site: Site, capsys: Capture) -> None:
    """Ubuntu's names have the branch. apt removes the old packages."""
    site.driver.branched = True
    assert site.upgrade(f"--to {NEW}") == 0
    shown = capsys.readouterr().out
    assert f"libcuda1-550 {OLD}-1 -> (removed), libcuda1-580 (new) -> {NEW}-1" in shown
    assert site.driver.changes == [*BRANCHES, *STOP, *UNLOAD, f"install {NEW}", *LOAD, *START]
    assert "--no-remove" not in next(each for each in site.driver.calls if each.startswith("apt-get --yes"))
    assert site.driver.state() == UPGRADED
    assert site.is_finished()


def test_the_way_back_leads_to_the_old_branch(site: Site) -> None:
    site.driver.branched, site.driver.unloadable = True, NEW
    assert site.upgrade(f"--to {NEW}") == 1
    back = [f"install {NEW}", "load nvidia", "remove what is new", f"install {OLD} by dpkg", *LOAD, *START]
    assert site.driver.changes == [*BRANCHES, *STOP, *UNLOAD, *back]
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()


def test_the_branch_that_follows_an_ended_one_is_named(site: Site) -> None:
    """By then, Ubuntu's packages of 570 are empty, and need those of 580."""
    site.driver.branched = site.driver.ends_branch = True
    with pytest.raises(AgentError, match=rf"replace the packages of driver {OLD} by those of {NEW} \(use --to {NEW}\)"):
        site.upgrade()
    assert site.driver.changes == []
    assert site.upgrade(f"--to {NEW}") == 0
    assert site.driver.changes == [*BRANCHES, *STOP, *UNLOAD, f"install {NEW}", *LOAD, *START]


@pytest.mark.parametrize("killed", range(len([*BRANCHES, *STOP, *UNLOAD]) + 1, len([*BRANCHES, *STOP, *UNLOAD]) + 3))
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upgrade_to_another_branch_goes_on_after_a_kill(site: Site, killed: int, when: str) -> None:
    def kill(call: int) -> None:
        if call == killed:
            raise Interrupted

    site.driver.branched = True
    setattr(site.driver, when, kill)
    with pytest.raises(Interrupted):
        site.upgrade(f"--to {NEW}")
    site.driver.before = site.driver.after = lambda call: None
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED
    assert site.is_finished()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda it: it.sources[NEW].remove(DAEMON), f"no package source has nvidia-fabricmanager-580 in {NEW}"),
        (lambda it: it.sources.pop(NEW), f"no package source has the driver's packages in {NEW}"),
        (lambda it: it.removes.append("cuda"), "apt would remove cuda"),
    ],
)
def test_an_incomplete_branch_is_refused(site: Site, wrong: Callable[[DriverHost], object], words: str) -> None:
    site.driver.branched = True
    wrong(site.driver)
    with pytest.raises(AgentError, match=words):
        site.upgrade(f"--to {NEW}")
    assert site.driver.changes == []
    assert site.driver.state() == AS_BEFORE


def test_nvidias_own_names_have_no_branch(site: Site, capsys: Capture) -> None:
    """From driver 590 on, in NVIDIA's package source for Ubuntu; here, the versions are others."""
    site.driver.branched = site.driver.drops_branch = True
    follow = rf"replace the packages of driver {OLD} by those of {NEW} \(use --to {NEW}\)"
    with pytest.raises(AgentError, match=follow):
        site.upgrade()
    assert site.upgrade(f"--to {NEW}") == 0
    assert f"libcuda1 (new) -> {NEW}-1, libcuda1-550 {OLD}-1 -> (removed)" in capsys.readouterr().out
    assert site.driver.state() == UPGRADED
    assert site.is_finished()


def test_what_the_new_driver_adds_is_of_its_version(site: Site) -> None:
    """Where a package must be of that version at least, apt takes the newest."""
    driver = site.driver
    driver.branched, driver.added, driver.added_by_itself = True, "libnvidia-gpucomp1", "595.1"
    driver.sources[NEW].add(driver.added)
    assert site.upgrade(f"--to {NEW}") == 0
    assert f"download libnvidia-gpucomp1-580={NEW}-1 to new" in driver.changes
    assert driver.state() == UPGRADED


def test_apt_may_still_remove_what_nobody_asked_for(site: Site) -> None:
    driver = site.driver
    driver.branched, driver.added, driver.automatic = True, "libnvidia-gpucomp1", ["libcuda1-550", "zlib1g"]
    driver.sources[NEW].add(driver.added)
    assert site.upgrade(f"--to {NEW}") == 0
    assert driver.automatic == ["libcuda1-580", "libnvidia-gpucomp1-580"]


def test_without_marks_the_driver_is_upgraded(site: Site) -> None:
    site.driver.automatic = [LIBRARIES]
    site.driver.fails["apt-mark"] = "simulated"
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


@pytest.mark.parametrize("kept", ["550", OLD])
def test_a_package_that_keeps_apt_to_another_branch_is_named(site: Site, kept: str) -> None:
    site.driver.branched = True
    site.driver.have_built[f"nvidia-driver-pinning-{kept}"] = "1"
    with pytest.raises(AgentError, match=rf"pinning-{kept} keeps .*install nvidia-driver-pinning-580 with apt first"):
        site.upgrade(f"--to {NEW}")
    site.driver.have_built = {"nvidia-driver-pinning-580": "1"}
    assert site.upgrade(f"--to {NEW}") == 0


UBUNTU_KERNEL = "6.12.0-7-generic"
META, OF_KERNEL = "linux-modules-nvidia-{}-generic", f"linux-modules-nvidia-{{}}-{UBUNTU_KERNEL}"


def use_built_modules(driver: DriverHost, branch: str = "550") -> None:
    """Let the module come in Ubuntu's packages, which have the version of the kernel."""
    driver.host.file("/proc/sys/kernel/osrelease", f"{UBUNTU_KERNEL}\n")
    driver.module_files = ["x"]
    driver.have_built = {META.format(550): "6.12.0-7.7", OF_KERNEL.format(550): "6.12.0-7.7"}
    # The newest of the kernel packages belongs to another version of the branch.
    driver.built = {
        META.format(branch): {"6.12.0-9.9": "9.9", "6.12.0-7.7+1": NEW},
        OF_KERNEL.format(branch): {"6.12.0-7.7+1": NEW},
    }


def test_built_modules_are_of_the_drivers_version(site: Site) -> None:
    site.driver.branched = True
    use_built_modules(site.driver, "580")
    assert site.upgrade(f"--to {NEW}") == 0
    fetched = [each for each in site.driver.changes if "linux-" in each and each.endswith("new")]
    names = (META.format(580), OF_KERNEL.format(580))
    assert sorted(fetched) == sorted(f"download {name}=6.12.0-7.7+1 to new" for name in names)


@pytest.mark.parametrize("name", [META, OF_KERNEL])
def test_another_branch_without_its_modules_is_refused(site: Site, name: str) -> None:
    """Of which the package sources have a newer one; also for the next boot, for which no module is proved."""
    site.driver.branched = True
    use_built_modules(site.driver, "580")
    site.driver.have_built = {name.format(550): "6.12.0-7.7"}
    site.driver.built[name.format(580)] = {"6.12.0-9.9": "9.9"}
    with pytest.raises(AgentError, match=f"no package source has {name.format(580)} in {NEW}"):
        site.upgrade(f"--to {NEW} --next-boot")
    assert site.driver.changes == []


def test_built_modules_are_upgraded_with_the_driver(site: Site) -> None:
    """With Ubuntu's closed modules, apt would not: nothing forbids old modules with new libraries."""
    use_built_modules(site.driver)
    assert site.upgrade() == 0
    assert f"download {OF_KERNEL.format(550)}=6.12.0-7.7+1 to new" in site.driver.changes
    assert not any(META.format(550) in each for each in site.driver.changes)
    assert site.driver.state() == UPGRADED


@pytest.mark.parametrize("branch", ["550", "580"])
def test_a_built_module_of_another_version_stops_nothing(site: Site, branch: str) -> None:
    site.driver.branched = branch == "580"
    use_built_modules(site.driver, branch)
    site.driver.built[OF_KERNEL.format(branch)] = {"6.12.0-7.7+1": "9.9"}
    with pytest.raises(AgentError, match=f"driver {NEW} have no module for the running kernel {UBUNTU_KERNEL}"):
        site.upgrade(f"--to {NEW}" if branch == "580" else "")
    assert all(each.startswith("download") for each in site.driver.changes)
    assert site.driver.state() == AS_BEFORE


@pytest.mark.parametrize("options", ["", f"--to {NEW}"])
def test_a_built_module_on_hold_stops_nothing(site: Site, options: str) -> None:
    """apt only simulates its change: without --allow-change-held-packages, `apt-get --yes install` then refuses it."""
    site.driver.branched = bool(options)
    use_built_modules(site.driver, "580" if options else "550")
    site.driver.held.add(OF_KERNEL.format(550))
    with pytest.raises(AgentError, match=f"run `apt-mark unhold {OF_KERNEL.format(550)}`"):
        site.upgrade(options)
    assert site.driver.changes == []


def test_what_a_former_version_left_has_no_successor(site: Site) -> None:
    """Ubuntu's packages of firmware have branch and version in their names; apt keeps the former ones."""
    site.driver.branched = True
    site.driver.have_built["nvidia-firmware-550-550.90.07"] = "550.90.07"
    assert site.upgrade(f"--to {NEW}") == 0
    assert site.driver.state() == UPGRADED


KERNEL = "6.12.0"
DKMS = "src/nvidia-current-{}/dkms.conf"


def use_dkms(driver: DriverHost) -> None:
    """Let the packages have the module's source, and the host what builds it."""
    driver.module_files = [DKMS, "src/nvidia-current-{}/nvidia.c"]
    driver.host.make_directory(f"/lib/modules/{KERNEL}/build/include")
    driver.host.file("/usr/sbin/dkms")
    (driver.tree / "usr/sbin/dkms").chmod(0o755)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda it: setattr(it, "module_files", ["lib/modules/6.13.0/nvidia.ko"]), f"no module for .* {KERNEL}"),
        (lambda it: it.host.remove_tree(f"/lib/modules/{KERNEL}/build"), f"package linux-headers-{KERNEL}"),
        (
            lambda it: it.fails.update({"dkms build": "Error! Bad return status for module build"}),
            f"Bad return status .*see {DRIVER_PACKAGES}/build.log",
        ),
    ],
)
def test_no_machine_is_drained_for_a_driver_without_a_module(
    site: Site, wrong: Callable[[DriverHost], object], words: str
) -> None:
    use_dkms(site.driver)
    wrong(site.driver)
    with pytest.raises(AgentError, match=words):
        site.upgrade()
    assert [each for each in site.driver.changes if not each.startswith("build")] == FETCH
    assert site.driver.state() == AS_BEFORE
    assert not site.host.exists(DRIVER_UPGRADE)


def test_a_build_that_fails_leaves_only_its_log(site: Site) -> None:
    """Most of all if it has filled the disk: the kubelets would evict pods."""
    use_dkms(site.driver)
    site.driver.fails["dkms build"] = "No space left on device"

    def build(call: int) -> None:
        if call == len(FETCH) + 1:
            site.host.file(f"{DRIVER_PACKAGES}/build/built/nvidia-current/{NEW}/build/make.log", "why")
            site.host.file(f"{DRIVER_PACKAGES}/build/built/nvidia-current/{NEW}/build/nvidia.o")

    site.driver.before = build
    with pytest.raises(AgentError):
        site.upgrade()
    assert site.host.read_text(f"{DRIVER_PACKAGES}/build.log") == "why"
    assert sorted(site.host.entries(DRIVER_PACKAGES)) == ["build.log", "new", "old"]


def test_nothing_is_built_without_room(site: Site) -> None:
    """There is room for the driver itself."""
    use_dkms(site.driver)
    site.driver.size, site.host.free = 100 << 20, 600 << 20
    with pytest.raises(AgentError, match=rf"1320 MiB may be needed to build the module of driver {NEW}"):
        site.upgrade()
    assert site.driver.changes == FETCH
    assert not any("--extract" in each for each in site.driver.calls)


def test_what_a_killed_build_left_takes_no_room(site: Site) -> None:
    site.host.file(f"{DRIVER_PACKAGES}/build/built/nvidia.o")
    site.host.free = 1 << 20
    with pytest.raises(AgentError, match="may be needed for driver"):
        site.upgrade()
    assert not site.host.exists(f"{DRIVER_PACKAGES}/build")


def test_no_dkms_is_no_dkms(site: Site, capsys: Capture) -> None:
    """Ubuntu's nvidia-headless-no-dkms is for hosts with built modules."""
    site.driver.have["nvidia-headless-no-dkms-550"] = (OLD, "installed")
    site.driver.sources[NEW].add("nvidia-headless-no-dkms-550")
    assert site.upgrade("--dry-run") == 0
    shown = capsys.readouterr().out
    assert "nvidia-headless-no-dkms-550" in shown
    assert "would build" not in shown


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_dkms_builds_is_built_once_before(site: Site, is_installed: bool) -> None:
    """DKMS itself may come with the new packages. Only packages with the module's source are unpacked."""
    use_dkms(site.driver)
    if not is_installed:
        site.host.remove("/usr/sbin/dkms")
    assert site.upgrade() == 0
    build = [f"build nvidia-current {NEW} for {KERNEL}"] * is_installed
    assert site.driver.changes == [*FETCH, *build, *STOP, *UNLOAD, f"install {NEW}", *LOAD, *START]
    unpacked = [each for each in site.driver.calls if "--extract" in each]
    assert [f"{MODULES}_{NEW}-1_amd64.deb" in each for each in unpacked] == [True] * is_installed
    assert site.is_finished()


def test_a_module_that_comes_built_needs_no_headers(site: Site) -> None:
    """Even if a package has the source too: without DKMS's own package, nothing builds it."""
    use_dkms(site.driver)
    site.driver.module_files.append(f"lib/modules/{KERNEL}/kernel/nvidia-580/nvidia.ko")
    site.host.remove_tree(f"/lib/modules/{KERNEL}/build")
    assert site.upgrade() == 0
    assert site.driver.changes == [*FETCH, *STOP, *UNLOAD, f"install {NEW}", *LOAD, *START]


def test_modinfo_need_not_know_the_module(site: Site) -> None:
    """Debian names the file nvidia-current, and has a line in modprobe.d for it."""
    site.driver.fails["modinfo"] = "modinfo: ERROR: Module nvidia not found."
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


def test_a_module_of_another_version_is_not_loaded(site: Site, capsys: Capture) -> None:
    site.driver.other_module = OLD
    assert site.upgrade() == 1
    assert f"for this kernel, there is nvidia {OLD}, not {NEW}" in capsys.readouterr().out
    assert "load nvidia" not in site.driver.changes[: site.driver.changes.index(f"install {OLD} by dpkg")]
    assert site.driver.state() == AS_BEFORE


def test_a_version_is_chosen_and_may_be_older(site: Site) -> None:
    assert site.upgrade() == 0
    assert site.upgrade(f"--to {OLD}") == 0
    assert site.driver.state() == AS_BEFORE


@pytest.mark.parametrize("part", ["drain", "systemctl stop nvidia-persistenced.service", "rmmod nvidia_uvm"])
def test_a_failure_before_the_installation_only_starts_all_again(site: Site, capsys: Capture, part: str) -> None:
    site.driver.fails[part] = "simulated"
    assert site.upgrade() == 1
    assert f"driver {OLD} runs: nothing of the driver was changed" in capsys.readouterr().out
    assert not any(each.startswith("install") for each in site.driver.changes)
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()
    site.driver.fails.clear()
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


@pytest.mark.parametrize("part", ["apt-get --yes", "modprobe -- nvidia_uvm", "modprobe -- nvidia"])
def test_it_goes_back_if_the_new_driver_is_not_usable(site: Site, capsys: Capture, part: str) -> None:
    site.driver.fails[part] = "simulated"

    def mend(call: int) -> None:
        if "by dpkg" in site.driver.changes[-1]:
            site.driver.fails.clear()

    site.driver.before = mend
    assert site.upgrade() == 1
    assert f"driver {OLD} runs: driver {NEW} is not usable" in capsys.readouterr().out
    assert f"install {OLD} by dpkg" in site.driver.changes
    assert site.driver.changes[-4:] == START
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()


def test_going_back_removes_what_the_new_driver_added(site: Site) -> None:
    """With dpkg 1.21.22, an added package that breaks the old ones kept dpkg from configuring them."""
    driver = site.driver
    driver.added, driver.unloadable = "libnvidia-gpucomp1", NEW
    driver.sources[NEW].add(driver.added)
    assert site.upgrade() == 1
    assert driver.changes.index(f"remove {driver.added}") < driver.changes.index(f"install {OLD} by dpkg")
    assert driver.added not in driver.have
    assert driver.state() == AS_BEFORE
    assert site.is_finished()


def test_a_machine_starts_even_if_the_old_driver_does_not_come_back(site: Site, capsys: Capture) -> None:
    site.driver.fails["modprobe -- nvidia"] = "simulated"
    assert site.upgrade() == 1
    shown = capsys.readouterr().out
    assert f"driver {NEW} is not usable" in shown
    assert f"driver {OLD} could not be put back" in shown
    assert site.driver.machine_runs()
    assert "left to do: go back to the old packages" in left_to_do(site.host)
    site.driver.fails.clear()
    assert site.upgrade() == 1
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()


CALLS = len([*FETCH, *STOP, *UNLOAD, "install", *LOAD, *START])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("killed", [1, *range(len(FETCH), CALLS + 1)])
def test_it_goes_on_after_a_kill(site: Site, killed: int, when: str) -> None:
    """Killed before or after each program that changes something; nothing goes on by itself, but `doctor` says it."""

    def kill(call: int) -> None:
        if call == killed:
            raise Interrupted

    setattr(site.driver, when, kill)
    with pytest.raises(Interrupted):
        site.upgrade()
    site.driver.before = site.driver.after = lambda call: None
    agent = node_reconciler(site.host)
    done = len(site.driver.changes)
    brief = faults_in_brief(agent.reconcile().facts, agent.config, site.host)
    assert any("an upgrade of the driver runs, or was interrupted" in each for each in brief) is (killed > len(FETCH))
    assert len(site.driver.changes) == done
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED
    assert site.is_finished()


BACK = range(len([*FETCH, *STOP, *UNLOAD]) + 1, CALLS + 3)


@pytest.mark.parametrize("killed", BACK)
def test_going_back_goes_on_after_a_kill(site: Site, killed: int) -> None:
    def kill(call: int) -> None:
        if call == killed:
            raise Interrupted

    site.driver.unloadable, site.driver.before = NEW, kill
    with pytest.raises(Interrupted):
        site.upgrade()
    site.driver.before = lambda call: None
    assert site.upgrade() == 1
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()


def test_a_damaged_record_is_named(site: Site) -> None:
    site.host.file(DRIVER_UPGRADE, "{")
    with pytest.raises(AgentError, match=r"driver-upgrade.json: .*then remove"):
        site.upgrade()
    assert DRIVER_UPGRADE in left_to_do(site.host)


def cut_power(site: Site) -> None:
    """Let the power fail during the installation. The host boots: the machine and the daemons run."""

    def cut(call: int) -> None:
        if site.driver.changes[-1] == f"install {NEW}":
            site.driver.have[LIBRARIES] = (NEW, "half-configured")
            raise Interrupted

    site.driver.before = cut
    with pytest.raises(Interrupted):
        site.upgrade()
    site.driver.before = lambda call: None
    for argv in [("modprobe", "--", module) for module in reversed(LOADED)]:
        site.driver.run(argv, 1)
    for unit in UNITS[:2]:
        site.driver.run(("systemctl", "start", unit), 1)
    site.host.boot()
    site.driver.changes.clear()


def test_it_goes_on_after_a_power_cut(site: Site) -> None:
    """With half of the packages."""
    cut_power(site)
    assert site.upgrade() == 0
    assert site.driver.changes.index("configure") < site.driver.changes.index(f"install {NEW}")
    assert site.driver.changes.index("unload nvidia") < site.driver.changes.index(f"install {NEW}")
    assert site.driver.state() == UPGRADED


def test_it_does_not_go_back_because_the_driver_is_in_use(site: Site) -> None:
    cut_power(site)
    site.driver.fails["drain"] = "budget"
    with pytest.raises(AgentError, match=r"the driver is in use: .*budget"):
        site.upgrade()
    assert "left to do: install the new packages" in left_to_do(site.host)
    assert site.driver.machine_runs()
    assert site.driver.version() == OLD
    site.driver.fails.clear()
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


def test_nothing_is_stopped_while_a_gpu_is_reset(site: Site, capsys: Capture) -> None:
    """Between the steps of a reset, no process has the GPU open."""
    with detach_lock(site.host, "0000:01:00.0"):
        assert site.upgrade() == 1
    assert (
        "another `gpus detach`, `gpus reset` or `gpus test` of 0000:01:00.0 is still running" in capsys.readouterr().out
    )
    assert site.driver.changes == FETCH
    assert site.driver.state() == AS_BEFORE
    assert site.is_finished()


def test_a_full_disk_leaves_no_machine_stopped(site: Site) -> None:
    def fill(call: int) -> None:
        if site.driver.changes[-1] == f"stop {UNITS[1]}":
            site.host.full.append(DRIVER_UPGRADE)

    site.driver.before = fill
    with pytest.raises(OSError, match="No space left"):
        site.upgrade()
    assert site.driver.state() == AS_BEFORE
    site.driver.before = lambda call: None
    site.host.full.clear()
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


def test_the_lock_of_another_program_is_waited_for(site: Site, clock: Clock) -> None:
    inode = site.host.link_inode("/var/lib/dpkg/lock-frontend")
    site.host.file("/proc/locks", f"8: POSIX  ADVISORY  WRITE 4906 fe:00:{inode} 0 EOF\n")
    process(site.driver.tree, 4906, command=b"unattended-upgr")

    def release() -> None:
        if any("PID 4906 (unattended-upgr)" in each for each in site.messages):
            site.host.file("/proc/locks")

    clock.meanwhile = release
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED


def test_no_machine_is_drained_while_somebody_keeps_the_lock(site: Site, clock: Clock) -> None:
    inode = site.host.link_inode("/var/lib/dpkg/lock-frontend")
    process(site.driver.tree, 4906, command=b"unattended-upgr")
    site.host.file("/proc/locks", f"8: POSIX  ADVISORY  WRITE 4906 fe:00:{inode} 0 EOF\n")
    clock.least = 60.0
    with pytest.raises(AgentError, match=r"PID 4906 \(unattended-upgr\) still has the lock of apt and dpkg"):
        site.upgrade()
    assert site.driver.changes == FETCH
    assert left_to_do(site.host) == ""


def test_who_keeps_the_lock_is_named(site: Site, clock: Clock, capsys: Capture) -> None:
    inode = site.host.link_inode("/var/lib/dpkg/lock-frontend")
    process(site.driver.tree, 4906, command=b"unattended-upgr")

    def take(call: int) -> None:
        if call > len(FETCH):
            site.host.file("/proc/locks", f"8: POSIX  ADVISORY  WRITE 4906 fe:00:{inode} 0 EOF\n")

    site.driver.before, clock.least = take, 60.0
    assert site.upgrade() == 1
    assert "PID 4906 (unattended-upgr) still has the lock of apt and dpkg" in capsys.readouterr().out
    assert site.driver.version() == OLD
    assert site.driver.machine_runs()


def test_at_the_next_boot(site: Site, capsys: Capture) -> None:
    """Nothing is stopped, and the record stays until the module is loaded."""
    site.driver.run(("systemctl", "stop", UNITS[1]), 1)
    site.driver.changes.clear()
    assert site.upgrade("--next-boot") == 0
    assert "until the host's next boot" in capsys.readouterr().out
    assert site.driver.changes == [*FETCH, f"install {NEW}"]
    assert site.driver.version() == OLD
    assert "load the installed modules at the host's next boot" in left_to_do(site.host)
    site.host.file("/sys/module/nvidia/version", f"{NEW}\n")
    assert left_to_do(site.host) == ""
    assert site.upgrade() == 0
    assert site.is_finished()


@pytest.mark.parametrize("options", ["--next-boot", ""])
def test_an_installation_for_the_next_boot_goes_on_after_a_kill(site: Site, capsys: Capture, options: str) -> None:
    """It does not claim that anything is installed, and whoever goes on chooses whether machines stop."""
    site.driver.run(("systemctl", "stop", UNITS[1]), 1)
    site.driver.changes.clear()

    def kill(call: int) -> None:
        if call > len(FETCH):
            raise Interrupted

    site.driver.before = kill
    with pytest.raises(Interrupted):
        site.upgrade("--next-boot")
    site.driver.before = lambda call: None
    left = left_to_do(site.host)
    assert "left to do: install the new packages: with --next-boot again, or" in left
    site.driver.changes.clear()
    assert site.upgrade(options) == 0
    assert f"left to do: {left.partition('to do: ')[2]}" in capsys.readouterr().out
    if options:
        assert site.driver.changes == [f"install {NEW}"]
        assert "load the installed modules at the host's next boot" in left_to_do(site.host)
        with pytest.raises(AgentError, match="left to do: load the installed modules"):
            site.upgrade(options)
    else:
        assert site.driver.version() == NEW
        assert site.is_finished()


def test_neither_packages_for_the_next_boot_nor_the_old_ones(site: Site) -> None:
    """The error gives both reasons, and the same command goes on."""
    site.driver.run(("systemctl", "stop", UNITS[1]), 1)
    site.driver.fails.update({"apt-get --yes": "no room for the new", "--install": "no room for the old"})
    with pytest.raises(AgentError, match=r"(?s)no room for the new.*could not be put back.*no room for the old"):
        site.upgrade("--next-boot")
    site.driver.fails.clear()
    assert site.upgrade("--next-boot") == 0
    assert "load the installed modules" in left_to_do(site.host)


def test_packages_for_the_next_boot_that_fail_are_replaced_at_once(site: Site, capsys: Capture) -> None:
    site.driver.run(("systemctl", "stop", UNITS[1]), 1)
    site.driver.fails["apt-get --yes"] = "simulated"
    assert site.upgrade("--next-boot") == 1
    assert f"{OLD} is installed again" in capsys.readouterr().out
    assert site.driver.changes[-1] == f"install {OLD} by dpkg"
    assert site.is_finished()


def test_old_packages_come_from_apts_cache(site: Site) -> None:
    site.driver.sources[OLD] = set()
    for name in (LIBRARIES, MODULES, DAEMON):
        site.host.file(f"/var/cache/apt/archives/{name}_{OLD}-1_amd64.deb")
    copied = site.driver.run

    def copy(argv: tuple[str, ...], timeout: float) -> object:
        if argv[0] == "cp":
            site.host.file(argv[3])
            argv = ("kubectl", "copied")
        return copied(argv, timeout)

    site.host.program_runner = copy  # type: ignore[assignment]
    assert site.upgrade() == 0
    assert site.driver.state() == UPGRADED
