"""Publishes a vendor's CDI specification. It is generated in another directory, verified, and published by a rename.

A specification that serves fewer GPUs never replaces one that serves more, unless the published one is faulty.
"""

import posixpath
import time
from typing import NamedTuple

from agent import __version__
from agent.machine import failures
from agent.machine.cdi import foreign_specs
from agent.machine.cdi.candidate import (
    Candidate,
    excuse_noted_unpartitioned,
    excuse_unpartitioned,
    in_words,
    make_output_directory,
    published_candidate,
    verdict_of,
)
from agent.machine.cdi.foreign_specs import Foreign
from agent.machine.containerd.active import containerd_state
from agent.machine.context import Context
from agent.machine.devices.nodes import live_numbers
from agent.machine.failures import Failure
from agent.machine.notes import remove_remains
from agent.machine.repairs import record_repair
from agent.machine.vendors import VENDOR_NAMES
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true
from agent.model.device import DeviceNumber
from agent.model.digest import json_digest, sha256
from agent.model.errors import AgentError
from agent.model.handoff import Repair, Request
from agent.model.json_document import json_for_yaml
from agent.model.paths import CDI_DIRECTORIES, mode_spec_file, spec_directory, spec_file
from agent.model.reasons import Reason
from agent.system.journal import INFO, WARNING, say
from agent.vendors.machine_vendor import MachineVendor, Verdict

KIND = ConditionType.CDI_SPEC_CURRENT
UNPARTITIONED_FOR = 600.0
"""Seconds for which a GPU that is usable only in partitions, but has none, does not count as missing. The time is
limited, because no event shows that the GPU has become usable without partitions."""


class Published(NamedTuple):
    """The condition CDISpecCurrent, and the names of the devices that pods can request."""

    condition: Condition
    devices: tuple[str, ...] = ()


def publish_spec(context: Context, vendor: MachineVendor, request: Request, *, at_once: bool = False) -> Published:
    """Bring the published specification up to date. Raises AgentError or OSError.

    If the last result was good, programs are started only after an input, the published file or another program's
    specification has changed. If the last result was not good, the same holds until the next attempt is due (Failure),
    or with `at_once`.
    """
    if at_once:
        failures.forget(context, _failure_note(vendor))
    if not request.gpus:
        removed = context.owned.remove(vendor.spec_path)
        if removed:
            context.notes.save(f"spec-{vendor.name}", {"removed": time.time_ns()})
        message = f"no GPU is granted to this machine{f'; removed {vendor.spec_path}' if removed else ''}"
        return Published(not_applicable(KIND, message))
    if not context.owned.make_way(vendor.spec_path):
        return Published(_left_unchanged(vendor.spec_path))
    foreign = foreign_specs.find_foreign(context, vendor)
    published = _publish(context, vendor, request, foreign)
    names = tuple(each for each in published.devices if f"{vendor.spec_kind}={each}" not in foreign.names())
    return Published(foreign_specs.with_foreign(published.condition, published.devices, foreign, vendor), names)


def remove_stale_specs(context: Context) -> None:
    """Remove the agent's specifications for modes that are no longer requested.

    Temporary files that killed writers left next to notes and specifications are removed too. Errors are only logged.
    """
    system, owned, requests = context.system, context.owned, context.handoff.requests
    modes = (mode_spec_file(request.vendor, mode) for request in requests for mode in request.cdi_modes)
    wanted = (*map(spec_file, VENDOR_NAMES), *modes)
    try:
        for path in owned.paths:
            if posixpath.dirname(path) in CDI_DIRECTORIES and path not in wanted and owned.remove(path):
                say(INFO, f"removed {path}: its mode is no longer requested")
        for path in wanted:
            system.remove_temporary(path)
        remove_remains(system)
    except (AgentError, OSError) as error:
        # Leftovers must not keep the report from being written.
        say(WARNING, f"cannot remove leftovers of earlier CDI specifications and runs: {error}")


def spec_changed_at(context: Context, vendor: MachineVendor) -> int:
    """Return the time of the specification's last change or removal, in nanoseconds since the epoch; 0 if unknown."""
    try:
        return context.system.identity(vendor.spec_path, follow=False).mtime_ns
    except FileNotFoundError:
        removed: int = context.notes.load(f"spec-{vendor.name}").get("removed", 0)
        return removed


