"""Tests GPUs: keeps new pods from them, asks their machines for the test, and records what came of it.

The host half runs nothing in a machine: it publishes a request, and reads results. These are not trusted. A machine can
only say something about GPUs that it has and was asked to test.
"""

import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from msgspec import Struct, field
from msgspec.structs import replace

from agent.host.apply.steps import AGAIN, publish_documents, publish_request
from agent.host.detach import Timing, find_gpu
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import record_fault, record_test, record_testing
from agent.host.state.locks import detach_lock, locked, pass_lock
from agent.host.vendors import host_vendor
from agent.host.verify.answers import MACHINE_SAYS
from agent.host.verify.gpu_states import module_version
from agent.model.contract import (
    FIRST_CONTEXT,
    GpuTestEnd,
    GpuTestRequest,
    GpuTestResult,
    GpuTestResults,
    GpuToTest,
    parse_test_results,
    render_test_request,
)
from agent.model.errors import AgentError, DocumentError
from agent.model.facts import GPU_TEST, Facts, Gpu, GpuFault, Verdict
from agent.model.handoff import DRA, SIZE_LIMIT
from agent.model.paths import GPU_TEST_LOCK, GPU_TESTS_NAME, PCI_DEVICES, gpu_test_file, report_directory
from agent.model.text import one_line, printable
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.trust import read_seen

BEGIN = 60.0
"""Seconds in which a machine must begin."""
MARGIN = 90.0
"""Seconds in addition to a test's own limit: the machine looks for pods that have the GPU, and kills a program."""
DEVICES = 8
"""More than the MIG devices that one GPU can have, which are seven."""
EQUAL = 0.9
"""The share of the best figure of its model below which a GPU is slower than its equals."""
COMPARED = ("memory_bandwidth", "device_to_host", "host_to_device")
"""Figures by which GPUs are compared, in bytes per second."""
SEE = "see `journalctl -M {} -u unbounded-agent-gpu-test`"
FAILED, PEER_FAILED, SLOW = "TestFailed", "PeerTestFailed", "TestSlow"
"""Reasons of faults."""


