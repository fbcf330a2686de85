"""From a bare host to a node and back: `up`, what it does when it is repeated, and `reset`."""

import gzip
import hashlib
import json
import os
import posixpath
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.provision.host_settings import NO_SWAP, SYSCTLS
from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.host.provision.preflight import CHECKS
from agent.host.provision.up import Provisioner
from agent.model.contract import parse_node_files
from agent.model.errors import AgentError, CommandError, ConfigError
from agent.model.node import Link
from agent.model.paths import (
    AS_FOUND,
    BINARIES,
    MACHINE_ROOTS,
    MANIFESTS,
    NODE_FILES,
    STATE,
    TREES,
    machine_root,
    node_record,
    nspawn_file,
    rewritten_nspawn,
    unit_drop_in,
)
from agent.system.files import temporary_path
from tests.fakes.archives import entry, packed
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS, units, without_gpus
from tests.fakes.libcuda import answer_of_libcuda
from tests.fakes.node_host import CA_FILE, DIGEST, NODE, NodeHost, node_host, node_reconciler, wanted

PREFLIGHT = Path(__file__).resolve().parents[2] / "agent/host/provision/preflight.py"
COMMAND = "/etc/systemd/system/kubelet.service.d/99-unbounded-agent.conf"
WANTS = posixpath.dirname(wanted(UNITS[0]))
STOP = f"systemctl stop {UNITS[0]}"
ENABLED = (wanted(UNITS[0]), wanted("machines.target"))


pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def host(tmp_path: Path) -> NodeHost:
    return node_host(tmp_path / "host")


def run(host: NodeHost, /, *, rebuild: bool = False, for_programs: bool = False, **node: object) -> int:
    options = f"{' --rebuild' if rebuild else ''}{' --json' if for_programs else ''}"
    agent = node_reconciler(host, **node)
    return command(agent, f"up {MACHINE}{options}", network=host.network, ask=host.ask)


def undo(host: NodeHost) -> int:
    return command(node_reconciler(host), "reset", MACHINE, network=host.network)


def record(host: NodeHost) -> NodeRecord:
    found = NODE_RECORDS.read(record_paths(MACHINE), host)
    assert isinstance(found, NodeRecord)
    return found


def calls(host: NodeHost) -> list[str]:
    """Return the programs that were started since this was called before."""
    started = [" ".join(argv) for argv in host.runner.calls]
    host.runner.calls.clear()
    return started


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tree(host: NodeHost) -> dict[str, bytes]:
    """Return all files of the host, but for the agent's own state and what is in /run."""
    root = Path(host.root)
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file() or path.is_symlink()}
    return {
        name: str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for name, path in files.items()
        if not name.startswith((STATE.lstrip("/"), "run/"))
    }


def test_a_bare_host_becomes_a_node(host: NodeHost, capsys: Capture) -> None:
    assert run(host) == 0
    root = machine_root(MACHINE)
    assert host.is_file(f"{root}/usr/lib/systemd/systemd")
    assert host.is_file(f"{root}/etc/kubernetes/kubelet.json")
    assert all(host.exists(link) for link in ENABLED)
    assert all(host.exists(path) for path in (node_record(MACHINE), nspawn_file(MACHINE)))
    records = (*AS_FOUND, *record_paths(MACHINE))
    assert {host.mode(path) for path in records} == {0o600}, "they have what files of the host contained"
    assert host.read("/proc/sys/vm/overcommit_memory").strip() == b"1"
    assert f"nodes/agent-ubuntu2404-nvidia@{DIGEST}" in host.read(node_record(MACHINE)).decode()
    assert [name for name in host.entries("/var/lib/machines") if name != MACHINE] == []
    assert f"{MACHINE}: ready" in capsys.readouterr().out


def test_a_host_without_gpus_becomes_a_node_too(host: NodeHost) -> None:
    """With GPUs, the node gets labels for them."""
    answer_of_libcuda(host)
    assert run(host, kubelet={"node_ip": "192.0.2.10", "gpu_labels": True}) == 0
    assert b"nvidia.com/gpu.present=true" in host.read(f"{machine_root(MACHINE)}{COMMAND}")
    assert undo(host) == 0
    without_gpus(host, driver=False)
    assert run(host) == 0
    assert "nodes/agent-ubuntu2404@" in host.read(node_record(MACHINE)).decode()
    assert host.exists(nspawn_file(MACHINE)), "the template's -U would change the owners of all files"


