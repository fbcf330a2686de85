"""Several machines on one host, each with its own GPUs."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.goal import plan
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, DeviceAllow, Facts, FileState, Granted, LiveSettings, MachineFacts, Unseen
from agent.model.goal import fault
from agent.model.paths import machine_files
from tests.fakes.facts import address, facts, nvidia

GPUS = 4


def host(*machines: str, gpus: range = range(GPUS)) -> Facts:
    """Return a host where those of the GPUs 0 to GPUS - 1 are plugged in that `gpus` has."""
    seen = facts(nvidia(GPUS))
    vendor = seen.vendors[0]
    assert isinstance(vendor.devices, tuple)
    present = {address(index) for index in gpus}
    vendor = replace(
        vendor,
        gpus=tuple(gpu for gpu in vendor.gpus if gpu.pci_address in present),
        devices=tuple(node for node in vendor.devices if node.pci_address in {"", *present}),
    )
    return replace(
        seen,
        vendors=(vendor,),
        machines=tuple(MachineFacts("inactive", name=name, root=f"/var/lib/machines/{name}") for name in machines),
        files={path: FileState(Absent("not there"), False) for name in machines for path in machine_files(name)},
    )


def config(**gpus: str | list[str]) -> Config:
    return Config(machines={name: MachineSettings(gpus=wanted) for name, wanted in gpus.items()})


def gpus_by_machine(settings: Config, seen: Facts) -> dict[str, list[int]]:
    """Return the indices of GPUs by machine."""
    machines = plan(settings, seen).goal.machines
    return {each.name: [int(gpu[5:7], 16) - 1 for gpu in each.grants[0].gpus] for each in machines}


def after(settings: Config, seen: Facts, then: Facts) -> Facts:
    """Return the host `then`, with what was granted on the host `seen`."""
    granted = {each.name: each.granted for each in plan(settings, seen).goal.machines}
    return replace(then, machines=tuple(replace(each, granted=granted[each.name]) for each in then.machines))


def test_numbers_of_gpus_do_not_overlap_with_each_other_nor_with_named_gpus() -> None:
    """But `all` means all GPUs."""
    assert gpus_by_machine(config(a="count=1", b="count=2"), host("a", "b")) == {"a": [0], "b": [1, 2]}
    assert gpus_by_machine(config(a="count=2", b=[address(1)]), host("a", "b")) == {"a": [0, 2], "b": [1]}
    assert gpus_by_machine(config(a="count=1", b="all"), host("a", "b")) == {"a": [0], "b": [0, 1, 2, 3]}
    (_, second) = plan(config(a="count=3", b="count=2"), host("a", "b")).goal.machines
    assert second.grants[0].problems == (
        "the configuration asks for 2 GPUs, but other machines have 3 of the host's 4 usable GPUs",
    )


def test_only_a_candidate_may_have_the_gpus_of_a_number_that_another_machine_has() -> None:
    """It has its machine's, and takes none from any machine, whatever its own settings would select."""
    settings = config(**{"a": "count=1", "a-next": "count=1", "b": "count=2"})
    seen = replace(host("a", "a-next", "b"), candidates={"a-next": "a"})
    assert gpus_by_machine(settings, seen) == {"a": [0], "a-next": [0], "b": [1, 2]}
    assert gpus_by_machine(settings, after(settings, seen, seen)) == {"a": [0], "a-next": [0], "b": [1, 2]}
    none = replace(host("a", "a-next", "b", gpus=range(0)), candidates={"a-next": "a"})
    names = [goal.name for goal in plan(settings, none).goal.machines]
    assert names == ["a-next"], "without settings, its files would change owners when it starts"


def without_access(seen: Facts, index: int) -> Facts:
    """Return the host with a GPU that the driver excludes."""
    (vendor,) = seen.vendors
    gpus = tuple(replace(gpu, excluded=gpu.pci_address == address(index)) for gpu in vendor.gpus)
    return replace(seen, vendors=(replace(vendor, gpus=gpus),))


