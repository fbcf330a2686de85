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
from agent.host.daemon.loop import START_STEP, Timing
from agent.host.daemon.server import BACKLOG
from agent.host.state.locks import PASS_WAIT
from agent.machine import node_condition
from agent.model import paths
from agent.system import api_server
from agent.system.process import FILE_LIMIT
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
DRA = UNITS / "machine" / "unbounded-agent-dra.service"
NODE_CONDITION = UNITS / "machine" / "unbounded-agent-node-condition.service"
TMPFILES = UNITS / "unbounded-agent.tmpfiles.conf"
GPU_SETUP = UNITS / "machine" / "unbounded-agent-gpu.service"
EXPOSURE = {
    SERVICE.name: 25,
    PREPARE.name: 20,
    MODULES.name: 31,
    GPU_SETUP.name: 39,
    "unbounded-agent-gpu-again.service": 28,
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


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    return found


def test_every_service_has_a_limit_of_exposure() -> None:
    assert sorted(EXPOSURE) == sorted(path.name for path in SERVICES)


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem)
def test_no_unit_takes_the_whole_host(unit: Path) -> None:
    """Pods run next to it."""
    assert {"MemoryMax", "TasksMax"} < set(settings(unit, "Service"))


@pytest.mark.parametrize("unit", [SERVICE, PREPARE, MODULES], ids=lambda path: path.stem)
def test_the_host_half_takes_one_processor(unit: Path) -> None:
    """A pass has one thread, which a quota below one processor would delay."""
    assert settings(unit, "Service")["CPUQuota"] == "100%"