def test_a_node_without_a_kubelet_is_not_made(host: NodeHost, capsys: Capture) -> None:
    """The image that is unpacked by then is not pulled again, and needs no space again: otherwise, the user would have
    to find and remove hidden directories."""
    host.free = 1 << 30
    assert run(host) == 1
    assert "FAILED  disk: /var/lib/machines has 1073 MB free" in capsys.readouterr().out
    assert not host.exists(AS_FOUND[0])
    host.free = 1 << 40
    host.tools.image.remove("usr/bin/kubelet")
    assert run(host) == 1
    assert "the image has no kubelet" in capsys.readouterr().err
    assert not host.exists(machine_root(MACHINE))
    host.free = 1 << 30
    host.file("/srv/kubelet", b"a program")
    assert run(host, binaries={"version": "1.36.3", "bundle": "/srv", "sha256": {"kubelet": sha256(b"a program")}}) == 0
    assert "warning  disk: /var/lib/machines has 1073 MB free, and 2147 MB are needed" in capsys.readouterr().out
    assert len([each for each in calls(host) if "skopeo" in each and " copy " in each]) == 1


def test_programs_of_a_bundle_are_put_into_the_node(host: NodeHost, capsys: Capture) -> None:
    """The machine has a list of what was put into it, without CNI plugins: network plugins replace them.

    A wrong digest leaves a host that can go on.
    """
    host.tools.image.remove("usr/bin/kubelet")
    archive = gzip.compress(packed(entry("crictl"), content=b"a tool"))
    host.file("/srv/crictl-v1.36.0-linux-amd64.tar.gz", archive)
    host.file("/srv/cni-plugins-linux-amd64-v1.9.1.tgz", archive)
    digest = sha256(b"a program")
    digests = {"kubelet": digest, "crictl": sha256(archive), "cni_plugins": sha256(archive)}
    versions = {"version": "1.36.3", "crictl_version": "1.36.0", "cni_plugins_version": "1.9.1"}
    binaries = {**versions, "bundle": "/srv", "sha256": digests}
    host.file("/srv/kubelet", b"something else")
    assert run(host, for_programs=True, binaries=binaries) == 1
    *_, last = capsys.readouterr().out.splitlines()
    (failure,) = json.loads(last)["failures"]
    assert "its SHA-256 digest is" in failure
    assert not host.exists(machine_root(MACHINE))
    host.file("/srv/kubelet", b"a program")
    assert run(host, binaries=binaries) == 0
    assert f'/kubelet": "{digest}"' in host.read(node_record(MACHINE)).decode()
    root = machine_root(MACHINE)
    (program,) = Path(host.root + root).rglob("kubelet")
    assert (program.read_bytes(), program.stat().st_mode & 0o777) == (b"a program", 0o755)
    assert host.read(f"{root}/usr/local/bin/crictl") == host.read(f"{root}/usr/lib/cni/crictl") == b"a tool"
    listed = parse_node_files(NODE_FILES, host.read(f"{root}{NODE_FILES}"))
    assert listed["/usr/local/bin/kubelet"] == (digest, len(b"a program"))
    assert listed["/usr/local/bin/crictl"] == (sha256(b"a tool"), len(b"a tool"))
    assert not [path for path in listed if path.startswith("/usr/lib/cni")]
    files = record(host).files
    assert {path: listed[path][0] for path in files} == files
    assert all(host.identity(f"{root}{path}").size == size for path, (_, size) in listed.items())
    assert undo(host) == 0
    assert not host.exists(BINARIES)


def test_the_service_reads_the_configuration_before_the_machine_has_settings(host: NodeHost, capsys: Capture) -> None:
    """A service that does not know the machine would remove its settings, and it would start without them."""
    reload = ("systemctl", "reload", "unbounded-agent.service")
    settings: list[bool] = []
    host.tools.before = lambda argv: settings.append(host.exists(nspawn_file(MACHINE))) if argv == reload else None
    assert run(host) == 0
    assert settings == [False]
    host.bus.unit("unbounded-agent.service", "reloading")
    assert run(host, rebuild=True) == 0
    assert len(settings) == 2
    host.bus.unit("unbounded-agent.service", "inactive")
    assert run(host, rebuild=True) == 0
    assert "systemctl enable --now unbounded-agent.service" in capsys.readouterr().err


@pytest.mark.parametrize(("later", "reloads"), [("active", 1), ("failed", 0), ("activating", 0)])
def test_a_service_that_starts_is_reloaded_when_it_runs(host: NodeHost, clock: Clock, later: str, reloads: int) -> None:
    """It may have read the configuration before the machine was added, and systemd reloads no service that starts."""
    host.bus.unit("unbounded-agent.service", "activating")
    clock.meanwhile = lambda: host.bus.unit("unbounded-agent.service", later)
    assert run(host) == 0
    assert host.runner.calls.count(("systemctl", "reload", "unbounded-agent.service")) == reloads


