"""Publishes a vendor's CDI specification. It is generated in another directory, verified, and published by a rename.

A specification that serves fewer GPUs never replaces one that serves more, unless the published one is faulty.
"""

import contextlib
import json
import posixpath
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent import __version__
from agent.machine import foreign_specs, notes
from agent.machine.containerd import containerd_state
from agent.machine.devices import live_numbers
from agent.machine.foreign_specs import Foreign, ForeignSpec
from agent.machine.notes import ERROR_SHOWN, Context, Failure, record_repair, remove_remains
from agent.machine.vendors import VENDOR_NAMES
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true
from agent.model.contract import AllocatableDevice, AllocatableVendor, render_allocatable
from agent.model.device import DeviceNumber
from agent.model.errors import AgentError
from agent.model.handoff import GrantedDevice, Repair, Request, with_remark
from agent.model.json_document import json_for_yaml, parse_json
from agent.model.paths import (
    ALLOCATABLE,
    CDI_DIRECTORIES,
    MACHINE_HOST_NVIDIA,
    mode_spec_file,
    spec_directory,
    spec_file,
)
from agent.model.text import first_of, json_digest, one_line, quoted, sha256
from agent.system.files import UNUSABLE, System
from agent.system.journal import INFO, WARNING, say
from agent.vendors.machine_vendor import CdiModes, Generated, MachineVendor, Verdict, looked_up

# A CDI specification with its verdict, and the GPUs that do not count as missing in it.


SHOWN = 10
"""How many parts the message names, because its length is limited; the others are counted."""


class Candidate(NamedTuple):
    """A specification's text with its verdict."""

    text: bytes
    verdict: Verdict
    unpartitioned: tuple[str, ...] = ()
    """Granted GPUs that no specification can list, because they have no partition yet (see UNPARTITIONED_FOR).

    The verdict does not count them as missing.
    """

    @property
    def good(self) -> bool:
        return not self.verdict.problems and not self.verdict.missing


def published_candidate(
    system: System, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]
) -> Candidate | None:
    """Return the published specification; None if it is missing or malformed, not a regular file, or too large.

    Raises OSError if the specification exists but cannot be read now. Then it must not be replaced, because it may
    serve more GPUs than a new one.
    """
    try:
        text = system.read_untrusted(vendor.spec_path)[0]
        spec = parse_json(text)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        return None
    return Candidate(text, verdict_of(system, vendor, spec, request, live))


def make_output_directory(system: System, directory: str) -> None:
    """Make a generator's directory, and remove from it what a generator would follow, or hang on.

    Regular files stay: a generator that was started early may be writing one.
    """
    system.make_directory(directory)
    for name in system.entries(directory):
        path = f"{directory}/{name}"
        if system.read_link(path) is not None or not system.is_file(path):
            system.remove_tree(path)


def verdict_of(
    system: System, vendor: MachineVendor, spec: object, request: Request, live: dict[str, DeviceNumber]
) -> Verdict:
    return vendor.verify(spec, request, *looked_up(system, spec, live))


def in_words(spec_path: str, generator: str, left_out: Sequence[str]) -> str:
    """Return a sentence on what is left out of a specification."""
    return (
        f"EditsLeftOut: this agent does not know all that {generator} writes, and has left out of {spec_path}: "
        f"{first_of(left_out, SHOWN)}"
    )


def excuse_noted_unpartitioned(current: Candidate | None, noted: Mapping[str, Any], inputs: str) -> Candidate | None:
    """Return `current`. Until the noted time, GPUs that are noted as unpartitioned do not count as missing in it.

    A note for other inputs is ignored.
    """
    until, gpus = noted.get("until"), noted.get("unpartitioned")
    if current is None or noted.get("inputs") != inputs or not isinstance(gpus, list):
        return current
    return excuse_unpartitioned(current, gpus) if isinstance(until, float) and time.monotonic() < until else current


def excuse_unpartitioned(candidate: Candidate, gpus: Collection[str]) -> Candidate:
    missing = tuple(gpu for gpu in candidate.verdict.missing_gpus if gpu not in gpus)
    return Candidate(candidate.text, candidate.verdict._replace(missing_gpus=missing), tuple(gpus))


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
        notes.forget(context, _failure_note(vendor))
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
    from agent.machine.containerd import adapt_to_containerd
    from agent.vendors.cdi import normalised

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