def _publish(context: Context, vendor: MachineVendor, request: Request, foreign: Foreign) -> Published:
    system, notes = context.system, context.notes
    live = live_numbers(system, request.devices)
    current = published_candidate(system, vendor, request, live)
    if vendor.driver_files and not request.driver_root:
        # The generator is not run: to it, an empty --driver-root= would mean the machine's own root.
        return _kept(
            current, Reason.NO_DRIVER_ROOT, "GPUs are granted, but no driver files: see DriverRootStaged on the host"
        )
    inputs = _inputs_digest(context, vendor, request, live)
    noted = notes.load(f"spec-{vendor.name}")
    current = excuse_noted_unpartitioned(current, noted, inputs)
    if current and current.good and (noted.get("inputs"), noted.get("digest")) == (inputs, sha256(current.text)):
        condition = true(KIND, Reason.VERIFIED, str(noted.get("message")))
        return Published(condition._replace(reason=str(noted.get("reason"))), current.verdict.devices)
    # If an earlier run generated a specification from the same inputs, but it was refused, its devices are noted. If a
    # specification with these devices would be refused again, it need not be generated again.
    if noted.get("inputs") == inputs and (
        refused := foreign_specs.refusal(system, vendor, noted.get("colliding", ()), foreign)
    ):
        return Published(refused)
    if failed := _failure(context, vendor, inputs, current).noted():
        devices = current.verdict.devices if current and not current.verdict.problems else ()
        gpus = tuple(map(str, failed.get("gpus", ())))
        condition = Condition(KIND, Status.FALSE, str(failed["reason"]), str(failed["message"]), gpus=gpus)
        return Published(condition, devices)
    try:
        published = _attempt(context, vendor, request, foreign, current, inputs)
    except (AgentError, OSError) as error:
        # The specification was generated, but it, or a note about it, could not be written.
        published = _kept(published_candidate(system, vendor, request, live), Reason.FAILED, str(error))
    condition = published.condition
    if condition.status is Status.FALSE and condition.reason != Reason.NAMES_COLLIDE:
        found = published_candidate(system, vendor, request, live)
        _failure(context, vendor, inputs, found).save(
            reason=condition.reason, message=condition.message, gpus=condition.gpus
        )
    return published


def _failure(context: Context, vendor: MachineVendor, inputs: str, current: Candidate | None) -> Failure:
    found = (sha256(current.text), current.verdict.problems) if current else ()
    return Failure.of(context, _failure_note(vendor), inputs, found)


def _failure_note(vendor: MachineVendor) -> str:
    return f"spec-failed-{vendor.name}"


def _attempt(
    context: Context,
    vendor: MachineVendor,
    request: Request,
    foreign: Foreign,
    current: Candidate | None,
    inputs: str,
) -> Published:
    """Generate a specification, and publish it if it may replace the current one."""
    system, notes, live = context.system, context.notes, live_numbers(context.system, request.devices)
    noted = notes.load(f"spec-{vendor.name}")
    try:
        new, remarks, left_out = _generate(context, vendor, request, live)
    except (AgentError, OSError) as error:
        return _kept(current, Reason.GENERATION_FAILED, f"{error}; see also DevicesAllowed and LibrariesLinked")
    if new.verdict.problems or (current and not _may_replace(new.verdict, current.verdict)):
        faults = new.verdict.problems or (f"{', '.join(sorted(new.verdict.missing))} is not in it",)
        why = "; ".join((*faults, *left_out, *remarks))
        return _kept(
            current,
            Reason.SPEC_REFUSED,
            f"the new CDI specification from {_generator_name(vendor)} failed the check: {why}",
        )
    if refused := foreign_specs.refusal(system, vendor, new.verdict.devices, foreign):
        notes.save(f"spec-{vendor.name}", {"inputs": inputs, "colliding": list(new.verdict.devices)})
        return Published(refused)
    if not current or current.text != new.text:
        context.owned.claim(vendor.spec_path)
        # The name of the temporary file, which is in the same directory, does not end in .yaml or .json. So runtimes do
        # not read it. If they did, devices that are in both files would be unusable.
        system.write_quickly(vendor.spec_path, new.text)
        context.unsynced.append(vendor.spec_path)
        is_as_published = current is not None and noted.get("digest") == sha256(current.text)
        if noted.get("inputs") == inputs and "digest" in noted and not is_as_published:
            record_repair(notes, Repair.SPEC, f"somebody changed {vendor.spec_path}")
    condition = _condition(vendor, new.verdict, remarks, left_out)
    if condition.status is Status.TRUE:
        noted = {"inputs": inputs, "digest": sha256(new.text), "message": condition.message}
        noted["reason"] = condition.reason
        noted |= {"unpartitioned": list(new.unpartitioned), "until": time.monotonic() + UNPARTITIONED_FOR}
        notes.save(f"spec-{vendor.name}", noted)
    return Published(condition, new.verdict.devices)