def test_a_finished_node_costs_nothing(host: NodeHost) -> None:
    assert run(host) == 0
    before, _ = tree(host), calls(host)
    changes = {path: path.lstat().st_mtime_ns for path in Path(host.root).rglob("*")}
    assert run(host) == 0
    assert [each for each in calls(host) if each.split()[0].rpartition("/")[2] != "ldconfig"] == []
    assert tree(host) == before
    written = (path for path in Path(host.root).rglob("*") if changes.get(path) != path.lstat().st_mtime_ns)
    assert [path for path in written if path.suffix != ".lock"] == []


def test_a_machine_without_its_settings_is_not_enabled(host: NodeHost, capsys: Capture) -> None:
    """At the host's boot, the template's -U would change the owners of all files in it."""
    host.full.append(nspawn_file(MACHINE))
    assert run(host) == 1
    assert "gpu-node will not start when the host boots" in capsys.readouterr().err
    assert not host.exists(wanted(UNITS[0]))
    host.full.clear()
    # The agent does not start a machine with settings of others, so it is not waited for.
    host.file(nspawn_file(MACHINE), "[Exec]\nBoot=yes\n")
    assert run(host) == 1
    said = capsys.readouterr().err
    assert "gpu-node was not started, because its settings files are missing or not the agent's" in said
    assert "was not ready within" not in said
    assert not host.exists(wanted(UNITS[0]))
    host.remove(nspawn_file(MACHINE))
    assert run(host) == 0
    assert host.exists(wanted(UNITS[0]))


def test_programs_get_one_object_per_line(host: NodeHost, capsys: Capture) -> None:
    assert run(host, for_programs=True) == 0
    output = capsys.readouterr()
    events = [json.loads(line) for line in output.out.splitlines()]
    assert {event["event"] for event in events} == {"step", "result"}
    assert all(event["version"] == 1 and event["time"].endswith("Z") for event in events)
    assert events[-1]["machines"] == {MACHINE: {"ready": "True", "reason": "AllConditionsTrue", "node": NODE}}
    assert events[-1]["failures"] == []
    secret = "0123456789abcdef"
    assert secret not in output.out + output.err
    assert not [argv for argv in host.runner.calls if secret in " ".join(argv)]
    for path in Path(host.root + STATE).rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_failed_check_changes_nothing(host: NodeHost, capsys: Capture) -> None:
    before = tree(host)
    host.file("/etc/unbounded-agent/token", "fedcba.fedcba9876543210\n")
    host.remove_file("/usr/bin/umoci")
    assert run(host) == 1
    printed = capsys.readouterr().out
    assert "FAILED  token: gpu-node: the API server does not accept the bootstrap token" in printed
    assert "FAILED  programs: not installed: umoci" in printed
    host.file("/etc/unbounded-agent/token", before["etc/unbounded-agent/token"])
    host.file("/usr/bin/umoci", executable=True)
    assert tree(host) == before
    assert not host.exists(AS_FOUND[0])


def test_an_ignored_check_that_fails_is_a_warning(host: NodeHost, capsys: Capture) -> None:
    """Only the checks that are named, and only in `preflight`."""

    notes = ""

    def preflight(options: str = "") -> tuple[int, str]:
        nonlocal notes
        code = command(node_reconciler(host), f"preflight{options}", network=host.network, ask=host.ask)
        shown, notes = capsys.readouterr()
        return code, shown

    host.remove_file("/usr/bin/umoci")
    code, shown = preflight()
    assert code == 1
    assert " FAILED  programs: " in shown
    assert "`up`" not in notes
    code, shown = preflight(" --ignore programs --ignore disk")
    assert code == 0
    assert "warning  programs: not installed: umoci" in shown
    assert "FAILED" not in shown
    assert "note: `up` fails until these pass: programs\n" in notes
    host.file("/etc/unbounded-agent/token", "fedcba.fedcba9876543210\n")
    assert preflight(" --ignore programs")[0] == 1, "the API server does not accept the token"
    assert preflight(" --ignore programs --ignore token")[0] == 0
    found = json.loads(preflight(" --json --ignore programs --ignore token")[1])
    (programs,) = [each for each in found["checks"] if each["check"] == "programs"]
    assert (found["ok"], programs["ok"], programs["required"]) == (True, False, False)
    with pytest.raises(ConfigError, match="--ignore: there is no check 'programm'") as error:
        preflight(" --ignore programm")
    assert "the checks are: binaries, ca_file, " in error.value.hint


