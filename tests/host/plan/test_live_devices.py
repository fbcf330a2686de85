"""Changing the devices of a running machine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.apply.steps import apply, change_devices
from agent.host.plan.diff import diff
from agent.host.plan.goal import plan
from agent.host.plan.live_devices import Acknowledged
from agent.host.state.records import MARK
from agent.model.errors import AgentError, BusAnswerError, BusError, DocumentError
from agent.model.facts import (
    FIXED_FORM,
    DeviceAllow,
    Facts,
    FileState,
    LiveSettings,
    Unseen,
    VendorFacts,
    parse_live,
    render_live,
)
from agent.model.goal import ChangeDevices, RemoveFile, WriteFile
from agent.model.paths import (
    OWNED,
    RELOAD_PENDING,
    device_allow_drop_in,
    handoff_file,
    live_file,
    machine_unit,
    unit_drop_in,
)
from tests.fakes.facts import CONFIG, MACHINE, facts, nvidia, running, without_second_gpu
from tests.fakes.host import Host

BEFORE = LiveSettings(
    FIXED_FORM + "0" * 64,
    (DeviceAllow("char-pts", "rw"), DeviceAllow("/dev/char/195:0", "rw")),
    {"/dev/nvidia0": "195:0"},
)
ALLOW = (DeviceAllow("char-pts", "rw"), DeviceAllow("/dev/char/195:1", "rw"))
NODES = {"/dev/nvidia1": "195:1", "/dev/nvidia2": "195:2"}
AFTER = LiveSettings(BEFORE.fixed, ALLOW, NODES)
CHANGE = ChangeDevices(MACHINE, BEFORE, AFTER, (DeviceAllow("char-drm", "rw"),))
SET = (
    "SetUnitProperties",
    machine_unit(MACHINE),
    True,
    [
        ("DeviceAllow", ("a(ss)", [])),
        ("DeviceAllow", ("a(ss)", [("char-pts", "rw"), ("/dev/char/195:1", "rw"), ("char-drm", "rw")])),
    ],
)


def bind(path: str) -> tuple[object, ...]:
    return ("BindMountMachine", MACHINE, path, path, False, True)


def test_drms_nodes_are_bound_last_and_gpus_nodes_read_only(host: Host) -> None:
    """A pod could change the mode of the host's node. An entry without permissions stands for all of them."""
    nodes = {"/dev/dri/card0": "226:0", **CHANGE.after.nodes, "/dev/dri/renderD128": "226:128", "/dev/x": "9:9"}
    change = replace(CHANGE, after=replace(CHANGE.after, nodes=nodes), read_only=frozenset({"/dev/nvidia1"}))
    change_devices(replace(change, foreign=(DeviceAllow.parse("/dev/x"),)), host)
    paths = ["/dev/nvidia1", "/dev/nvidia2", "/dev/x", "/dev/dri/card0", "/dev/dri/renderD128"]
    assert [each[2] for each in host.bus.changes[1:]] == paths
    assert [each[4] for each in host.bus.changes[1:]] == [True, False, False, False, False]
    assert ("/dev/x", "rwm") in host.bus.changes[0][3][1][1][1]  # type: ignore[index]


@given(st.builds(
    LiveSettings, st.just("") | st.text().map(FIXED_FORM.__add__),
    st.lists(st.text().map(DeviceAllow.parse)).map(tuple),
    st.dictionaries(st.text(), st.text()), st.text(), st.booleans(),
    st.dictionaries(st.text(), st.text()),
))  # fmt: skip
def test_a_note_is_read_back(live: LiveSettings) -> None:
    assert parse_live(render_live(live)) == live


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (b'{"version": 2}', "version 2 is unknown"),
        (b'{"version": 1, "fixed": "", "allow": [1], "nodes": {}}', r"allow\[0\]"),
        (b'{"version": 1, "fixed": "", "allow": [], "nodes": {"/dev/x": 1}}', r"key nodes\["),
    ],
)
def test_an_unreadable_note_names_its_key(document: bytes, key: str) -> None:
    with pytest.raises(DocumentError, match=key):
        parse_live(document)


class Recording(Host):
    """A host that records how many changes the bus had got at each write, and the content."""

    writes: list[tuple[str, int, bytes]]

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.writes.append((path, len(self.bus.changes), content))
        super().write(path, content, mode)


