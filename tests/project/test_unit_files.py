"""The unit files, checked with systemd's own tools: valid, hardened, and in agreement with the code's paths."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import fields

from agent.cli.prepare import WAIT_LIMIT
from agent.config.checks import Range
from agent.config.settings import MachineSettings, MetricsSettings
from agent.dra.service import SETUP_AGAIN
from agent.host import gpu_recovery, switching
from agent.host.daemon.loop import START_STEP, Timing
from agent.host.daemon.server import BACKLOG
from agent.host.observe.checks import LIMIT, STALE_AFTER
from agent.host.state.locks import PASS_WAIT
from agent.machine import node_condition, node_cordon
from agent.model import paths
from agent.system import api_server, kubelet_identity
from agent.system.process import FILE_LIMIT, KILL_MARGIN
from agent.vendors.nvidia.devices import DISPLAY_CLASSES, VENDOR_ID
from agent.vendors.nvidia.driver import MODPROBE_LIMIT, SETTLE
from agent.vendors.nvidia.places import PLACES
from deploy.generate.sample_configuration import sample

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = REPOSITORY / "systemd"
SERVICE = UNITS / "unbounded-agent.service"
SOCKET = UNITS / "unbounded-agent.socket"
PREPARE = UNITS / "unbounded-agent-prepare@.service"
MODULES = UNITS / "unbounded-agent-modules.service"
CHECKS = UNITS / "unbounded-agent-checks.service"
TIMER = UNITS / "unbounded-agent-checks.timer"
GPUS = UNITS / gpu_recovery.UNIT
SWITCH = UNITS / switching.UNIT
DRA = UNITS / "machine" / "unbounded-agent-dra.service"
NODE_CONDITION = UNITS / "machine" / "unbounded-agent-node-condition.service"
TMPFILES = UNITS / "unbounded-agent.tmpfiles.conf"
STOP = UNITS / "machine" / "unbounded-agent-stop.service"
GPU_SETUP = UNITS / "machine" / "unbounded-agent-gpu.service"
EXPOSURE = {
    SERVICE.name: 25,
    PREPARE.name: 20,
    MODULES.name: 31,
    CHECKS.name: 12,
    # It runs the vendor's tool, which nobody has tried in a narrower sandbox on a real GPU.
    GPUS.name: 64,
    # It does what a user's `switch` does: renames and removes root file systems, which may have any owners and flags.
    SWITCH.name: 80,
    GPU_SETUP.name: 39,
    "unbounded-agent-gpu-again.service": 28,
    "unbounded-agent-gpu-test.service": 21,
    "unbounded-agent-leave.service": 28,
    STOP.name: 29,
    DRA.name: 28,
    NODE_CONDITION.name: 24,
}
"""The highest level that `systemd-analyze security` may give each unit, in tenths. The units' comments say why."""
SERVICES = sorted(UNITS.rglob("*.service"))