@pytest.mark.processes
@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem)
def test_exposure_is_within_the_limit(analyze: str, unit: Path) -> None:
    limit = EXPOSURE[unit.name]
    finished = subprocess.run(
        [analyze, "security", "--offline=yes", "--no-pager", f"--threshold={limit}", str(unit)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = re.search(r"Overall exposure level for unbounded-agent.*\.service: (\d+)\.(\d)", finished.stdout)
    assert found
    assert int(found[1]) * 10 + int(found[2]) <= limit


def test_prepare_makes_its_pass_in_the_sandbox_of_the_service() -> None:
    """What a pass of the service may do, its pass may do too, and nothing else."""
    service, prepare = settings(SERVICE, "Service"), settings(PREPARE, "Service")
    same = ("ReadWritePaths", "InaccessiblePaths", "ProtectSystem", "ProtectHome", "ProtectProc", "SystemCallFilter")
    assert [prepare[key] for key in same] == [service[key] for key in same]
    assert set(prepare["CapabilityBoundingSet"].split()) < set(service["CapabilityBoundingSet"].split())


def test_the_gpu_setup_acts_on_the_machines_own_mounts() -> None:
    """It unmounts nodes that are no longer granted: in a mount namespace of its own, it would unmount only there."""
    found = settings(GPU_SETUP, "Service")
    own_namespace = {
        "PrivateTmp",
        "PrivateDevices",
        "ReadWritePaths",
        "ReadOnlyPaths",
        "InaccessiblePaths",
        "ProcSubset",
    }
    own_namespace |= {"BindPaths", "BindReadOnlyPaths", "TemporaryFileSystem", "MountFlags", "PrivateIPC"}
    protections = {key for key in found if key.startswith("Protect")} - {"ProtectHostname", "ProtectClock"}
    assert not protections | (own_namespace & set(found))
    assert found["PrivateMounts"] == "no"
    assert "umount2" in GPU_SETUP.read_text()


def test_a_program_that_takes_too_much_memory_does_not_end_the_gpu_setup() -> None:
    """The run reports what was killed; and whatever happens to the run, containerd starts."""
    assert settings(GPU_SETUP, "Service")["OOMPolicy"] == "continue"
    drop_in = (UNITS / "machine/containerd.service.d/50-unbounded-agent.conf").read_text()
    assert f"\nWants={GPU_SETUP.name}\n" in drop_in
    for unit in UNITS.rglob("*"):
        if unit.is_file():
            assert not re.search(r"^(Requires|BindsTo|Requisite|RequiredBy)=", unit.read_text(), re.MULTILINE), unit


@pytest.mark.processes
def test_units_are_valid(analyze: str, tmp_path: Path) -> None:
    """The agent is not installed here: an existing program takes its place."""
    (tmp_path / SOCKET.name).write_text(SOCKET.read_text())
    for unit in (SERVICE, PREPARE, MODULES):
        text = unit.read_text()
        assert "/usr/bin/unbounded-agent" in text
        (tmp_path / unit.name).write_text(text.replace("/usr/bin/unbounded-agent", "/bin/true"))
    finished = subprocess.run(
        [
            analyze,
            "verify",
            "--man=no",
            str(tmp_path / SERVICE.name),
            str(tmp_path / SOCKET.name),
            str(tmp_path / PREPARE.name.replace("@", "@gpu-node")),
            str(tmp_path / MODULES.name),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
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
    tool = shutil.which("systemd-tmpfiles")
    if tool is None:
        pytest.skip("systemd-tmpfiles is not installed (apt install systemd)")
    # systemd-tmpfiles resolves the owner's name in the tree.
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    mark = tmp_path / paths.start_began_mark("gpu-node")[1:]
    mark.mkdir(parents=True)
    machines = tmp_path / paths.MACHINE_ROOTS[1:]
    machines.mkdir(parents=True)
    machines.chmod(0o755)
    argv = [tool, f"--root={tmp_path}", "--create", str(TMPFILES)]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=600)
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
    subprocess.run([*argv, "--remove", "--boot"], check=True, capture_output=True, timeout=600)
    assert not mark.exists()
    assert mark.parent.exists()


def test_prepare_closes_the_directory_of_root_file_systems_outside_its_sandbox() -> None:
    """A file system may have been mounted there since the boot, with a top directory that is open to all users."""
    found = settings(PREPARE, "Service")
    assert paths.MACHINE_ROOTS not in found["ReadWritePaths"].split(), "in the sandbox it is read-only"
    assert found["ExecStartPre"] == "-+/usr/bin/systemd-tmpfiles --create unbounded-agent.conf"
    assert f"\nz {paths.MACHINE_ROOTS} 0700 root root -\n" in TMPFILES.read_text()


def test_everything_that_the_agent_writes_is_writable() -> None:
    writable = settings(SERVICE, "Service")["ReadWritePaths"].split()
    for path in (paths.STATE, paths.RUNTIME, paths.NSPAWN, paths.UNITS):
        assert path in writable


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


def test_the_service_waits_for_the_file_systems_of_its_state_and_the_machines() -> None:
    needed = settings(SERVICE, "Unit")["RequiresMountsFor"].split()
    assert needed == [paths.STATE, paths.MACHINE_ROOTS]


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "status"),
    [("[driver]\nload_modules = true\n", 0), ("driver.load_modules = true\n", 0), ("[machines.a]\n", 1), (None, 1)],
)
def test_modules_are_checked_only_if_configured(tmp_path: Path, text: str | None, status: int) -> None:
    """The check precedes the start of Python, which each machine's start would wait for; 1 to 254 skip the unit."""
    if text is not None:
        (tmp_path / "config.d").mkdir()
        (tmp_path / "config.d/10-driver.toml").write_text(text)
    argv = settings(MODULES, "Service")["ExecCondition"].split()
    assert argv[-1] == str(Path(paths.CONFIG_FILE).parent)
    directory = tmp_path if text is not None else tmp_path / "missing"
    found = subprocess.run([*argv[:-1], directory], capture_output=True, timeout=600)
    assert 0 < found.returncode < 255 if status else found.returncode == 0


@pytest.mark.processes
def test_the_packaged_sample_is_no_configuration(tmp_path: Path) -> None:
    """It names every setting, and is on each host that has the Debian package."""
    (tmp_path / "config.toml.sample").write_text(text := sample())
    assert "load_modules" in text
    (tmp_path / "config.toml").write_text("[machines.a]\n")
    argv = settings(MODULES, "Service")["ExecCondition"].split()
    assert subprocess.run([*argv[:-1], tmp_path], capture_output=True, timeout=600).returncode == 1


@pytest.mark.processes
@pytest.mark.parametrize("linked", ["config.toml", "config.d"])
def test_a_configuration_behind_a_link_is_checked_too(tmp_path: Path, linked: str) -> None:
    """NixOS, among others, has links to the real files."""
    (directory := tmp_path / "unbounded-agent").mkdir()
    (target := tmp_path / "store").mkdir()
    (target / "a.toml").write_text("[driver]\nload_modules = true\n")
    (directory / linked).symlink_to(target / "a.toml" if linked.endswith("toml") else target)
    argv = settings(MODULES, "Service")["ExecCondition"].split()
    assert subprocess.run([*argv[:-1], directory], capture_output=True, timeout=600).returncode == 0


def test_the_rule_names_the_unit_and_the_classes_of_gpus() -> None:
    text = (UNITS / "70-unbounded-agent.rules").read_text()
    assert f'ENV{{SYSTEMD_WANTS}}+="{MODULES.name}"' in text
    assert {int(each, 16) for each in re.findall(r"0x(03[0-9a-f]{2})\*", text)} == DISPLAY_CLASSES
    assert f'ATTR{{vendor}}=="{VENDOR_ID:#06x}"' in text


def test_prepare_has_no_right_to_mount() -> None:
    """The machine's own unit mounts, because that has to work without the agent."""
    found = settings(PREPARE, "Service")
    assert "CAP_SYS_ADMIN" not in found["CapabilityBoundingSet"]
    assert "@mount" not in found["SystemCallFilter"]


@pytest.mark.processes
def test_units_of_the_machine_are_valid(analyze: str) -> None:
    """All except those of the node's packages, which are not installed here."""
    units = sorted(str(path) for path in (UNITS / "machine").glob("unbounded-agent-*"))
    assert len(units) == 9
    finished = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True, timeout=600)
    our_warnings = [line for line in (finished.stdout + finished.stderr).splitlines() if "unbounded-agent" in line]
    assert (finished.returncode, our_warnings) == (0, [])


