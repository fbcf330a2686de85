"""Publishes a vendor's CDI spec: generated aside, verified, and put in place by one rename. A worse one never is."""

import hashlib
import json
import posixpath
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from agent.conditions import Condition, ConditionType, Status, false, not_applicable, true
from agent.errors import AgentError
from agent.handoff import Repair, Request
from agent.identity import DeviceNumber
from agent.inside import foreign_specs
from agent.inside.devices import live_numbers
from agent.inside.foreign_specs import Foreign
from agent.inside.journal import INFO, WARNING, say
from agent.inside.notes import Notes, Owned
from agent.inside.repairs import repaired
from agent.inside.runtime_active import containerd_state
from agent.paths import CDI_DIRECTORIES, mode_spec_file, spec_directory, spec_file
from agent.system.files import System
from agent.vendors.machine import VENDOR_NAMES
from agent.vendors.machine_protocol import MachineVendor, Verdict

KIND = ConditionType.CDI_SPEC_CURRENT
UNPARTITIONED_FOR = 600.0
"""Seconds for which a GPU is believed to be usable by partitions only: nothing tells when that ends without any."""


@dataclass(frozen=True, slots=True)
class Published:
    """The CDISpecCurrent condition, and the names of the devices that pods can ask for."""

    condition: Condition
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A spec's text with its verdict."""

    text: bytes
    verdict: Verdict
    unpartitioned: tuple[str, ...] = ()
    """Granted GPUs that no spec can serve; they are not missing in the verdict."""

    @property
    def good(self) -> bool:
        return not self.verdict.problems and not self.verdict.missing


def publish_spec(
    system: System, notes: Notes, owned: Owned, vendor: MachineVendor, request: Request, generation: str
) -> Published:
    """Bring the published spec up to date; spawns nothing when nothing that it depends on has changed."""
    if not request.gpus:
        removed = owned.remove(vendor.spec_path)
        if removed:
            notes.save(f"spec-{vendor.name}", {"removed": time.time_ns()})
        message = f"no GPU is granted to this machine{f'; removed {vendor.spec_path}' if removed else ''}"
        return Published(not_applicable(KIND, message))
    if not owned.may_write(vendor.spec_path):
        return Published(_foreign(vendor.spec_path))
    foreign = foreign_specs.look(system, notes, owned, vendor)
    published = _publish(system, notes, owned, vendor, request, generation, foreign)
    names = tuple(each for each in published.devices if f"{vendor.spec_kind}={each}" not in foreign.names())
    return Published(foreign_specs.beside(published.condition, published.devices, foreign, vendor), names)


def remove_stale_specs(system: System, owned: Owned, requests: Iterable[Request]) -> None:
    """Remove specs of ours under names of former releases, and of modes that no request names any more.

    And what a killed writer left beside the specs of all vendors that this release knows.
    """
    modes = (mode_spec_file(request.vendor, mode) for request in requests for mode in request.cdi_modes)
    wanted = (*map(spec_file, VENDOR_NAMES), *modes)
    try:
        for path in owned.paths:
            if posixpath.dirname(path) in CDI_DIRECTORIES and path not in wanted and owned.remove(path):
                say(INFO, f"removed {path}: this release makes no such specification")
        for path in wanted:
            system.remove_remains(path)
    except OSError as error:
        # What stays must not cost the report.
        say(WARNING, f"what is left of former CDI specs cannot be removed: {error}")


def spec_changed(system: System, notes: Notes, vendor: MachineVendor) -> int:
    """When the spec was published or removed last, nanoseconds since the epoch; 0 if it never was since boot."""
    try:
        return system.identity(vendor.spec_path).mtime_ns
    except FileNotFoundError:
        removed = notes.load(f"spec-{vendor.name}").get("removed")
        return removed if isinstance(removed, int) else 0


def _publish(
    system: System,
    notes: Notes,
    owned: Owned,
    vendor: MachineVendor,
    request: Request,
    generation: str,
    foreign: Foreign,
) -> Published:
    live = live_numbers(system, request.devices)
    current = _current(system, vendor, request, live)
    if vendor.driver_files and not request.driver_root:
        # An empty --driver-root= would mean the machine's own root.
        return _kept(current, "NoDriverRoot", "GPUs are granted, but no driver files: see DriverRootStaged on the host")
    inputs = _inputs(system, notes, vendor, request, live, generation)
    noted = notes.load(f"spec-{vendor.name}")
    current = _as_noted(current, noted, inputs)
    if current and current.good and (noted.get("inputs"), noted.get("digest")) == (inputs, _digest(current.text)):
        return Published(true(KIND, "Verified", str(noted.get("message"))), current.verdict.devices)
    if noted.get("inputs") == inputs and (
        refused := foreign_specs.refusal(system, vendor, noted.get("colliding", ()), foreign)
    ):
        return Published(refused)
    try:
        new, remarks = _generate(system, notes, vendor, request, live)
    except (AgentError, OSError) as error:
        return _kept(current, "GenerationFailed", f"{error}; what the spec needs is in DevicesAllowed, LibrariesLinked")
    if new.verdict.problems or (current and not _better(new.verdict, current.verdict)):
        faults = new.verdict.problems or (f"{', '.join(sorted(new.verdict.missing))} is not in it",)
        why = "; ".join((*faults, *remarks))
        return _kept(current, "SpecRefused", f"the new spec of {_maker(vendor)} is refused: {why}")
    if refused := foreign_specs.refusal(system, vendor, new.verdict.devices, foreign):
        notes.save(f"spec-{vendor.name}", {"inputs": inputs, "colliding": list(new.verdict.devices)})
        return Published(refused)
    if not current or current.text != new.text:
        owned.claim(vendor.spec_path)
        # The temporary file beside it has no suffix .yaml or .json: two specs naming one device make it unusable.
        system.write(vendor.spec_path, new.text)
        was_ours = current is not None and noted.get("digest") == _digest(current.text)
        if noted.get("inputs") == inputs and "digest" in noted and not was_ours:
            repaired(notes, Repair.SPEC, f"somebody changed {vendor.spec_path}")
    condition = _condition(vendor, new.verdict, remarks)
    if condition.status is Status.TRUE:
        noted = {"inputs": inputs, "digest": _digest(new.text), "message": condition.message}
        lasting = {"unpartitioned": list(new.unpartitioned), "until": time.monotonic() + UNPARTITIONED_FOR}
        notes.save(f"spec-{vendor.name}", noted | lasting)
    return Published(condition, new.verdict.devices)