def test_permitted_first_then_bound_then_noted(tmp_path: Path) -> None:
    """One call has the whole list, after an empty one: otherwise entries that are not in the list would stay.

    Only a note comes before that, and waits for no disk: it is in /run. If the pass is killed, and the GPU is removed
    meanwhile, the next pass forbids it.
    """
    host = Recording(tmp_path)
    host.writes = []
    applied = apply((CHANGE, WriteFile(unit_drop_in(MACHINE), b"")), host)
    assert applied.failures == ()
    assert host.bus.changes == [SET, bind("/dev/nvidia1"), bind("/dev/nvidia2")]
    paths = [live_file(MACHINE), live_file(MACHINE), OWNED, RELOAD_PENDING, unit_drop_in(MACHINE)]
    assert [each[:2] for each in host.writes] == list(zip(paths, (0, 3, 3, 3, 3), strict=True))
    first, last = (parse_live(content) for *_, content in host.writes[:2])
    assert set(first.allow) == {*BEFORE.allow, *ALLOW}
    assert last == AFTER


@pytest.mark.parametrize("full", ["/run/", "/var/", "/"])
def test_a_full_disk_leaves_nothing_permitted_that_is_not_granted(host: Host, full: str) -> None:
    """Withdrawing a permission waits for no note. Granting one does: otherwise each pass would bind it again."""
    host.full.append(full)
    applied = apply((CHANGE, WriteFile(unit_drop_in(MACHINE), b"")), host)
    assert applied.failures
    (_, _, _, properties), *others = host.bus.changes
    assert isinstance(properties, list)
    entries = [node for node, _ in properties[-1][1][1]]
    assert "/dev/char/195:0" not in entries
    if full == "/var/":
        assert [SET, *others] == [SET, bind("/dev/nvidia1"), bind("/dev/nvidia2")]
    else:
        assert (entries, others) == (["char-pts", "char-drm"], [])
    host.bus.changes.clear()
    if full != "/var/":
        with pytest.raises(OSError, match="No space"):
            change_devices(replace(CHANGE, before=replace(AFTER, nodes={})), host)
        assert host.bus.changes == [], "without new permissions, nothing is bound either"
    host.full.clear()
    change_devices(CHANGE, host)
    assert host.bus.changes == [SET, bind("/dev/nvidia1"), bind("/dev/nvidia2")]


def test_a_call_without_an_answer_may_have_been_executed(host: Host) -> None:
    """The call is repeated. What may have been permitted is known: if the GPU is removed meanwhile, it is forbidden."""
    host.bus.refused[machine_unit(MACHINE)] = BusAnswerError("Failed to set unit properties")
    with pytest.raises(AgentError, match="Failed to set unit properties"):
        change_devices(CHANGE, host)
    assert parse_live(host.read(live_file(MACHINE))).allow == BEFORE.allow, "nothing was permitted"
    host.bus.refused[machine_unit(MACHINE)] = BusError("no answer in time")
    with pytest.raises(AgentError, match="no answer"):
        change_devices(CHANGE, host)
    noted = parse_live(host.read(live_file(MACHINE)))
    assert set(noted.allow) == {*BEFORE.allow, *ALLOW}
    assert noted.unsure
    host.bus.refused.clear()
    host.bus.changes.clear()
    change_devices(replace(CHANGE, before=noted), host)
    assert host.bus.changes == [SET]
    assert parse_live(host.read(live_file(MACHINE))) == AFTER


def swapped() -> VendorFacts:
    """Return nvidia() after the driver found its two GPUs in the other order."""
    vendor = nvidia()
    assert isinstance(vendor.devices, tuple)
    first, second = (gpu.pci_address for gpu in vendor.gpus)
    other = {first: second, second: first, "": ""}
    return replace(vendor, devices=tuple(replace(node, pci_address=other[node.pci_address]) for node in vendor.devices))


NOTHING = Acknowledged()
RELEASED = Acknowledged(released=frozenset([MACHINE]))
LACKING = Acknowledged(missing_nodes=frozenset([MACHINE]))
FORBIDDEN = Acknowledged(forbidden_nodes=frozenset([MACHINE]))


def changes(seen: Facts, acknowledged: Acknowledged = NOTHING, config: Config = CONFIG) -> list[ChangeDevices]:
    actions = diff(plan(config, seen), seen, acknowledged).actions
    return [action for action in actions if isinstance(action, ChangeDevices)]