class TriedGpu(Struct, frozen=True):
    """What came of the test of one GPU."""

    gpu: Gpu
    machine: str
    """Empty if no machine was asked."""
    results: tuple[GpuTestResult, ...]
    """One for each of its MIG devices; or one for itself, and one for the way to each of up to two other GPUs."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """The best of its equals by figure, for the figures in which it is slower."""
    alone: bool = False
    """Whether it has passed, and there was no other of its model to compare it with."""

    @property
    def end(self) -> GpuTestEnd:
        """The worst result."""
        return max((each.result for each in self.results if each.counts), key=list(GpuTestEnd).index)


def run_tests(
    words: Sequence[str], seconds: float, force: bool, reconciler: Reconciler, timing: Timing = Timing()
) -> tuple[TriedGpu, ...]:
    """Test the GPUs with these addresses or UUIDs; without any, all that running machines have.

    New pods do not get the GPUs meanwhile, if the machine uses Dynamic Resource Allocation. If this process is killed,
    that lasts until the next test or `gpus attach`. Raises ConfigError for an unknown address, or another AgentError.
    """
    facts = reconciler.preview()[0]
    named = [find_gpu(word, facts) for word in words] or [
        gpu for vendor in facts.vendors for gpu in vendor.gpus if _machines(gpu, facts)
    ]
    addresses = sorted({gpu.pci_address for gpu in named})
    with ExitStack() as stack:
        for address in addresses:
            stack.enter_context(detach_lock(reconciler.system, address))
        # The request of another GPU's test would replace the machine's.
        stack.enter_context(locked(reconciler.system, GPU_TEST_LOCK, 0, "another `gpus test` is still running"))
        # Once more: until now, somebody may have detached one.
        facts = reconciler.preview()[0]
        gpus = [find_gpu(address, facts) for address in addresses]
        problems = {gpu.pci_address: why for gpu in gpus if (why := _problem(gpu, facts, force))}
        places = {gpu.pci_address: _machines(gpu, facts)[0] for gpu in gpus if gpu.pci_address not in problems}
        request = GpuTestRequest(secrets.token_hex(8), seconds, (), force, locked=True)
        uuids = {gpu.pci_address: gpu.uuid for gpu in gpus}
        drivers = {gpu.pci_address: module_version(gpu, facts) for gpu in gpus}
        shared = frozenset(gpu.pci_address for gpu in gpus if len(_machines(gpu, facts)) > 1)
        tests = _Tests(reconciler, timing, stack, request, places, problems, uuids, drivers, shared)
        if places:
            try:
                tests.run()
            finally:
                tests.end()
        return _compared([tests.tried(gpu) for gpu in gpus])


def _machines(gpu: Gpu, facts: Facts) -> tuple[str, ...]:
    """Return the machines that have the GPU and may run."""
    running = (each for each in facts.machines if each.may_run)
    return tuple(each.name for each in running if gpu.pci_address in each.kept_gpus)


def _problem(gpu: Gpu, facts: Facts, force: bool) -> str:
    """Return why the GPU cannot be tested; empty if it can be."""
    machines = _machines(gpu, facts)
    if not host_vendor(gpu.vendor).has_test:
        return f"there is no test for this vendor ({gpu.vendor})"
    if gpu.detached:
        return "it is detached"
    if gpu.why_lost or not gpu.driver:
        return "it no longer answers" if gpu.why_lost else "it has no kernel driver"
    if not machines:
        return "no running machine has it"
    if len(machines) > 1 and not force:
        return f"pods of each of these machines may use it, and only one can look for them: {', '.join(machines)}"
    return ""


def _link(system: System, address: str) -> GpuToTest:
    """Return the GPU with its link as it is now, which may rest at a lower speed: then the floors are lower too.

    An attribute reads as `16.0 GT/s PCIe`, `16` or, if that is not known, `Unknown` or 0 (drivers/pci/pci-sysfs.c).
    """
    numbers = []
    for name in ("current_link_speed", "current_link_width"):
        text = read_seen(lambda path: read_device_text(system, path), f"{PCI_DEVICES}/{address}/{name}")
        match = re.match(r"([0-9]{1,3}(?:\.[0-9])?)(?: GT/s|\s*$)", text) if isinstance(text, str) else None
        numbers.append(float(match[1]) if match else 0.0)
    speed, width = numbers
    return GpuToTest(address, speed, int(width)) if speed and 0 < width <= 32 else GpuToTest(address)


class _Tests(Struct):
    """One run of the command."""

    reconciler: Reconciler
    timing: Timing
    until: ExitStack
    """Ends when this no longer waits."""
    request: GpuTestRequest
    """As each machine gets it, without the GPUs."""
    places: Mapping[str, str]
    """The machines that test, by the GPU's address."""
    problems: dict[str, str]
    """Why GPUs were not tested, or machines no longer test, by address or name."""
    uuids: Mapping[str, str]
    """Of whole GPUs, by address."""
    drivers: Mapping[str, str]
    """The versions of the kernel modules, by address."""
    shared: frozenset[str]
    """GPUs that several machines have. No machine's word may cost, or give, another machine a GPU."""
    results: dict[tuple[str, str, str], GpuTestResult] = field(default_factory=dict)
    """By address, UUID and peer."""
    began: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    """Machines that have said all."""
    heard: dict[str, float] = field(default_factory=dict)
    """When each machine last said something new, by CLOCK_MONOTONIC."""
    asked: float = 0.0
    """When all were asked."""
    requests: dict[str, bytes] = field(default_factory=dict)
    """By machine."""
    published: float = 0.0
    """When they were last written."""

    @property
    def _machines(self) -> list[str]:
        return sorted(set(self.places.values()))

    def run(self) -> None:
        """Taint the GPUs, publish the requests, and wait for the results."""
        system, names = self.reconciler.system, self._machines
        with pass_lock(system, self.reconciler.progress):
            for address in self.places:
                if not record_testing(system, address, testing=True):
                    raise AgentError(f"{address} has left the PCI bus in the meantime")
        self.reconciler.reconcile()
        if any(self.reconciler.config.machines[name].allocation == DRA for name in names):
            self.reconciler.progress(f"waiting {self.timing.taint:.0f} s until no new pod gets the GPUs")
            time.sleep(self.timing.taint)
        for name in names:
            gpus = tuple(_link(system, address) for address, place in self.places.items() if place == name)
            self.requests[name] = render_test_request(self.request._replace(gpus=gpus))
        self.asked = time.monotonic()
        self.heard = dict.fromkeys(names, self.asked)
        self._publish(names)
        self.reconciler.wait(self._look, math.inf, self.timing.poll)

    def _publish(self, names: Iterable[str]) -> None:
        """Write machines' requests, also if they are there already. One that cannot get its own stops no other."""
        self.published = time.monotonic()
        for name in names:
            if failures := publish_request(
                self.reconciler.system, gpu_test_file, name, self.requests[name], self.until
            ):
                self.problems[name] = failures[0]

    def _look(self) -> tuple[None, str]:
        for name in self._machines:
            if name not in self.problems:
                self._read(name)
        if time.monotonic() - self.published >= AGAIN:
            self._publish(set(self._machines) - self.began - self.problems.keys())
        waits = [name for name in self._machines if name not in self.problems]
        tested = {address for address, *_ in self.results}
        left = [address for address, name in self.places.items() if name in waits and address not in tested]
        return None, f"waiting for {', '.join(waits)} to test {', '.join(left) or 'the rest'}" if waits else ""

    def _read(self, name: str) -> None:
        """Take what a machine says, and notice if it has said all, or says nothing."""
        path, now, said, why = f"{report_directory(name)}/{GPU_TESTS_NAME}", time.monotonic(), None, ""
        found = read_seen(lambda path: self.reconciler.system.read_untrusted(path, SIZE_LIMIT), path)
        try:
            said = parse_results(found[0]) if isinstance(found, tuple) else None
        except DocumentError as error:
            why = f": {error}"
        if said and said.id == self.request.id:
            pairs = {
                (each.gpu, each.uuid, each.peer): each for each in said.results if self.places.get(each.gpu) == name
            }
            # What was read once stays: the machine's service may have been killed since.
            new = {pair: each for pair, each in pairs.items() if pair not in self.results}
            if len(self.results) + len(new) > DEVICES * len(self.places):
                self.problems[name] = f"machine {name} names more devices than its GPUs can have"
                return
            self.results |= new
            if new or name not in self.began:
                self.began.add(name)
                self.heard[name] = now
            if said.done:
                own = {pair for pair in self.results if self.places[pair[0]] == name}
                self.complete |= {name} if own == pairs.keys() else set()
                self.problems[name] = f"machine {name} did not test it; {SEE.format(name)}"
                return
        limit = self.request.seconds + FIRST_CONTEXT + MARGIN if name in self.began else BEGIN
        if now - self.heard[name] > limit:
            old = "" if name in self.began else ", and its image may have an older agent"
            self.problems[name] = f"machine {name} has not answered for {limit:.0f} s{why}; {SEE.format(name)}{old}"
        # Until the last machine has finished, the GPUs of all are withheld.
        its_gpus = sum(place == name for place in self.places.values())
        most = its_gpus * (DEVICES * self.request.seconds + 2 * (FIRST_CONTEXT + MARGIN))
        if now - self.asked > most:
            self.problems[name] = f"machine {name} has not finished within {most:.0f} s; {SEE.format(name)}"

    def end(self) -> None:
        """Withdraw the requests, record the results, and give the GPUs back to new pods."""
        system, progress = self.reconciler.system, self.reconciler.progress
        for failure in publish_documents(system, gpu_test_file, {}, self._machines):
            progress(failure)
        # Recorded before the taint ends: no pod may get a GPU that has failed.
        recorded = [address for address in self.places if self._recorded(address)]
        try:
            with pass_lock(system, progress):
                for address in recorded:
                    record_testing(system, address, testing=False)
        except (AgentError, OSError) as error:
            progress(f"{', '.join(recorded)} stay withheld from new pods until the next test or `gpus attach`: {error}")
        try:
            self.reconciler.reconcile()
        except (AgentError, OSError) as error:
            progress(f"the next pass gives the GPUs back to pods: {error}")

    def _recorded(self, address: str) -> bool:
        """Record the result of a GPU, and return whether that worked."""
        if address in self.shared:
            return True
        try:
            tested = (self.places[address], self.drivers[address])
            _record(self.reconciler.system, address, self._results(address), tested, judged=not self.request.force)
        except (AgentError, OSError) as error:
            self.reconciler.progress(
                f"cannot record the result of {address}, so it stays withheld from new pods until the next test or "
                f"`gpus attach`: {error}"
            )
            return False
        return True

    def tried(self, gpu: Gpu) -> TriedGpu:
        return TriedGpu(gpu, self.places.get(gpu.pci_address, ""), self._results(gpu.pci_address))

    def _results(self, address: str) -> tuple[GpuTestResult, ...]:
        """Return the results of a GPU. If the machine has not said all, those of other MIG devices may be missing."""
        machine = self.places.get(address, "")
        results = tuple(each for (tested, *_), each in sorted(self.results.items()) if tested == address)
        is_whole = any(each.uuid == self.uuids[address] for each in results if each.uuid)
        if results and (is_whole or machine in self.complete):
            return results
        why = self.problems.get(address) or self.problems.get(machine, "")
        return (*results, GpuTestResult(address, "", GpuTestEnd.NOT_RUN, message=why))