def test_node_condition_runs_only_if_configured_or_to_be_withdrawn() -> None:
    """Either path triggers it ("|"); most machines have neither, and start no process each minute."""
    text = NODE_CONDITION.read_text()
    found = re.findall(r"^ConditionPathExists=(.*)$", text, re.MULTILINE)
    document = f"{paths.MACHINE_HANDOFF_DIRECTORY}/{paths.CONDITIONS_NAME}"
    assert found == [f"|{document}", f"|{paths.NODE_CONDITION_MARK}"]
    assert f"PathChanged={document}\n" in NODE_CONDITION.with_suffix(".path").read_text()
    service = settings(NODE_CONDITION, "Service")
    assert f"/var/lib/{service['StateDirectory']}" == paths.STATE
    assert f"/run/{service['RuntimeDirectory']}" == paths.MACHINE_STATE
    assert service["RuntimeDirectoryPreserve"] == "yes", "the GPU setup's notes lie there"


def test_the_gpu_setup_runs_when_the_host_publishes_something_for_it() -> None:
    lines = (UNITS / "machine" / "unbounded-agent-gpu.path").read_text()
    assert re.findall(r"PathChanged=(.*)", lines) == [
        f"{paths.MACHINE_HANDOFF_DIRECTORY}/{name}" for name in (paths.HANDOFF_NAME, paths.FABRIC_NAME)
    ]


def test_node_condition_is_withdrawn_from_a_machine_without_a_handoff() -> None:
    """A machine that was removed from the configuration boots without the bind, but the mark on its disk stays."""
    conditions = re.findall(r"^Condition.*$", NODE_CONDITION.with_suffix(".timer").read_text(), re.MULTILINE)
    assert conditions == [
        f"ConditionPathIsDirectory=|{paths.MACHINE_HANDOFF_DIRECTORY}",
        f"ConditionPathExists=|{paths.NODE_CONDITION_MARK}",
    ]


