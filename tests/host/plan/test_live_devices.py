"""Changing the devices of a running machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.settings import Config, MachineSettings
from agent.host.apply.live_devices import change_devices
from agent.host.apply.steps import apply
from agent.host.plan.diff import Said, diff
from agent.host.plan.goal import plan
from agent.model.actions import ChangeDevices, RemoveFile, WriteFile
from agent.model.device_allow import DeviceAllow
from agent.model.errors import ApplyError, BusAnswerError, BusError, DocumentError
from agent.model.facts import Facts, VendorFacts
from agent.model.live import LiveSettings, parse_live, render_live
from agent.model.paths import handoff_file, live_file, machine_unit, set_device_allow, unit_drop_in
from agent.system.files import System
from tests.fakes.facts import facts, nvidia
from tests.fakes.host import Host
from tests.host.plan.test_goal import CONFIG

MACHINE = "gpu-node"
BEFORE = LiveSettings(
    "0" * 64, (DeviceAllow("char-pts", "rw"), DeviceAllow("/dev/char/195:0", "rw")), {"/dev/nvidia0": "195:0"}
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


@given(st.builds(
    LiveSettings, st.text(), st.lists(st.text().map(DeviceAllow.parse)).map(tuple),
    st.dictionaries(st.text(), st.text()), st.text(), st.booleans(),
    st.dictionaries(st.text(), st.text()),
))  # fmt: skip
def test_what_is_noted_is_read_again(live: LiveSettings) -> None:
    assert parse_live(render_live(live)) == live


def test_permissions_are_noted_as_systemd_writes_them() -> None:
    """Machines go on while the agent is upgraded or taken back to an older release, which reads the same note."""
    assert json.loads(render_live(AFTER))["allow"] == ["char-pts rw", "/dev/char/195:1 rw"]


def test_an_entry_without_permissions_stands_for_all_of_them(host: Host) -> None:
    change_devices(replace(CHANGE, others=(DeviceAllow.parse("/dev/x"),)), host)
    assert ("/dev/x", "rwm") in host.bus.changes[0][3][1][1][1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (b"[]", "must be an object"),
        (b'{"version": 2}', "version 2 is unknown"),
        (b'{"version": 1, "fixed": "", "allow": [1], "nodes": {}}', r"allow\[0\]"),
        (b'{"version": 1, "fixed": "", "allow": [], "nodes": {"/dev/x": 1}}', r"nodes\['/dev/x'\]"),
    ],
)
def test_what_cannot_be_read_names_its_key(document: bytes, key: str) -> None:
    with pytest.raises(DocumentError, match=key):
        parse_live(document)


def test_permitted_first_then_bound_then_noted(host: Host) -> None:
    """The whole list in one call, an empty one first: otherwise entries that are not in it would stay."""
    change_devices(CHANGE, host)
    assert host.bus.changes == [SET, bind("/dev/nvidia1"), bind("/dev/nvidia2")]
    assert parse_live(host.read(live_file(MACHINE))) == AFTER


@pytest.mark.parametrize("full", ["/run/", "/var/", "/"])
def test_a_full_disk_leaves_nothing_permitted_that_is_not_granted(host: Host, full: str) -> None:
    """What takes a right away waits for no note; what gives one does, and what is bound would be bound in each pass."""
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
    host.full.clear()
    change_devices(CHANGE, host)
    assert host.bus.changes == [SET, bind("/dev/nvidia1"), bind("/dev/nvidia2")]


def test_a_full_run_binds_nothing_even_where_nothing_is_to_be_permitted(host: Host) -> None:
    host.full.append("/run/")
    with pytest.raises(OSError, match="No space"):
        change_devices(replace(CHANGE, before=replace(AFTER, nodes={})), host)
    assert host.bus.changes == []


def test_a_question_without_an_answer_may_have_been_heard(host: Host) -> None:
    """It is asked again, and what may be permitted is known: a GPU that goes meanwhile is forbidden."""
    host.bus.refused[machine_unit(MACHINE)] = BusError("no answer in time")
    with pytest.raises(ApplyError, match="no answer"):
        change_devices(CHANGE, host)
    noted = parse_live(host.read(live_file(MACHINE)))
    assert set(noted.allow) == {*BEFORE.allow, *ALLOW}
    assert noted.unsure
    host.bus.refused.clear()
    host.bus.changes.clear()
    change_devices(replace(CHANGE, before=noted), host)
    assert host.bus.changes == [SET]
    assert parse_live(host.read(live_file(MACHINE))) == AFTER


def test_what_may_not_have_been_done_is_done_again() -> None:
    seen = facts()
    live = replace(plan(CONFIG, seen).goal.machines[0].live, unsure=True)
    (change,) = changes(running(seen, live))
    assert not change.after.unsure


def test_what_an_older_version_noted_is_sure(host: Host) -> None:
    document = json.loads(render_live(BEFORE))
    del document["unsure"], document["owners"]
    assert parse_live(json.dumps(document).encode()) == BEFORE


def swapped() -> VendorFacts:
    """As nvidia(), after the driver found its two GPUs in the other order."""
    vendor = nvidia()
    assert isinstance(vendor.devices, tuple)
    first, second = (gpu.pci_address for gpu in vendor.gpus)
    other = {first: second, second: first, "": ""}
    return replace(vendor, devices=tuple(replace(node, pci_address=other[node.pci_address]) for node in vendor.devices))


def test_what_was_permitted_of_a_gpu_is_not_kept_for_another_one_that_has_its_number_now() -> None:
    """The machine has the same GPU before and after; the other GPU may be another machine's."""
    first, second = nvidia().gpus
    of_first = Config(machines={MACHINE: MachineSettings(gpus=[first.pci_address])})
    before = plan(of_first, facts()).goal.machines[0].live
    seen = running(facts(swapped()), before)
    actions = diff(plan(of_first, seen), seen, NOTHING).actions
    (change,) = (action for action in actions if isinstance(action, ChangeDevices))
    assert DeviceAllow("/dev/char/195:0", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:0", "rw") not in change.after.allow
    assert change.after.owners["/dev/char/195:1"] == first.pci_address
    # As an older version noted it: that the number is still the GPU's cannot be told.
    taken = running(facts(), replace(before, owners={}))
    of_second = Config(machines={MACHINE: MachineSettings(gpus=[second.pci_address])})
    actions = diff(plan(of_second, taken), taken, NOTHING).actions
    (change,) = (action for action in actions if isinstance(action, ChangeDevices))
    assert DeviceAllow("/dev/char/195:0", "rw") not in change.after.allow


def test_a_drained_gpus_number_is_kept_for_who_used_that_gpu() -> None:
    first, second = nvidia().gpus
    of_second = Config(machines={MACHINE: MachineSettings(gpus=[second.pci_address])})
    before = plan(of_second, facts()).goal.machines[0].live
    vendor = replace(swapped(), gpus=(replace(first, detached=True), second))
    seen = replace(running(facts(vendor), before), draining=frozenset([first.pci_address]))
    assert DeviceAllow("/dev/char/195:1", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in plan(of_second, seen).goal.machines[0].live.allow


def test_whose_the_numbers_are_is_noted_in_what_an_older_version_noted(host: Host) -> None:
    seen = facts()
    live = plan(CONFIG, seen).goal.machines[0].live
    (change,) = changes(running(seen, replace(live, owners={})))
    change_devices(change, host)
    assert host.bus.changes == []
    assert parse_live(host.read(live_file(MACHINE))) == live


def test_one_bad_node_does_not_hold_up_the_others(host: Host) -> None:
    """What succeeded is noted, and only the rest is tried again: systemd 252 would stack mounts."""
    host.bus.refused["/dev/nvidia1"] = BusError("Failed to bind mount: Operation not supported")
    with pytest.raises(ApplyError, match=r"/dev/nvidia1.*not supported.*machinectl reboot gpu-node"):
        change_devices(CHANGE, host)
    noted = parse_live(host.read(live_file(MACHINE)))
    assert (noted.allow, list(noted.nodes)) == (ALLOW, ["/dev/nvidia2"])


def test_what_could_not_be_permitted_may_be_and_is_tried_again(host: Host) -> None:
    host.bus.refused[machine_unit(MACHINE)] = BusAnswerError("Failed to set unit properties")
    with pytest.raises(ApplyError, match="Failed to set unit properties"):
        change_devices(CHANGE, host)
    assert parse_live(host.read(live_file(MACHINE))).allow == BEFORE.allow


NOTHING = Said()
RELEASED = Said(released=frozenset([MACHINE]))
LACKING = Said(lacking=frozenset([MACHINE]))


def running(seen: Facts, live: LiveSettings | None) -> Facts:
    return replace(seen, machines=(replace(seen.machines[0], unit_state="active", live=live),))


def changes(seen: Facts, said: Said = NOTHING) -> list[ChangeDevices]:
    actions = diff(plan(CONFIG, seen), seen, said).actions
    return [action for action in actions if isinstance(action, ChangeDevices)]


def without_second_gpu() -> VendorFacts:
    """As nvidia(), after the GPU of /dev/nvidia1 was unplugged."""
    vendor = nvidia()
    assert isinstance(vendor.devices, tuple)
    nodes = tuple(node for node in vendor.devices if node.pci_address != vendor.gpus[1].pci_address)
    return replace(vendor, gpus=vendor.gpus[:1], devices=nodes)


def test_a_gpu_that_comes_is_permitted_and_bound_before_the_handoff() -> None:
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
    assert "ReloadUnits" not in kinds, "the machine's answer does not wait for it"


def test_a_gpu_that_is_gone_is_forbidden_at_once() -> None:
    """Its number may be another device's in a moment."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    (change,) = changes(running(facts(without_second_gpu()), before))
    assert DeviceAllow("/dev/char/195:1", "rw") in before.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in change.after.allow
    assert "/dev/nvidia1" not in change.after.nodes


def test_a_gpu_that_is_taken_back_is_forbidden_once_no_pod_can_be_given_it() -> None:
    """The machine half removes it from the CDI spec first, and says so by its report."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    taken = replace(nvidia(), gpus=(nvidia().gpus[0], replace(nvidia().gpus[1], driver="vfio-pci")))
    seen = running(facts(taken), before)
    assert DeviceAllow("/dev/char/195:1", "rw") in changes(seen)[0].after.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in changes(seen, RELEASED)[0].after.allow


def test_a_running_machine_that_has_everything_is_left_alone() -> None:
    seen = facts()
    assert changes(running(seen, plan(CONFIG, seen).goal.machines[0].live)) == []


def test_what_an_administrator_permitted_stays() -> None:
    """By a drop-in that sorts behind ours; the whole list is replaced when a GPU comes."""
    before = plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    seen = running(facts(), before)
    listed = (*reversed(before.allow), DeviceAllow("char-alsa", "rw"))
    seen = replace(seen, machines=(replace(seen.machines[0], device_allow=listed),))
    assert changes(seen)[0].others == (DeviceAllow("char-alsa", "rw"),)


def test_nothing_is_done_in_a_machine_of_which_nothing_is_known() -> None:
    """It was started without our settings: nothing of ours is bound into it."""
    assert changes(running(facts(), None)) == []


def test_another_number_at_the_same_path_is_bound_anew() -> None:
    """A module that is loaded again may get other majors."""
    live = plan(CONFIG, facts()).goal.machines[0].live
    old = replace(live, nodes={**live.nodes, "/dev/nvidia-uvm": "509:0"})
    (change,) = changes(running(facts(), old))
    assert change.describe() == "change the devices of machine gpu-node: bind /dev/nvidia-uvm"


def test_who_is_killed_in_between_leaves_no_permission_that_nobody_knows_of(host: Host) -> None:
    """What is about to be permitted is noted first: a GPU that goes meanwhile is forbidden by the next pass."""
    noted: list[LiveSettings] = []

    def die(*call: object) -> tuple[object, ...]:
        noted.append(parse_live(Path(host.root, live_file(MACHINE)[1:]).read_bytes()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change_devices(CHANGE, System(host.runner, host.root, die))
    assert set(noted[0].allow) == {*BEFORE.allow, *ALLOW}


def test_nodes_that_the_machine_lacks_are_bound_once_more_for_each_handoff(host: Host) -> None:
    """They were unmounted there, by somebody or by a run that was overtaken by another handoff."""
    seen = facts()
    goal = plan(CONFIG, seen).goal.machines[0]
    (change,) = changes(running(seen, goal.live), LACKING)
    assert change.before.nodes == {}
    assert change.after == replace(goal.live, rebound=goal.generation)
    assert changes(running(seen, change.after), LACKING) == []
    (change,) = changes(running(seen, change.after), RELEASED)
    assert change.after == goal.live


def test_what_a_drained_gpus_users_may_open_outlasts_a_daemon_reload() -> None:
    """A reload applies the drop-in anew, over what was set in the running unit."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    first, second = nvidia().gpus
    seen = running(facts(replace(nvidia(), gpus=(first, replace(second, detached=True)))), before)
    drained = plan(CONFIG, replace(seen, draining=frozenset([second.pci_address]))).goal.machines[0]
    assert b"\nDeviceAllow=/dev/char/195:1 rw\n" in drained.drop_in.content
    assert b"/dev/nvidia1\n" not in drained.nspawn.content
    assert b"/dev/char/195:1 " not in plan(CONFIG, seen).goal.machines[0].drop_in.content


def test_settings_stay_as_long_as_a_permission_cannot_be_removed(host: Host) -> None:
    """Their record is what leads the next pass to it."""
    permission, drop_in = set_device_allow(MACHINE), unit_drop_in(MACHINE)
    host.file(f"{permission}/not-empty")
    host.file(drop_in)
    applied = apply((RemoveFile(permission), RemoveFile(drop_in)), host)
    assert [permission in each for each in applied.failures] == [True]
    assert host.exists(drop_in)
    assert applied.done == ()