def _record(
    system: System, address: str, results: Iterable[GpuTestResult], tested: tuple[str, str], *, judged: bool
) -> None:
    """Record the worst result, and a fault if there is one. To be not tested says nothing.

    `tested` are the machine and the driver's version. If not `judged`, other programs may have used the GPU: then it
    may be slow.
    """
    counting = [each for each in results if each.counts]
    worst = max(counting, key=lambda each: (list(GpuTestEnd).index(each.result), not each.slow))
    if worst.result is GpuTestEnd.NOT_RUN:
        return
    # The error first: what ends the taint is the record of the result.
    if fault := _fault(address, worst, judged):
        record_fault(system, address, fault)
    ended = (FAILED, SLOW, *(PEER_FAILED for each in counting if each.peer))
    record_test(system, address, worst.result, ended if worst.result is GpuTestEnd.PASSED else (), *tested)


def _fault(address: str, worst: GpuTestResult, judged: bool) -> GpuFault | None:
    again, now = f"`unbounded-agent gpus test {address}`", time.time()
    if worst.peer:
        again = f"`unbounded-agent gpus test {address} {worst.peer}`"
    if worst.result is GpuTestEnd.FAILED and worst.slow:
        if not judged:
            return None
        meaning = f"its test was too slow ({', '.join(worst.slow)}); look at its link and its cooling, then run {again}"
        return GpuFault(SLOW, meaning, now, Verdict.DEGRADED, now, GPU_TEST)
    if worst.result.is_bad:
        step = f" (step: {worst.step})" if worst.step else ""
        what = "did not end" if worst.result is GpuTestEnd.HUNG else f"failed{step}"
        reset = f"`unbounded-agent gpus reset {address}`"
        found = PEER_FAILED if worst.peer else FAILED
        what = f"with {worst.peer} {what}; either may be at fault, or the host's IOMMU" if worst.peer else what
        meaning = f"its test {what}; run {reset}, then {again}: if it fails again, replace the GPU"
        return GpuFault(found, meaning, now, Verdict.NEEDS_RESET, now, GPU_TEST)
    return None


