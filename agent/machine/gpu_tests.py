"""Tests GPUs of this machine when the host asks for it, one after the other, and writes down what came of it.

Then it tests the ways between those that have passed, each to the next one and the last to the first: that tries each
GPU twice, in a time that grows with their number and not with its square.

It is a service of its own, because a test takes long, and the GPU setup must not wait for it. Each device is tested by
a program in a process of its own, which is killed if it hangs. A GPU that a pod has is not tested, unless the host
forces it. If the host takes its request back, the test ends within a second: this process ends, and systemd kills what
it has started.
"""

import posixpath
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agent.machine.kubelet import (
    CHECKPOINT,
    CHECKPOINT_LIMIT,
    Allocation,
    allocations,
    device_name,
    prepared_claims,
    published_devices,
)
from agent.machine.notes import InBackground, in_words
from agent.machine.requests import WithdrawnError, read_request, serve
from agent.machine.vendors import VENDORS
from agent.model.contract import (
    FIRST_CONTEXT,
    AllocatableDevice,
    GpuTestEnd,
    GpuTestRequest,
    GpuTestResult,
    GpuTestResults,
    GpuToTest,
    parse_test_request,
    render_test_results,
)
from agent.model.device import gives_gpus
from agent.model.errors import AgentError, CommandError, DocumentError, ExitCodeError, UnkillableError
from agent.model.handoff import SIZE_LIMIT, Request, parse_handoff
from agent.model.json_document import get, parse_object
from agent.model.paths import (
    GPU_TEST_NAME,
    GPU_TESTS_NAME,
    HANDOFF_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
)
from agent.model.text import one_line, quoted
from agent.system.deadlines import bounded
from agent.system.files import System
from agent.system.journal import INFO, say
from agent.system.process import TimeLimitError, host_runner
from agent.system.processes import find_holders
from agent.vendors.machine_vendor import MachineVendor

REQUEST = f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_TEST_NAME}"
RESULTS = f"{MACHINE_REPORT_DIRECTORY}/{GPU_TESTS_NAME}"
PODS = "/var/lib/kubelet/pods"
"""The kubelet's directory of pods, at its usual place. A pod's own directory is there until the pod is deleted."""
LOOK = 0.5
"""Seconds between two looks at whether the host still wants the test."""
HOLDERS_LIMIT = 30.0
"""Seconds to search the machine's processes for those of pods that have a GPU open."""
SHOWN = 500
"""Characters of a message that the host gets."""
OPPOSITE = {"peer_to": "peer_from", "peer_from": "peer_to"}
"""Figures of a way as the other GPU sees it."""
ENDS = {"passed": GpuTestEnd.PASSED, "failed": GpuTestEnd.FAILED, "not run": GpuTestEnd.NOT_RUN}
"""How the program says that a test ended."""


class _Device(NamedTuple):
    """A device to test, or the reason why none of the GPU's devices can be tested."""

    vendor: MachineVendor | None = None
    granted: Request | None = None
    uuid: str = ""
    is_part: bool = False
    problem: str = ""


def main() -> int:
    """Test what the host asks for, and return the exit code."""
    return run(System(host_runner))


def run(system: System) -> int:
    """Test what the host asks for, and return the exit code (agent.machine.requests)."""
    return serve(partial(_requested, system), partial(_answer, system))


def _requested(system: System) -> GpuTestRequest | None:
    return read_request(REQUEST, parse_test_request, system)


def _answer(system: System, request: GpuTestRequest) -> None:
    """Test the GPUs, and write the results after each. Raises OSError if they cannot be written.

    A request is not worked on twice: if this process was killed, the host keeps the results that it has read.
    """
    before, results, stopped = _before(system), list[GpuTestResult](), ""
    passed = dict[GpuToTest, _Device]()
    if before.get("id") == request.id:
        if before.get("done") is not True:
            _write(system, GpuTestResults(request.id, True))
        return
    _write(system, GpuTestResults(request.id, False))
    for gpu in request.gpus:
        for device in [_Device(problem=stopped)] if stopped else _devices(system, request, gpu):
            result, unkillable = _tested(system, request, gpu, device._replace(problem=device.problem or stopped))
            results.append(result)
            say(INFO, f"{gpu.pci_address} {result.uuid}: {result.result} {result.message}")
            _write(system, GpuTestResults(request.id, False, tuple(results)))
            if unkillable:
                stopped = f"the test of {gpu.pci_address} waits in the kernel, and cannot be killed"
            if result.result is GpuTestEnd.PASSED and not device.is_part:
                passed[gpu] = device
    for first, second in ring([] if stopped else [*passed]):
        found, unkillable = _tested_pair(system, request, first, second)
        results += found
        say(INFO, f"{first.pci_address} with {second.pci_address}: {found[0].result} {found[0].message}")
        _write(system, GpuTestResults(request.id, False, tuple(results)))
        if unkillable:
            break
    _write(system, GpuTestResults(request.id, True, tuple(results)))