# Publishes which devices pods may get through claims: those in verified CDI specifications.
#
# A document (ALLOCATABLE) lists these devices. agent.dra reads the document, and offers no other devices. The document
# exists only while the host's settings ask for Dynamic Resource Allocation.


def allocatable_vendor(
    context: Context, vendor: MachineVendor, request: Request, verified: Collection[str], spec_condition: Condition
) -> AllocatableVendor:
    """Return the vendor's devices that pods can get from the published specification, and why some are missing.

    `verified` has the names of the verified specification's devices. It is empty if there is no verified specification.
    `spec_condition` is CDISpecCurrent.
    """
    problem = "" if spec_condition.status is Status.TRUE else one_line(spec_condition.message)
    devices: tuple[AllocatableDevice, ...] = ()
    if verified:
        try:
            spec = json.loads(context.system.read_untrusted(vendor.spec_path)[0])
            devices = vendor.allocatable(spec, request, frozenset(verified))
        except (AgentError, OSError, ValueError, RecursionError) as error:
            # Somebody replaced the specification after it was verified. The next run repairs it.
            problem = f"{vendor.spec_path}: {one_line(str(error))}"
    return AllocatableVendor(vendor.name, devices, problem, request.driver_version)


def publish_allocatable(context: Context, vendors: Iterable[AllocatableVendor]) -> None:
    """Write the document if its content has changed. Raises OSError."""
    content = render_allocatable(vendors)
    try:
        if context.system.read(ALLOCATABLE) == content:
            return
    except OSError:
        # Missing, or damaged: write it again.
        pass
    context.system.write(ALLOCATABLE, content, 0o600)


# Publishes the additional CDI specifications that a vendor's generator makes: one for each requested mode.
#
# Each mode has a file of its own. These specifications are treated like that of the GPUs: generated in another
# directory, verified, published by a rename, and generated again when an input changes.


MODE_LIMIT = 8.0
"""Seconds to generate the specification of one mode. No mode does anything slow."""
LIMIT = 10.0
"""Seconds to generate the specifications of all modes. Even a run that also generates the specification of the GPUs
twice stays below TimeoutStartSec= of unbounded-agent-gpu.service. systemd kills a run at that limit, and a killed
run withdraws and reports nothing."""
SHORTEST = 1.0
"""Seconds of LIMIT that must be left to start the generator."""


class _Mode(NamedTuple):
    """One mode's specification: its inputs, and where it is published. It implements OwnSpec."""

    name: str
    generator: CdiModes
    request: Request
    """What the specification is made from."""
    spec_path: str
    spec_kind: str
    rival_spec: str = ""
    rival_units: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return f"spec-{self.request.vendor}-{self.name}"


def publish_modes(context: Context, vendor: MachineVendor, request: Request) -> tuple[str, bool]:
    """Publish the specifications of all requested modes. Raises nothing.

    Returns a remark for CDISpecCurrent, and whether something is left out of a specification.

    A failure is only a remark, because Ready is about GPUs, and pods get the GPUs from another specification.
    """
    modes, granted = vendor.cdi_modes, [device for each in context.handoff.requests for device in each.devices]
    owned, publisher = context.owned, _Publisher(context, vendor)
    served, without_devices, failed = [], [], []
    for name in request.cdi_modes:
        path = mode_spec_file(vendor.name, name)
        if modes is None or not (kind := modes.kind(name)):
            failed.append(
                f"{name}: the image's agent does not support this mode: update it to the host agent's release"
            )
            with contextlib.suppress(OSError, AgentError):
                # If the image was replaced by an older one, there may be a file for this mode. It is removed, because
                # this release cannot tell which of the devices in it are still granted.
                owned.remove(path)
            continue
        mode = _Mode(name, modes, modes.mode_request(name, request, granted), path, kind)
        try:
            if not mode.request.devices:
                # Pods must not get devices that are no longer granted.
                owned.remove(path)
                without_devices.append(name)
            else:
                served.append(publisher.settle(mode))
        # Any exception, because the content of files or a tool's output must not keep the report from being written.
        except Exception as error:
            failed.append(f"{name}: {one_line(str(error))[:ERROR_SHOWN]}{publisher.keep(mode)}")
    parts = [
        *([f"ModeNotServed: {'; '.join(failed)}"] if failed else []),
        *served,
        *publisher.remarks,
        *publisher.left_out,
        *([f"no devices for mode {', '.join(without_devices)}"] if without_devices else []),
    ]
    return "".join(f"; {part}" for part in parts), bool(publisher.left_out)