def _compared(tried: Sequence[TriedGpu]) -> tuple[TriedGpu, ...]:
    """Compare whole GPUs that have passed with the others of their model."""
    figures: dict[tuple[str, str], dict[str, Mapping[str, float]]] = {}
    for each in tried:
        result = each.results[0]
        if each.end is GpuTestEnd.PASSED and result.uuid == each.gpu.uuid:
            figures.setdefault((each.gpu.vendor, each.gpu.model), {})[each.gpu.pci_address] = result.figures
    compared = []
    for each in tried:
        equals = figures.get((each.gpu.vendor, each.gpu.model), {})
        if own := equals.get(each.gpu.pci_address):
            best = {name: max(other.get(name, 0.0) for other in equals.values()) for name in COMPARED}
            slower = {name: most for name, most in best.items() if own.get(name, 0.0) < EQUAL * most}
            each = replace(each, slower=slower, alone=len(equals) == 1)
        compared.append(each)
    return tuple(compared)


def parse_results(data: bytes) -> GpuTestResults:
    """Parse a machine's results, which are not trusted: all texts become printable. Raises DocumentError."""
    found = parse_test_results(data)
    says = (f"{MACHINE_SAYS}{printable(one_line(each.message))}" if each.message else "" for each in found.results)
    results = (each._replace(message=said) for each, said in zip(found.results, says, strict=True))
    return found._replace(results=tuple(results))