def test_dra_runs_only_if_the_host_publishes_states_of_gpus() -> None:
    document = f"{paths.MACHINE_HANDOFF_DIRECTORY}/{paths.GPU_STATES_NAME}"
    assert settings(DRA, "Unit")["ConditionPathExists"] == document
    assert settings(DRA.with_suffix(".path"), "Path")["PathExists"] == document
    service = settings(DRA, "Service")
    assert f"/var/lib/{service['StateDirectory']}" == paths.DRA_STATE
    assert f"/run/{service['RuntimeDirectory']}" == paths.MACHINE_STATE
    assert service["RuntimeDirectoryPreserve"] == "yes", "the GPU setup's notes lie there"


def test_dra_sees_a_new_host_name() -> None:
    """It may be the Node's name. With ProtectHostname=, the service would keep the name that it started with."""
    service = settings(DRA, "Service")
    assert service["Restart"] == "always", "it runs on while the name changes"
    assert not {"ProtectHostname", "ProtectHostnameEx"} & set(service)


def test_dra_is_back_before_the_kubelet_deletes_its_slices() -> None:
    """30 seconds after its socket has gone (defaultWipingDelay in pkg/kubelet/cm/dra/manager.go of Kubernetes)."""
    service = settings(DRA, "Service")
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) + int(service["TimeoutStopSec"]) < 30
    assert settings(DRA, "Unit")["StartLimitIntervalSec"] == "0"
    made = service["ExecStartPre"].split()[-2:]
    assert service["ReadWritePaths"].split() == made, "otherwise it would not start before the kubelet has run"


def test_dra_never_holds_up_containerd_or_the_kubelet() -> None:
    """It waits for the API server; pods without GPUs do not."""
    assert "Before" not in settings(DRA, "Unit")
    for unit in sorted((UNITS / "machine").rglob("*.*")):
        if unit.is_file() and unit.stem != DRA.stem:
            assert "unbounded-agent-dra" not in unit.read_text()


def test_what_changes_during_a_run_of_the_gpu_setup_causes_another_run() -> None:
    """A start during a run only joins it. The other unit waits for the run, and OnSuccess= starts it once more."""
    again, setup = "unbounded-agent-gpu-again.service", "unbounded-agent-gpu.service"
    drop_in = (UNITS / "machine/containerd.service.d/50-unbounded-agent.conf").read_text()
    assert f"\nExecStartPost=-/usr/bin/systemctl --no-block start {again}\n" in drop_in
    assert again == SETUP_AGAIN
    unit = settings(UNITS / "machine" / again, "Unit")
    assert (unit["After"], unit["OnSuccess"], unit["OnSuccessJobMode"]) == (setup, setup, "fail")


def test_no_program_of_the_machine_half_fills_the_memory_with_its_output() -> None:
    unit = (UNITS / "machine/unbounded-agent-gpu.service").read_text()
    assert f"\nLimitFSIZE={FILE_LIMIT >> 20}M\n" in unit


def test_gpu_setup_never_waits_for_the_node_condition() -> None:
    """An API server that does not answer must not delay containerd."""
    longest = node_condition.AGAIN_WITHIN + api_server.KUBECTL_LIMIT + api_server.REQUEST_LIMIT
    assert int(settings(NODE_CONDITION, "Service")["TimeoutStartSec"]) > longest, "ended, it could not say why"
    for unit in ("unbounded-agent-gpu.service", "containerd.service.d/50-unbounded-agent.conf"):
        assert "node-condition" not in (UNITS / "machine" / unit).read_text()
    assert "Before" not in settings(NODE_CONDITION, "Unit")


def test_no_setting_is_newer_than_debian_12() -> None:
    """systemd 252 warns about unknown settings."""
    newer = {"RestartSteps", "RestartMaxDelaySec", "MemoryPressureWatch", "PrivatePIDs", "ProtectControlGroupsEx"}
    for unit in SERVICES:
        assert not newer & {line.partition("=")[0] for line in unit.read_text().splitlines()}