def settings(path: Path, section: str) -> dict[str, str]:
    """Return the last assignment of each key; enough for keys that occur once."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=["="], comment_prefixes=["#"])
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return dict(parser[section])


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's tools."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (apt install systemd)")
    return subprocess.run([name, *arguments], capture_output=True, text=True, timeout=600)


def test_no_unit_takes_the_whole_host() -> None:
    """Pods run next to it. A pass has one thread, which a quota below one processor would delay."""
    assert sorted(EXPOSURE) == sorted(path.name for path in SERVICES)
    for unit in SERVICES:
        assert {"MemoryMax", "TasksMax"} < set(settings(unit, "Service")), unit
    for unit in (SERVICE, PREPARE, MODULES, CHECKS):
        assert settings(unit, "Service")["CPUQuota"] == "100%", unit


@pytest.mark.processes
def test_exposure_is_within_the_limit() -> None:
    for unit in SERVICES:
        threshold = f"--threshold={EXPOSURE[unit.name]}"
        finished = tool("systemd-analyze", "security", "--offline=yes", "--no-pager", threshold, str(unit))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        found = re.search(r"Overall exposure level for unbounded-agent.*\.service: (\d+)\.(\d)", finished.stdout)
        assert found
        assert int(found[1]) * 10 + int(found[2]) <= EXPOSURE[unit.name]


def test_prepare_makes_its_pass_in_the_sandbox_of_the_service() -> None:
    """What a pass of the service may do, its pass may do too, and nothing else."""
    service, prepare = settings(SERVICE, "Service"), settings(PREPARE, "Service")
    same = ("ReadWritePaths", "InaccessiblePaths", "ProtectSystem", "ProtectHome", "ProtectProc", "SystemCallFilter")
    assert [prepare[key] for key in same] == [service[key] for key in same]
    assert set(prepare["CapabilityBoundingSet"].split()) < set(service["CapabilityBoundingSet"].split())
    # The machine's own unit mounts, because that has to work without the agent.
    assert "CAP_SYS_ADMIN" not in prepare["CapabilityBoundingSet"]
    assert "@mount" not in prepare["SystemCallFilter"]
    # Only the directory of root file systems is closed outside the sandbox, in which it is read-only: a file system may
    # have been mounted there since the boot, with a top directory that is open to all users.
    assert paths.MACHINE_ROOTS not in prepare["ReadWritePaths"].split()
    assert prepare["ExecStartPre"] == "-+/usr/bin/systemd-tmpfiles --create unbounded-agent.conf"
    assert f"\nz {paths.MACHINE_ROOTS} 0700 root root -\n" in TMPFILES.read_text()


def test_the_gpu_setup_acts_on_the_machines_own_mounts() -> None:
    """It unmounts nodes that are no longer granted: in a mount namespace of its own, it would unmount only there."""
    found = settings(GPU_SETUP, "Service")
    own_namespace = {
        *("PrivateTmp", "PrivateDevices", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths", "ProcSubset"),
        *("BindPaths", "BindReadOnlyPaths", "TemporaryFileSystem", "MountFlags", "PrivateIPC"),
    }
    protections = {key for key in found if key.startswith("Protect")} - {"ProtectHostname", "ProtectClock"}
    assert not protections | (own_namespace & set(found))
    assert found["PrivateMounts"] == "no"
    assert "umount2" in GPU_SETUP.read_text()


def test_a_program_that_takes_too_much_memory_does_not_end_the_gpu_setup() -> None:
    """The run reports what was killed; and whatever happens to the run, containerd starts.

    Nor does a program's output fill the memory.
    """
    assert settings(GPU_SETUP, "Service")["OOMPolicy"] == "continue"
    assert settings(GPU_SETUP, "Service")["LimitFSIZE"] == f"{FILE_LIMIT >> 20}M"
    drop_in = (UNITS / "machine/containerd.service.d/50-unbounded-agent.conf").read_text()
    assert f"\nWants={GPU_SETUP.name}\n" in drop_in
    for unit in UNITS.rglob("*"):
        if unit.is_file():
            assert not re.search(r"^(Requires|BindsTo|Requisite|RequiredBy)=", unit.read_text(), re.MULTILINE), unit


def test_checks_have_none_of_the_services_rights() -> None:
    """A check is a user who exists only meanwhile. It may write nothing: systemd itself opens the file of results."""
    found = settings(CHECKS, "Service")
    assert (found["DynamicUser"], found["CapabilityBoundingSet"], found["AmbientCapabilities"]) == ("yes", "", "")
    assert found["ProtectSystem"] == "strict"
    assert not {key for key in found if key in ("ReadWritePaths", "User", "BindPaths") or key.endswith("Directory")}
    assert (found["PrivateNetwork"], found["DevicePolicy"], found["ProtectProc"]) == ("yes", "closed", "invisible")
    # So that PrivateNetwork=no is enough for an administrator, as the unit and the docs say.
    assert "IPAddressDeny" not in found
    assert found["StandardOutput"] == f"file:{paths.CHECK_RESULTS}"
    assert found["LimitFSIZE"] == f"{FILE_LIMIT >> 20}M"
    assert settings(CHECKS, "Unit")["ConditionDirectoryNotEmpty"] == paths.CHECKS
    assert f"\nd {paths.CHECKS} 0755 root root -\n" in TMPFILES.read_text()
    # All at once: the program ends before systemd ends it, and the next run before the results are stale.
    longest = LIMIT + KILL_MARGIN
    assert longest < int(found["TimeoutStartSec"])
    between = int(settings(TIMER, "Timer")["OnUnitInactiveSec"].removesuffix("s"))
    assert 2 * (between + longest) < STALE_AFTER
    assert f"\nWants={TIMER.name}\n" in SERVICE.read_text()
    assert settings(TIMER, "Unit")["PartOf"] == SERVICE.name


@pytest.mark.processes
def test_units_are_valid(tmp_path: Path) -> None:
    """The agent and the node's packages are not installed here: an existing program takes the agent's place."""
    units = sorted(str(path) for path in (UNITS / "machine").glob("unbounded-agent-*"))
    assert len(units) == 15
    for unit in (SERVICE, SOCKET, PREPARE, MODULES, CHECKS, TIMER, GPUS):
        text = unit.read_text()
        assert unit in (SOCKET, TIMER) or "/usr/bin/unbounded-agent" in text
        units.append(str(tmp_path / unit.name.replace("@", "@gpu-node")))
        (tmp_path / unit.name).write_text(text.replace("/usr/bin/unbounded-agent", "/bin/true"))
    finished = tool("systemd-analyze", "verify", "--man=no", *units)
    our_warnings = [line for line in (finished.stdout + finished.stderr).splitlines() if "unbounded-agent" in line]
    assert (finished.returncode, our_warnings) == (0, [])


def test_the_socket_listens_where_the_service_would() -> None:
    """On loopback by default, without a name of its own: systemd starts the service of the same name."""
    found = settings(SOCKET, "Socket")
    assert found["ListenStream"] == MetricsSettings().address
    assert int(found["Backlog"]) == BACKLOG
    assert not {"Service", "Accept"} & set(found)


@pytest.mark.processes
def test_tmpfiles_makes_what_the_service_writes(tmp_path: Path) -> None:
    # systemd-tmpfiles resolves the owner's name in the tree.
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    mark = tmp_path / paths.start_began_mark("gpu-node")[1:]
    mark.mkdir(parents=True)
    machines = tmp_path / paths.MACHINE_ROOTS[1:]
    machines.mkdir(parents=True)
    machines.chmod(0o755)
    create = ("systemd-tmpfiles", f"--root={tmp_path}", "--create", str(TMPFILES))
    finished = tool(*create)
    if "Operation not permitted" in finished.stderr:
        pytest.skip("giving directories to root needs root")
    assert finished.returncode == 0, finished.stderr
    assert mark.exists(), "the service makes these directories at each of its starts"
    for path in settings(SERVICE, "Service")["ReadWritePaths"].split():
        assert (tmp_path / path[1:]).is_dir(), f"ReadWritePaths={path}: the service would not start"
    for path in (paths.HOST_NVIDIA, paths.MANIFESTS, paths.MACHINES_STATE, paths.RUNTIME, paths.MACHINES_RUNTIME):
        assert (tmp_path / path[1:]).stat().st_mode & 0o7777 == 0o755
    for path in (paths.STAGING, paths.MACHINE_ROOTS):
        assert (tmp_path / path[1:]).stat().st_mode & 0o7777 == 0o700
    # As systemd-tmpfiles-setup.service does at each boot. `systemctl soft-reboot` keeps /run.
    assert tool(*create, "--remove", "--boot").returncode == 0
    assert not mark.exists()
    assert mark.parent.exists()


def test_every_place_of_a_driver_is_visible_even_if_made_later() -> None:
    """A bind of one directory that is missing at the start stays empty; a whole directory shows what is added later."""
    service = settings(SERVICE, "Service")
    assert service["ProtectHome"] == "read-only"
    assert "BindReadOnlyPaths" not in service
    hidden = [path.lstrip("-") for path in service["InaccessiblePaths"].split()]
    places = [f"{place.root.rstrip('/')}{each}/" for place in PLACES for each in place.libraries or ("",)]
    assert not [place for place in places for path in hidden if place.startswith(f"{path}/")]


def test_the_service_is_supervised_and_stops_soon() -> None:
    service = settings(SERVICE, "Service")
    assert (service["Type"], service["KillMode"], service["Restart"]) == ("notify", "mixed", "always")
    assert int(service["TimeoutStopSec"]) <= 10
    assert int(service["WatchdogSec"]) == START_STEP >= 2 * Timing().interval
    assert service["RestartPreventExitStatus"] == "2", "bad input, by the command's exit codes"
    assert settings(SERVICE, "Unit")["RequiresMountsFor"].split() == [paths.STATE, paths.MACHINE_ROOTS]
    assert {paths.STATE, paths.RUNTIME, paths.NSPAWN, paths.UNITS} <= set(service["ReadWritePaths"].split())


def test_prepare_never_stops_a_machine_from_booting() -> None:
    """The drop-in's Wants= starts it; it is bounded in time, and blocks nothing once it has run."""
    unit, service = settings(PREPARE, "Unit"), settings(PREPARE, "Service")
    assert "RequiredBy" not in PREPARE.read_text()
    assert "systemd-nspawn@%i.service" in unit["Before"].split()
    assert service["Type"] == "oneshot"
    assert "RemainAfterExit" not in service
    (wait,) = (field.type for field in fields(MachineSettings) if field.name == "driver_wait")
    (longest,) = (each.highest for each in get_args(wait) if isinstance(each, Range))
    assert longest + 2 * PASS_WAIT <= WAIT_LIMIT <= int(service["TimeoutStartSec"]) - 60