class _Publisher:
    """Publishes the specifications of modes one after another."""

    def __init__(self, context: Context, vendor: MachineVendor) -> None:
        self._context, self._vendor = context, vendor
        self._system, self._notes, self._owned = context.system, context.notes, context.owned
        self._deadline = time.monotonic() + LIMIT
        self._foreign_specs: tuple[ForeignSpec, ...] | None = None
        self.remarks: dict[str, None] = {}
        """Remarks on the modes, in order. A remark on several modes is made only once. The values have no meaning."""
        self.left_out: list[str] = []
        """Sentences on what is left out of the specifications."""

    def settle(self, mode: _Mode) -> str:
        """Bring the mode's specification up to date, and return a sentence on what pods can request.

        Raises AgentError or OSError; the caller must then call `keep`.
        """
        if not self._owned.make_way(mode.spec_path):
            raise AgentError(
                f"{mode.spec_path} exists and was not written by the agent, so it was left unchanged",
                "move it away if nothing needs it",
            )
        if self._foreign_specs is None:
            self._foreign_specs = foreign_specs.foreign_specs(self._context, self._vendor)
        foreign = foreign_specs.with_same_kind(self._foreign_specs, mode)
        noted = self._current(mode) or self._publish(mode, foreign)
        self.remarks |= dict.fromkeys(noted["remarks"])
        if left_out := noted.get("left_out"):
            self.left_out.append(in_words(mode.spec_path, mode.generator.tools[0], left_out))
        condition = true(ConditionType.CDI_SPEC_CURRENT, Reason.VERIFIED, f"{mode.spec_path} has {mode.spec_kind}")
        condition = foreign_specs.with_foreign(condition, noted["devices"], foreign, mode)
        if condition.status is not Status.TRUE:
            raise AgentError(condition.message)
        return condition.message

    def keep(self, mode: _Mode) -> str:
        """Remove withdrawn nodes from the published specification, because no new specification could be published.

        If no granted device is left in the file, or if the file cannot be edited, the file is removed. Returns what was
        done, as the end of a message; empty if the file is up to date, missing, or not the agent's. Raises nothing.
        """
        try:
            if not self._owned.has(mode.spec_path) or not self._system.exists(mode.spec_path) or self._current(mode):
                return ""
            if self._remove_withdrawn_nodes(mode):
                return "; the published CDI specification is out of date"
            self._owned.remove(mode.spec_path)
            return f"; removed {mode.spec_path}, which had no granted device left or could not be edited"
        # Any exception, as in publish_modes. The failed publication, for which this was called, is always reported.
        except Exception as error:
            return f"; {mode.spec_path} may be out of date, and was not removed: {one_line(str(error))[:ERROR_SHOWN]}"

    def _remove_withdrawn_nodes(self, mode: _Mode) -> bool:
        """Remove nodes that are no longer granted from the published file. Return whether the file can stay."""
        from agent.vendors.cdi import normalised

        try:
            text = self._system.read_untrusted(mode.spec_path)[0]
            spec = mode.generator.narrowed(json.loads(text), mode.request)
            if spec is not None and json_for_yaml(normalised(spec), sort_keys=True) != text:
                self._system.write(mode.spec_path, json_for_yaml(normalised(spec), sort_keys=True))
        except (OSError, ValueError, RecursionError):
            # The file is malformed, or the disk is full. The file can still be removed.
            return False
        return spec is not None

    def _current(self, mode: _Mode) -> dict[str, Any]:
        """Return the note about the published specification.

        The result is empty if there is no published specification, or if the specification or an input has changed.
        """
        noted = self._notes.load(mode.note)
        if not self._system.exists(mode.spec_path) or noted.get("inputs") != _modes_inputs_digest(self._context, mode):
            return {}
        return noted if noted.get("digest") == sha256(self._system.read_untrusted(mode.spec_path)[0]) else {}

    def _publish(self, mode: _Mode, foreign: Foreign) -> dict[str, Any]:
        """Generate and publish the specification, and return the note about it. Raises AgentError or OSError."""
        noted, inputs = self._notes.load(mode.note), _modes_inputs_digest(self._context, mode)
        if noted.get("inputs") == inputs:
            # An earlier run generated a specification from the same inputs, and noted its devices. If a specification
            # with these devices would be refused, it need not be generated again.
            self._raise_if_refused(mode, noted["devices"], foreign)
        limit = min(MODE_LIMIT, self._deadline - time.monotonic())
        if limit < SHORTEST:
            raise AgentError(
                f"not generated yet: too little was left of the {LIMIT:.0f} s for all modes",
                "the next run generates it",
            )
        failure = Failure.of(self._context, f"{mode.note}-failed", inputs)
        if failed := failure.noted():
            raise AgentError(str(failed["message"]))
        with failure.saved():
            spec, made = self._generate(mode, limit)
        devices = [each["name"] for each in spec["devices"]]
        noted = {"inputs": inputs, "devices": devices}
        noted |= {"remarks": list(made.remarks), "left_out": list(made.left_out)}
        # Noted before the check, so that a refused specification is not generated again each minute.
        self._notes.save(mode.note, noted)
        self._raise_if_refused(mode, devices, foreign)
        text = json_for_yaml(spec, sort_keys=True)
        with failure.saved():
            self._owned.claim(mode.spec_path)
            self._system.write_quickly(mode.spec_path, text)
        self._context.unsynced.append(mode.spec_path)
        noted["digest"] = sha256(text)
        self._notes.save(mode.note, noted)
        return noted

    def _raise_if_refused(self, mode: _Mode, devices: Iterable[str], foreign: Foreign) -> None:
        if refused := foreign_specs.refusal(self._system, mode, devices, foreign):
            raise AgentError(refused.message)

    def _generate(self, mode: _Mode, limit: float) -> tuple[dict[str, Any], Generated]:
        """Return a verified specification, and the generator's result with all remarks.

        Raises AgentError or OSError.
        """
        # Imported here: most runs generate nothing.
        from agent.machine.containerd import adapt_to_containerd
        from agent.vendors.cdi import normalised

        directory = spec_directory(f"{mode.request.vendor}-{mode.name}")
        make_output_directory(self._system, directory)
        try:
            live = live_numbers(self._system, mode.request.devices)
            made = mode.generator.generate(self._system, mode.name, mode.request, directory, limit, live)
        finally:
            for name in self._system.entries(directory):
                self._system.remove_tree(f"{directory}/{name}")
        spec, remarks = adapt_to_containerd(self._context, normalised(made.spec))
        live = live_numbers(self._system, mode.request.devices)
        problems = mode.generator.verify(mode.name, spec, mode.request, *looked_up(self._system, spec, live))
        if problems or not isinstance(spec, dict):
            raise AgentError(f"the new CDI specification failed the check: {'; '.join(problems)}")
        return spec, made._replace(remarks=(*made.remarks, *remarks))