def _condition(vendor: MachineVendor, verdict: Verdict, remarks: tuple[str, ...]) -> Condition:
    if verdict.missing_gpus:
        return false(
            KIND,
            "GPUMissing",
            f"{_maker(vendor)} does not list GPU {', '.join(verdict.missing_gpus)}, the others are served: "
            f"see `dmesg` on the host for the driver's lines (NVRM, Xid), and DevicesAllowed",
        )
    if verdict.missing_partitions:
        message = f"{_maker(vendor)} does not list {', '.join(verdict.missing_partitions)}: see DevicesAllowed"
        return false(KIND, "PartitionMissing", "; ".join((message, "the others are served", *remarks)))
    parts = [f"{vendor.spec_path} has {len(verdict.devices)} device names"]
    if verdict.not_in_spec:
        parts.append(f"NotInSpec (the generator leaves them out): {', '.join(verdict.not_in_spec)}")
    return true(KIND, "Verified", "; ".join([*parts, *remarks]))


def _kept(current: Candidate | None, reason: str, message: str) -> Published:
    """Fail static: an old spec goes on serving, unless there is none or it is wrong by now."""
    if current is None:
        return Published(false(KIND, reason, f"{message}. No spec has been published yet"))
    if current.verdict.problems:
        faults = "; ".join(current.verdict.problems)
        return Published(false(KIND, reason, f"{message}. The published spec stays, but is out of date: {faults}"))
    return Published(false(KIND, reason, f"{message}. The last good spec stays in use"), current.verdict.devices)


def _better(new: Verdict, current: Verdict) -> bool:
    """Whether every GPU and partition that is served now will still be."""
    return bool(current.problems) or new.missing <= current.missing


def _generate(
    system: System, notes: Notes, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]
) -> tuple[Candidate, tuple[str, ...]]:
    directory = spec_directory(vendor.name)
    system.make_directory(directory)
    # Only here: most runs generate nothing.
    from agent.inside.cdi_form import settled
    from agent.inside.containerd_version import as_containerd_takes

    generated = vendor.generate(system, request, directory, live)
    for name in system.entries(directory):
        system.remove(f"{directory}/{name}")
    spec, left_out = as_containerd_takes(system, notes, settled(generated.spec))
    remarks = (*generated.remarks, *left_out)
    # What is published is what was verified, not what another parser may read from the same text. JSON is YAML.
    clean = json.dumps(spec, indent=1, sort_keys=True).encode() + b"\n"
    verdict = _verdict(system, vendor, spec, request, live)
    return _without_unpartitioned(Candidate(clean, verdict), generated.unpartitioned), remarks


def _as_noted(current: Candidate | None, noted: Mapping[str, Any], inputs: str) -> Candidate | None:
    """The published spec; what no spec could serve when it was made is not missing in it, for some time."""
    until, gpus = noted.get("until"), noted.get("unpartitioned")
    if current is None or noted.get("inputs") != inputs or not isinstance(gpus, list):
        return current
    return _without_unpartitioned(current, gpus) if isinstance(until, float) and time.monotonic() < until else current


def _without_unpartitioned(candidate: Candidate, gpus: Collection[str]) -> Candidate:
    missing = tuple(gpu for gpu in candidate.verdict.missing_gpus if gpu not in gpus)
    return Candidate(candidate.text, replace(candidate.verdict, missing_gpus=missing), tuple(gpus))


def _current(
    system: System, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]
) -> Candidate | None:
    """The published spec as it is now; None when there is none or somebody made something else of it."""
    try:
        text = system.read(vendor.spec_path)
        spec = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return Candidate(text, _verdict(system, vendor, spec, request, live))


def _verdict(
    system: System, vendor: MachineVendor, spec: object, request: Request, live: dict[str, DeviceNumber]
) -> Verdict:
    present = {path for path in vendor.host_paths(spec) if path.startswith("/") and system.exists(path)}
    return vendor.verify(spec, request, live, present)


def _inputs(
    system: System,
    notes: Notes,
    vendor: MachineVendor,
    request: Request,
    live: dict[str, DeviceNumber],
    generation: str,
) -> str:
    """A digest of all that a spec is made from. A boot of the machine clears the notes, and with them this."""
    programs = (*vendor.tools, *vendor.inputs)
    tools = {path: astuple(system.identity(path)) for path in programs if path and system.is_file(path)}
    numbers = {path: asdict(number) for path, number in live.items()}
    there = [path for path in vendor.optional_paths(request) if system.exists(path)]
    # What the spec may hold depends on containerd's version.
    depends = [generation, tools, numbers, there, containerd_state(system, notes)]
    return _digest(json.dumps(depends, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _maker(vendor: MachineVendor) -> str:
    return vendor.tools[0] if vendor.tools else "this agent"


def _foreign(path: str) -> Condition:
    return false(KIND, "ForeignFile", f"{path} is not ours and is not overwritten: move it away if nothing needs it")
