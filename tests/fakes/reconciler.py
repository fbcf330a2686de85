"""A simulation of agent.host.reconcile.Reconciler, with outcomes from a file. `main` runs the real daemon with it.

Its root directory has etc/unbounded-agent/config.toml and behaviour.json.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from agent.config.load import InForce, Loaded, load_or_last_good
from agent.host.daemon import loop
from agent.host.reconcile import MachineOutcome, Outcome
from agent.model.conditions import Condition, ConditionType, Status, summarize, with_transitions
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import DeviceNode, Driver, Facts, Gpu, Unseen, UserSpace, VendorFacts
from agent.model.goal import fault
from agent.system.deadlines import bounded
from agent.system.files import System
from agent.system.process import host_runner

GPUS = ("0000:01:00.0", "0000:02:00.0")


def conditions(*different: Condition, now: float = 1_700_000_000.0) -> tuple[Condition, ...]:
    """Return all conditions: the given ones, the others True, and Ready, which sums them up."""
    given = {each.type: each for each in different}
    found = [
        given.get(kind) or Condition(kind, Status.TRUE, "AsItShouldBe", "all is well")
        for kind in ConditionType
        if kind is not ConditionType.READY
    ]
    return with_transitions([*found, summarize(found)], (), now)


VENDOR = VendorFacts(
    vendor="nvidia",
    gpus=tuple(Gpu(address, "nvidia", driver="nvidia", minor=minor) for minor, address in enumerate(GPUS)),
    devices=(
        *(
            DeviceNode(f"/dev/nvidia{minor}", DeviceKind.GPU, DeviceNumber(195, minor), pci_address=address)
            for minor, address in enumerate(GPUS)
        ),
        DeviceNode("/dev/nvidiactl", DeviceKind.CONTROL, DeviceNumber(195, 255)),
    ),
    driver=Driver("550.163.01", UserSpace("550.163.01", ())),
)
"""Two GPUs with everything that they need."""


def outcome(*machines: MachineOutcome, vendor: VendorFacts = VENDOR, failures: tuple[str, ...] = ()) -> Outcome:
    """Return the outcome of a pass over a host with one vendor's GPUs."""
    facts = Facts(architecture="x86_64", systemd_version=252, template_device_allow=(), vendors=(vendor,), machines=())
    return Outcome(facts=facts, machines=machines, failures=failures, finished=time.time())


class SimulatedReconciler:
    """Does what behaviour.json says.

    Keys are `steps`, `error`, `bug`, `failures`, `pending`, `condition`, `unseen`; `faulty`, machines at which the pass
    has an internal error; `changed`, when conditions last changed; `waits`, which no pass says, but what begins resets
    and tests of GPUs; `hold`, which lengthens a pass until it is removed; and `stuck`, for a read (a thread that waits)
    or a command that never ends. `main` reads `loading`: how many seconds it takes to read the configuration.
    """

    def __init__(self, loaded: Loaded, progress: Callable[[str], None], root: Path) -> None:
        self.config, self.rejected, self.progress, self.root = loaded.config, loaded.rejected, progress, root
        self.system = System(host_runner)
        self.in_force = InForce(loaded.config, System(host_runner, str(root)), loaded.before)

    def _behaviour(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "behaviour.json").read_text())
        return content

    def run_pass(self) -> Outcome:
        self.in_force.check()
        with (self.root / "passes").open("a") as file:
            file.write(f"{time.monotonic()}\n")
        behaviour = self._behaviour()
        for step in behaviour.get("steps", ()):
            self.progress(step)
        while self._behaviour().get("hold"):
            time.sleep(0.01)
        if behaviour.get("stuck") == "read":
            bounded("/proc/driver/simulated", threading.Event().wait, behaviour["seconds"])
        if behaviour.get("stuck") == "command":
            self.system.run("sleep", "120", timeout=behaviour["seconds"])
        if behaviour.get("bug"):
            raise RecursionError(behaviour["bug"])
        if behaviour.get("error"):
            raise AgentError(behaviour["error"])
        different = []
        if "condition" in behaviour:
            kind, status, reason, message = behaviour["condition"]
            different.append(Condition(ConditionType(kind), Status(status), reason, message))
        unseen = replace(VENDOR, devices=Unseen("/dev: time limit"))
        return outcome(
            *(
                MachineOutcome(
                    name,
                    conditions(*different, now=behaviour.get("changed", 1_700_000_000.0)),
                    gpus=GPUS,
                    pending=behaviour.get("pending", False),
                    fault=fault("observe it", KeyError()) if name in behaviour.get("faulty", ()) else None,
                )
                for name in sorted(self.config.machines)
            ),
            vendor=unseen if behaviour.get("unseen") else VENDOR,
            failures=tuple(behaviour.get("failures", ())),
        )


def main(root: str, timing: dict[str, float], environment: dict[str, str]) -> NoReturn:
    """Run the real daemon below `root` in this process, with its log in `root`/log."""
    warnings.simplefilter("error")
    with Path(root, "log").open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    system = System(host_runner, root)

    def load() -> Loaded:
        if seconds := json.loads(Path(root, "behaviour.json").read_text()).get("loading"):
            system.run("sleep", str(seconds), timeout=seconds)
        return load_or_last_good(system)

    try:
        code = loop.run(
            load,
            lambda loaded, progress: SimulatedReconciler(loaded, progress, Path(root)),
            timing=loop.Timing(**timing),
            system=system,
            begin=lambda *_: tuple(json.loads(Path(root, "behaviour.json").read_text()).get("waits", ())),
        )
    except AgentError as error:
        sys.stderr.write(f"unbounded-agent: {error}\n")
        code = 2 if isinstance(error, ConfigError) else 1
    sys.exit(code)
