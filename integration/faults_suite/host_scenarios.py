"""The host half's scenarios."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.host.detach import Timing, attach, detach
from integration.faults_suite.host_world import HostWorld
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import INFORMATION

NEWER = "580.95.05"
FIRST, SECOND, THIRD = (f"0000:0{bus}:00.0" for bus in (1, 2, 3))
FAST = Timing(poll=0, answer=20)


def _nothing(world: HostWorld) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Scenario:
    """The state before, the change, and what the agent does afterwards."""

    name: str
    before: Callable[[HostWorld], None]
    change: Callable[[HostWorld], None]
    work: Callable[[HostWorld], None] = HostWorld.converge
    """The work during which the agent is killed at a call, or a call fails."""
    again: Callable[[HostWorld], None] = HostWorld.converge
    """What the service or an administrator does next, after `work`."""


def _upgrade(world: HostWorld) -> None:
    world.install(NEWER)
    world.host.file("/sys/module/nvidia/version", f"{NEWER}\n")


def _swap(world: HostWorld) -> None:
    """Load the driver again, with the minor numbers of the two GPUs swapped."""
    host = world.host
    for minor, address in ((1, FIRST), (0, SECOND)):
        host.file(f"/proc/driver/nvidia/gpus/{address}/information", INFORMATION.format(minor=minor, address=address))


def _one_of_two(world: HostWorld) -> None:
    world.machines = {MACHINE: {"gpus": [FIRST]}}
    world.converge()


def _take_out(world: HostWorld) -> None:
    world.stop()
    world.machines = {}


def _restart(world: HostWorld) -> None:
    world.stop()
    world.starting = True


def _restart_with_more(world: HostWorld) -> None:
    _restart(world)
    world.add_gpu(THIRD, 2)


def _detach(world: HostWorld) -> None:
    ending = detach(SECOND, world.configured(), FAST)
    # If detach was not done although nothing struck it, that is wrong. After a strike, it only has to report that.
    if not ending.done and not world.watch.struck:
        world.wrong.append(f"gpus detach: {'; '.join(ending.sentences)}")
    world.converge()


def _attach(world: HostWorld) -> None:
    ending = attach(SECOND, world.configured(), FAST)
    # If attach was not done although nothing struck it, that is wrong. After a strike, it only has to report that.
    if not ending.done and not world.watch.struck:
        world.wrong.append(f"gpus attach: {'; '.join(ending.sentences)}")
    world.converge()


def _node_condition(world: HostWorld) -> None:
    world.machines = {MACHINE: {"node_condition": True}}


def _with_node_condition(world: HostWorld) -> None:
    _node_condition(world)
    world.converge()


def _no_node_condition(world: HostWorld) -> None:
    world.machines = {MACHINE: {}}


SCENARIOS = (
    Scenario("first apply", _nothing, _nothing),
    Scenario("driver upgrade", HostWorld.converge, _upgrade),
    Scenario("GPU added", HostWorld.converge, lambda world: world.add_gpu(THIRD, 2)),
    Scenario("GPU removed", HostWorld.converge, lambda world: world.remove_gpu(SECOND, 1)),
    Scenario("GPUs swapped", _one_of_two, _swap),
    Scenario("machine taken out", HostWorld.converge, _take_out),
    Scenario("detach", HostWorld.converge, _nothing, _detach, _detach),
    Scenario("attach", _detach, _nothing, _attach, _attach),
    Scenario("node condition", HostWorld.converge, _node_condition),
    Scenario("node condition withdrawn", _with_node_condition, _no_node_condition),
    Scenario("start of the machine", HostWorld.converge, _restart),
    Scenario("start with another GPU", HostWorld.converge, _restart_with_more),
)
