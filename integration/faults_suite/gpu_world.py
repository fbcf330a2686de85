"""A simulated host with GPUs of three vendors, two machines and the service, on which GPUs fail.

What follows the kernel log and udevd's events, and what makes passes, is the agent's own. Simulated are the kernel, by
the records and events that it sends; time; systemd; nvidia-smi; and the machines.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from unittest.mock import patch

from agent.cli.prepare import prepare
from agent.config.settings import Config
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.daemon.wakeups import Udev
from agent.host.observe.host import Memory
from agent.host.reconcile import Outcome, Reconciler, granted_to
from agent.host.state.records import read_ages
from agent.host.verify.gpu_states import listed_gpus
from agent.model.conditions import Status
from agent.model.contract import (
    GpuState,
    GpuTestEnd,
    GpuTestResult,
    GpuTestResults,
    parse_gpu_states,
    parse_test_request,
    render_test_results,
)
from agent.model.errors import AgentError
from agent.model.facts import DrmDevice, PciDevice
from agent.model.handoff import HealthAnswer, parse_handoff
from agent.model.paths import (
    GPU_TESTS_NAME,
    PCI_DEVICES,
    gpu_states_file,
    gpu_test_file,
    handoff_file,
    report_directory,
)
from agent.system.devices import CONTROL
from agent.system.process import Completed
from tests.fakes.host import ScriptedRunner, UnexpectedError
from tests.fakes.kernel_log import Log
from tests.fakes.lively_host import LivelyHost
from tests.fakes.udev import Event, Sent

FIRST, SECOND, ONLY = NVIDIA = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
AMD, XE, I915 = "0000:83:00.0", "0000:04:00.0", "0000:00:02.0"
DRIVERS = {**dict.fromkeys(NVIDIA, "nvidia"), AMD: "amdgpu", XE: "xe", I915: "i915"}
SWITCH = "0000:c1:00.0"
"""An NVSwitch: no GPU, but its errors concern all of NVIDIA's."""
MACHINES = {"a": (FIRST, SECOND, AMD, XE, I915), "b": (ONLY,)}
MACHINE_OF = {gpu: machine for machine, gpus in MACHINES.items() for gpu in gpus}
VERSION = "550.163.01"
ROUNDS = 10
"""Passes until nothing changes. Three are usual."""
LOOKS = 6
"""How often the service looks at its events before it makes a pass."""


class Seen(NamedTuple):
    """What is published of a GPU."""

    verdict: str
    """As `unbounded-agent gpus` shows it."""
    fenced: bool
    """Whether the node's slices keep new pods from it."""
    reason: str = ""
    """The taint's value."""


def nothing() -> None:
    """Nothing happens."""


