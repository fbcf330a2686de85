"""The steps of up and reset follow from what is there: nothing foreign is touched, nothing unknown is guessed."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.config.settings import ImageSettings
from agent.host.provision import plan
from agent.host.provision.network import NO_LEFTOVERS
from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.model.errors import AgentError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.node import FoundFile, HostSettings, HostState, NodeBinary, NodeFile, NodeImage
from agent.model.paths import PARTIAL, cordoned_file, staged_root
from agent.model.typed_json import Base64
from tests.fakes.host import Host
from tests.fakes.provisioned import FOUND, NETWORK

DIGEST = "sha256:" + "a1" * 32
IMAGE = NodeImage(f"docker://registry.example.com/nodes/agent@{DIGEST}", DIGEST, "amd64", 100_000_000)
UNPACKED = "/var/lib/machines/.gpu-node.unbounded-agent-a1a1a1a1a1a1a1a1"
RECORD = NodeRecord("node-1", IMAGE, 77, {}, {}, {}, 1.0)
UNIT = "systemd-nspawn@gpu-node.service"
NEW = plan.NodeFacts("gpu-node", Absent("no root"), Absent("no record"), (), {UNIT: False, "machines.target": True})
MADE = replace(NEW, root=77, record=RECORD)
BINARIES = (NodeBinary("kubelet", "https://dl.k8s.io/kubelet", "b2" * 32, "/usr/local/bin/kubelet"),)
FILES = (NodeFile("/etc/kubernetes/kubelet.json", b"{}"),)
SETTINGS_OF_IMAGE = ImageSettings(repository="docker://registry.example.com/nodes")
HOST = plan.HostFacts(FOUND.host, FOUND.units, NETWORK, FOUND, ())
SETTINGS = HostSettings({"kernel.panic": "10"}, (), swap_off=True, files=())


def root_steps(
    facts: plan.NodeFacts = NEW, binaries: tuple[NodeBinary, ...] = BINARIES, files: tuple[NodeFile, ...] = FILES
) -> tuple[plan.NodeStep, ...]:
    return plan.plan_root(facts, RECORD, binaries, files, SETTINGS_OF_IMAGE)


def filled_by(**other: Any) -> str:  # noqa: ANN401
    """Return where the root file system is while it is filled."""
    (fill,) = (step for step in root_steps(**other) if isinstance(step, plan.FillRoot))
    return fill.staged


# ---- what up does to a root file system


OTHER_BINARY = replace(BINARIES[0], sha256="c3")


@pytest.mark.parametrize("other", [{"binaries": ()}, {"files": ()}, {"binaries": (OTHER_BINARY,)}])
def test_what_was_filled_by_other_settings_is_not_used(other: dict[str, Any]) -> None:
    """Filling only adds programs and files: those of the earlier settings would stay."""
    filled = filled_by(**other)
    steps = root_steps(replace(NEW, staged=(filled,)))
    assert steps[:2] == (plan.RemoveTree(filled), plan.StageRoot(SETTINGS_OF_IMAGE, IMAGE, UNPACKED))


def test_a_rebuild_stops_the_machine_when_the_new_root_is_complete() -> None:
    assert plan.must_make_root(MADE, rebuild=True) is True
    *made, stop, remove, publish = (type(step) for step in root_steps(MADE))
    assert made == [plan.StageRoot, plan.FetchBinaries, plan.FillRoot]
    assert (stop, remove, publish) == (plan.StopMachine, plan.RemoveRoot, plan.PublishRoot)


REPLACED = replace(MADE, born=2, record=replace(RECORD, born=1))
"""ext4 gives a free inode number away at once: `rm -rf` and `mkdir` make a directory with the same one."""


@pytest.mark.parametrize(
    ("facts", "rebuilt"),
    [
        *((replace(NEW, root=root), False) for root in (77, Broken("a symbolic link"), Unseen("no permission"))),
        *((replace(MADE, root=root), False) for root in (Broken("a symbolic link"), Unseen("no permission"))),
        *((replace(MADE, record=record), True) for record in (Broken("damaged"), Unseen("no permission"))),
        *((replace(MADE, root=78), True), (REPLACED, True)),
    ],
)
def test_up_and_reset_touch_no_root_of_which_it_is_unknown_whether_up_made_it(
    facts: plan.NodeFacts, rebuilt: bool
) -> None:
    """If `up` made the machine, a user may want to replace it."""
    with pytest.raises(AgentError):
        plan.plan_removal(facts, "inactive")
    with pytest.raises(AgentError, match="unbounded-agent up --rebuild gpu-node" if rebuilt else None):
        plan.must_make_root(facts)
    if rebuilt:
        assert plan.must_make_root(facts, rebuild=True) is True
    else:
        with pytest.raises(AgentError):
            plan.must_make_root(facts, rebuild=True)


def test_without_the_time_of_a_roots_birth_its_inode_shows_that_up_made_it() -> None:
    """The file system or an older release did not record the time."""
    for same in (replace(REPLACED, born=1), replace(REPLACED, born=0), replace(MADE, born=2)):
        assert plan.must_make_root(same) is False
        assert plan.plan_removal(same, "inactive")


# ---- what up does to the host


def test_what_a_further_node_changes_is_added_to_the_record() -> None:
    done, nothing = (
        HostState({"kernel.panic": "10", "vm.swappiness": "60"}, {}, (), {}),
        HostSettings({}, (), False, ()),
    )
    steps = plan.plan_host(SETTINGS, replace(HOST, state=done), 5.0)
    assert steps == (plan.RecordHost(FOUND.extended(done, FOUND.units)),)
    assert plan.plan_host(nothing, HOST, 5.0) == ()
    # `reset` unloads only modules that are in the record.
    state = replace(FOUND.host, modules={**FOUND.host.modules, "ip_vs": False})
    assert plan.plan_host(nothing, replace(HOST, state=state), 5.0) == (plan.RecordHost(replace(FOUND, host=state)),)


@pytest.mark.parametrize("found", [Broken("damaged"), Unseen("no permission"), Absent("lost")])
def test_nobody_guesses_how_the_host_was(found: Broken | Unseen | Absent) -> None:
    """A lost record is not replaced by the changed host."""
    with pytest.raises(AgentError, match="how the host was before its first node"):
        plan.plan_host(SETTINGS, replace(HOST, found=found, others=("gpu-node",)), 5.0)
    if not isinstance(found, Absent):
        with pytest.raises(AgentError, match="how the host was before its first node"):
            plan.plan_restoration(replace(HOST, found=found), NO_LEFTOVERS)


# ---- what reset does


def test_reset_goes_on_after_a_root_with_a_damaged_record_was_removed() -> None:
    """The record shows at least that `up` made the machine."""
    damaged = replace(MADE, record=Broken("damaged"), enabled={UNIT: True})
    removed = replace(damaged, root=Absent("removed"), staged=(UNPACKED,))
    steps = (plan.ChangeUnit("disable", UNIT), plan.StopMachine("gpu-node"), plan.RemoveTree(UNPACKED))
    assert plan.plan_removal(removed, "active") == steps
    with pytest.raises(AgentError):
        plan.plan_removal(replace(removed, record=Unseen("no permission")), "inactive")


@pytest.mark.parametrize("now", [{"modules": {"overlay": True}}, {"absent_directories": ()}])
def test_reset_also_undoes_an_up_that_had_only_begun_to_change_the_host(now: dict[str, Any]) -> None:
    """No setting differs yet, but a module is loaded, or a file's directory exists."""
    found = replace(FOUND.host, modules={"overlay": False}, absent_directories=("/etc/needrestart",))
    began = replace(found, **now)
    facts = replace(HOST, found=replace(FOUND, host=found), state=began)
    assert plan.plan_restoration(facts, NO_LEFTOVERS) == (plan.RestoreHost(found),)
    assert plan.plan_restoration(replace(facts, state=found), NO_LEFTOVERS) == ()