def _modes_inputs_digest(context: Context, mode: _Mode) -> str:
    """Return a digest of everything that the specification depends on."""
    system = context.system
    tools = {path: system.identity(path) for path in mode.generator.tools if system.is_file(path)}
    live = live_numbers(system, mode.request.devices)
    present = [path for path in mode.generator.optional_paths(mode.name) if system.exists(path)]
    # The versions of the agent and of containerd decide what the specification may contain.
    return json_digest([__version__, mode.request, tools, live, present, containerd_state(context)])


# Finds outdated pods: their containers have driver roots or device numbers that are no longer those of the handoff.
#
# The agent only names these pods: they keep what they were created with until their owner recreates them.


BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
"""containerd's bundles of the CRI's running containers: `<container id>/config.json` is the OCI specification.

Since containerd 1.2, they are below the directory `state` of containerd's configuration, by default /run/containerd.
"""
NAMESPACE, POD = "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"
"""Annotations that containerd's CRI plugin writes (pkg/cri/annotations)."""
LONGEST_INDEX = 9
"""Digits of the largest index of a driver root."""
SHOWN_PODS = 10
"""How many pods the message names, because its length is limited; the others are counted."""


def name_outdated(context: Context, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Return the conditions with the pods' names added to CDISpecCurrent's message. Status and reason stay.

    A long message, which may name each node of each GPU, is shortened.
    """
    pods = outdated_pods(context)
    if not pods:
        return conditions
    described = [f"{quoted(pod)} ({', '.join(sorted(outdated))})" for pod, outdated in sorted(pods.items())]
    remark = f"; PodsOutdated (recreate them: they keep what they were made with): {first_of(described, SHOWN_PODS)}"
    return with_remark(conditions, ConditionType.CDI_SPEC_CURRENT, remark)


def outdated_pods(context: Context) -> dict[str, set[str]]:
    """Return descriptions of the driver roots and device numbers that are outdated, by the pod's `namespace/name`."""
    requests, versions = context.handoff.requests, _driver_versions(context)
    granted = {device.path: device for request in requests for device in request.devices}
    current = {request.driver_root for request in requests}
    pods: dict[str, set[str]] = {}
    for container in _containers(context).values():
        outdated = {_describe_root(root, versions) for root in container.get("roots", ()) if root not in current}
        outdated |= set(_changed_numbers(container.get("devices", {}), granted))
        if outdated:
            pods.setdefault(container["pod"], set()).update(outdated)
    return pods


def _driver_versions(context: Context) -> dict[str, Any]:
    """Return the driver versions of all driver roots that handoffs have named since the machine's boot, by path."""
    versions, requests = context.notes.load("driver-versions"), context.handoff.requests
    versions |= {request.driver_root: request.driver_version for request in requests if request.driver_root}
    context.notes.save("driver-versions", versions)
    return versions


def _describe_root(root: str, versions: Mapping[str, Any]) -> str:
    version = f" with driver {versions[root]}" if root in versions else ""
    return f"driver root {root.rpartition('/')[2]}{version}"


def _changed_numbers(devices: Mapping[str, list[int]], granted: Mapping[str, GrantedDevice]) -> list[str]:
    return [
        f"{path} as {number[0]}:{number[1]}"
        for path, number in devices.items()
        if path in granted and number != [granted[path].major, granted[path].minor]
    ]


def _containers(context: Context) -> dict[str, dict[str, Any]]:
    """Return the containers by id. Each is read only once: its OCI specification never changes while it runs."""
    system, notes = context.system, context.notes
    noted = notes.load("containers")
    names = system.entries(BUNDLES) if system.is_directory(BUNDLES) else ()
    containers = {}
    for name in names:
        known = noted.get(name)
        container = known if isinstance(known, dict) else _container(system, name)
        if container is not None:
            containers[name] = container
    notes.save("containers", containers)
    return containers


def _container(system: System, name: str) -> dict[str, Any] | None:
    """Return a container's pod, driver roots and device numbers; None if they cannot be read, as during its removal.

    The result is empty for a container without driver roots and devices.
    """
    try:
        specification = parse_json(system.read(f"{BUNDLES}/{name}/config.json"))
        annotations = specification.get("annotations") or {}
        sources = [str(mount.get("source")) for mount in specification.get("mounts") or ()]
        devices = (specification.get("linux") or {}).get("devices") or ()
        numbers = {str(device["path"]): [int(device["major"]), int(device["minor"])] for device in devices}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    inside = f"{MACHINE_HOST_NVIDIA}/"
    places = {source.removeprefix(inside).partition("/")[0] for source in sources if source.startswith(inside)}
    # A pod's hostPath may be any path there, existing or not. A driver root is a number.
    indices = {place for place in places if place.isascii() and place.isdecimal() and len(place) <= LONGEST_INDEX}
    if not numbers and not indices:
        return {}
    pod = f"{annotations.get(NAMESPACE, '?')}/{annotations.get(POD, name)}"
    return {"pod": pod, "roots": sorted(inside + index for index in indices), "devices": numbers}