def ring(gpus: Sequence[GpuToTest]) -> list[tuple[GpuToTest, GpuToTest]]:
    """Return each with the next one. Two have only one way between them."""
    pairs = [*zip(gpus, [*gpus[1:], *gpus[:1]], strict=True)]
    return pairs if len(gpus) > 2 else pairs[: len(gpus) - 1]


def _before(system: System) -> Mapping[str, Any]:
    try:
        return parse_object(RESULTS, system.read(RESULTS, SIZE_LIMIT))
    except (FileNotFoundError, DocumentError):
        return {}


def _write(system: System, results: GpuTestResults) -> None:
    system.write(RESULTS, render_test_results(results))


def _devices(system: System, request: GpuTestRequest, gpu: GpuToTest) -> list[_Device]:
    """Return the GPU's devices: itself, or its MIG devices. Of a GPU that must not be tested, only why."""
    try:
        handoff = parse_handoff(system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}", SIZE_LIMIT))
        granted = next((each for each in handoff.requests if gpu.pci_address in each.gpus), None)
        if granted is None:
            return [_Device(problem="it is not granted to this machine")]
        vendor = VENDORS.get(granted.vendor)
        if vendor is None or not vendor.test_program:
            return [_Device(problem=f"there is no test for this vendor ({granted.vendor})")]
        published = published_devices(system, vendor, granted)
        devices = tuple(each for each in published if each.pci_address == gpu.pci_address)
        if not devices:
            return [_Device(problem="the CDI specification does not name it: see CDISpecCurrent")]
        if not request.force and (problem := _taken(system, vendor, granted, gpu, devices)):
            return [_Device(problem=problem)]
        return [_Device(vendor, granted, device_name(each), bool(each.partition)) for each in devices]
    # Any exception: files of pods may have unexpected content, and the other GPUs are tested all the same.
    except Exception as error:
        return [_Device(problem=f"cannot tell whether it may be tested: {in_words(error)}")]


def _taken(
    system: System,
    vendor: MachineVendor,
    granted: Request,
    gpu: GpuToTest,
    devices: tuple[AllocatableDevice, ...],
) -> str:
    """Return which pod has the GPU; empty if none has. Raises OSError or an AgentError.

    That a process has it open is no proof: device plugins and monitors keep all GPUs open.
    """
    uuids = {vendor.gpu_of(device_name(each), granted) for each in devices}
    for allocation in _allocations(system):
        if gives_gpus(allocation.resource, vendor.resource_prefix, vendor.harmless_resources):
            found = {vendor.gpu_of(each, granted) for each in allocation.ids}
            # An id of an unknown form may be this GPU's.
            if found & {*uuids, ""}:
                return f"the kubelet gave it to pod {quoted(allocation.pod)}; delete the pod if it has ended"
    names = {name for each in devices for name in each.cdi_names}
    for claim in prepared_claims(system):
        if names & claim.cdi_names:
            return f"the claim {quoted(f'{claim.namespace}/{claim.name}')} has it"
    numbers = {(each.major, each.minor): each.path for each in granted.devices if each.pci_address == gpu.pci_address}
    held = bounded("/proc", partial(find_holders, system, numbers), HOLDERS_LIMIT).holders if numbers else ()
    used = [each.describe() for each in held if each.pod_uid and each.command not in vendor.monitors]
    return f"a pod has it open: {used[0]}" if used else ""


def _allocations(system: System) -> Iterator[Allocation]:
    """Yield what the kubelet gave to pods that have not been deleted since."""
    try:
        found = allocations(system.read_untrusted(CHECKPOINT, CHECKPOINT_LIMIT)[0])
    except FileNotFoundError:
        return
    # Without the directory, the kubelet's root is elsewhere.
    kept = set(system.entries(PODS)) if system.is_directory(PODS) else None
    yield from (each for each in found if kept is None or each.pod in kept)


def _tested(system: System, request: GpuTestRequest, gpu: GpuToTest, device: _Device) -> tuple[GpuTestResult, bool]:
    """Return the result of one device, and whether its program cannot be killed. Raises WithdrawnError."""
    if device.problem or not device.vendor:
        why = one_line(device.problem)[:SHOWN]
        not_run = GpuTestResult(gpu.pci_address, device.uuid, GpuTestEnd.NOT_RUN, message=why, finished=time.time())
        return not_run, False
    link = gpu.link_speed and gpu.link_width and not device.is_part
    arguments = ("--link-speed", str(gpu.link_speed), "--link-width", str(gpu.link_width)) if link else ()
    before, stuck = _errors(system, device, gpu)
    if stuck:
        not_run = GpuTestResult(gpu.pci_address, device.uuid, GpuTestEnd.NOT_RUN, message=stuck, finished=time.time())
        return not_run, True
    result, unkillable = _watched(
        system, request, gpu, device, "--seconds", str(request.seconds), *arguments, limit=request.seconds
    )
    after, stuck = ({}, "") if unkillable else _errors(system, device, gpu)
    if known := before.keys() & after.keys():
        # A counter that has begun again says nothing about this time.
        count = max(0, *(after[each] - before[each] for each in known))
        result = result._replace(figures={**result.figures, "uncorrected_errors": count})
        if count and not result.result.is_bad:
            message = f"the GPU counted {count} more uncorrected ECC errors"
            result = result._replace(result=GpuTestEnd.FAILED, step="memory errors", message=message)
    return result, unkillable or bool(stuck)


