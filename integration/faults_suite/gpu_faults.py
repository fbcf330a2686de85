"""Faults of GPUs, each with the verdict that the oracle asks for: whom it costs what, how soon, and how it ends."""

import errno
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.host import gpu_reset
from agent.host.detach import attach
from agent.host.gpu_tests import run_tests
from agent.model.contract import GpuTestEnd
from agent.system.devices import BURST
from integration.faults_suite import gpu_oracle as oracle
from integration.faults_suite.gpu_oracle import BROKEN, DEGRADED, FENCED, HEALTHY, NO_DRIVER, REBOOT, RESET, Line
from integration.faults_suite.gpu_world import (
    AMD,
    DRIVERS,
    FIRST,
    I915,
    MACHINE_OF,
    MACHINES,
    NVIDIA,
    ONLY,
    SECOND,
    SWITCH,
    XE,
    GpuWorld,
    nothing,
)
from integration.faults_suite.points import Finding, directory, silence

EACH = 4
"""Faults of each kind."""
SEED = 1
DAY, NORMAL, REPEATED = 86_400.0, 720.0, 61.0
"""Seconds: a GPU that needs something never recovers in the first; a degraded one does in the second; the GPU's own
word counts against an error that is older than the third."""
XID = "NVRM: Xid (PCI:{}): {}, pid=1, name=x, words"
RECOVERY = "NVRM: Xid (PCI:{}): 154, GPU recovery action changed from 0x{:x} ({}) to 0x{:x} ({})"
LOST_LINES = (
    "NVRM: Xid (PCI:{}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: GPU {}.0: GPU has fallen off the bus.",
)


class Fault(NamedTuple):
    """A fault, and what must come of it."""

    about: str
    """What it was made from."""
    verdicts: Mapping[str, str]
    """By address. GPUs without one are healthy."""
    strike: Callable[[], None]
    ends: tuple[str, ...] = ()
    """Names of what ends it (WAYS)."""
    reason: str = ""
    """What the taint says; empty if it does not matter."""
    silent: bool = False
    """Whether the service notices it only at its next pass: a report, or a command that makes passes itself."""
    withdrawn: frozenset[str] = frozenset()
    """GPUs that lose what machines had of them."""
    not_ready: frozenset[str] = frozenset()
    """Machines that must have such a GPU, as their settings name it."""


Maker = Callable[[GpuWorld, random.Random], Fault]
KINDS: dict[str, Maker] = {}


