"""Slices at an API server, generation by generation. The server here has only the rules that matter."""

import copy
from typing import Any

import pytest

from agent.dra.inventory import Device, Taint
from agent.dra.slices import ATTEMPTS, COLLECTION, Node, Publisher, slice_name
from agent.model.contract import Effect
from agent.system.api_server import ApiClient, ApiError, ConflictError
from tests.fakes.api_server import ApiServer, failure
from tests.fakes.dra_machine import NODE

HERE = Node(NODE, "uid-1")
TAINT = Taint("gpu.unbounded-agent.io/lost", "Xid79", Effect.NO_SCHEDULE, 7)

pytestmark = pytest.mark.processes


def device(number: int, *taints: Taint) -> Device:
    return Device(f"gpu-{number:03}", "vendor", (f"v.com/c={number}",), f"0000:{number:02x}:00.0", taints=taints)


def devices(count: int, *taints: Taint) -> list[Device]:
    return [device(number, *taints) for number in range(count)]


@pytest.fixture
def publisher(client: ApiClient) -> Publisher:
    return Publisher(client)


def pools(api: ApiServer) -> list[tuple[int, int]]:
    return [(each["spec"]["pool"]["generation"], len(each["spec"]["devices"])) for each in api.slices]


def test_a_change_is_a_generation(api: ApiServer, publisher: Publisher) -> None:
    first = publisher.publish(HERE, [device(1)])
    assert (first.generation, first.devices, first.written) == (1, ("gpu-001",), True)
    assert not publisher.publish(HERE, [device(1)]).written
    assert publisher.publish(HERE, [device(1), device(2, TAINT)]).tainted == ("gpu-002",)
    assert pools(api) == [(2, 2)]
    assert api.written == ["POST", "PUT"]
    assert publisher.publish(Node(NODE, "uid-2"), [device(1), device(2, TAINT)]).written, "the Node was made again"


def test_slices_come_and_go_with_their_devices(api: ApiServer, client: ApiClient, publisher: Publisher) -> None:
    for count, sizes in ((200, [(1, 128), (1, 72)]), (100, [(2, 100)]), (0, []), (1, [(4, 1)])):
        publisher.publish(HERE, devices(count))
        assert pools(api) == sizes
    written = len(api.written)
    Publisher(client).publish(HERE, [device(0)])
    assert len(api.written) == written, "another process goes on from what is there"
    api.wipe()
    assert publisher.publish(HERE, [device(0)]).generation == 5, "consumers may still have the deleted one"
    assert pools(api) == [(5, 1)]


def test_what_others_changed_is_put_right(api: ApiServer, publisher: Publisher) -> None:
    publisher.publish(HERE, [device(1)])
    changed = copy.deepcopy(api.slices[0])
    changed["spec"]["devices"] = []
    api.put(f"{COLLECTION}/{changed['metadata']['name']}", changed)
    foreign = {**changed, "metadata": {"name": "left-over"}}
    api.put(f"{COLLECTION}/left-over", foreign)
    assert publisher.publish(HERE, [device(1)]).generation == 2
    assert pools(api) == [(2, 1)]


def test_a_write_that_meets_another_is_a_conflict(api: ApiServer, publisher: Publisher) -> None:
    publisher.publish(HERE, [device(1)])
    api.answer = lambda method, path: failure(409, "the object has been modified") if method == "PUT" else None
    with pytest.raises(ConflictError, match="409 Conflict: the object has been modified"):
        publisher.publish(HERE, [device(2)])
    assert api.written.count("PUT") == ATTEMPTS == 3, "it is tried again"
    api.answer = None
    assert publisher.publish(HERE, [device(2)]).generation == 2


def test_attack_another_node_takes_the_names(api: ApiServer, client: ApiClient, publisher: Publisher) -> None:
    """A node may create its own slices under these names. This node can neither see nor delete them."""
    taken = {f"{COLLECTION}/{slice_name(NODE, index)}" for index in range(3)}
    for path in taken:
        api.put(path, {"metadata": {"name": path.rpartition("/")[2]}, "spec": {"nodeName": "another"}})
    assert publisher.publish(HERE, devices(129)).written
    assert not publisher.publish(HERE, devices(129)).written
    # After a restart, and with one slice more, the names stay.
    another = Publisher(client)
    assert not another.publish(HERE, devices(129)).written
    own = {path for path in api.objects if path.startswith(COLLECTION)} - taken
    for _ in range(2):
        another.publish(HERE, devices(257))
    assert not another.publish(HERE, devices(257)).written
    now = {path for path in api.objects if path.startswith(COLLECTION)} - taken
    assert own < now
    assert sorted(len(api.objects[path]["spec"]["devices"]) for path in now) == [1, 128, 128]
    another.publish(HERE, [])
    assert {path for path in api.objects if path.startswith(COLLECTION)} == taken


def test_half_a_pool_is_completed(api: ApiServer, publisher: Publisher) -> None:
    """The second write fails: slices of two generations are there, which consumers ignore."""
    publisher.publish(HERE, devices(129))
    name = api.slices[1]["metadata"]["name"]
    api.answer = lambda method, path: failure(500, "no") if method == "PUT" and path.endswith(name) else None
    with pytest.raises(ApiError, match="500"):
        publisher.publish(HERE, devices(128, TAINT))
    assert [generation for generation, _ in pools(api)] == [2, 1]
    api.answer = None
    publisher.publish(HERE, devices(128, TAINT))
    assert pools(api) == [(3, 64), (3, 64)]


def without_taints(item: dict[str, Any]) -> dict[str, Any]:
    devices = [{key: value for key, value in each.items() if key != "taints"} for each in item["spec"]["devices"]]
    return {**item, "spec": {**item["spec"], "devices": devices}}


def test_a_device_whose_taint_is_not_kept_is_not_offered(api: ApiServer, publisher: Publisher) -> None:
    """A server without the feature drops taints silently: claims would get a failed GPU."""
    api.stored = without_taints
    published = publisher.publish(HERE, [device(1), device(2, TAINT)])
    assert (published.devices, published.tainted, published.withheld) == (("gpu-001",), (), ("gpu-002",))
    assert pools(api) == [(2, 1)]
    assert not publisher.publish(HERE, [device(1), device(2, TAINT)]).written
    assert publisher.publish(HERE, [device(1), device(2)]).devices == ("gpu-001", "gpu-002")


def test_what_the_server_adds_is_not_a_difference(api: ApiServer, publisher: Publisher) -> None:
    def later_release(item: dict[str, Any]) -> dict[str, Any]:
        devices = [{**each, "new": True} for each in item["spec"]["devices"]]
        return {**item, "spec": {**item["spec"], "devices": devices}}

    api.stored = later_release
    for _ in range(3):
        publisher.publish(HERE, [device(1)])
    assert api.written == ["POST"]


def test_a_slice_that_goes_at_the_moment_of_a_write_is_no_failure(api: ApiServer, publisher: Publisher) -> None:
    publisher.publish(HERE, [device(1)])
    api.answer = lambda method, path: api.wipe() if method == "PUT" and api.slices else None
    assert publisher.publish(HERE, [device(2)]).devices == ("gpu-002",)
    assert pools(api) == [(2, 1)]
    api.answer = lambda method, path: failure(404, "gone") if method == "DELETE" else None
    assert publisher.publish(HERE, []).generation == 0