@pytest.mark.parametrize(
    ("wanted", "granted", "problems"),
    [
        ("all", [1, 2, 3], []),
        ("count=3", [1, 2, 3], []),
        ("count=4", [1, 2, 3], ["the configuration asks for 4 GPUs, but the host has 3 usable GPUs", "excluded"]),
        ([address(0), address(1)], [1], ["excluded"]),
    ],
)
def test_a_gpu_that_the_driver_excludes_is_granted_to_no_machine(
    wanted: str | list[str], granted: list[int], problems: list[str]
) -> None:
    """Also if a machine had it before. The machine with all others gets the fabric."""
    settings = config(a=wanted)
    seen = after(settings, host("a"), without_access(host("a"), 0))
    assert gpus_by_machine(settings, seen) == {"a": granted}
    (grant,) = plan(settings, seen).goal.machines[0].grants
    assert len(grant.problems) == len(problems)
    assert all(part in problem for part, problem in zip(problems, grant.problems, strict=True))
    assert any(node.kind is DeviceKind.NVSWITCH for node in grant.nodes) is (len(granted) == 3)
    (machine,) = plan(config(a="all"), without_access(host("a", gpus=range(1)), 0)).goal.machines
    assert (machine.grants[0].gpus, len(machine.grants[0].problems)) == ((), 1), "all are excluded"


def test_a_new_gpu_displaces_none_in_use_and_a_removed_one_is_replaced() -> None:
    """This holds even if its address sorts before theirs."""
    settings = config(a="count=1", b="count=1")
    before = host("a", "b", gpus=range(1, 4))
    assert gpus_by_machine(settings, before) == {"a": [1], "b": [2]}
    assert gpus_by_machine(settings, after(settings, before, host("a", "b"))) == {"a": [1], "b": [2]}
    settings = config(a="count=2", b="count=1")
    then = after(settings, host("a", "b"), host("a", "b", gpus=range(1, 4)))
    assert gpus_by_machine(settings, then) == {"a": [1, 3], "b": [2]}


def detaching(seen: Facts, *indices: int, draining: bool) -> Facts:
    """Return the host while an administrator detaches some of its GPUs."""
    taken = {address(index) for index in indices}
    vendor = seen.vendors[0]
    vendor = replace(vendor, gpus=tuple(replace(gpu, detached=gpu.pci_address in taken) for gpu in vendor.gpus))
    return replace(seen, vendors=(vendor,), draining=frozenset(taken if draining else ()))


def test_a_drained_gpu_stays_with_its_machine_until_it_is_drained() -> None:
    """It may be attached again. Meanwhile nobody else gets it, and its machine gets no other, even if short of GPUs."""
    settings = config(a="count=4", b="count=1")
    seen = host("a", "b", gpus=range(3))
    seen = replace(seen, machines=(seen.machines[0], replace(seen.machines[1], granted=Granted("", (address(1),), {}))))
    before = after(settings, seen, seen)
    assert gpus_by_machine(settings, before) == {"a": [0, 2], "b": [1]}
    for _ in range(2):
        before = after(settings, before, detaching(host("a", "b"), 1, draining=True))
        assert gpus_by_machine(settings, before) == {"a": [0, 2, 3], "b": []}
    assert gpus_by_machine(settings, after(settings, before, host("a", "b"))) == {"a": [0, 2, 3], "b": [1]}
    settings = config(a="count=1", b="count=1")
    before = after(settings, host("a", "b"), detaching(host("a", "b"), 0, draining=True))
    assert gpus_by_machine(settings, before) == {"a": [], "b": [1]}
    then = after(settings, before, detaching(host("a", "b"), 0, draining=False))
    assert gpus_by_machine(settings, then) == {"a": [2], "b": [1]}
    assert gpus_by_machine(settings, after(settings, then, host("a", "b"))) == {"a": [2], "b": [1]}


def test_only_a_machine_with_all_gpus_gets_the_fabric() -> None:
    """Detached GPUs count: otherwise a machine with the other GPUs could reach the detached ones when those return."""
    for gpus, seen, expected in (
        ([address(0)], detaching(host("a", gpus=range(2)), 1, draining=False), False),
        ("all", detaching(host("a", gpus=range(2)), 1, draining=False), True),
        ([address(0)], host("a", gpus=range(1)), True),
    ):
        (machine,) = plan(config(a=gpus), seen).goal.machines
        assert any(node.kind is DeviceKind.NVSWITCH for node in machine.grants[0].nodes) is expected


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, GPUS + 1), min_size=1))
def test_no_gpu_is_granted_twice_by_number(wanted: dict[str, int]) -> None:
    settings = config(**{name: f"count={number}" for name, number in wanted.items()})
    found = gpus_by_machine(settings, host(*wanted))
    assert sum(map(len, found.values())) == len({gpu for gpus in found.values() for gpu in gpus})
    assert gpus_by_machine(settings, after(settings, host(*wanted), host(*wanted))) == found


