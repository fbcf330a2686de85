"""The systemd, machined and commands of a simulated host. They are simulated, and survive a kill of the agent."""

from pathlib import Path
from typing import Protocol

from agent.model.errors import BusAnswerError, BusError
from agent.system.process import Completed
from integration.faults_suite.interception import Watch
from tests.fakes.clearing import clear_below, clears
from tests.fakes.host import CHANGES, JOB_VERBS, Host, ScriptedBus, ScriptedRunner


class Site(Protocol):
    """The world on which the simulated services act."""

    tree: Path
    watch: Watch
    mounts: set[str]

    def reload(self) -> None: ...

    def start_requested(self) -> None: ...

    def permit(self, arguments: tuple[object, ...]) -> None: ...

    def bind(self, path: str) -> None: ...


class Bus(ScriptedBus):
    """PID 1 and machined, on the bus. The world makes the changes that calls ask for."""

    def __init__(self, world: Site) -> None:
        super().__init__()
        self.world = world

    def __call__(
        self, service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        watch, name = self.world.watch, method.rpartition(".")[2]
        what = f"{name} {' '.join(str(each) for each in arguments if isinstance(each, str))}"
        try:
            if method not in (*CHANGES, *JOB_VERBS):
                watch.before_read("call", what)
            else:
                watch.before_write("call", what)
        except OSError as error:
            raise (BusAnswerError if method in (*CHANGES, *JOB_VERBS) else BusError)(
                f"{what}: {error.strerror}"
            ) from error
        with watch.pause():
            answer = super().__call__(service, path, method, signature, arguments, timeout)
            if name == "SetUnitProperties":
                self.world.permit(arguments)
            elif name == "BindMountMachine":
                self.world.bind(str(arguments[1]))
        return answer


class Runner(ScriptedRunner):
    """systemctl, mount and umount, and the removal of trees."""

    def __init__(self, world: Site) -> None:
        super().__init__()
        self.world = world

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        watch = self.world.watch
        if argv[-1] == "-p":
            watch.before_read("run", " ".join(argv))
        else:
            watch.before_write("run", " ".join(argv))
        with watch.pause():
            match argv:
                case ("systemctl", "daemon-reload"):
                    self.world.reload()
                case ("systemctl", "start", "--no-block", _):
                    self.world.start_requested()
                case ("mount", *_):
                    self.world.mounts.add(argv[-1])
                case ("umount", *_):
                    self.world.mounts.discard(argv[-1])
                case _ if clears(argv):
                    return clear_below(self.world.tree, argv)
                case _:
                    return super().__call__(argv, timeout)
            return Completed(0, b"", b"")


class ScenarioHost(Host):
    """The host of a scenario: its mounts are simulated too."""

    world: Site

    def is_mount(self, path: str) -> bool:
        self.world.watch.before_read("is_mount", path)
        return path in self.world.mounts or super().is_mount(path)
