"""Resets GPUs by their vendor's tool: takes them from their machines first, and gives them back afterwards.

How far a reset has got is recorded with the GPU. If the command is killed at any step, the same command goes on from
there, and `gpus attach` undoes it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from agent.host import leave
from agent.host.detach import (
    POLICIES,
    Ending,
    Removal,
    Timing,
    describe,
    find_gpu,
    gpu_nodes,
    granted_to,
    restore,
    why_unknown,
)
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import (
    Resetting,
    forget_detached,
    forget_fault,
    observe_gpus,
    record_resetting,
    record_tainted,
)
from agent.host.state.locks import detach_lock, pass_lock
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_states import health
from agent.model.contract import LEAVE_LIMIT
from agent.model.device import DeviceKind
from agent.model.errors import AgentError, CommandError
from agent.model.facts import GPU_TEST, KERNEL_LOG, Facts, Gpu, Verdict
from agent.model.handoff import DRA
from agent.vendors.host_vendor import GpuReset, Refusal

HOPELESS: Mapping[Verdict, str] = {
    Verdict.NEEDS_REBOOT: "drain the nodes of all machines, then run `systemctl reboot`",
    Verdict.BROKEN: "run `unbounded-agent gpus detach {}`, and do what is said above, such as replace the GPU",
}
"""What to do about a GPU that a reset does not help."""


def prepare(
    words: Iterable[str], reconciler: Reconciler, *, evict: bool, seconds: float | None, timing: Timing = Timing()
) -> "Reset":
    """Return the reset of the GPUs with these addresses or UUIDs. Changes nothing.

    With `evict` or `seconds`, wait for the GPUs' users, whatever on_detach says: for `seconds`, or as long as evicted
    pods take to end. Raises ConfigError for an unknown GPU, and AgentError if the GPUs cannot be reset.
    """
    facts, planned, _ = reconciler.preview()
    gpus = {gpu.pci_address: gpu for gpu in (find_gpu(word, facts) for word in words)}
    tool, configured = _tool(gpus.values(), facts, reconciler), reconciler.config.machines
    removals = []
    for address, gpu in sorted(gpus.items()):
        machines = granted_to(address, facts, planned, configured)
        removal = Removal(gpu, machines, reconciler, timing, gpu_nodes(facts, address), purpose="reset")
        removal.ignored = tool.released | tool.partners
        removals.append(removal)
    having = sorted({name for removal in removals for name in removal.machines})
    if evict and (others := [name for name in having if configured[name].allocation != DRA]):
        hint = "leave out --evict, and stop the machine first: `unbounded-agent stop {} --kubeconfig FILE`"
        what = "a device plugin offers its GPUs, and nothing evicts the pods of a single one"
        raise AgentError(f"machine {others[0]}: {what}", hint.format(others[0]))
    # As in `detach`.
    policy = min((configured[name].on_detach for name in having), key=POLICIES.index, default="refuse")
    limit: float = max((configured[name].drain_wait for name in having), default=0)
    if evict or seconds is not None:
        policy, limit = "drain-wait", timing.eviction if seconds is None else seconds
    return Reset(tuple(removals), tool, reconciler, policy, limit, having, facts, evict)


def _tool(gpus: Iterable[Gpu], facts: Facts, reconciler: Reconciler) -> GpuReset:
    """Return the tool that resets the GPUs. Raises AgentError if there is none, or if it would not help."""
    tools = {}
    for gpu in gpus:
        address, vendor, found = gpu.pci_address, host_vendor(gpu.vendor), health(gpu, facts)
        if vendor.reset is None:
            by_hand = vendor.reset_by_hand.format(address=address)
            raise AgentError(
                f"{address}: `gpus reset` cannot reset GPUs of {vendor.name}",
                f"run `unbounded-agent gpus detach {address}`, then {by_hand}, then "
                f"`unbounded-agent gpus attach {address}`",
            )
        # Of what a machine says, the plan tells, but it may be a lie.
        if found.verdict in HOPELESS and found.source == KERNEL_LOG:
            advice = HOPELESS[found.verdict].format(address)
            raise AgentError(f"{address} {found.verdict.in_words}, so a reset does not help: {found.message}", advice)
        if gpu.driver not in vendor.drivers:
            has = f"kernel driver {gpu.driver}" if gpu.driver else "no kernel driver"
            raise AgentError(f"{address} has {has}: only {' or '.join(vendor.drivers)} can reset it")
        if unknown := why_unknown(gpu, gpu_nodes(facts, address)):
            raise AgentError(f"{address} was not reset: {unknown}")
        tools[vendor.name] = vendor.reset
    if len(tools) > 1:
        raise AgentError(f"these are GPUs of {' and '.join(tools)}", "name the GPUs of one vendor")
    (tool,) = tools.values()
    if reconciler.system.find_program(tool.program) is None:
        raise AgentError(f"{tool.program} was not found on this host", "install the driver's package that has it")
    return tool


class Reset(Struct):
    """Resets GPUs of one vendor, all of them by one call of the vendor's tool."""

    removals: tuple[Removal, ...]
    """One for each GPU, sorted by address."""
    tool: GpuReset
    reconciler: Reconciler
    policy: str
    """Decides about GPUs in use (POLICIES)."""
    seconds: float
    """Limit for the GPUs' users to exit."""
    machines: list[str]
    """Machines that have one of the GPUs, or may open it."""
    facts: Facts
    """What `sentences` tells about."""
    evict: bool = False
    """Whether pods that were given the GPUs are evicted first."""
    remarks: list[str] = field(default_factory=list)
    """What went wrong although the GPUs work, one sentence each."""
    allow: Callable[[str], object] = lambda address: None
    """Called for each GPU before it is reset. Raises AgentError if it must not be."""
    returned: bool = False
    """Whether the GPUs were reset, and were to be given back."""
    together: tuple[str, ...] = ()
    """Further GPUs without which, as the tool has said, it resets none."""

    @property
    def addresses(self) -> list[str]:
        return [removal.gpu.pci_address for removal in self.removals]

    @property
    def names(self) -> str:
        return ", ".join(self.addresses)

    @property
    def to_test(self) -> list[str]:
        """The GPUs that must pass a test afterwards."""
        gated = [each for each in self.machines if self.reconciler.config.machines[each].test_gpus]
        can = [each for each in self.removals if host_vendor(each.gpu.vendor).has_test]
        return [each.gpu.pci_address for each in can if not set(each.machines).isdisjoint(gated)]

    def sentences(self) -> tuple[str, ...]:
        """Return what is known of the GPUs, and each step."""
        lines = []
        for removal in self.removals:
            gpu, found = removal.gpu, health(removal.gpu, self.facts)
            about = f" ({gpu.model})" if gpu.model else ""
            lines.append(f"{gpu.pci_address}{about} {found.verdict.in_words}{found.message and ': '}{found.message}")
            if gpu.pci_address in observe_gpus(self.reconciler.system).resetting:
                lines.append(f"{gpu.pci_address}: a reset was interrupted; this one goes on from there")
            if any(node.kind is DeviceKind.CAPABILITY for node in removal.nodes):
                lines.append(f"{gpu.pci_address}: its partitions are lost; make them again after the reset")
            lines += [f"{gpu.pci_address}: {each}" for each in describe(removal.check(), gpu)]
        waits = {
            "refuse": "give up if a process has it open (on_detach is refuse; --timeout waits)",
            "drain-wait": f"wait up to {self.seconds:.0f} s until no process has it open",
            "force": "take it even from processes that have it open (on_detach is force)",
        }
        have = ", ".join(self.machines) or "no machine"
        evict = ", and evict the pods that have it" if self.evict else ""
        return (
            *lines,
            f"would keep new pods from {self.names}{evict}",
            f"would {waits[self.policy]}, and take it from {have}",
            f"would {self.tool.describe(self.addresses)}",
            f"would forget its last error, and give it back to {have}",
            *([f"would run `unbounded-agent gpus test {' '.join(self.to_test)}`"] if self.to_test else ()),
        )

    def run(self) -> Ending:
        """Reset the GPUs, or go on with a reset that was interrupted. Raises AgentError.

        The result is `done` if the GPUs work, and the machines have them again.
        """
        with ExitStack() as locks:
            for removal in self.removals:
                locks.enter_context(detach_lock(self.reconciler.system, removal.gpu.pci_address))
            try:
                return self._run()
            except BaseException:
                for line in self._withheld():
                    self.reconciler.progress(line)
                raise

    def _run(self) -> Ending:
        recorded = observe_gpus(self.reconciler.system).resetting
        if not all(address in recorded and self._is_done(address) for address in self.addresses):
            failed = self._take() or self._reset()
            if failed:
                return failed
        return self._give_back()

    def _is_done(self, address: str) -> bool:
        """Return whether the GPU was reset, and has had no error since."""
        notes = observe_gpus(self.reconciler.system)
        done = notes.resetting[address].done
        return done > 0 and (address not in notes.faults or notes.faults[address].last <= done)

    def _take(self) -> Ending | None:
        """Keep new pods from the GPUs, and take them from their machines. Return why that failed."""
        end = time.monotonic() + self.seconds
        for removal in self.removals:
            removal.found = removal.is_recorded()
            if self.policy == "refuse" and (held := removal.check()):
                what = "is in use; nothing was changed (on_detach is refuse; --timeout waits)"
                return self._stopped(removal.in_use(what, held).sentences)
        for removal in self.removals:
            removal.record(partial(record_tainted, evict=False, reset=True))
        if self.evict and (failed := self._evict(end)):
            return failed
        for removal in self.removals:
            ending = removal.run(self.policy, max(0, round(end - time.monotonic())))
            self.remarks += removal.remarks
            if not ending.done:
                return self._stopped(ending.sentences)
        return None

    def _evict(self, end: float) -> Ending | None:
        """Let the machines evict the pods that were given the GPUs. Return why that failed."""
        system, progress, taint = self.reconciler.system, self.reconciler.progress, self.removals[0].timing.taint
        running = {each.name for each in self.reconciler.reconcile().facts.machines if not each.ended}
        if running.isdisjoint(self.machines):
            return None
        progress(f"waiting {taint:.0f} s until no new pod gets {self.names}")
        time.sleep(taint)
        for name in (each for each in self.machines if each in running):
            gpus = [each.gpu.pci_address for each in self.removals if name in each.machines]
            try:
                leave.evict(name, gpus, system, progress, min(LEAVE_LIMIT, max(0.0, end - time.monotonic())))
            except AgentError as error:
                return self._stopped((f"{self.names} was not reset: {error}",))
        for removal in self.removals:
            removal.waited = True
        return None

    def _reset(self) -> Ending | None:
        """Reset the GPUs, which no machine has. Return why that failed."""
        system, progress = self.reconciler.system, self.reconciler.progress
        for address in self.addresses:
            self.allow(address)
        for address in self.addresses:
            progress(f"letting the driver release {address}")
            self._release(address)
        progress(f"resetting {self.names}")
        try:
            if refusal := self.tool.run(system, self.addresses):
                return self._refused(refusal)
            progress(f"checking whether {self.names} works")
            self.tool.verify(system, self.addresses)
            self._check_nodes()
        except AgentError as error:
            # Many errors of programs have a hint of their own.
            advice = "see `dmesg`; if the GPU does not answer or hangs, only a reboot of the host helps"
            return self._stopped((f"{self.names} may not work: {error}", advice))
        for address in self.addresses:
            record_resetting(system, address, replace(self._recorded(address), done=time.time()))
        return None

    def _release(self, address: str) -> None:
        system, recorded = self.reconciler.system, self._recorded(address)
        if recorded.restore is None:
            # Before the release: after it, nothing tells how it was.
            record_resetting(system, address, replace(recorded, restore=self.tool.kept(system, address)))
        try:
            self.tool.release(system, address)
        except CommandError as error:
            # The tool decides whether the GPU can be reset nevertheless.
            self.remarks.append(str(error))

    def _recorded(self, address: str) -> Resetting:
        recorded = observe_gpus(self.reconciler.system).resetting.get(address)
        if recorded is None:
            raise AgentError(f"{address} was attached, or left the PCI bus, in the meantime")
        return recorded

    def _check_nodes(self) -> None:
        """Raise AgentError if a GPU has no driver or no node after its reset."""
        facts = self.reconciler.preview()[0]
        for address in self.addresses:
            gpu = find_gpu(address, facts)
            unknown = why_unknown(gpu, gpu_nodes(facts, address))
            if unknown or not gpu.driver:
                raise AgentError(f"{address} was reset, but {unknown or 'has no kernel driver'}")

    def _refused(self, refusal: Refusal) -> Ending:
        lines = [f"{self.names} could not be reset: {refusal.why}"]
        self.together = refusal.together
        if refusal.together:
            every = " ".join(sorted({*self.addresses, *refusal.together}))
            lines.append(f"linked GPUs are reset together: run `unbounded-agent gpus reset {every}`")
        for removal in self.removals:
            # What was to release the GPU is named too, if it did not.
            removal.ignored = self.tool.partners
            lines += [f"{removal.gpu.pci_address}: {each}" for each in describe(removal.check(), removal.gpu)]
        return self._stopped(lines)

    def _stopped(self, lines: Iterable[str]) -> Ending:
        return Ending(False, tuple(dict.fromkeys((*lines, *self.remarks, *self._withheld()))))

    def _withheld(self) -> Iterable[str]:
        recorded = observe_gpus(self.reconciler.system).resetting
        arguments = " ".join((*self.addresses, *(["--evict"] if self.evict else ())))
        for address in self.addresses:
            if address in recorded:
                yield (
                    f"{address} stays withheld: `unbounded-agent gpus reset {arguments}` goes on, "
                    f"`unbounded-agent gpus attach {address}` gives it back as it is, and forgets its error"
                )

    def _give_back(self) -> Ending:
        """Give GPUs that were reset back to their machines."""
        system, first, self.returned = self.reconciler.system, self.removals[0], True
        failed = [
            why for each in self.removals for why in restore(each.gpu, self._recorded(each.gpu.pci_address), system)
        ]
        # All of them before the next pass, which gives them back.
        with pass_lock(system, self.reconciler.progress):
            for address in self.addresses:
                forget_fault(system, address, self._recorded(address).done)
            self._forget_shared()
            for address in self.addresses:
                forget_detached(system, address, was_reset=True)
        giving = Removal(first.gpu, tuple(self.machines), self.reconciler, first.timing, remarks=failed)
        outcome = giving.passes(f"get {self.names} back", giving.not_reported)
        have = [each.name for each in outcome.machines if not set(self.addresses).isdisjoint(each.gpus)]
        what = f"was given back to {', '.join(have)}" if have else "belongs to no machine now"
        present = {gpu.pci_address: gpu for vendor in outcome.facts.vendors for gpu in vendor.gpus}
        known = [(each, health(present[each], outcome.facts)) for each in self.addresses if each in present]
        bad = [
            f"{each} still {found.verdict.in_words}: {found.message}"
            for each, found in known
            if found.verdict.fenced and not (found.source == GPU_TEST and each in self.to_test)
        ]
        sentence = f"{self.names} was reset, {'' if bad else 'works, '}and {what}"
        return Ending(not (giving.remarks or bad), (sentence, *bad, *giving.remarks, *self.remarks))

    def _forget_shared(self) -> None:
        """Forget what concerned all GPUs of the vendor, such as an NVSwitch's error, if all of them were reset."""
        vendor = self.removals[0].gpu.vendor
        every = {gpu.pci_address for each in self.facts.vendors for gpu in each.gpus if gpu.vendor == vendor}
        if every <= set(self.addresses):
            done = min(self._recorded(each).done for each in self.addresses)
            for address, fault in self.facts.gpus.faults.items():
                if fault.vendor == vendor:
                    forget_fault(self.reconciler.system, address, done)