def test_a_named_gpu_is_reserved_for_its_machine() -> None:
    """Its root directory may be mounted later, and its GPU would then have to be withdrawn from another machine."""
    seen = host("a", "b")
    seen = replace(seen, machines=(replace(seen.machines[0], root=Absent("not mounted")), seen.machines[1]))
    assert gpus_by_machine(config(a=[address(0)], b="count=1"), seen) == {"b": [1]}


def test_a_machine_that_keeps_its_settings_without_a_table_keeps_its_gpus() -> None:
    """It runs, or `up` made it and the host's next boot starts it with them: the GPU would be granted twice."""
    a, z = host("a", "z").machines
    z = replace(z, granted=Granted("", (address(0), address(2)), {}))
    until = " but starts when the host boots; `machinectl disable z` releases the GPU"
    for each, then in (
        (replace(z, unit_state="active"), ""),
        (replace(z, kept_from_boot_by="machinectl disable z"), until),
    ):
        seen = replace(host("a", "z"), machines=(a, each))
        assert gpus_by_machine(config(a="count=2"), seen) == {"a": [1, 3]}
        assert gpus_by_machine(config(a="count=3"), seen) == {"a": [1, 3]}
        expected = f"GPU {address(0)} is still held by machine z, which is no longer in the configuration{then}"
        assert expected in problems(config(a="count=3"), seen), "plan alone would say how to free it"
        # Machines may share GPUs that their settings name.
        assert gpus_by_machine(config(a=[address(0)]), seen) == {"a": [0]}
        assert gpus_by_machine(config(a="all"), seen) == {"a": [0, 1, 2, 3]}
        # An earlier release may have granted a GPU twice. Pods use it.
        twice = replace(a, granted=Granted("", (address(0),), {}))
        assert gpus_by_machine(config(a="count=2"), replace(seen, machines=(twice, each))) == {"a": [0, 1]}
        for unknown in (Unseen("EIO"), Broken("damaged")):
            seen = replace(seen, machines=(a, replace(each, granted=unknown)))
            assert gpus_by_machine(config(a="count=2"), seen) == {"a": []}
            assert f"{address(3)} is perhaps still held" in str(problems(config(a="count=2"), seen))
            seen = replace(seen, machines=(a, replace(each, granted=unknown, unit_state="active", live=LIVE)))
            assert gpus_by_machine(config(a="count=3"), seen) == {"a": [0, 1, 3]}, "it may open GPU 2"
    ended = replace(host("a", "z"), machines=(a, z))
    assert gpus_by_machine(config(a="count=2"), ended) == {"a": [0, 1]}, "z loses its settings"


def test_an_unknown_grant_holds_up_only_machines_that_could_get_its_gpus() -> None:
    """Machines with a number of GPUs are held up; the others get theirs, whoever else has them."""
    wanted: dict[str, str | list[str]] = {"a": "count=1", "b": "count=1", "c": "all", "d": [address(3)]}
    seen = host(*wanted)
    unseen = Unseen("granted.json: Input/output error")
    seen = replace(seen, machines=(replace(seen.machines[0], granted=unseen), *seen.machines[1:]))
    assert plan(config(**wanted), seen).held == {"a": unseen.why, "b": unseen.why}, "it may have any of the GPUs"
    assert gpus_by_machine(config(**wanted), seen) == {"c": [0, 1, 2, 3], "d": [3]}
    with_all_unseen = replace(
        seen, machines=(*seen.machines[:2], replace(seen.machines[2], granted=unseen), seen.machines[3])
    )
    with_all_unseen = replace(with_all_unseen, machines=(host("a").machines[0], *with_all_unseen.machines[1:]))
    assert plan(config(**wanted), with_all_unseen).held.keys() == {"c"}, "nobody's GPUs are kept free for one with all"