BRIDGED = {**FOUND.host.sysctls, "net.bridge.bridge-nf-call-iptables": "1"}
OURS = FoundFile(Base64(b"ours"), 0o644)


@pytest.mark.parametrize(
    ("now", "sentences"),
    [
        ({"sysctls": BRIDGED, "modules": {"overlay": True, "br_netfilter": True}}, ()),
        ({"sysctls": {**BRIDGED, "kernel.panic": "10"}}, ("kernel.panic is 10, and was 0",)),
        ({"sysctls": {**BRIDGED, "kernel.panic": None}}, ("kernel.panic does not exist, and was 0",)),
        ({"swaps": ()}, ("/dev/sda2 is no longer used as swap",)),
        ({"files": {"/etc/a": OURS, "/etc/b": None}}, ("/etc/a still exists", "/etc/b is not as it was")),
    ],
)
def test_each_difference_is_a_sentence(now: dict[str, Any], sentences: tuple[str, ...]) -> None:
    """Modules, and parameters that they brought, may stay."""
    assert plan.since_found(FOUND.host, replace(FOUND.host, **now)) == sentences


# ---- what both see of machines whose names end in what the agent appends to names


NAMES = ("x", "x.copy", "x.copy.copy", "x.cordoned", "x.json", "x.unbounded-agent-y")


@pytest.mark.parametrize("copy", [0, 1])
def test_each_node_has_its_own_record(host: Host, copy: int) -> None:
    """Also when one copy is lost."""
    for name in NAMES:
        NODE_RECORDS.write(record_paths(name), replace(RECORD, node=name), host)
        host.file(cordoned_file(name), name)
    for name in NAMES:
        host.remove(record_paths(name)[copy])
    assert plan.made_nodes(host) == NAMES
    assert [plan.observe_node(name, host).record for name in NAMES] == [replace(RECORD, node=name) for name in NAMES]
    for path in record_paths("x"):
        host.remove(path)
    assert plan.made_nodes(host) == NAMES[1:]
    assert isinstance(plan.observe_node("x", host).record, Absent), "not another's"


@pytest.mark.parametrize("suffix", ["", PARTIAL])
def test_each_machine_has_its_own_unfinished_files(host: Host, suffix: str) -> None:
    """Even if the next attempt makes the machine from another image, or there is none."""
    staged = {name: staged_root(name, DIGEST) + suffix for name in NAMES}
    for path in staged.values():
        host.make_directory(f"{path}/image/blobs")
    assert {name: plan.observe_node(name, host).staged for name in NAMES} == {name: (staged[name],) for name in NAMES}