def test_every_check_can_be_ignored() -> None:
    """Check(...), checked(...) and failed_check(...) in the code have all names."""
    sources = (PREFLIGHT, PREFLIGHT.with_name("up.py"))
    calls = re.compile(r'\b(?:Check|checked|failed_check)\(\s*"([^"]+)"')
    assert {name for path in sources for name in calls.findall(path.read_text())} == {*CHECKS}


def test_a_dry_run_of_up_and_reset_only_prints_the_steps(host: NodeHost, capsys: Capture) -> None:
    def steps(line: str, **services: object) -> list[str]:
        assert command(node_reconciler(host), f"{line} --dry-run", network=host.network, **services) == 0
        return [each for each in capsys.readouterr().out.splitlines() if each.startswith("would ")]

    before = tree(host)
    first = steps(f"up {MACHINE}", ask=host.ask)
    assert first[0] == "would record the host as it was found"
    assert f"would make {machine_root(MACHINE)} from the complete root file system" in first
    assert tree(host) == before
    assert run(host) == 0
    capsys.readouterr()
    before = tree(host)
    calls(host)
    rebuilt = steps(f"up {MACHINE} --rebuild", ask=host.ask)
    assert f"would remove {machine_root(MACHINE)}" in rebuilt
    assert "would record the host as it was found" not in rebuilt
    removed = steps(f"reset {MACHINE}")
    assert f"would remove {machine_root(MACHINE)}" in removed
    assert "would restore the host's settings" in removed
    host.file("/etc/unbounded-agent/token", "fedcba.fedcba9876543210\n")
    assert command(node_reconciler(host), f"up {MACHINE} --rebuild --dry-run", network=host.network, ask=host.ask) == 1
    host.file("/etc/unbounded-agent/token", before["etc/unbounded-agent/token"])
    assert tree(host) == before
    assert STOP not in calls(host)


def test_a_check_whose_error_has_no_advice_fails_too(host: NodeHost, capsys: Capture) -> None:
    """Otherwise, `up --rebuild` would remove the node before it fails."""
    assert run(host) == 0
    before = tree(host)
    host.owners["/etc/unbounded-agent/token"] = (0o600, 1000)
    assert run(host, rebuild=True) == 1
    assert "FAILED  token: gpu-node: /etc/unbounded-agent/token: refused" in capsys.readouterr().out
    del host.owners["/etc/unbounded-agent/token"]
    host.failing["/proc/sys/vm/overcommit_memory"] = CommandError(("sysctl",), "exit code 1")
    assert run(host) == 1
    assert "FAILED  host settings: sysctl: exit code 1 (correct this" in capsys.readouterr().out
    host.failing.clear()
    assert tree(host) == before


def test_changed_settings_are_reported_and_a_rebuild_applies_them(host: NodeHost, capsys: Capture) -> None:
    assert run(host) == 0
    kubelet = {"node_ip": "192.0.2.10", "labels": {"role": "gpu"}}
    assert run(host, kubelet=kubelet) == 0
    printed = capsys.readouterr().err
    assert "was made with other settings: kubelet.labels; first run `kubectl delete node node-1`, because" in printed
    assert "keeps its labels and taints; then run `unbounded-agent up --rebuild" in printed
    assert run(host, rebuild=True, kubelet=kubelet) == 0
    assert b"role=gpu" in host.read(f"{machine_root(MACHINE)}{COMMAND}")
    assert STOP in calls(host)
    # The node's files have the server's address, and those of its network.
    assert run(host, server="https://192.0.2.2:6443", kubelet=kubelet) == 0
    assert "was made with other settings: server; run `unbounded-agent up --rebuild" in capsys.readouterr().err
    agent = node_reconciler(host, kubelet=kubelet)
    (machine,) = agent.config.machines.values()
    own = replace(machine, nspawn=replace(machine.nspawn, virtual_ethernet=True))
    agent.config = replace(agent.config, machines={MACHINE: own})
    command(agent, f"up {MACHINE}", network=host.network, ask=host.ask)
    assert "other settings: whether the machine is on the host's network; run" in capsys.readouterr().err


def test_a_setting_that_the_nodes_release_did_not_have_is_no_change(host: NodeHost, capsys: Capture) -> None:
    """After an upgrade, `up` would advise to rebuild each node."""
    assert run(host) == 0
    made = record(host)
    older = {key: value for key, value in made.settings.items() if key != "containerd.cni_binaries"}
    NODE_RECORDS.write(record_paths(MACHINE), replace(made, settings=older), host)
    assert run(host) == 0
    assert "was made with other settings" not in capsys.readouterr().err