def test_modules_are_loaded_before_services_that_need_gpus() -> None:
    """They are wanted, never required: a driver that cannot be loaded costs only its GPUs, not service or machine."""
    for unit in (SERVICE, PREPARE):
        text = unit.read_text()
        for key in ("Wants", "After"):
            assert re.search(rf"^{key}={MODULES.name} {paths.DRIVER_ROOTS_TARGET}$", text, re.MULTILINE)
        assert "\nRequires=" not in text
    service = settings(MODULES, "Service")
    assert service["Type"] == "oneshot"
    assert "RemainAfterExit" not in service, "the next machine's start looks again"
    assert int(service["TimeoutStartSec"]) > MODPROBE_LIMIT + SETTLE
    assert "[Install]" not in MODULES.read_text()


LOAD = "[driver]\nload_modules = true\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({"config.d/10-driver.toml": LOAD}, 0),
        ({"config.d/10-driver.toml": "driver.load_modules = true\n"}, 0),
        ({"config.d/10-driver.toml": "[machines.a]\n"}, 1),
        (None, 1),
        # The sample names every setting, and is on each host that has the Debian package.
        ({"config.toml.sample": sample(), "config.toml": "[machines.a]\n"}, 1),
        # NixOS, among others, has links to the real files.
        ({"config.toml": Path("store/a.toml"), "store/a.toml": LOAD}, 0),
        ({"config.d": Path("store"), "store/a.toml": LOAD}, 0),
    ],
)
def test_modules_are_checked_only_if_configured(
    tmp_path: Path, files: dict[str, str | Path] | None, status: int
) -> None:
    """The check precedes the start of Python, which each machine's start would wait for; 1 to 254 skip the unit."""
    directory = tmp_path / "unbounded-agent"
    for name, content in (files or {}).items():
        place = (tmp_path if name.startswith("store") else directory) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            place.symlink_to(tmp_path / content)
        else:
            place.write_text(content)
    assert "load_modules" in sample()
    argv = settings(MODULES, "Service")["ExecCondition"].split()
    assert argv[-1] == str(Path(paths.CONFIG_FILE).parent)
    found = subprocess.run([*argv[:-1], directory], capture_output=True, timeout=600)
    assert 0 < found.returncode < 255 if status else found.returncode == 0