class GpuWorld:
    """See the module's docstring. As a context, it has time of its own."""

    def __init__(self, tree: Path) -> None:
        self.ahead = 0.0
        """Seconds that have passed in addition to the real ones."""
        self.bad: frozenset[str] = frozenset()
        """The GPUs that no pod must get now, as the oracle says."""
        self.passes = self.false_ready = 0
        self.meanwhile: list[Callable[[], None]] = []
        """Steps, run one by one whenever a command waits."""
        self.test_end = GpuTestEnd.PASSED
        self.during_reset = self.after_reset = nothing
        """What happens while nvidia-smi resets a GPU, and when it sets persistence mode again."""
        self.persistent = dict.fromkeys(NVIDIA, True)
        wall, monotonic, of_clock = time.time, time.monotonic, time.clock_gettime
        self._clocks = (
            patch.object(time, "time", lambda: wall() + self.ahead),
            patch.object(time, "monotonic", lambda: monotonic() + self.ahead),
            patch.object(time, "clock_gettime", lambda clock: of_clock(clock) + self.ahead),
            patch.object(time, "sleep", self._wait),
        )
        self.host = host = LivelyHost(tree, tuple(MACHINES))
        self.log, self._monitor = Log(), Sent()
        host.program_runner = self._run_program
        host.driver(VERSION)
        host.install(VERSION)
        host.node("/dev/kfd", 511, 2)
        host.file(CONTROL)
        host.file("/usr/bin/nvidia-smi", executable=True)
        host.make_directory("/proc")
        host.symlink(f"{PCI_DEVICES}/{SWITCH}", "../../../devices/switch")
        host.symlink("/sys/devices/switch/driver", "../../bus/pci/drivers/nvidia-nvswitch")
        for minor, gpu in enumerate(NVIDIA):
            host.plug(minor, gpu, minor)
        for number, (gpu, vendor) in enumerate(((AMD, 0x1002), (XE, 0x8086), (I915, 0x8086)), start=20):
            self._plug_other(number, gpu, vendor)

    def __enter__(self) -> "GpuWorld":
        for each in self._clocks:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._clocks:
            each.stop()
        self.log.close()

    def begin(self) -> None:
        """Start the service, and the machines, whose NVIDIA GPUs say that they are healthy."""
        self.log.write("Linux version")
        self.agent = self._configured()
        self.follower, self.udev = self._service()
        self.make_pass()
        for name in MACHINES:
            self.start(name)
        for gpu in NVIDIA:
            self.say(gpu)
        self.settle()

    # ---- the kernel

    def _plug_other(self, number: int, gpu: str, vendor: int) -> None:
        host, driver = self.host, DRIVERS[gpu]
        host.make_directory(f"/sys/devices/device-{number}")
        host.symlink(f"{PCI_DEVICES}/{gpu}", f"../../../devices/device-{number}")
        host.make_directory(f"/sys/module/{driver}")
        assert isinstance(host.pci, tuple)
        host.pci = (*host.pci, PciDevice(gpu, vendor, 0x030000))
        host.link_driver(gpu, driver)
        self._nodes(gpu, number)

    def _nodes(self, gpu: str, number: int) -> None:
        assert isinstance(self.host.drm, tuple)
        for path, minor in ((f"/dev/dri/card{number}", number), (f"/dev/dri/renderD{128 + number}", 128 + number)):
            self.host.node(path, 226, minor)
            self.host.drm = (*self.host.drm, DrmDevice(path, gpu))

    def tell(self, *lines: str, priority: int = 3) -> None:
        """Let the kernel write these lines to its log; user space, if the priority is higher than 7."""
        for line in lines:
            self.log.write(line, priority)

    def wedge(self, gpu: str, methods: str) -> None:
        """Let a driver say by a uevent that it has given up a GPU."""
        path = f"/devices/pci0000:00/{gpu}/drm/card20"
        self._monitor.append(Event("drm", "change", path, {"WEDGED": methods}))

    def unbind(self, gpu: str) -> None:
        """Take a GPU's driver away."""
        if gpu in NVIDIA:
            self.host.unbind(gpu)
            return
        self.host.link_driver(gpu, "")
        assert isinstance(self.host.drm, tuple)
        for path in [each.path for each in self.host.drm if each.pci_address == gpu]:
            self.host.remove_file(path)
            del self.host.device_numbers[path]
        self.host.drm = tuple(each for each in self.host.drm if each.pci_address != gpu)

    def bind(self, gpu: str) -> None:
        if gpu in NVIDIA:
            self.host.bind(gpu, NVIDIA.index(gpu))
        elif not self.host.exists(f"{PCI_DEVICES}/{gpu}/driver"):
            self.host.link_driver(gpu, DRIVERS[gpu])
            self._nodes(gpu, 20 + [AMD, XE, I915].index(gpu))

    def boot(self) -> None:
        """Reboot the host. The kernel log begins again, and drivers are bound again."""
        self.follower.close()
        self.log.close()
        self.log = Log()
        self.host.boot()
        for gpu in DRIVERS:
            self.host.link_driver(gpu, DRIVERS[gpu])
        self.begin()

    # ---- the machines

    def start(self, name: str) -> None:
        self.host.start(name, lambda name: prepare(name, self._configured()))

    def restart(self, name: str) -> None:
        """Restart a machine. No GPU has said anything to the new one."""
        self.host.stop(name)
        self.start(name)
        self.settle()

    def say(self, gpu: str, **words: str) -> None:
        """Let a GPU say these words of its health, by nvidia-smi's fields with _ for a dot; else that it is well."""
        said = {
            "gpu_recovery_action": "None",
            "remapped_rows.failure": "No",
            "remapped_rows.pending": "No",
            "persistence_mode": "Enabled",
            "ecc.errors.uncorrected.volatile.total": "0",
        }
        self.claim(MACHINE_OF[gpu], gpu, said | words)

    def claim(self, machine: str, gpu: str, words: Mapping[str, str]) -> None:
        """Let a machine claim that a GPU, whoever has it, has just said these words."""
        running, now = self.host.running[machine], time.time()
        others = [each for each in running.health if each.gpu != gpu]
        running.health = (*others, HealthAnswer(gpu, words, now, now))

    # ---- the agent

    def _configured(self) -> Reconciler:
        machines = {name: {"gpus": [*gpus], "allocation": "dra", "driver_wait": 0} for name, gpus in MACHINES.items()}
        memory = Memory(ages=read_ages(self.host))
        return Reconciler(Config.validated({"machines": machines}), self.host, self.host, memory=memory)

    def _service(self) -> tuple[GpuErrors, Udev]:
        follower = GpuErrors(self.host, open_log=lambda path, after: self.log.open(path, after))
        udev = Udev(self.host, (), follower.receive, lambda: self._monitor)
        follower.open()
        udev.open()
        return follower, udev

    def restart_service(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Stop the service, let something happen, and start it."""
        self.follower.close()
        meanwhile()
        self.agent = self._configured()
        self.follower, self.udev = self._service()

    def notices(self) -> bool:
        """Let the service look at its events. Return whether it wants a pass now."""
        # The service looks again while there is something to read; a flood takes several looks.
        found = [source.needs_pass() for _ in range(LOOKS) for source in (self.follower, self.udev)]
        return any(found)

    def make_pass(self) -> Outcome:
        """Make a pass as the service does, and look at each machine's Ready."""
        self.follower.needs_pass()
        self.outcome = outcome = self.agent.run_pass()
        self.follower.save_position(gpu.pci_address for vendor in outcome.facts.vendors for gpu in vendor.gpus)
        self.passes += 1
        for machine in outcome.machines:
            mine = set(MACHINES[machine.name])
            if machine.ready.status is Status.TRUE and mine & self.bad:
                all_bad = mine <= self.bad
                self.false_ready += all_bad or machine.ready.reason == "AllConditionsTrue"
        return outcome

    def settle(self) -> None:
        """Let the machines report and make passes, until there is nothing left to do."""
        resting, left = 0, tuple[str, ...]()
        for _ in range(ROUNDS):
            self.answer()
            outcome = self.make_pass()
            left = (*outcome.sentences, *outcome.failures)
            resting = 0 if outcome.actions or outcome.failures else resting + 1
            if resting == 2:
                return
        raise AgentError(f"no rest after {ROUNDS} passes: {'; '.join(left)}")

    def later(self, seconds: float) -> None:
        """Let time pass. The machines report on, but no GPU says anything new."""
        self.ahead += seconds
        self.settle()

    def answer(self) -> None:
        """Let the machines report."""
        for name in self.host.running:
            self.host.answer(name)
            self._answer_test(name)

    def _wait(self, seconds: float) -> None:
        """What happens while a command sleeps."""
        self.ahead += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()
        self.answer()

    def _answer_test(self, name: str) -> None:
        if not self.host.exists(gpu_test_file(name)):
            return
        request = parse_test_request(self.host.read(gpu_test_file(name)))
        uuids = {gpu.pci_address: gpu.uuid for vendor in self.outcome.facts.vendors for gpu in vendor.gpus}
        step = "" if self.test_end is GpuTestEnd.PASSED else "memory"
        results = tuple(
            GpuTestResult(each.pci_address, uuids[each.pci_address], self.test_end, step) for each in request.gpus
        )
        path = f"{report_directory(name)}/{GPU_TESTS_NAME}"
        self.host.write(path, render_test_results(GpuTestResults(request.id, True, results)))

    # ---- nvidia-smi

    def _run_program(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[0] != "nvidia-smi":
            runner: ScriptedRunner = self.host.runner
            return runner(argv, timeout)
        return Completed(0, self._smi(argv[1:]).encode(), b"")

    def _smi(self, words: tuple[str, ...]) -> str:
        match words:
            case ("-i", gpu, "--query-gpu=persistence_mode", "--format=csv,noheader"):
                return "Enabled\n" if self.persistent[gpu] else "Disabled\n"
            case ("-i", gpu, "--query-gpu=pci.bus_id,name", "--format=csv,noheader"):
                return f"0000{gpu.upper()}, NVIDIA H100 80GB HBM3\n"
            case ("-i", gpu, "-pm", mode):
                if mode == "1":
                    self.after_reset()
                self.persistent[gpu] = mode == "1"
            case ("--gpu-reset", "-i", _):
                self.during_reset()
                self._wait(5)
            case _:
                raise UnexpectedError(words)
        return "All done.\n"

    # ---- what is published

    def seen(self) -> dict[str, Seen]:
        """Return what is published of each GPU, by address."""
        listed = listed_gpus(self.outcome.facts, granted_to(self.outcome.machines))
        verdicts = {each.pci_address: each.health for each in listed}
        found = {}
        for name in MACHINES:
            for address, each in parse_gpu_states(self.host.read(gpu_states_file(name))).items():
                fenced = each.state is not GpuState.HEALTHY
                found[address] = Seen(verdicts[address], fenced, each.reason)
        return found

    def ready(self) -> dict[str, str]:
        """Return status and reason of each machine's Ready."""
        return {each.name: f"{each.ready.status} {each.ready.reason}" for each in self.outcome.machines}

    def given(self, without: Iterable[str] = ()) -> dict[str, object]:
        """Return what each machine can use, without what belongs to these GPUs."""
        gone = set(without)
        owners = {gpu: f"195:{minor}" for minor, gpu in enumerate(NVIDIA)}
        found: dict[str, object] = {}
        for name, running in self.host.running.items():
            handoff = parse_handoff(self.host.read(handoff_file(name)))
            devices = [each for request in handoff.requests for each in request.devices]
            found[f"{name}: handoff"] = sorted(str(each) for each in devices if each.pci_address not in gone)
            numbers = {f"{each.major}:{each.minor}" for each in devices if each.pci_address in gone}
            numbers |= {owners[gpu] for gpu in gone & owners.keys()}
            found[f"{name}: permitted"] = sorted(
                each for each in running.allow if each.removeprefix("/dev/char/") not in numbers
            )
        return found

    def describe(self) -> str:
        """Return what is published, for a finding."""
        return json.dumps({"gpus": self.seen(), "ready": self.ready()})