def test_other_contents_of_a_node_are_reported_too(host: NodeHost, capsys: Capture) -> None:
    """No setting differs if the cluster's CA is rotated in the same file, or the host is renamed."""
    assert run(host) == 0
    ca = host.read(CA_FILE)
    capsys.readouterr()
    host.file(CA_FILE, b"-----BEGIN CERTIFICATE-----\nnew\n-----END CERTIFICATE-----\n" + ca)
    assert run(host) == 0
    printed = capsys.readouterr().err
    assert f"node {NODE} was made with other settings: the content of ca_file; run `unb" in printed
    assert "delete node" not in printed
    host.file(CA_FILE, ca)
    host.file("/proc/sys/kernel/hostname", "renamed\n")
    assert run(host) == 0
    printed = capsys.readouterr().err
    assert f"node {NODE} was made with other settings: the host's name, now renamed; run" in printed
    assert f"{MACHINE}`, then `kubectl delete node {NODE}`: it joins as another Node" in printed
    host.remove_file(CA_FILE)
    host.file("/proc/sys/kernel/hostname", "localhost\n")
    assert run(host) == 0
    assert "other settings" not in capsys.readouterr().err, "what cannot be known is not reported"


def test_swap_that_is_to_be_kept_from_now_on(host: NodeHost, capsys: Capture) -> None:
    """The kubelet was made to refuse it, and no boot of the host turns it on."""
    kept = {"swap": "keep"}
    assert run(host) == 0
    assert run(host, host=kept) == 0
    printed = capsys.readouterr().err
    assert "was made with other settings: host.swap; run `unbounded-agent up --rebuild" in printed
    assert run(host, rebuild=True, host=kept) == 0
    assert json.loads(host.read(f"{machine_root(MACHINE)}/etc/kubernetes/kubelet.json"))["failSwapOn"] is False
    capsys.readouterr()
    host.remove(NO_SWAP)
    host.tools(("swapon", "/dev/sda2"), 1)
    assert run(host, host=kept) == 0
    assert capsys.readouterr().err == ""
    before = tree(host)
    assert undo(host) == 0
    assert host.read("/proc/swaps") == before["proc/swaps"]
    assert not host.exists(AS_FOUND[0])


def test_a_renamed_table_makes_no_second_machine_of_the_same_node(host: NodeHost, capsys: Capture) -> None:
    """The first machine runs on, and starts at each boot: its kubelet has the same name, and needs the same ports."""
    agent = node_reconciler(host)
    assert run(host) == 0
    (settings,) = agent.config.machines.values()
    host.bus.unit("systemd-nspawn@new.service", "inactive")
    host.bus.unit("systemd-networkd.service", "active")
    agent.config = replace(agent.config, machines={"new": settings})
    capsys.readouterr()
    assert command(agent, "up new", network=host.network, ask=host.ask) == 1
    printed = capsys.readouterr().out
    assert f"FAILED  former nodes: new: machine {MACHINE}, which `up` made, is the node {NODE}, too" in printed
    assert f"run `unbounded-agent reset {MACHINE}` first" in printed
    assert settings.node
    named = replace(settings, node=replace(settings.node, name="other"))
    agent.config = replace(agent.config, machines={"new": named})
    assert command(agent, "up new", network=host.network, ask=host.ask) == 1
    assert f"machine {MACHINE}, which `up` made, is a node on the host's network, too" in capsys.readouterr().out
    assert not host.exists(machine_root("new"))
    own = replace(named, nspawn=replace(named.nspawn, virtual_ethernet=True))
    agent.config = replace(agent.config, machines={"new": own})
    assert not Provisioner(agent.config, host, host.network, ask=host.ask).work(("new",), agent.preview()[0]).failed


def test_a_deleted_machine_is_noticed_and_made_again(host: NodeHost) -> None:
    assert run(host) == 0
    host.tools(("systemctl", "stop", UNITS[0]), 1)
    host.remove_tree(machine_root(MACHINE))
    (machine,) = node_reconciler(host).reconcile().machines
    assert "was deleted since `up` made it; run `unbounded-agent up gpu-node`" in machine.ready.message
    assert run(host) == 0
    assert host.is_file(f"{machine_root(MACHINE)}/etc/kubernetes/kubelet.json")


# ---- interrupted anywhere


class Killed(BaseException):
    """SIGKILL."""