def test_the_rule_names_the_unit_and_the_classes_of_gpus() -> None:
    text = (UNITS / "70-unbounded-agent.rules").read_text()
    assert f'ENV{{SYSTEMD_WANTS}}+="{MODULES.name}"' in text
    assert {int(each, 16) for each in re.findall(r"0x(03[0-9a-f]{2})\*", text)} == DISPLAY_CLASSES
    assert f'ATTR{{vendor}}=="{VENDOR_ID:#06x}"' in text


def test_node_condition_runs_only_if_configured_or_to_be_withdrawn() -> None:
    """Each path triggers it ("|"); most machines have none, and start no process each minute."""
    document = f"{paths.MACHINE_HANDOFF_DIRECTORY}/{paths.CONDITIONS_NAME}"
    marks = [f"|{paths.NODE_CONDITION_MARK}", f"|{paths.NODE_CORDON_MARK}"]
    found = re.findall(r"^ConditionPathExists=(.*)$", NODE_CONDITION.read_text(), re.MULTILINE)
    assert found == [f"|{document}", *marks]
    assert f"PathChanged={document}\n" in NODE_CONDITION.with_suffix(".path").read_text()
    # A machine that was removed from the configuration boots without the bind, but the mark on its disk stays.
    conditions = re.findall(r"^Condition.*$", NODE_CONDITION.with_suffix(".timer").read_text(), re.MULTILINE)
    handoff = f"ConditionPathIsDirectory=|{paths.MACHINE_HANDOFF_DIRECTORY}"
    assert conditions == [handoff, *(f"ConditionPathExists={mark}" for mark in marks)]
    # It says why it ended before systemd ends it.
    clients, requests = node_cordon.TRIES + 2, 2 * node_cordon.TRIES + 3  # The cordon, the conditions, an Event.
    asked = 3 * kubelet_identity.SYSTEMD_LIMIT
    one_run = clients * api_server.KUBECTL_LIMIT + requests * api_server.REQUEST_LIMIT + asked
    longest = node_condition.AGAIN_WITHIN + one_run
    assert int(settings(NODE_CONDITION, "Service")["TimeoutStartSec"]) > longest