def test_a_gpus_permission_is_not_kept_for_another_gpu_with_its_number() -> None:
    """The machine has the same GPU before and after; the other GPU may be another machine's."""
    first, second = nvidia().gpus
    with_first = Config(machines={MACHINE: MachineSettings(gpus=[first.pci_address])})
    before = plan(with_first, facts()).goal.machines[0].live
    (change,) = changes(running(facts(swapped()), before), config=with_first)
    assert DeviceAllow("/dev/char/195:0", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:0", "rw") not in change.after.allow
    assert change.after.owners["/dev/char/195:1"] == first.pci_address
    # With an older version's note, nobody knows whether the number is still the GPU's.
    with_second = Config(machines={MACHINE: MachineSettings(gpus=[second.pci_address])})
    (change,) = changes(running(facts(), replace(before, owners={})), config=with_second)
    assert DeviceAllow("/dev/char/195:0", "rw") not in change.after.allow


def test_a_drained_gpus_number_is_kept_for_its_users() -> None:
    first, second = nvidia().gpus
    with_second = Config(machines={MACHINE: MachineSettings(gpus=[second.pci_address])})
    before = plan(with_second, facts()).goal.machines[0].live
    vendor = replace(swapped(), gpus=(replace(first, detached=True), second))
    seen = replace(running(facts(vendor), before), draining=frozenset([first.pci_address]))
    assert DeviceAllow("/dev/char/195:1", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in plan(with_second, seen).goal.machines[0].live.allow


def test_a_new_gpu_is_permitted_and_bound_before_the_handoff() -> None:
    before = plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    seen = running(facts(), before)
    (change,) = changes(seen)
    assert change.after.allow == plan(CONFIG, seen).goal.machines[0].live.allow
    assert "/dev/nvidia1" in set(change.after.nodes) - set(before.nodes)
    assert "/dev/char/195:1 rw" in change.describe()
    actions = diff(plan(CONFIG, seen), seen).actions
    kinds = [type(action).__name__ for action in actions]
    handoff = next(index for index, each in enumerate(actions) if getattr(each, "path", "") == handoff_file(MACHINE))
    assert kinds.index("ChangeDevices") < handoff
    assert kinds.index("ReloadUnits") > handoff, "the machine's answer does not wait for it"


def test_a_removed_gpu_is_forbidden_at_once_and_its_node_withdrawn_until_it_is_granted_again() -> None:
    """Another device may get its number at any moment. The machine half may never have read the earlier handoff."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    seen = running(facts(without_second_gpu()), before)
    (change,) = changes(seen)
    assert DeviceAllow("/dev/char/195:1", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in change.after.allow
    assert "/dev/nvidia1" not in change.after.nodes
    withdrawn = plan(CONFIG, seen).goal.machines[0].handoff.withdrawn
    assert "/dev/nvidia1" in withdrawn
    assert not {"/dev/nvidia0", "/dev/nvidiactl"} & set(withdrawn)
    later = running(facts(without_second_gpu()), change.after)
    assert plan(CONFIG, later).goal.machines[0].handoff.withdrawn == withdrawn
    assert changes(later) == []
    again = running(facts(), change.after)
    assert plan(CONFIG, again).goal.machines[0].handoff.withdrawn == ()
    assert changes(again)[0].after.withdrawn == ()
    starting = replace(seen, machines=(replace(seen.machines[0], unit_state="activating"),))
    assert plan(CONFIG, starting).goal.machines[0].handoff.withdrawn == ()


@pytest.mark.parametrize("state", ["inactive", "activating", "deactivating", "failed"])
def test_a_machine_that_does_not_run_or_is_unknown_is_not_changed(state: str) -> None:
    """Its next start gives it everything. If it was started without our settings, none of our nodes is bound."""
    before = plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    seen = running(facts(), before)
    assert changes(seen)
    assert changes(replace(seen, machines=(replace(seen.machines[0], unit_state=state),))) == []
    assert changes(running(facts(), None)) == []


def test_a_new_number_at_the_same_path_is_bound_again() -> None:
    """A module that is loaded again may get other major numbers."""
    live = plan(CONFIG, facts()).goal.machines[0].live
    old = replace(live, nodes={**live.nodes, "/dev/nvidia-uvm": "509:0"})
    (change,) = changes(running(facts(), old))
    assert change.describe() == "change the devices of machine gpu-node: bind /dev/nvidia-uvm"


def test_missing_nodes_are_bound_again_once_for_each_handoff() -> None:
    """Somebody, or a run that another handoff overtook, unmounted them in the machine.

    systemd before 255 would stack a second mount on each of them. Only a report that misses none ends that.
    """
    seen = facts()
    goal = plan(CONFIG, seen).goal.machines[0]
    again = replace(goal.live, rebound=goal.generation)
    (change,) = changes(running(seen, goal.live), LACKING)
    assert (change.before.nodes, change.after) == ({}, again)
    both = Acknowledged(released=frozenset([MACHINE]), missing_nodes=frozenset([MACHINE]))
    for report in (NOTHING, LACKING, both):
        assert changes(running(seen, again), report) == []
    (change,) = changes(running(seen, again), RELEASED)
    assert change.after == goal.live
    first = {path: number for path, number in goal.live.nodes.items() if path != "/dev/nvidia1"}
    (change,) = changes(running(seen, replace(again, nodes=first)), LACKING)
    assert (change.before.nodes, change.after) == (first, again)


def test_a_drained_gpus_permission_survives_a_daemon_reload() -> None:
    """A reload applies the drop-in again, over what was set in the running unit."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    first, second = nvidia().gpus
    seen = running(facts(replace(nvidia(), gpus=(first, replace(second, detached=True)))), before)
    drained = plan(CONFIG, replace(seen, draining=frozenset([second.pci_address]))).goal.machines[0]
    assert b"\nDeviceAllow=/dev/char/195:1 rw\n" in drained.drop_in.content
    assert b"/dev/nvidia1\n" not in drained.nspawn.content
    assert b"/dev/char/195:1 " not in plan(CONFIG, seen).goal.machines[0].drop_in.content


def test_settings_stay_as_long_as_a_permission_cannot_be_removed(host: Host) -> None:
    """Their record leads the next pass to the permission."""
    permission, drop_in = device_allow_drop_in(MACHINE), unit_drop_in(MACHINE)
    host.file(f"{permission}/not-empty")
    host.file(drop_in)
    others = RemoveFile(unit_drop_in("other"))
    applied = apply((RemoveFile(permission), RemoveFile(drop_in), others), host)
    assert [permission in each for each in applied.failures] == [True]
    assert host.exists(drop_in)
    assert applied.done == (others,)


def listed(seen: Facts, *allow: DeviceAllow) -> Facts:
    """Return the facts with these entries in the list of the machine's unit."""
    return replace(seen, machines=(replace(seen.machines[0], device_allow=allow),))


def test_a_permission_that_somebody_removed_is_given_again_if_the_machine_misses_it() -> None:
    """`systemctl set-property` may have changed the unit's list."""
    seen = facts()
    live = plan(CONFIG, seen).goal.machines[0].live
    (*others, taken) = live.allow
    assert changes(listed(running(seen, live), *live.allow), FORBIDDEN) == []
    assert changes(listed(running(seen, live), *others)) == [], "nobody misses it"
    (change,) = changes(listed(running(seen, live), *others), FORBIDDEN)
    assert taken not in change.before.allow
    assert set(change.after.allow) == set(live.allow)


def test_missing_nodes_are_bound_together_with_missing_permissions(host: Host) -> None:
    """A GPU that left the bus while the machine started is in the record, but not in the settings of that start."""
    seen = facts()
    live = plan(CONFIG, seen).goal.machines[0].live
    (change,) = changes(listed(running(seen, live), *live.allow[:-1]), LACKING)
    assert change.before.unsure
    change_devices(change, host)
    assert [call[0] for call in host.bus.changes[:2]] == ["SetUnitProperties", "BindMountMachine"]
    (change,) = changes(listed(running(seen, live), *live.allow), LACKING)
    assert not change.before.unsure


def test_an_administrators_permission_stays_but_not_what_an_outdated_drop_in_lists() -> None:
    """A drop-in that sorts after ours permits it; a new GPU replaces the whole list.

    If ours could not be updated, PID 1 lists its withdrawn devices again after a daemon-reload.
    """
    before = plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    withdrawn, foreign = DeviceAllow("/dev/char/195:9", "rw"), DeviceAllow("char-alsa", "rw")
    seen = listed(running(facts(), before), *reversed(before.allow), withdrawn, foreign)
    for content, expected in (
        (MARK + b"\n[Service]\nDeviceAllow=/dev/char/195:9 rw\n", {foreign}),
        (b"[Service]\nDeviceAllow=/dev/char/195:9 rw\n", {withdrawn, foreign}),
    ):
        files = {**seen.files, unit_drop_in(MACHINE): FileState(content, owned=True)}
        (change,) = changes(replace(seen, files=files))
        assert set(change.foreign) == expected


@pytest.mark.parametrize("silent", [False, True])
def test_one_bad_node_does_not_hold_up_the_others_unless_the_machine_is_silent(host: Host, silent: bool) -> None:
    """Each call would take as long to fail, and hold up all other machines.

    Successful binds are noted, and only the rest is tried again: systemd 252 would stack mounts.
    """
    error = BusError("Failed to bind mount: Operation not supported")
    error.__cause__ = TimeoutError() if silent else None
    host.bus.refused["/dev/nvidia1"] = error
    with pytest.raises(AgentError, match=r"/dev/nvidia1.*not supported.*restart gpu-node --kubeconfig"):
        change_devices(CHANGE, host)
    assert (bind("/dev/nvidia2") in host.bus.changes) is not silent
    noted = parse_live(host.read(live_file(MACHINE)))
    assert (noted.allow, list(noted.nodes)) == (ALLOW, [] if silent else ["/dev/nvidia2"])


def test_a_withdrawn_gpu_is_forbidden_once_no_pod_can_get_it() -> None:
    """The machine half removes it from the CDI specification first, and confirms that in its report.

    The time since which it is kept does not begin again: a machine that causes a change in each pass would keep it.
    """
    before = plan(CONFIG, facts()).goal.machines[0].live
    taken = replace(nvidia(), gpus=(nvidia().gpus[0], replace(nvidia().gpus[1], driver="vfio-pci")))
    (first,) = changes(running(facts(taken), before), Acknowledged(at=100.0))
    assert first.after.kept_since == 100.0
    assert DeviceAllow("/dev/char/195:1", "rw") in first.after.allow
    assert changes(running(facts(taken), first.after), Acknowledged(at=200.0)) == []
    lacking = replace(first.after, nodes={})
    (again,) = changes(running(facts(taken), lacking), Acknowledged(at=300.0))
    assert again.after.kept_since == 100.0
    (released,) = changes(running(facts(taken), first.after), RELEASED)
    assert released.after.kept_since == 0.0
    assert DeviceAllow("/dev/char/195:1", "rw") not in released.after.allow


def test_each_machine_is_compared_with_its_own_record() -> None:
    first, second = nvidia().gpus
    config = Config.validated({"machines": {"a": {"gpus": [first.pci_address]}, "b": {"gpus": [second.pci_address]}}})
    seen = facts(machine="a")
    files = {**seen.files, **facts(machine="b").files}
    both = tuple(replace(each.machines[0], unit_state="active") for each in (seen, facts(machine="b")))
    seen = replace(seen, files=files, machines=both)
    lives = {each.name: each.live for each in plan(config, seen).goal.machines}
    settled = tuple(replace(each, live=lives[each.name]) for each in both)
    assert changes(replace(seen, machines=settled), config=config) == []
    lacking = (settled[0], replace(settled[1], live=replace(lives["b"], nodes={})))
    assert [each.machine for each in changes(replace(seen, machines=lacking), config=config)] == ["b"]
    with_withdrawn = (settled[0], replace(settled[1], live=replace(lives["b"], nodes={"/dev/nvidia9": "195:9"})))
    goals = plan(config, replace(seen, machines=with_withdrawn)).goal.machines
    assert [each.handoff.withdrawn for each in goals] == [(), ("/dev/nvidia9",)]


def test_directories_of_sockets_are_no_withdrawn_nodes() -> None:
    """The machine half would look for device nodes there."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    nodes = {**before.nodes, "/run/nvidia-persistenced": "ro:7", "/run/nvidia-mps": "rw:8", "/dev/nvidia9": "195:9"}
    seen = running(facts(), replace(before, nodes=nodes))
    assert plan(CONFIG, seen).goal.machines[0].handoff.withdrawn == ("/dev/nvidia9",)
    unknown = replace(seen, machines=(replace(seen.machines[0], unit_state=Unseen("no answer")),))
    assert plan(CONFIG, unknown).goal.machines[0].handoff.withdrawn == ("/dev/nvidia9",), "it may run"


def test_an_uncertain_change_is_repeated_and_stays_uncertain_while_nodes_are_bound_again() -> None:
    seen = facts()
    live = replace(plan(CONFIG, seen).goal.machines[0].live, unsure=True)
    (change,) = changes(running(seen, live))
    assert not change.after.unsure
    (change,) = changes(listed(running(seen, live), *live.allow), LACKING)
    assert change.before.unsure