def kill(command: Callable[[NodeHost], object], host: NodeHost, place: int) -> None:
    """Run a command, and kill it before the n-th program that it starts."""
    left = iter(range(place, -1, -1))

    def before(argv: tuple[str, ...]) -> None:
        # Once it is killed, none of its threads starts anything.
        if next(left, 0) == 0:
            raise Killed

    host.tools.before = before
    with suppress(Killed):
        command(host)
    host.tools.before = lambda argv: None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    host = node_host(tmp_path_factory.mktemp("undisturbed") / "host")
    assert run(host) == 0
    return tree(host)


@pytest.mark.parametrize("place", range(16))
def test_the_next_up_ends_in_the_same_state(undisturbed: dict[str, bytes], host: NodeHost, place: int) -> None:
    kill(run, host, place)
    assert run(host) == 0
    assert tree(host) == undisturbed
    assert host.read(AS_FOUND[0]).count(b'"kernel.panic": "0"') == 1, "the host was recorded after it had changed"


# ---- reset


def test_reset_leaves_the_host_as_it_was_found(host: NodeHost, capsys: Capture) -> None:
    before, network = tree(host), host.network.now
    assert run(host) == 0
    for path in (SYSCTLS, nspawn_file(MACHINE), unit_drop_in(MACHINE)):
        host.file(temporary_path(path), b"what a killed process has written until then")
    host.file(rewritten_nspawn(MACHINE), b"what the unit has written until its shell was killed")
    manifest = temporary_path(f"{MANIFESTS}/0.json")
    host.file(manifest, b"what a killed process has written until then")
    assert undo(host) == 0
    assert tree(host) == before
    assert host.network.now == network
    assert [path for path in (manifest, AS_FOUND[0], node_record(MACHINE)) if host.exists(path)] == []
    assert not host.exists(f"/run/unbounded-agent/machines/{MACHINE}")
    for made in (WANTS, posixpath.dirname(unit_drop_in(MACHINE))):
        assert not host.exists(made), "this directory was made for the node"
    printed = capsys.readouterr().out
    assert "machine gpu-node is removed; the host is as it was found" in printed
    assert f"kubectl delete node {NODE}" in printed
    assert undo(host) == 0
    assert capsys.readouterr().out == f"machine {MACHINE}: nothing to do\n"
    assert run(host) == 0


def test_reset_keeps_what_was_there_before_the_first_node(host: NodeHost) -> None:
    directory = posixpath.dirname(unit_drop_in(MACHINE))
    host.symlink(wanted("machines.target"), "/usr/lib/systemd/system/machines.target")
    host.file(f"{directory}/50-own.conf", "[Service]\n")
    run(host)
    assert undo(host) == 0
    assert host.exists(wanted("machines.target"))
    assert host.entries(directory) == ("50-own.conf",)


def test_reset_keeps_the_target_with_which_another_machine_starts(host: NodeHost, capsys: Capture) -> None:
    run(host)
    host.symlink(wanted("systemd-nspawn@other.service"), "/usr/lib/systemd/system/systemd-nspawn@.service")
    assert undo(host) == 0
    assert host.exists(wanted("machines.target"))
    assert (
        "note: machines.target stays enabled: it starts systemd-nspawn@other.service at boot" in capsys.readouterr().err
    )
    assert not host.exists(AS_FOUND[0])


def test_reset_removes_drivers_only_with_the_last_machine(host: NodeHost) -> None:
    """Also a machine without a node uses them."""
    agent = node_reconciler(host)
    run(host)
    assert host.entries(TREES) == ("0",)
    others = {**agent.config.machines, "other": MachineSettings()}
    host.make_directory(machine_root("other"))
    agent.config = replace(agent.config, machines=others)
    host.bus.unit("systemd-nspawn@other.service")
    command(agent, "reset", MACHINE, network=host.network)
    assert host.entries(TREES) == ("0",)