def kind(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        KINDS[name] = maker
        return maker

    return add


def short(gpu: str) -> str:
    """Return an address as a Xid has it."""
    return gpu.removesuffix(".0")


# ---- what ends faults


def _rebind(world: GpuWorld, gpu: str) -> None:
    world.unbind(gpu)
    world.settle()
    world.bind(gpu)


def _reload(world: GpuWorld, _: str) -> None:
    """All that NVIDIA's driver has is bound again."""
    for gpu in NVIDIA:
        world.unbind(gpu)
    world.settle()
    world.host.link_driver(SWITCH, "nvidia-nvswitch")
    for gpu in NVIDIA:
        world.bind(gpu)


def _attach(world: GpuWorld, gpu: str) -> None:
    attach(gpu, world.agent)


def _reset(world: GpuWorld, *gpus: str) -> None:
    ending = gpu_reset.prepare(gpus, world.agent, evict=False, seconds=None).run()
    if not ending.done:
        raise AssertionError(f"gpus reset: {'; '.join(ending.sentences)}")


def _xid_154(world: GpuWorld, gpu: str) -> None:
    world.tell(RECOVERY.format(short(gpu), 1, "GPU Reset Required", 0, "None"))


def _own_word(world: GpuWorld, gpu: str) -> None:
    world.later(REPEATED)
    world.say(gpu)


def _answer(world: GpuWorld, gpu: str) -> None:
    """The driver of this GPU has no recovery action to tell."""
    world.later(REPEATED)
    world.claim(MACHINE_OF[gpu], gpu, {"persistence_mode": "Enabled"})


def _test(world: GpuWorld, gpu: str) -> None:
    world.test_end = GpuTestEnd.PASSED
    run_tests([gpu], 1.0, False, world.agent)


WAYS: dict[str, Callable[[GpuWorld, str], None]] = {
    "the driver is bound again": _rebind,
    "a reboot": lambda world, gpu: world.boot(),
    "gpus attach": _attach,
    "gpus reset": _reset,
    "Xid 154": _xid_154,
    "the GPU's own word": _own_word,
    "any answer": _answer,
    "ten normal minutes": lambda world, gpu: world.later(NORMAL),
    "a test that passes": _test,
    "amdgpu's success": lambda world, gpu: world.tell(f"amdgpu {gpu}: amdgpu: GPU reset(2) succeeded!"),
    "the driver is loaded again": _reload,
    "the GPU comes back": lambda world, gpu: world.host.plug(NVIDIA.index(gpu), gpu, NVIDIA.index(gpu)),
}
TRIED_IN_VAIN = ("Xid 154", "the GPU's own word", "a test that passes")
"""What must not end a fault of NVIDIA's GPUs unless it is among its ends."""
ALWAYS = ("the driver is bound again", "a reboot")
NEEDS = (*ALWAYS, "gpus attach", "gpus reset", "Xid 154", "the GPU's own word")
TOGETHER = ("gpus reset", "a reboot", "the driver is loaded again")
BY_HAND = (*ALWAYS, "gpus attach")


def _ends(verdict: str) -> tuple[str, ...]:
    """Return what ends an error of NVIDIA's that the kernel log has."""
    if verdict == REBOOT:
        # The command refuses: a reset would not help.
        return tuple(each for each in NEEDS if each != "gpus reset")
    return {RESET: NEEDS, BROKEN: BY_HAND, DEGRADED: ("ten normal minutes", *BY_HAND), HEALTHY: ()}[verdict]


# ---- the kinds


def _xid(world: GpuWorld, rng: random.Random, verdict: str, numbers: list[int]) -> Fault:
    gpu, number = rng.choice(NVIDIA), rng.choice(numbers)
    line = XID.format(short(gpu), number)
    reason = "" if verdict not in FENCED else f"Xid{number}"
    return Fault(line, {gpu: verdict}, lambda: world.tell(line), _ends(verdict), reason)


for _name, _verdict in (
    ("a Xid that asks for a reset", RESET),
    ("a Xid that asks for a reboot", REBOOT),
    ("a Xid that asks for a repair", BROKEN),
    ("a Xid after which the GPU works on", DEGRADED),
    ("a Xid that asks for nothing", HEALTHY),
):
    KINDS[_name] = partial(_xid, verdict=_verdict, numbers=oracle.xids()[_verdict])
KINDS["a Xid of an application"] = partial(_xid, verdict=HEALTHY, numbers=oracle.of_applications())


@kind("a GPU off the bus")
def _off_the_bus(world: GpuWorld, rng: random.Random) -> Fault:
    gpu = rng.choice(NVIDIA)
    lines = [each.format(short(gpu)) for each in rng.choice((LOST_LINES, LOST_LINES[:1], LOST_LINES[1:]))]
    return Fault("; ".join(lines), {gpu: REBOOT}, lambda: world.tell(*lines), ALWAYS)


@kind("an NVLink 5 error")
def _nvlink(world: GpuWorld, rng: random.Random) -> Fault:
    gpu, fatal, number = rng.choice(NVIDIA), rng.random() < 0.6, rng.randint(144, 150)
    data = " ".join(f"0x{rng.getrandbits(32):08x}" for _ in range(6))
    words = f"NETIR_LINK_EVT {'Fatal   ' if fatal else 'Nonfatal'} XC0 i0 Link {rng.randint(0, 17):02} ({data})"
    line, verdict = f"NVRM: Xid (PCI:{short(gpu)}): {number}, {words}", RESET if fatal else HEALTHY
    return Fault(line, {gpu: verdict}, lambda: world.tell(line), _ends(verdict), f"Xid{number}" if fatal else "")


@kind("Xid 154, there and back")
def _recovery(world: GpuWorld, rng: random.Random) -> Fault:
    gpu, action = rng.choice(NVIDIA), rng.choice([*oracle.RECOVERY_ACTIONS])
    words, verdict = oracle.RECOVERY_ACTIONS[action]
    line = RECOVERY.format(short(gpu), 0, "None", action, words)
    return Fault(
        line, {gpu: verdict}, lambda: world.tell(line), _ends(verdict), "" if verdict == DEGRADED else "Xid154"
    )


@kind("an NVSwitch's error")
def _sxid(world: GpuWorld, rng: random.Random) -> Fault:
    """Whatever GPU says that it is well: the switch connects them."""
    severity = rng.choice(("Fatal", "Fatal", "Non-fatal", "Correctable"))
    line = f"nvidia-nvswitch0: SXid (PCI:{SWITCH}): {rng.randint(10000, 29999)}, {severity}, Link 28 words"
    if severity != "Fatal":
        return Fault(line, {}, lambda: world.tell(line))
    return Fault(line, dict.fromkeys(NVIDIA, RESET), lambda: world.tell(line), TOGETHER)


@kind("an initialisation that fails")
def _init(world: GpuWorld, rng: random.Random) -> Fault:
    gpu = rng.choice(NVIDIA)
    line = f"NVRM: GPU {gpu}: RmInitAdapter failed! (0x{rng.getrandbits(8):x}:0x65:1792)"
    ends = (*NEEDS, "any answer")
    return Fault(line, {gpu: RESET}, lambda: world.tell(line), ends, "InitFailed")


@kind("a driver that refuses a GPU")
def _refused(world: GpuWorld, rng: random.Random) -> Fault:
    gpu, line = rng.choice(NVIDIA), rng.choice(oracle.REFUSED)

    def strike() -> None:
        world.unbind(gpu)
        world.tell(line.text.format(gpu))

    ends = ("the driver is bound again",)
    return Fault(line.text, {gpu: line.verdict}, strike, ends, line.reason, withdrawn=frozenset({gpu}))


def _drm(world: GpuWorld, rng: random.Random, gpu: str, lines: tuple[Line, ...]) -> Fault:
    found = rng.choice(lines)
    line, verdict = found.text.format(gpu, gpu), found.verdict
    ends: tuple[str, ...] = () if verdict == HEALTHY else BY_HAND
    if verdict == DEGRADED:
        ends = ("ten normal minutes", *BY_HAND)
    elif ends and gpu == AMD:
        ends = (*BY_HAND, "amdgpu's success")
    return Fault(line, {gpu: verdict}, lambda: world.tell(line), ends, found.reason if verdict in FENCED else "")


KINDS["a line of amdgpu"] = partial(_drm, gpu=AMD, lines=oracle.AMD_LINES)
KINDS["a line of xe"] = partial(_drm, gpu=XE, lines=oracle.XE_LINES)
KINDS["a line of i915"] = partial(_drm, gpu=I915, lines=oracle.I915_LINES)


@kind("a uevent of a wedged GPU")
def _wedged(world: GpuWorld, rng: random.Random) -> Fault:
    gpu, methods = rng.choice((AMD, XE, I915)), rng.choice([*oracle.WEDGED])
    verdict = oracle.WEDGED[methods]
    ends = () if verdict == HEALTHY else BY_HAND
    fault = Fault(
        f"WEDGED={methods}", {gpu: verdict}, lambda: world.wedge(gpu, methods), ends, "Wedged" if ends else ""
    )
    # An event of a DRM node causes a pass in any case.
    return fault._replace(silent=verdict == HEALTHY)


@kind("a GPU that asks for a recovery itself")
def _asks(world: GpuWorld, rng: random.Random) -> Fault:
    gpu, word = rng.choice(NVIDIA), rng.choice([*oracle.ASKED_FOR, "requires"])
    verdict = oracle.ASKED_FOR.get(word, RESET)
    words = {"gpu_recovery_action": word}
    if word == "requires":
        words = dict.fromkeys(("gpu_recovery_action", "remapped_rows.pending"), "GPU requires reset")
    # A machine may have made up the Reboot: the command may try.
    ends = ("the GPU's own word",) if verdict == DEGRADED else ("the GPU's own word", "any answer", "Xid 154", *BY_HAND)
    return Fault(str(words), {gpu: verdict}, lambda: world.say(gpu, **words), ends, silent=True)


@kind("rows and pages of a GPU's memory")
def _rows(world: GpuWorld, rng: random.Random) -> Fault:
    gpu = rng.choice(NVIDIA)
    field = rng.choice(("remapped_rows.failure", "remapped_rows.pending", "retired_pages.pending"))
    verdict = BROKEN if field == "remapped_rows.failure" else DEGRADED
    return Fault(field, {gpu: verdict}, lambda: world.say(gpu, **{field: "Yes"}), ("the GPU's own word",), silent=True)


@kind("a GPU that says that it is impaired")
def _impaired(world: GpuWorld, rng: random.Random) -> Fault:
    gpu = rng.choice(NVIDIA)
    words = rng.choice(
        (
            {"ecc.errors.uncorrected.volatile.total": str(rng.randint(1, 10**6))},
            {"clocks_throttle_reasons.hw_power_brake_slowdown": "Active"},
            {"fabric.health.summary": rng.choice(("Unhealthy", "Limited Capacity"))},
        )
    )
    return Fault(str(words), {gpu: DEGRADED}, lambda: world.say(gpu, **words), ("the GPU's own word",), silent=True)


@kind("a GPU that leaves the bus")
def _leaves(world: GpuWorld, rng: random.Random) -> Fault:
    gpu = rng.choice((FIRST, SECOND))
    ends, gone = ("the GPU comes back",), frozenset({gpu})
    fault = Fault(
        "pulled", {gpu: NO_DRIVER}, lambda: world.host.pull(gpu), ends, "GPULost", silent=True, withdrawn=gone
    )
    return fault._replace(not_ready=frozenset({"a"}))


@kind("a flood")
def _flood(world: GpuWorld, rng: random.Random) -> Fault:
    """Lines without meaning, errors of an application without end, and one error in between, some overwritten."""
    gpu, number = rng.choice(NVIDIA), rng.choice(oracle.xids()[RESET])
    overwritten = rng.random() < 0.5

    def strike() -> None:
        world.log.failing = [errno.EPIPE] * overwritten
        world.log.flood(rng.randint(1, 2 * BURST))
        world.log.flood(rng.randint(1, 2 * BURST), XID.format(short(gpu), 31), priority=3)
        world.tell(XID.format(short(gpu), number))

    return Fault(f"Xid {number}", {gpu: RESET}, strike, _ends(RESET), f"Xid{number}")


@kind("an error that concerns nobody")
def _nobody(world: GpuWorld, rng: random.Random) -> Fault:
    """At an address where no GPU is, or written by a program, or in the name of a device."""
    gpu, number = rng.choice(NVIDIA), rng.choice(oracle.xids()[RESET])
    how = rng.randrange(3)

    def strike() -> None:
        if how == 0:
            world.tell(XID.format("0000:77:00", number), "xe 0000:77:00.0: [drm] device wedged, needs recovery")
        elif how == 1:
            world.tell(XID.format(short(gpu), number), priority=rng.randint(8, 191))
        else:
            world.tell(f"usb 1-1: Product: {XID.format(short(gpu), number)}")

    return Fault(("nowhere", "user space", "a name")[how], {}, strike)


@kind("two GPUs at a time")
def _two(world: GpuWorld, rng: random.Random) -> Fault:
    one, other = rng.sample(NVIDIA, 2)
    lines = [XID.format(short(gpu), rng.choice(oracle.xids()[RESET])) for gpu in (one, other)]
    return Fault("; ".join(lines), {one: RESET, other: RESET}, lambda: world.tell(*lines), NEEDS)


@kind("an error while the service is down")
def _while_down(world: GpuWorld, rng: random.Random) -> Fault:
    fault = rng.choice((_off_the_bus, _nvlink, _recovery, _sxid, _init, _refused))(world, rng)
    return fault._replace(strike=lambda: world.restart_service(fault.strike))


@kind("an error during a reset")
def _during_reset(world: GpuWorld, rng: random.Random) -> Fault:
    """Of the GPU that is reset: it counts only after the reset. Of another one: that one does not come back with it."""
    gpu, other = rng.sample(NVIDIA, 2)
    failing, number = rng.choice((gpu, other)), rng.choice(oracle.xids()[RESET])

    def strike() -> None:
        world.tell(XID.format(short(gpu), 48))
        world.make_pass()
        world.during_reset = lambda: _tell(world, failing, number) if failing == other else None
        # The GPU works again, and fails before its machine has it back.
        world.after_reset = lambda: _tell(world, failing, number) if failing == gpu else None
        gpu_reset.prepare([gpu], world.agent, evict=False, seconds=None).run()
        world.during_reset = world.after_reset = nothing

    return Fault(f"{failing}: Xid {number}", {failing: RESET}, strike, _ends(RESET), f"Xid{number}", silent=True)


def _tell(world: GpuWorld, gpu: str, number: int) -> None:
    world.tell(XID.format(short(gpu), number))
    world.follower.needs_pass()


@kind("an error during a test")
def _during_test(world: GpuWorld, rng: random.Random) -> Fault:
    """The test passes, and ends only what a test found."""
    gpu, number = rng.choice(NVIDIA), rng.choice(oracle.xids()[RESET])

    def strike() -> None:
        world.meanwhile = [lambda: _tell(world, gpu, number)]
        _test(world, gpu)

    return Fault(f"Xid {number}", {gpu: RESET}, strike, _ends(RESET), f"Xid{number}", silent=True)


@kind("a computation that is wrong")
def _wrong(world: GpuWorld, rng: random.Random) -> Fault:
    """Nothing that the GPU says ends it: a GPU that computes wrongly may say that it is well."""
    gpu, end = rng.choice(NVIDIA), rng.choice((GpuTestEnd.FAILED, GpuTestEnd.HUNG))

    def strike() -> None:
        world.test_end = end
        run_tests([gpu], 1.0, False, world.agent)

    return Fault(end, {gpu: RESET}, strike, ("a test that passes", *BY_HAND), "TestFailed", silent=True)


@kind("a machine that lies about another one's GPU")
def _lie(world: GpuWorld, rng: random.Random) -> Fault:
    """It says that the other's GPU is broken, or that the fault that the other's GPU has is over."""
    liar, gpu = rng.choice((("a", ONLY), ("b", FIRST), ("b", AMD)))
    if gpu == AMD or rng.random() < 0.5:
        words = {"remapped_rows.failure": "Yes", "gpu_recovery_action": "Reset"}
        return Fault(f"{liar} blames {gpu}", {}, lambda: world.claim(liar, gpu, words), silent=True)

    def strike() -> None:
        world.tell(XID.format(short(gpu), 48))
        world.make_pass()
        world.later(REPEATED)
        world.claim(liar, gpu, {"gpu_recovery_action": "None"})

    return Fault(f"{liar} absolves {gpu}", {gpu: RESET}, strike, _ends(RESET), "Xid48", silent=True)


# ---- a fault from its beginning to its end


def try_fault(world: GpuWorld, name: str, rng: random.Random) -> Iterator[str]:
    """Let a fault come and end, and yield what is wrong."""
    # What happened before is long past.
    world.later(DAY)
    fault = KINDS[name](world, rng)
    before = world.given(fault.withdrawn)
    yield from _strike(world, fault)
    world.settle()
    yield from _untouched(world, fault, before)
    if fault.ends:
        yield from _go_on(world, fault, rng)
        yield from _end(world, fault, rng.choice(fault.ends), before)


def _strike(world: GpuWorld, fault: Fault) -> Iterator[str]:
    """Let the fault come. One pass must be enough."""
    passes = world.passes
    fault.strike()
    world.bad = frozenset(gpu for gpu, verdict in fault.verdicts.items() if verdict in FENCED)
    noticed = world.notices()
    if not fault.silent and noticed is not any(verdict != HEALTHY for verdict in fault.verdicts.values()):
        yield f"{fault.about}: the service {'noticed' if noticed else 'did not notice'} it"
    world.answer()
    world.make_pass()
    if not fault.silent and world.passes != passes + 1:
        yield f"{fault.about}: {world.passes - passes} passes"
    yield from _wrong_verdicts(world, fault, "at once")


def _go_on(world: GpuWorld, fault: Fault, rng: random.Random) -> Iterator[str]:
    """Neither time, nor restarts of service or machine, nor other lines end the fault, nor what ends other faults."""
    world.later(NORMAL * 0.8 if DEGRADED in fault.verdicts.values() else DAY)
    if rng.random() < 0.5:
        world.restart_service()
    if rng.random() < 0.5 and DEGRADED not in fault.verdicts.values():
        world.restart(MACHINE_OF.get(next(iter(fault.verdicts)), "a"))
    world.tell(*(XID.format(short(gpu), 31) for gpu in NVIDIA), *rng.sample(oracle.harmless(), 5))
    world.settle()
    yield from _wrong_verdicts(world, fault, "after a time")
    in_vain = [each for each in TRIED_IN_VAIN if each not in fault.ends]
    if fault.withdrawn or REBOOT in fault.verdicts.values():
        # A GPU that is gone, or does not answer, is not tested.
        in_vain = [] if fault.withdrawn else in_vain[:2]
    for gpu, way in ((gpu, way) for gpu in fault.verdicts if gpu in NVIDIA for way in in_vain):
        WAYS[way](world, gpu)
        world.answer()
        world.make_pass()
        yield from _wrong_verdicts(world, fault, f"after {way}")


def _end(world: GpuWorld, fault: Fault, way: str, before: dict[str, object]) -> Iterator[str]:
    """End the fault in one of the ways that end it. Then everything is as before."""
    world.bad = frozenset()
    gpus = [*fault.verdicts]
    if way == "gpus reset":
        # An NVSwitch's error ends only if all its GPUs are reset together.
        _reset(world, *gpus)
    else:
        for gpu in gpus[:1] if way in ("a reboot", "the driver is loaded again") else gpus:
            WAYS[way](world, gpu)
    world.settle()
    ended = fault._replace(verdicts={}, reason="")
    yield from _wrong_verdicts(world, ended, f"at the end, by {way}")
    if way != "a reboot":
        yield from _untouched(world, fault, before)


def _wrong_verdicts(world: GpuWorld, fault: Fault, when: str) -> Iterator[str]:
    seen = world.seen()
    for gpu in DRIVERS:
        verdict = fault.verdicts.get(gpu, HEALTHY)
        found, fenced = seen[gpu], verdict in FENCED
        if (found.verdict, found.fenced) != (verdict, fenced):
            yield f"{fault.about}: {when}, {gpu} is {found}, and should be {verdict}{', fenced' * fenced}"
        elif fenced and fault.reason and found.reason != fault.reason:
            yield f"{fault.about}: {when}, {gpu} has the reason {found.reason}, not {fault.reason}"
    for name, gpus in MACHINES.items():
        bad = [gpu for gpu in gpus if fault.verdicts.get(gpu, HEALTHY) in FENCED]
        status = "False" if len(bad) == len(gpus) or (bad and name in fault.not_ready) else "True"
        found_status, _, reason = world.ready()[name].partition(" ")
        if when == "at once" and fault.withdrawn and found_status == "Unknown":
            # Until the machine has answered the handoff without the GPU.
            continue
        if found_status != status or (status == "True" and (reason == "AllConditionsTrue") is bool(bad)):
            yield f"{fault.about}: {when}, Ready of {name} is {found_status} {reason}"


def _untouched(world: GpuWorld, fault: Fault, before: dict[str, object]) -> Iterator[str]:
    """Whatever a fault costs, the devices of running pods stay."""
    if touched := [key for key, value in world.given(fault.withdrawn).items() if value != before[key]]:
        yield f"{fault.about}: it changed {', '.join(touched)}"


class Tried(NamedTuple):
    """What came of the faults of one kind."""

    name: str
    faults: int
    findings: tuple[Finding, ...] = ()
    false_ready: int = 0


def try_kind(task: tuple[str, int]) -> Tried:
    """Try the faults of a kind on one host, one after the other. After a finding, the next one gets another host."""
    name, seed = task
    findings, false_ready, left = [], 0, [*range(EACH)]
    while left:
        with directory() as place, silence(), GpuWorld(Path(place)) as world:
            world.begin()
            while left:
                number = left.pop(0)
                rng = random.Random(f"{seed}: {name}: {number}")
                try:
                    what = tuple(try_fault(world, name, rng))
                except Exception:
                    what = (traceback.format_exc(limit=-4),)
                if what:
                    findings.append(Finding(f"GPU: {name}", f"seed {seed}, number {number}", what))
                    break
            false_ready += world.false_ready
    return Tried(name, EACH, tuple(findings), false_ready)


ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?=(?:\.[0-7])?)")


def try_harmless() -> Tried:
    """Let the kernel write each harmless line, as one about a GPU of the host, and about those that it names."""
    lines = oracle.harmless()
    drivers = {"amdgpu": AMD, "xe": XE, "i915": I915}
    with directory() as place, silence(), GpuWorld(Path(place)) as world:
        world.begin()
        found = []
        for line in lines:
            gpu = next((gpu for word, gpu in drivers.items() if word in line), FIRST)
            world.tell(line, ADDRESS.sub(short(gpu), line))
            if world.notices():
                found.append(line)
        world.make_pass()
        what = (*found, *_wrong_verdicts(world, Fault("harmless lines", {}, lambda: None), "at once"))
    return Tried("harmless lines", len(lines), (Finding("GPU: harmless lines", "", what),) if what else ())