def _errors(system: System, device: _Device, gpu: GpuToTest) -> tuple[Mapping[str, int], str]:
    """Return the GPU's counts of memory errors, and why the program that asks cannot be killed, if so.

    If the counts are not known, there are none, which says nothing about the GPU.
    """
    if not (device.vendor and device.granted):
        return {}, ""
    try:
        return device.vendor.uncorrected_errors(system, device.granted, gpu.pci_address), ""
    except UnkillableError as error:
        return {}, one_line(f"the question about its ECC errors cannot be killed: {error}")[:SHOWN]
    except (AgentError, OSError) as error:
        say(INFO, f"{gpu.pci_address}: its ECC errors are not known: {error}")
        return {}, ""


def _tested_pair(
    system: System, request: GpuTestRequest, first: GpuToTest, second: GpuToTest
) -> tuple[list[GpuTestResult], bool]:
    """Return the result for each of two GPUs, and whether the program cannot be killed. Raises WithdrawnError.

    Since they were tested alone, a pod may have got one.
    """
    one, other = (_devices(system, request, each)[0] for each in (first, second))
    if why := one_line(one.problem or other.problem)[:SHOWN]:
        result, unkillable = GpuTestResult("", "", GpuTestEnd.NOT_RUN, message=why, finished=time.time()), False
    else:
        result, unkillable = _watched(system, request, first, one, "--peer", other.uuid)
    figures = {OPPOSITE.get(name, name): each for name, each in result.figures.items()}
    here = result._replace(gpu=first.pci_address, uuid=one.uuid, peer=second.pci_address)
    there = result._replace(gpu=second.pci_address, uuid=other.uuid, peer=first.pci_address, figures=figures)
    return [here, there], unkillable


def _watched(
    system: System, request: GpuTestRequest, gpu: GpuToTest, device: _Device, *arguments: str, limit: float = 0.0
) -> tuple[GpuTestResult, bool]:
    """Run the program, and return what came of it, as `_tested`. `limit` is added to FIRST_CONTEXT."""
    program = f"{posixpath.dirname(__file__)}/{device.vendor.test_program if device.vendor else ''}"
    argv = (sys.executable, "-I", "-S", program, device.uuid, *arguments)
    running = InBackground(lambda: _run(system, argv, limit + FIRST_CONTEXT))
    while not running.ends_within(LOOK):
        now = _requested(system)
        if not now or now.id != request.id:
            raise WithdrawnError
    end, report, unkillable = running.result()
    figures, floors = (_numbers(report.get(key)) for key in ("figures", "floors"))
    slow = tuple(each for each in report.get("slow") or () if isinstance(each, str))
    step, message = (one_line(str(report.get(key) or ""))[:SHOWN] for key in ("step", "message"))
    result = GpuTestResult(gpu.pci_address, device.uuid, end, step, message, figures, floors, slow, time.time())
    return result, unkillable


def _numbers(found: object) -> dict[str, float]:
    """Return what is known: a floor may be null."""
    items = found.items() if isinstance(found, dict) else ()
    return {name: each for name, each in items if isinstance(each, int | float)}


def _run(system: System, argv: tuple[str, ...], limit: float) -> tuple[GpuTestEnd, Mapping[str, Any], bool]:
    """Run the program. Return how the test ended, what it reports, and whether it cannot be killed. Raises nothing.

    A program that does not end in time was stopped by the GPU. One that fails otherwise says nothing about the GPU.
    """
    try:
        try:
            printed = system.run(*argv, timeout=limit)
        except ExitCodeError as error:
            if not error.stdout:
                raise
            printed = error.stdout
        report = parse_object(argv[3], printed.encode(errors="replace"))
        return ENDS[get(argv[3], report, "result", str)], report, False
    except UnkillableError as error:
        return GpuTestEnd.HUNG, {"message": f"it waits in the kernel, and cannot be killed: {error.ended}"}, True
    except CommandError as error:
        hung = isinstance(error.__cause__, TimeLimitError)
        return GpuTestEnd.HUNG if hung else GpuTestEnd.NOT_RUN, {"message": error.ended}, False
    except Exception as error:
        return GpuTestEnd.NOT_RUN, {"message": in_words(error)}, False
