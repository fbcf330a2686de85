"""Resets and tests GPUs by itself, where the configuration asks for it.

The service only decides what to do, and starts a unit. Its command does the work, in a process of its own that goes on
if the service restarts. How that has ended is in the record of GPUs, not in what the command prints.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Literal, TypeAlias

from agent.config.settings import Config
from agent.host import gpu_reset
from agent.host.detach import Timing, describe
from agent.host.gpu_tests import run_tests
from agent.host.reconcile import MachineOutcome, Outcome, Reconciler
from agent.host.state.gpus import (
    count_reset,
    forget_reset,
    observe_gpus,
    record_begun,
    record_stopped,
    require_reset_left,
)
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_states import health, needs_test
from agent.model.conditions import Status
from agent.model.contract import GpuTestEnd
from agent.model.errors import AgentError
from agent.model.facts import Begun, Facts, Gpu, Verdict
from agent.model.paths import WAKE
from agent.model.text import one_line
from agent.system.files import System
from agent.system.systemd import list_units, queue_job

What: TypeAlias = Literal["reset", "test"]
UNIT = "unbounded-agent-gpus.service"
"""Runs `work`. systemd starts it only once at a time."""
AGAIN, LATEST = 60.0, 600.0
"""Seconds until what did not succeed is begun again: doubled each time, up to the second number."""
SHOWN = 500
"""Characters of the reason why something did not succeed: it may name many processes."""


def wanted(config: Config, facts: Facts, machines: Iterable[MachineOutcome]) -> Mapping[str, What]:
    """Return what GPUs need, by address. A test has to wait until `_may_begin`."""
    gpus = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    found: dict[str, What] = {
        address: "test"
        for each in machines
        if config.machines[each.name].test_gpus
        for address in each.gpus
        if address in gpus and _is_free(address, facts) and needs_test(gpus[address], facts, each.name)
    }
    policy = config.gpu_recovery.policy
    return found | {address: "reset" for address, gpu in gpus.items() if _needs_reset(gpu, facts, policy)}


def _may_begin(address: str, what: What, machines: Iterable[MachineOutcome]) -> bool:
    """Return whether the GPU can be reset, or can be tested because a machine is ready for it."""
    return what == "reset" or any(address in each.gpus and each.ready.status is Status.TRUE for each in machines)


def _is_free(address: str, facts: Facts) -> bool:
    """Return whether nobody but a test, perhaps a killed one, keeps pods from the GPU."""
    taint = facts.gpus.tainted.get(address)
    return taint is None or taint.testing


def _needs_reset(gpu: Gpu, facts: Facts, policy: str) -> bool:
    """Return whether to reset the GPU: it asks for that itself, or our reset has not ended, whatever the policy is now.

    Otherwise nothing would give the GPU back.
    """
    address, fault, begun = gpu.pci_address, facts.gpus.faults.get(gpu.pci_address), facts.gpus.begun
    if address in facts.gpus.resetting:
        return address in begun and begun[address].what == "reset"
    own_word = policy == "reset" and fault is not None and fault.own_word
    asks = own_word and health(gpu, facts).verdict is Verdict.NEEDS_RESET
    return asks and _is_free(address, facts) and host_vendor(gpu.vendor).reset is not None


def begin(config: Config, system: System, outcome: Outcome) -> tuple[str, ...]:
    """Start the unit if there is something to do now. Return what is stopped, and why, in sentences.

    Raises OSError or an AgentError.
    """
    begun, wants = outcome.facts.gpus.begun, wanted(config, outcome.facts, outcome.machines)
    for address in begun.keys() - wants.keys():
        record_begun(system, address, None)
    possible = {address: what for address, what in wants.items() if _may_begin(address, what, outcome.machines)}
    due = {address: what for address, what in possible.items() if _is_due(begun.get(address), what)}
    for address in [address for address, what in due.items() if what == "reset"]:
        if address in outcome.facts.gpus.resetting:
            # The GPU may be reset already, and then has only to be given back.
            continue
        try:
            require_reset_left(system, address, config.gpu_recovery.attempts, config.gpu_recovery.hours)
        except AgentError as error:
            del due[address]
            _record(system, address, "reset", begun.get(address), str(error))
    if due and not _runs(system):
        # Recorded first: whatever becomes of the unit, it is not started in each pass.
        for address, what in due.items():
            _record(system, address, what, begun.get(address))
        queue_job("StartUnit", UNIT, system)
    return tuple(f"{address}: its {each.what} waits: {each.why}" for address, each in begun.items() if each.why)


def _is_due(begun: Begun | None, what: What) -> bool:
    if begun is None or begun.what != what:
        return True
    # The clock may have been set back since.
    return not 0 <= time.time() - begun.at < min(LATEST, AGAIN * 2 ** min(begun.times - 1, 10))


def _record(system: System, address: str, what: What, before: Begun | None, why: str = "") -> None:
    last = before if before and before.what == what else Begun(what, 0, 0.0)
    record_begun(system, address, Begun(what, last.times + 1, time.time(), why or last.why))


def _runs(system: System) -> bool:
    (unit,) = list_units([UNIT], system)
    return unit.starts or unit.active_state not in ("inactive", "failed")


def work(reconciler: Reconciler, timing: Timing = Timing()) -> None:
    """Reset and test the GPUs for which the configuration asks it. Raises OSError or an AgentError."""
    system = reconciler.system
    try:
        left = _wanted_now(reconciler, "reset")
        while left:
            group, why = _reset_with_linked(left[0], left, reconciler, timing)
            for address in group if why else ():
                _stopped(reconciler, address, "reset", why)
            left = [each for each in left if each not in group]
        if tests := _wanted_now(reconciler, "test"):
            try:
                ends = {each.gpu.pci_address: each for each in run_tests(tests, 0.0, False, reconciler, timing)}
            except AgentError as error:
                for address in tests:
                    _stopped(reconciler, address, "test", str(error))
            else:
                for address, each in ends.items():
                    if each.end is GpuTestEnd.NOT_RUN:
                        _stopped(reconciler, address, "test", each.results[-1].message)
    finally:
        with suppress(OSError):
            system.write(WAKE, b"")


def _wanted_now(reconciler: Reconciler, what: What) -> list[str]:
    outcome = reconciler.reconcile()
    found, begun = wanted(reconciler.config, outcome.facts, outcome.machines), outcome.facts.gpus.begun
    if what == "reset":
        # Without this record, nothing would go on with a reset that fails.
        found = {each: wants for each, wants in found.items() if each in begun and begun[each].what == what}
    return [each for each, wants in found.items() if wants == what and _may_begin(each, what, outcome.machines)]


def _reset_with_linked(
    address: str, wanted: Collection[str], reconciler: Reconciler, timing: Timing
) -> tuple[list[str], str]:
    """Reset a GPU, and those that must be reset together with it if they are `wanted` too.

    Return these GPUs, and why that failed; empty if it did not.
    """
    group = [address]
    why, together = _reset(group, reconciler, timing)
    if together and together <= {*wanted}:
        group = sorted({address, *together})
        why, _ = _reset(group, reconciler, timing)
    return group, why


def _reset(addresses: list[str], reconciler: Reconciler, timing: Timing) -> tuple[str, frozenset[str]]:
    """Reset GPUs that no process has open. Return why that failed, empty if it did not; and without which it cannot.

    A GPU in use is left as it is: new pods are kept from it by its verdict.
    """
    recovery, system = reconciler.config.gpu_recovery, reconciler.system
    try:
        reset = gpu_reset.prepare(addresses, reconciler, evict=False, seconds=0.0, timing=timing)
        resetting = observe_gpus(system).resetting
        for removal in (each for each in reset.removals if each.gpu.pci_address not in resetting):
            address = removal.gpu.pci_address
            if held := removal.check():
                which = f"{address} is " if len(addresses) > 1 else ""
                return f"{which}in use by {'; by '.join(describe(held, removal.gpu))}", frozenset()
            # The unit may run for another GPU. One that must not be reset is not taken from its machine either.
            require_reset_left(system, address, recovery.attempts, recovery.hours)
        reset.policy = "refuse"
        reset.allow = partial(count_reset, system, attempts=recovery.attempts, hours=recovery.hours)
        ending = reset.run()
        for address in addresses if reset.together else ():
            forget_reset(system, address)
    except AgentError as error:
        return str(error), frozenset()
    return "" if ending.done else "; ".join(ending.sentences), frozenset(reset.together)


def _stopped(reconciler: Reconciler, address: str, what: What, why: str) -> None:
    reconciler.progress(f"{address}: its {what} is begun again later: {why}")
    record_stopped(reconciler.system, address, one_line(why)[:SHOWN])
