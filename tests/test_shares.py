"""Several machines on one host, each with its GPUs."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.config import Config, MachineSettings
from agent.facts import Absent, Facts, FileState, MachineFacts, Unseen
from agent.granted import Granted
from agent.identity import DeviceKind
from agent.paths import machine_files
from agent.plan import plan
from tests.example import address, facts, nvidia

GPUS = 4


def host(*machines: str, gpus: range = range(GPUS)) -> Facts:
    """With those of the GPUs 0 to GPUS - 1 that are plugged in."""
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
        machines=tuple(MachineFacts(name, f"/var/lib/machines/{name}", "inactive") for name in machines),
        files={path: FileState(Absent("not there"), False) for name in machines for path in machine_files(name)},
    )


def config(**gpus: str | list[str]) -> Config:
    return Config(machines={name: MachineSettings(gpus=wanted) for name, wanted in gpus.items()})


def given_to(settings: Config, seen: Facts) -> dict[str, list[int]]:
    """Indices of the GPUs by machine."""
    machines = plan(settings, seen).goal.machines
    return {each.name: [int(gpu[5:7], 16) - 1 for gpu in each.grants[0].gpus] for each in machines}


def after(settings: Config, seen: Facts, then: Facts) -> Facts:
    """The host later, with what was granted for what was seen before."""
    granted = {each.name: each.granted for each in plan(settings, seen).goal.machines}
    return replace(then, machines=tuple(replace(each, granted=granted[each.name]) for each in then.machines))


def test_numbers_of_gpus_do_not_overlap() -> None:
    assert given_to(config(a="count=1", b="count=2"), host("a", "b")) == {"a": [0], "b": [1, 2]}


def test_gpus_that_are_named_are_not_counted() -> None:
    assert given_to(config(a="count=2", b=[address(1)]), host("a", "b")) == {"a": [0, 2], "b": [1]}


def test_all_are_all() -> None:
    assert given_to(config(a="count=1", b="all"), host("a", "b")) == {"a": [0], "b": [0, 1, 2, 3]}


def test_too_few_are_said_with_the_reason() -> None:
    (_, second) = plan(config(a="count=3", b="count=2"), host("a", "b")).goal.machines
    assert second.grants[0].problems == ("2 GPUs are wanted and the host has 1, and 3 for other machines",)


def test_a_gpu_that_comes_pushes_out_none_that_is_used() -> None:
    """Also where it sorts before them."""
    settings = config(a="count=1", b="count=1")
    before = host("a", "b", gpus=range(1, 4))
    assert given_to(settings, before) == {"a": [1], "b": [2]}
    assert given_to(settings, after(settings, before, host("a", "b"))) == {"a": [1], "b": [2]}


def test_one_that_goes_is_replaced_and_the_others_stay() -> None:
    settings = config(a="count=2", b="count=1")
    before = host("a", "b")
    then = after(settings, before, host("a", "b", gpus=range(1, 4)))
    assert given_to(settings, then) == {"a": [1, 3], "b": [2]}


def detaching(seen: Facts, *indices: int, draining: bool) -> Facts:
    """The host while an administrator takes some of its GPUs."""
    taken = {address(index) for index in indices}
    vendor = seen.vendors[0]
    vendor = replace(vendor, gpus=tuple(replace(gpu, detached=gpu.pci_address in taken) for gpu in vendor.gpus))
    return replace(seen, vendors=(vendor,), draining=frozenset(taken if draining else ()))


def test_one_that_is_drained_stays_its_machines() -> None:
    """It may be given back: nobody gets another one in its place meanwhile, nor it, also who is short of GPUs."""
    settings = config(a="count=4", b="count=1")
    seen = host("a", "b", gpus=range(3))
    seen = replace(seen, machines=(seen.machines[0], replace(seen.machines[1], granted=Granted("", (address(1),), {}))))
    before = after(settings, seen, seen)
    assert given_to(settings, before) == {"a": [0, 2], "b": [1]}
    for _ in range(2):
        before = after(settings, before, detaching(host("a", "b"), 1, draining=True))
        assert given_to(settings, before) == {"a": [0, 2, 3], "b": []}
    assert given_to(settings, after(settings, before, host("a", "b"))) == {"a": [0, 2, 3], "b": [1]}


def test_one_that_is_detached_is_replaced_once_it_is_drained() -> None:
    settings = config(a="count=1", b="count=1")
    before = after(settings, host("a", "b"), detaching(host("a", "b"), 0, draining=True))
    assert given_to(settings, before) == {"a": [], "b": [1]}
    then = after(settings, before, detaching(host("a", "b"), 0, draining=False))
    assert given_to(settings, then) == {"a": [2], "b": [1]}
    assert given_to(settings, after(settings, then, host("a", "b"))) == {"a": [2], "b": [1]}


def test_the_fabric_is_for_who_has_all_gpus_of_the_host() -> None:
    """With those that are detached: else a machine with a part would reach the others when those come back."""
    for gpus, seen, expected in (
        ([address(0)], detaching(host("a", gpus=range(2)), 1, draining=False), False),
        ("all", detaching(host("a", gpus=range(2)), 1, draining=False), True),
        ([address(0)], host("a", gpus=range(1)), True),
    ):
        (machine,) = plan(config(a=gpus), seen).goal.machines
        assert any(node.kind is DeviceKind.NVSWITCH for node in machine.grants[0].nodes) is expected


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, GPUS + 1), min_size=1))
def test_no_gpu_is_given_twice_by_number(wanted: dict[str, int]) -> None:
    settings = config(**{name: f"count={number}" for name, number in wanted.items()})
    found = given_to(settings, host(*wanted))
    assert sum(map(len, found.values())) == len({gpu for gpus in found.values() for gpu in gpus})
    assert given_to(settings, after(settings, host(*wanted), host(*wanted))) == found


def test_a_gpu_that_is_named_waits_for_its_machine() -> None:
    """Its root directory may not be mounted yet: nobody else gets what would be taken back in a moment."""
    seen = host("a", "b")
    seen = replace(seen, machines=(replace(seen.machines[0], root=Absent("not mounted")), seen.machines[1]))
    assert given_to(config(a=[address(0)], b="count=1"), seen) == {"b": [1]}


def test_what_cannot_be_seen_is_not_given_away() -> None:
    """Fail static: the machine whose grant cannot be read may have any of them."""
    seen = host("a", "b")
    unseen = Unseen("granted.json: Input/output error")
    seen = replace(seen, machines=(replace(seen.machines[0], granted=unseen), seen.machines[1]))
    found = plan(config(a="count=1", b="count=1"), seen)
    assert found.held == {"a": unseen.why, "b": unseen.why}