def _condition(
    vendor: MachineVendor, verdict: Verdict, remarks: tuple[str, ...], left_out: tuple[str, ...]
) -> Condition:
    remarks = (*left_out, *remarks)
    if verdict.missing:
        reason = Reason.GPU_MISSING if verdict.missing_gpus else Reason.PARTITION_MISSING
        names = [*(f"GPU {gpu}" for gpu in verdict.missing_gpus), *verdict.missing_partitions]
        log = ", and the driver's lines (NVRM, Xid) in `dmesg` on the host" if verdict.missing_gpus else ""
        message = f"{_generator_name(vendor)} does not list {', '.join(names)}: see DevicesAllowed{log}"
        gpus = dict.fromkeys((*verdict.missing_gpus, *verdict.missing_partitions.values()))
        return false(KIND, reason, "; ".join((message, "the others are served", *remarks)), gpus)
    parts = [f"{vendor.spec_path} has {len(verdict.devices)} device names"]
    if verdict.not_in_spec:
        parts.append(f"NotInSpec (the generator leaves them out): {', '.join(verdict.not_in_spec)}")
    return true(KIND, Reason.EDITS_LEFT_OUT if left_out else Reason.VERIFIED, "; ".join([*parts, *remarks]))


def _kept(current: Candidate | None, reason: Reason, message: str) -> Published:
    """Return the result of a run that cannot publish a new specification. The current one, if any, stays."""
    if current is None:
        return Published(false(KIND, reason, f"{message}. There is no usable CDI specification"))
    if current.verdict.problems:
        faults = "; ".join(current.verdict.problems)
        why = f"{message}. The published CDI specification stays, but is out of date: {faults}"
        return Published(false(KIND, reason, why))
    why = f"{message}. The last good CDI specification stays in use"
    return Published(false(KIND, reason, why), current.verdict.devices)


def _may_replace(new: Verdict, current: Verdict) -> bool:
    """Return whether the new specification has every granted GPU and partition that the current one has.

    If the current one has problems, any new one may replace it.
    """
    return bool(current.problems) or new.missing <= current.missing


def _generate(
    context: Context, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]
) -> tuple[Candidate, tuple[str, ...], tuple[str, ...]]:
    """Return a new specification, remarks on it, and a sentence on what is left out. Raises AgentError or OSError.

    If nothing is left out, there is no sentence.
    """
    system = context.system
    directory = spec_directory(vendor.name)
    make_output_directory(system, directory)
    # Imported here: most runs generate nothing.
    from agent.machine.containerd.version import adapt_to_containerd
    from agent.vendors.cdi.normalise import normalised

    generated = vendor.generate(system, request, directory, live)
    for name in system.entries(directory):
        system.remove_tree(f"{directory}/{name}")
    spec, adapted = adapt_to_containerd(context, normalised(generated.spec))
    left_out = (in_words(vendor.spec_path, vendor.tools[0], generated.left_out),) if generated.left_out else ()
    # The verified data is published, not the generator's text, which another parser may read differently.
    clean = json_for_yaml(spec, sort_keys=True)
    verdict = verdict_of(system, vendor, spec, request, live)
    candidate = excuse_unpartitioned(Candidate(clean, verdict), generated.unpartitioned)
    return candidate, (*generated.remarks, *adapted), left_out


def _inputs_digest(context: Context, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]) -> str:
    """Return a digest of everything that the specification depends on."""
    system, paths = context.system, (*vendor.tools, *vendor.inputs)
    identities = {path: system.identity(path) for path in paths if path and system.is_file(path)}
    numbers = {path: number._asdict() for path, number in live.items()}
    present = [path for path in vendor.optional_paths(request) if system.exists(path)]
    # The versions of the agent and of containerd decide what the specification may contain.
    return json_digest([__version__, context.generation, identities, numbers, present, containerd_state(context)])


def _generator_name(vendor: MachineVendor) -> str:
    return vendor.tools[0] if vendor.tools else "this agent"


def _left_unchanged(path: str) -> Condition:
    what = f"{path} exists and was not written by the agent, so it was left unchanged"
    return false(KIND, Reason.FOREIGN_FILE, f"{what}: move it away if nothing needs it")