@pytest.mark.parametrize(("unit", "state"), [(NODE_CONDITION, paths.STATE), (DRA, paths.DRA_STATE)])
def test_services_of_the_machine_have_directories_of_their_own(unit: Path, state: str) -> None:
    service = settings(unit, "Service")
    assert f"/var/lib/{service['StateDirectory']}" == state
    assert f"/run/{service['RuntimeDirectory']}" == paths.MACHINE_STATE
    assert service["RuntimeDirectoryPreserve"] == "yes", "the GPU setup's notes lie there"
    # An API server that does not answer holds up neither containerd nor the kubelet.
    assert "Before" not in settings(unit, "Unit")
    for other in sorted((UNITS / "machine").rglob("*.*")):
        if other.is_file() and other.stem != unit.stem:
            assert unit.stem not in other.read_text()


def test_dra_runs_only_if_the_host_publishes_states_of_gpus_and_is_back_soon() -> None:
    document = f"{paths.MACHINE_HANDOFF_DIRECTORY}/{paths.GPU_STATES_NAME}"
    assert settings(DRA, "Unit")["ConditionPathExists"] == document
    assert settings(DRA.with_suffix(".path"), "Path")["PathExists"] == document
    service = settings(DRA, "Service")
    # The kubelet deletes its slices 30 seconds after its socket has gone (defaultWipingDelay in
    # pkg/kubelet/cm/dra/manager.go of Kubernetes).
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) + int(service["TimeoutStopSec"]) < 30
    assert settings(DRA, "Unit")["StartLimitIntervalSec"] == "0"
    made = service["ExecStartPre"].split()[-2:]
    assert service["ReadWritePaths"].split() == made, "otherwise it would not start before the kubelet has run"
    # The host's name may be the Node's. With these settings, the service would keep the name that it started with.
    assert not {"ProtectHostname", "ProtectHostnameEx"} & set(service)


def test_what_the_host_publishes_causes_a_run_of_the_gpu_setup_also_during_a_run() -> None:
    """A start during a run only joins it. The other unit waits for the run, and OnSuccess= starts it once more."""
    published = [f"{paths.MACHINE_HANDOFF_DIRECTORY}/{name}" for name in (paths.HANDOFF_NAME, paths.FABRIC_NAME)]
    assert re.findall(r"PathChanged=(.*)", GPU_SETUP.with_suffix(".path").read_text()) == published
    again, setup = "unbounded-agent-gpu-again.service", "unbounded-agent-gpu.service"
    drop_in = (UNITS / "machine/containerd.service.d/50-unbounded-agent.conf").read_text()
    assert f"\nExecStartPost=-/usr/bin/systemctl --no-block start {again}\n" in drop_in
    assert again == SETUP_AGAIN
    unit = settings(UNITS / "machine" / again, "Unit")
    assert (unit["After"], unit["OnSuccess"], unit["OnSuccessJobMode"]) == (setup, setup, "fail")


def test_the_host_s_stop_shuts_the_machine_down_but_never_at_its_boot() -> None:
    """PathExists= would start the unit at the boot too, if a stop that was killed has left its mark."""
    mark = f"{paths.MACHINE_HANDOFF_DIRECTORY}/{paths.STOP_NAME}"
    path = settings(STOP.with_suffix(".path"), "Path")
    assert {key: value for key, value in path.items() if key.startswith("Path")} == {"PathChanged": mark}
    assert settings(STOP, "Unit")["ConditionPathExists"] == mark
    answer = f"{paths.MACHINE_REPORT_DIRECTORY}/{paths.STOPPING_NAME}"
    command = f"ln -s . {answer}; systemctl poweroff || rm -f {answer}"
    assert settings(STOP, "Service")["ExecStart"] == f"/bin/sh -c '{command}'"
    assert "unbounded-agent-stop.path" in (REPOSITORY / "containerfiles/install-agent").read_text()


def test_no_setting_is_newer_than_debian_12() -> None:
    """systemd 252 warns about unknown settings."""
    newer = {"RestartSteps", "RestartMaxDelaySec", "MemoryPressureWatch", "PrivatePIDs", "ProtectControlGroupsEx"}
    for unit in SERVICES:
        assert not newer & {line.partition("=")[0] for line in unit.read_text().splitlines()}
