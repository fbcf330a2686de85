"""ResourceSlice objects, and their comparison with what the API server has."""

import copy

import pytest

from agent.config.checks import is_subdomain
from agent.dra.inventory import NUMA_NODE, Device, Taint
from agent.dra.slices import Node, make_slices, own_slices, quantity, slice_name
from agent.model.contract import Effect
from agent.vendors.dra_vendor import Attribute, Version

NODE = Node("node", "uid-1")
TAINT = Taint("gpu.unbounded-agent.io/lost", "Xid79", Effect.NO_EXECUTE, 1_700_000_000)


def devices(count: int, *taints: Taint) -> list[Device]:
    return [
        Device(f"gpu-{number:03}", "vendor", ("v.com/c=n",), "0000:01:00.0", taints=taints) for number in range(count)
    ]


def test_a_slice_has_what_claims_select_by() -> None:
    attributes: dict[str, Attribute] = {"uuid": "x", NUMA_NODE: 0, "ok": True, "driverVersion": Version("1.2.3")}
    # What is empty or longer than the API server takes is left out.
    known = {**attributes, "no": "", "long": "x" * 65}
    (item,) = make_slices(NODE, [Device("gpu-0", "vendor", (), "", known, {"memory": 80 << 30}, (TAINT,))], 7)
    assert item["metadata"] == {
        "name": "node-gpu.unbounded-agent.io-0",
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node", "uid": "uid-1", "controller": True}],
    }
    assert item["spec"]["pool"] == {"name": "node", "generation": 7, "resourceSliceCount": 1}
    assert item["spec"]["devices"] == [
        {
            "name": "gpu-0",
            "attributes": {
                "uuid": {"string": "x"},
                "resource.kubernetes.io/numaNode": {"int": 0},
                "ok": {"bool": True},
                "driverVersion": {"version": "1.2.3"},
            },
            "capacity": {"memory": {"value": "80Gi"}},
            "taints": [
                {"key": TAINT.key, "value": "Xid79", "effect": "NoExecute", "timeAdded": "2023-11-14T22:13:20Z"}
            ],
        }
    ]


def test_a_shared_device_may_be_allocated_several_times() -> None:
    (item,) = make_slices(NODE, [Device("gpu-0", "vendor", (), "", {}, {"memory": 80 << 30}, shared=True)], 1)
    (device,) = item["spec"]["devices"]
    assert device["allowMultipleAllocations"] is True
    policy = {"default": "80Gi", "validRange": {"min": "1Mi"}}
    assert device["capacity"] == {"memory": {"value": "80Gi", "requestPolicy": policy}}


@pytest.mark.parametrize(
    ("found", "sizes"),
    [
        (devices(0), []),
        (devices(128), [128]),
        (devices(129), [128, 1]),
        ([*devices(64), *devices(1, TAINT)], [64, 1]),
        (devices(130, TAINT), [64, 64, 2]),
    ],
)
def test_slices_stay_within_the_limits(found: list[Device], sizes: list[int]) -> None:
    made = make_slices(NODE, found, 1)
    assert [len(each["spec"]["devices"]) for each in made] == sizes
    assert {each["spec"]["pool"]["resourceSliceCount"] for each in made} <= {len(sizes)}


def test_names_are_fixed_and_not_too_long() -> None:
    long = [slice_name("n" * 250 + end, 12) for end in ("1", "2")]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 253
    assert is_subdomain(slice_name("n" * 179 + "." + "y" * 60, 0)), "also if it is cut after a dot"


def test_only_slices_of_this_driver_and_node_count() -> None:
    own = make_slices(NODE, devices(1500), 1)
    others = [copy.deepcopy(own[0]) for _ in range(2)]
    others[0]["spec"]["driver"], others[1]["spec"]["nodeName"] = "other.example.com", "other"
    listed = {"items": [*others, None, {}, {"metadata": {}, "spec": 1}, *reversed(own)]}
    assert own_slices(listed, "node") == own, "in the order in which they are made"
    assert own_slices({}, "node") == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1, "1"), (1023, "1023"), (1 << 30, "1Gi"), (3 << 29, "1536Mi"), (1 << 80, "1048576Ei")],
)
def test_quantities_are_written_as_the_server_does(number: int, text: str) -> None:
    assert quantity(number) == text