@pytest.fixture
def mounted(host: NodeHost, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that mounts a directory with data somewhere in the host."""
    if os.geteuid():
        pytest.skip("mounts need root")
    places: list[str] = []
    (tmp_path / "data").mkdir()
    (tmp_path / "data/kept").touch()

    def mount(path: str) -> None:
        host.make_directory(path)
        subprocess.run(["mount", "--bind", tmp_path / "data", host.full_path(path)], check=True)
        places.append(host.full_path(path))

    yield mount
    for place in places:
        # What was renamed has its mount at another path, as the test would show.
        subprocess.run(["umount", place], check=True)
    assert (tmp_path / "data/kept").exists()


DATA = f"{machine_root(MACHINE)}/srv/data"


def test_nothing_is_removed_while_something_is_mounted_in_the_machine(
    host: NodeHost, mounted: Callable[[str], None], capsys: Capture
) -> None:
    """A bind mount of the same file system lost its data. The machine runs on."""
    run(host)
    mounted(DATA)
    before, _ = tree(host), calls(host)
    with pytest.raises(AgentError, match=r"something is mounted there.*/srv/data; unmount it: `umount ") as error:
        undo(host)
    assert "run the same command again" in error.value.hint
    assert run(host, rebuild=True) == 1
    assert "something is mounted there" in capsys.readouterr().out
    assert tree(host) == before
    assert not [each for each in calls(host) if "skopeo copy" in each or each == STOP]


@pytest.mark.parametrize("rebuild", [False, True])
def test_what_is_mounted_while_the_machine_stops_stays(
    host: NodeHost, mounted: Callable[[str], None], rebuild: bool
) -> None:
    run(host)

    def mount(argv: tuple[str, ...]) -> None:
        if " ".join(argv) == STOP:
            mounted(DATA)

    host.tools.before = mount
    if rebuild:
        assert run(host, rebuild=True) == 1
    else:
        with pytest.raises(AgentError, match="something is mounted there"):
            undo(host)
    assert host.exists(f"{DATA}/kept")
    assert host.is_file(f"{machine_root(MACHINE)}/usr/lib/systemd/systemd")


def test_reset_removes_what_root_in_the_machine_made_unremovable(host: NodeHost) -> None:
    before = tree(host)
    run(host)
    root = Path(host.full_path(machine_root(MACHINE)))
    for path in (root / "usr/bin/kubelet", root / "usr/bin", root):
        if subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
            pytest.skip("no such flags here")
    assert undo(host) == 0
    assert tree(host) == before


def test_reset_of_a_name_that_nothing_knows(host: NodeHost) -> None:
    """A misspelt name must not look like success. A script's variable may be empty."""
    unconfigured = node_reconciler(host)
    unconfigured.config = Config(machines={})
    hints = ("no machine is configured, and `up` has made none", f"the machines are {MACHINE}")
    for agent, hint in zip((unconfigured, node_reconciler(host)), hints, strict=True):
        with pytest.raises(ConfigError, match="there is no machine nosuch") as error:
            command(agent, "reset", "nosuch", network=host.network)
        assert error.value.hint == hint
    run(host)
    for name in ("nosuch", "", ".", "..", "../machines/a", "a/", "-a"):
        with pytest.raises(ConfigError, match=r"no machine nosuch|no machine's name") as error:
            command(node_reconciler(host), "reset --", name, network=host.network)
        assert "remove" not in str(error.value)
    assert host.exists(machine_root(MACHINE))


def test_reset_of_what_is_left_of_a_machine_is_no_error(host: NodeHost) -> None:
    agent = node_reconciler(host)
    for left in (nspawn_file(MACHINE), unit_drop_in(MACHINE), machine_root(f".{MACHINE}.unbounded-agent-1")):
        agent.config = Config(machines={})
        host.make_directory(left)
        assert command(agent, "reset", MACHINE, network=host.network) == 0
        host.remove_tree(left)


def test_reset_of_a_masked_machine(host: NodeHost, capsys: Capture) -> None:
    """systemd ignores a masked unit that it should disable, and succeeds. Whoever masked it may want it to stay so."""
    mask = f"/etc/systemd/system/{UNITS[0]}"
    before = tree(host)
    assert run(host) == 0
    host.symlink(mask, "/dev/null")
    host.bus.unit(UNITS[0], "inactive", load="masked", stopped_at=1)
    assert undo(host) == 0
    assert tree(host).keys() - before.keys() == {mask.lstrip("/")}
    assert not host.exists(WANTS)
    assert f"note: {UNITS[0]} is still masked: `systemctl unmask {UNITS[0]}`" in capsys.readouterr().err


def test_what_still_differs_after_a_reset_is_told_and_the_record_stays(host: NodeHost, capsys: Capture) -> None:
    """Another reset can then restore it."""

    def enable_again(argv: tuple[str, ...]) -> None:
        if argv[0] == "swapon":
            host.symlink(wanted("machines.target"), "/usr/lib/systemd/system/machines.target")

    before = tree(host)
    assert run(host) == 0
    host.tools.before = enable_again
    assert undo(host) == 1
    printed = capsys.readouterr()
    assert "machines.target is enabled" in printed.err
    assert "is as it was found" not in printed.out
    assert host.exists(AS_FOUND[0])
    host.tools.before = lambda argv: None
    assert undo(host) == 0
    assert tree(host) == before
    assert not host.exists(AS_FOUND[0])


def test_reset_does_not_remove_a_directory_that_somebody_put_in_the_place(host: NodeHost) -> None:
    assert run(host) == 0
    units(host, "inactive", stopped_at=1)
    root = machine_root(MACHINE)
    host.remove_tree(root)
    host.file(f"{root}/data", b"a user's")
    # As on ext4, whatever the file system of this test does.
    inode = host.link_inode(root)
    assert inode is not None
    NODE_RECORDS.write(record_paths(MACHINE), replace(record(host), inode=inode), host)
    with pytest.raises(AgentError, match="was replaced since `up` made it"):
        undo(host)
    assert host.read(f"{root}/data") == b"a user's"


def test_reset_ends_even_if_a_swap_or_parameter_no_longer_exists(host: NodeHost, capsys: Capture) -> None:
    """A swap file that was removed, for example, and a parameter that a newer kernel lacks."""
    host.file("/proc/sys/vm/old", "7\n")
    assert run(host, host={"sysctls": {"vm.old": "8"}}) == 0
    host.remove_file("/dev/sda2")
    host.remove_file("/proc/sys/vm/old")
    calls(host)
    assert undo(host) == 0
    assert not [each for each in calls(host) if "swapon" in each]
    printed = capsys.readouterr()
    assert "note: /dev/sda2 was used as swap and no longer exists" in printed.err
    assert "note: the kernel no longer has the parameter vm.old, which was 7" in printed.err
    assert "the host is as it was found" in printed.out
    assert not host.exists(AS_FOUND[0])


def test_reset_leaves_swap_alone_that_up_never_turned_off(host: NodeHost) -> None:
    """The administrator may have turned it off since."""
    assert run(host, host={"swap": "keep"}) == 0
    host.tools(("swapoff", "/dev/sda2"), 1)
    calls(host)
    assert undo(host) == 0
    assert not [each for each in calls(host) if "swapon" in each]


def test_reset_of_one_of_two_nodes_keeps_the_hosts_settings(host: NodeHost, capsys: Capture) -> None:
    assert run(host) == 0
    host.write(node_record("other"), host.read(node_record(MACHINE)))
    assert undo(host) == 0
    assert "machine gpu-node is removed; the host keeps its settings for other" in capsys.readouterr().out
    assert host.read("/proc/sys/vm/overcommit_memory").strip() == b"1"
    assert host.exists(AS_FOUND[0])


def test_reset_keeps_what_others_added_and_says_so(host: NodeHost, capsys: Capture) -> None:
    assert run(host) == 0
    foreign = Link("wg0", "wireguard")
    host.network.now = type(host.network.now)((*host.network.now.links, foreign), (), host.network.now.rules)
    assert undo(host) == 0
    assert host.network.removed == [Link("cni0", "bridge")]
    assert "interface wg0 (wireguard) is new" in capsys.readouterr().err


@pytest.mark.parametrize("place", range(5, 15))
def test_reset_removes_what_an_interrupted_up_left(host: NodeHost, place: int) -> None:
    before = tree(host)
    kill(run, host, place)
    assert undo(host) == 0
    assert tree(host) == before
    assert not host.exists(MACHINE_ROOTS) or host.entries(MACHINE_ROOTS) == ()


@pytest.mark.parametrize("place", range(10))
def test_an_interrupted_reset_can_be_repeated(host: NodeHost, place: int) -> None:
    before = tree(host)
    assert run(host) == 0
    kill(undo, host, place)
    assert undo(host) == 0
    assert tree(host) == before
    assert not host.exists(AS_FOUND[0])


def test_a_node_with_a_damaged_record_can_be_removed(host: NodeHost) -> None:
    before = tree(host)
    assert run(host) == 0
    for path in record_paths(MACHINE):
        host.file(path, b"damaged")
    with pytest.raises(AgentError, match=f"remove {machine_root(MACHINE)} yourself; then run"):
        undo(host)
    units(host, "inactive", stopped_at=1)
    host.remove_tree(machine_root(MACHINE))
    assert undo(host) == 0
    assert tree(host) == before
    assert not any(host.exists(path) for path in record_paths(MACHINE))


def test_reset_refuses_to_guess(host: NodeHost) -> None:
    assert run(host) == 0
    for path in AS_FOUND:
        host.file(path, b"damaged")
    calls(host)
    with pytest.raises(AgentError, match="how the host was before its first node"):
        undo(host)
    assert STOP not in calls(host)
    assert host.exists(unit_drop_in(MACHINE))