def test_a_running_machine_whose_grant_is_damaged_keeps_the_gpus_that_it_may_open() -> None:
    """Without a record of these, it may have any GPU: no machine with a number of GPUs changes until it has ended."""
    settings, damaged = config(a="count=1", z="count=1"), Broken("granted.json: damaged")
    a, z = host("a", "z").machines
    z = replace(z, unit_state="active", live=LIVE, granted=damaged)
    seen = host("a", "z", gpus=range(2, 4))
    for other in (a, replace(a, granted=damaged), replace(a, granted=Granted("", (address(3),), {}))):
        assert gpus_by_machine(settings, replace(seen, machines=(other, z))) == {"a": [3], "z": [2]}
    seen = replace(seen, machines=(a, replace(z, live=None)))
    assert plan(settings, seen).held == {"a": damaged.why, "z": damaged.why}
    assert not plan(settings, replace(seen, machines=(a, replace(z, live=None, unit_state="inactive")))).held


LIVE = LiveSettings("", (DeviceAllow("/dev/char/195:2", "rw"),), {}, owners={"/dev/char/195:2": address(2)})
NO_TEXT = cast(Any, (*LIVE.allow, None))
"""In place of a permission, this makes the machine's plan fail."""


def faulted(*granted: int, seen: Facts | None = None) -> Facts:
    """Return facts of `z`, which sorts last, was granted these GPUs, may still open GPU 2, and whose plan fails."""
    machines = {each.name: each for each in (seen or host("a", "z")).machines}
    had = Granted("", tuple(map(address, granted)), {})
    machines["z"] = replace(machines["z"], granted=had, live=replace(LIVE, allow=NO_TEXT))
    return replace(seen or host("a", "z"), machines=tuple(machines.values()))


def problems(settings: Config, seen: Facts) -> tuple[str, ...]:
    return next(each for each in plan(settings, seen).goal.machines if each.name == "a").grants[0].problems


@pytest.mark.parametrize(
    ("wanted", "given_then"), [([address(1), address(2), address(3)], [3]), ("all", [0, 3]), ("count=3", [0, 3])]
)
def test_nobody_gets_what_a_faulted_machine_has(wanted: str | list[str], given_then: list[int]) -> None:
    """This holds even for a machine that is planned first.

    `z` was granted GPU 1, still has GPU 2, and was to have one more.
    """
    settings, seen = config(a=wanted, z="count=1"), faulted(1)
    assert plan(settings, seen).faults.keys() == {"z"}
    assert gpus_by_machine(settings, seen) == {"a": given_then}
    why = "still held by machine z, for which the agent had an unexpected error (InternalError)"
    still = [f"GPU {address(gpu)} is {why}" for gpu in (1, 2)]
    assert [each for each in problems(settings, seen) if each.startswith("GPU")] == still


def test_a_fault_withdraws_no_gpu_from_another_machine() -> None:
    """A machine keeps its GPUs, whoever else has them; the same holds for GPUs that the settings of both name."""
    settings = config(a="all", z=[address(0)])
    before = after(settings, host("a", "z"), host("a", "z"))
    assert gpus_by_machine(settings, faulted(1, 2, seen=before)) == {"a": [0, 1, 2, 3]}
    assert gpus_by_machine(settings, faulted(0)) == {"a": [0, 1, 3]}
    assert gpus_by_machine(config(a=[address(2)], z="all"), faulted(0)) == {"a": [2]}


@pytest.mark.parametrize("wanted", [[address(1)], "all"])
def test_nobody_gets_more_while_a_faulted_machines_gpus_are_unknown(wanted: str | list[str]) -> None:
    wrong = fault("observe it", ValueError("nonsense"))
    settings = config(a=wanted, z=[address(3)])
    seen = host("a", "z")
    seen = replace(seen, machines=(seen.machines[0], replace(seen.machines[1], root=wrong, granted=wrong)))
    assert gpus_by_machine(settings, seen) == {"a": [3] if wanted == "all" else []}
    expected = f"GPU {address(1)} is perhaps still held by machine z, for which the agent had an unexpected error"
    assert any(each.startswith(expected) for each in problems(settings, seen))
    has = replace(seen.machines[0], granted=Granted("", (address(1),), {}))
    seen = replace(seen, machines=(has, seen.machines[1]))
    assert gpus_by_machine(settings, seen) == {"a": [1, 3] if wanted == "all" else [1]}
    # It does not lose its own GPU either, if that is unknown.
    seen = replace(seen, machines=(replace(has, granted=Unseen("EIO")), seen.machines[1]))
    assert plan(settings, seen).held["a"] == "EIO"
