"""The machine half's scenarios."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.machine.containerd_tables import MAIN
from agent.machine.node_condition import HOST_STATUS
from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice
from integration.faults_suite.machine_world import MachineWorld, begin, one_gpu, stage
from tests.fakes.containerd_files import MAIN_2
from tests.fakes.machine import LIBRARIES, REQUEST, gpu_machine, recorded_spec
from tests.fakes.mig import DEVICES as RECORDED
from tests.fakes.mig import MIG_REQUEST, live_mode, mig_spec
from tests.fakes.node import Node

NEWER = "580.95.05"
SPEC = "/etc/cdi/nvidia.yaml"
NEW_NODE = "/dev/nvidia1"
DEVICES = tuple(each._replace(major=240, minor=minor) for minor, each in enumerate(RECORDED))
WITH_INSTANCES = MIG_REQUEST._replace(devices=DEVICES)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Like the host half's: the state before, the change, and what the agent does afterwards."""

    name: str
    before: Callable[[MachineWorld], None]
    change: Callable[[MachineWorld], None]
    work: Callable[[MachineWorld], None] = MachineWorld.settle
    start: Callable[[Path], MachineWorld] = lambda directory: begin(directory, recorded_spec)


def _nothing(world: MachineWorld) -> None:
    pass


def _with_one_gpu(world: MachineWorld) -> None:
    machine = world.machine
    machine.drop(NEW_NODE)
    del machine.nodes[NEW_NODE]
    machine.mounts.remove(NEW_NODE)
    machine.hand(one_gpu())
    world.settle()


def _add_gpu(world: MachineWorld) -> None:
    world.machine.node(NEW_NODE, 195, 1)
    world.machine.mounts.append(NEW_NODE)
    world.machine.hand(REQUEST)


def _remove_gpu(world: MachineWorld) -> None:
    world.machine.hand(one_gpu(), withdrawn=(NEW_NODE,))


def _remove_gpus(world: MachineWorld) -> None:
    empty = REQUEST._replace(gpus=(), devices=(), driver_version="", driver_root="", files=())
    world.machine.hand(empty, withdrawn=tuple(device.path for device in REQUEST.devices))


def _switch_driver(world: MachineWorld) -> None:
    world.machine.hand(stage(world.machine, NEWER, "/run/host-nvidia/1"))


def _replace_main_file(world: MachineWorld) -> None:
    world.machine.put(MAIN, MAIN_2)


def _edit_spec(world: MachineWorld) -> None:
    spec = json.loads(world.machine.read(SPEC))
    spec["devices"] = spec["devices"][:1]
    world.machine.put(SPEC, json.dumps(spec))


def _edit_links(world: MachineWorld) -> None:
    world.machine.drop(f"/{LIBRARIES}/libcuda.so.1")
    world.machine.drop("/usr/bin/nvidia-smi")


def _begin_with_mig(directory: Path) -> MachineWorld:
    world = begin(directory, mig_spec)
    world.machine.mounts.clear()
    for device in DEVICES:
        _bind(world, device)
    return world


def _bind(world: MachineWorld, device: GrantedDevice) -> None:
    world.machine.put(device.path)
    world.machine.nodes[device.path] = DeviceNumber(device.major, device.minor, live_mode(device.path))
    world.machine.mounts.append(device.path)


def _without_instances(world: MachineWorld) -> None:
    kept = [each for each in DEVICES if not each.capability]
    for device in DEVICES:
        if device.capability:
            world.machine.drop(device.path)
            del world.machine.nodes[device.path]
            world.machine.mounts.remove(device.path)
    world.machine.hand(WITH_INSTANCES._replace(devices=tuple(kept)))
    world.settle()


def _make_instances(world: MachineWorld) -> None:
    for device in DEVICES:
        if device.capability:
            _bind(world, device)
    world.machine.hand(WITH_INSTANCES)


def _begin_with_node(directory: Path) -> MachineWorld:
    machine = gpu_machine(directory / "machine")
    machine.__class__ = Node
    assert isinstance(machine, Node)
    world = MachineWorld(machine, recorded_spec)
    machine.join()
    return world


def _publish_status(world: MachineWorld) -> None:
    machine: Any = world.machine
    machine.publish_status(evaluated=time.time(), since=time.time() - 1000)


def _set_on_node(world: MachineWorld) -> None:
    _publish_status(world)
    world.update_node()


def _unwanted(world: MachineWorld) -> None:
    world.machine.drop(HOST_STATUS)


SETTLE, UPDATE_NODE = MachineWorld.settle, MachineWorld.update_node
SCENARIOS = (
    Scenario("first run", _nothing, _nothing),
    Scenario("first run with a configuration of containerd", _nothing, _replace_main_file),
    Scenario("new handoff: GPU added", _with_one_gpu, _add_gpu),
    Scenario("new handoff: GPU removed", SETTLE, _remove_gpu),
    Scenario("new handoff: no GPU left", SETTLE, _remove_gpus),
    Scenario("new handoff: another driver", SETTLE, _switch_driver),
    Scenario("containerd's configuration replaced", SETTLE, _replace_main_file),
    Scenario("spec changed by somebody", SETTLE, _edit_spec),
    Scenario("links removed by somebody", SETTLE, _edit_links),
    Scenario("MIG instances made", _without_instances, _make_instances, start=_begin_with_mig),
    Scenario("condition on the Node", _nothing, _publish_status, UPDATE_NODE, start=_begin_with_node),
    Scenario("condition on the Node withdrawn", _set_on_node, _unwanted, UPDATE_NODE, start=_begin_with_node),
)
