"""Directories of a machine that outlive its root file system."""

import errno
import os
from pathlib import Path

import pytest

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.model.conditions import ConditionType
from agent.model.paths import CARRIED, carried_directory, machine_root, nspawn_file
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE
from tests.fakes.node_host import CA_FILE, REPOSITORY, SERVER, TOKEN_FILE, NodeHost, node_host, node_reconciler

DATA = "/srv/da:ta"
DIRECTORY = f"{CARRIED}/{MACHINE}/srv%2Fda:ta"
BIND = f"Bind={CARRIED}/{MACHINE}/srv%2Fda\\:ta:/srv/da\\:ta"


@pytest.fixture
def host(tmp_path: Path, clock: Clock) -> NodeHost:
    return node_host(tmp_path / "host")


def up(host: NodeHost, *words: str, carry: tuple[str, ...] = (DATA,)) -> Reconciler:
    host.node_settings = {"carry": list(carry)}
    agent = node_reconciler(host, **host.node_settings)
    assert command(agent, " ".join(("up", *words)), network=host.network, ask=host.ask) == 0
    return agent


def binds(host: NodeHost) -> list[str]:
    return [line for line in host.read_text(nspawn_file(MACHINE)).splitlines() if CARRIED in line]


def remark(agent: Reconciler) -> str:
    (machine,) = agent.reconcile().machines
    return machine.condition(ConditionType.DEVICES_PRESENT).message


def test_a_new_node_has_its_directories_from_the_start(host: NodeHost) -> None:
    up(host)
    assert carried_directory(MACHINE, DATA) == DIRECTORY
    assert (host.is_directory(DIRECTORY), binds(host)) == (True, [BIND])
    assert host.mode(CARRIED) & 0o777 == 0o700


def test_they_outlive_the_root_and_the_node(host: NodeHost) -> None:
    agent = up(host)
    host.file(f"{DIRECTORY}/file", "kept")
    up(host, "--rebuild", MACHINE)
    assert host.read_text(f"{DIRECTORY}/file") == "kept"
    assert command(agent, f"reset {MACHINE} --yes", network=host.network) in (0, 1)
    assert not host.exists(machine_root(MACHINE))
    assert host.read_text(f"{DIRECTORY}/file") == "kept"


def test_a_node_that_exists_gets_them_when_its_files_were_moved(host: NodeHost, capsys: Capture) -> None:
    """A bind would hide the files that the root has there."""
    up(host, carry=())
    agent = up(host)
    assert binds(host) == []
    assert f"{DATA} of node.carry (its files are still in the machine's root: run" in remark(agent)
    assert f"`systemd-nspawn --settings=no -D {machine_root(MACHINE)} '--bind={CARRIED}/" in remark(agent)
    assert "MachineRestartNeeded" not in capsys.readouterr().out, "a restart alone does not help"
    host.make_directory(DIRECTORY)
    assert "node.carry" not in remark(agent)
    assert binds(host) == [BIND]


def test_a_link_in_its_place_is_not_followed(host: NodeHost) -> None:
    up(host, carry=())
    host.symlink(DIRECTORY, "/etc")
    up(host)
    assert binds(host) == []


def test_what_cannot_be_observed_takes_no_directory_away(host: NodeHost) -> None:
    agent = up(host)
    host.failing[DIRECTORY] = OSError(errno.EIO, os.strerror(errno.EIO))
    agent.reconcile()
    assert binds(host) == [BIND]


@pytest.mark.parametrize(
    ("carry", "why"),
    [
        (["srv"], "not an absolute path"),
        (["/srv/../etc"], "not an absolute path"),
        (["/"], "would hide files"),
        (["/etc"], "would hide files"),
        (["/etc/kubernetes"], "state of the kubelet"),
        (["/var/lib"], "would hide files"),
        (["/var/lib/kubelet/pods"], "state of the kubelet"),
        (["/opt"], "state of the kubelet"),
        (["/proc/x"], "each machine has its own"),
        (["/tmp"], "removes old files"),
        (["/run/x"], "belongs to the image"),
        (["/usr/share"], "belongs to the image"),
        (["/usr/lib/unbounded-agent"], "the agent has files there"),
        (["/srv/data", "/srv/data"], "the directory"),
        (["/srv", "/srv/data"], "has another carried directory in it"),
        (["/" + "x/" * 100 + "x"], "too long"),
        (["/mnt/models/mine"], "overlaps with an extra mount"),
        (["/mnt"], "overlaps with an extra mount"),
    ],
)
def test_directories_that_cannot_be_carried(carry: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        configured(carry)


def test_directories_that_can_be_carried() -> None:
    carry = ["/srv/data", "/usr/local/share/app", "/root/notes", "/home", "/var/lib/app", "/etc/app"]
    (machine,) = configured(carry).machines.values()
    assert machine.node
    assert machine.node.carry == carry


def configured(carry: list[str]) -> Config:
    node: dict[str, object] = {
        "server": SERVER,
        "ca_file": CA_FILE,
        "bootstrap_token": TOKEN_FILE,
        "image": {"repository": REPOSITORY},
    }
    node["carry"] = carry
    mounts = [{"source": "/srv/models", "target": "/mnt/models"}]
    return Config.validated({"machines": {MACHINE: {"node": node, "extra_mounts": mounts}}})


def test_directories_of_two_paths_are_never_the_same() -> None:
    paths = ("/a/b", "/a%2Fb", "/a-b", "/a%252Fb", "/a b")
    assert len({carried_directory(MACHINE, path) for path in paths}) == len(paths)
