"""All scenarios of both halves, in one form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.model.paths import live_file
from integration.faults_suite import host_scenarios, machine_scenarios
from integration.faults_suite.host_world import HostWorld
from integration.faults_suite.machine_world import MachineWorld, begin
from integration.faults_suite.points import Story, World
from tests.fakes.gpu_host import MACHINE
from tests.fakes.machine import recorded_spec


def _host(scenario: host_scenarios.Scenario) -> Story:
    def begin(directory: Path) -> World:
        world = HostWorld(directory)
        scenario.before(world)
        scenario.change(world)
        return world

    return Story(f"host: {scenario.name}", begin, _for_any_world(scenario.work), _for_any_world(scenario.again))


def _machine(scenario: machine_scenarios.Scenario) -> Story:
    def begin(directory: Path) -> World:
        world = scenario.start(directory)
        scenario.before(world)
        scenario.change(world)
        return world

    return Story(
        f"machine: {scenario.name}", begin, _for_any_world(scenario.work), _for_any_world(scenario.work), in_order=True
    )


def _for_any_world(step: Callable[[Any], None]) -> Callable[[World], None]:
    return step


STORIES = {
    story.name: story for story in (*map(_host, host_scenarios.SCENARIOS), *map(_machine, machine_scenarios.SCENARIOS))
}


def _settled(directory: Path) -> World:
    world = HostWorld(directory)
    world.converge()
    return world


def _served(directory: Path) -> World:
    world = begin(directory, recorded_spec)
    world.settle()
    return world


CONVERGE, SETTLE = _for_any_world(HostWorld.converge), _for_any_world(MachineWorld.settle)
STEADY = {
    story.name: story
    for story in (
        Story("host: nothing happens", _settled, CONVERGE, CONVERGE),
        Story("machine: nothing happens", _served, SETTLE, SETTLE, in_order=True),
    )
}
PLACES = {
    "host: nothing happens": (
        "/var/lib/unbounded-agent/driver-roots/",
        "/var/lib/unbounded-agent/machines/",
        "/var/lib/unbounded-agent/granted-gpus",
        "/var/lib/unbounded-agent/owned.json",
        "/run/unbounded-agent/conditions.json",
        live_file(MACHINE),
        "/etc/systemd/",
    ),
    "machine: nothing happens": (
        "/var/lib/unbounded-agent/",
        "/run/unbounded-agent/state/",
        "/etc/cdi/",
        "/etc/containerd/conf.d/",
    ),
}
"""For each story in STEADY, how the paths of the files begin that the suite damages."""
