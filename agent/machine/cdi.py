"""Publishes a vendor's CDI specification. It is generated in another directory, verified, and published by a rename.

A specification that serves fewer GPUs never replaces one that serves more, unless the published one is faulty.
"""

import contextlib
import json
import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent import __version__
from agent.machine import foreign_specs
from agent.machine.containerd import containerd_state
from agent.machine.devices import live_numbers
from agent.machine.foreign_specs import Foreign
from agent.machine.notes import ERROR_SHOWN, Context, Failure, record_repair, remove_remains
from agent.machine.vendors import VENDOR_NAMES
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true
from agent.model.contract import AllocatableDevice, AllocatableVendor, render_allocatable
from agent.model.device import DeviceNumber
from agent.model.errors import AgentError
from agent.model.handoff import Repair, Request
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
from agent.vendors.machine_vendor import CdiMode, Generated, MachineVendor, Verdict, looked_up

SHOWN = 10
"""How many parts, or pods, a message names, because its length is limited; the others are counted."""
KIND = ConditionType.CDI_SPEC_CURRENT
UNPARTITIONED_FOR = 600.0
"""Seconds for which a GPU that is usable only in partitions, but has none, does not count as missing. The time is
limited, because no event shows that the GPU has become usable without partitions."""


class Candidate(NamedTuple):
    """A specification's text with its verdict."""

    text: bytes
    verdict: Verdict


def _published_candidate(
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
    return Candidate(text, vendor.verify(spec, request, *looked_up(system, spec, live)))


def _excused(candidate: Candidate, gpus: Collection[str]) -> Candidate:
    """Return the candidate, in which these GPUs without a partition do not count as missing (UNPARTITIONED_FOR)."""
    missing = tuple(gpu for gpu in candidate.verdict.missing_gpus if gpu not in gpus)
    return candidate._replace(verdict=candidate.verdict._replace(missing_gpus=missing))


def _generated(context: Context, directory: str, generate: Callable[[], Generated]) -> tuple[object, Generated]:
    """Return a new specification that this machine's containerd accepts, and the generator's result with all remarks.

    Raises AgentError or OSError.
    """
    # Imported here: most runs generate nothing.
    from agent.machine.containerd import adapt_to_containerd
    from agent.vendors.cdi import normalised

    system = context.system
    system.make_directory(directory)
    for name in system.entries(directory):
        # A generator would follow a link, and hang on a FIFO. Regular files stay: a generator that was started early
        # may be writing one.
        path = f"{directory}/{name}"
        if system.read_link(path) is not None or not system.is_file(path):
            system.remove_tree(path)
    try:
        made = generate()
    finally:
        for name in system.entries(directory):
            system.remove_tree(f"{directory}/{name}")
    spec, adapted = adapt_to_containerd(context, normalised(made.spec))
    return spec, made._replace(remarks=(*made.remarks, *adapted))


def _write(context: Context, path: str, text: bytes) -> None:
    context.owned.claim(path)
    # The name of the temporary file, which is in the same directory, does not end in .yaml or .json. So runtimes do not
    # read it. If they did, devices that are in both files would be unusable.
    context.system.stream(path, (text,), durable=False)
    context.unsynced.append(path)


def _inputs_digest(
    context: Context, asked: object, files: Iterable[str], live: Mapping[str, DeviceNumber], optional: Iterable[str]
) -> str:
    """Return a digest of everything that a specification depends on. `asked` says what the host asks for."""
    system = context.system
    identities = {path: system.identity(path) for path in files if path and system.is_file(path)}
    present = [path for path in optional if system.exists(path)]
    # The versions of the agent and of containerd decide what the specification may contain.
    return json_digest([__version__, asked, identities, live, present, containerd_state(context)])


def _left_out_in_words(spec_path: str, generator: str, left_out: Sequence[str]) -> str:
    return (
        f"EditsLeftOut: this agent does not know all that {generator} writes, and has left out of {spec_path}: "
        f"{first_of(left_out, SHOWN)}"
    )


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
        context.notes.save(f"spec-failed-{vendor.name}", {})
    if not request.gpus:
        removed = context.owned.remove(vendor.spec_path)
        if removed:
            context.notes.save(f"spec-{vendor.name}", {"removed": time.time_ns()})
        message = f"no GPU is granted to this machine{f'; removed {vendor.spec_path}' if removed else ''}"
        return Published(not_applicable(KIND, message))
    if not context.owned.make_way(vendor.spec_path):
        what = f"{vendor.spec_path} exists and was not written by the agent, so it was left unchanged"
        return Published(false(KIND, Reason.FOREIGN_FILE, f"{what}: move it away if nothing needs it"))
    foreign = foreign_specs.find_foreign(context, vendor)
    published = _publish(context, vendor, request, foreign)
    others = {*foreign.same_directory, *foreign.preferred}
    # Pods do not get the others' devices from the agent's specification.
    names = tuple(each for each in published.devices if f"{vendor.spec_kind}={each}" not in others)
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
    current = _published_candidate(system, vendor, request, live)
    if vendor.driver_files and not request.driver_root:
        # The generator is not run: to it, an empty --driver-root= would mean the machine's own root.
        message = "GPUs are granted, but no driver files: see DriverRootStaged on the host"
        return _kept(current, Reason.NO_DRIVER_ROOT, message)
    files, optional = (*vendor.tools, *vendor.inputs), vendor.optional_paths(request)
    inputs = _inputs_digest(context, context.generation, files, live, optional)
    noted = notes.load(f"spec-{vendor.name}")
    if noted.get("inputs") == inputs:
        if current and time.monotonic() < noted.get("until", 0.0):
            current = _excused(current, noted["unpartitioned"])
        faultless = current and not current.verdict.problems and not current.verdict.missing
        if current and faultless and noted.get("digest") == sha256(current.text):
            condition = true(KIND, Reason.VERIFIED, str(noted.get("message")))
            return Published(condition._replace(reason=str(noted.get("reason"))), current.verdict.devices)
        # If an earlier run generated a specification from the same inputs, but it was refused, its devices are noted.
        # If a specification with these devices would be refused again, it need not be generated again.
        if refused := foreign_specs.refusal(system, vendor, noted.get("colliding", ()), foreign):
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
        published = _kept(_published_candidate(system, vendor, request, live), Reason.FAILED, str(error))
    condition = published.condition
    if condition.status is Status.FALSE and condition.reason != Reason.NAMES_COLLIDE:
        found = _published_candidate(system, vendor, request, live)
        _failure(context, vendor, inputs, found).save(
            reason=condition.reason, message=condition.message, gpus=condition.gpus
        )
    return published


def _failure(context: Context, vendor: MachineVendor, inputs: str, current: Candidate | None) -> Failure:
    found = (sha256(current.text), current.verdict.problems) if current else ()
    return Failure.of(context, f"spec-failed-{vendor.name}", inputs, found)


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
    directory, generator = spec_directory(vendor.name), _generator_name(vendor)
    noted = notes.load(f"spec-{vendor.name}")
    try:
        spec, made = _generated(context, directory, lambda: vendor.generate(system, request, directory, live))
        # The verified data is published, not the generator's text, which another parser may read differently.
        verdict = vendor.verify(spec, request, *looked_up(system, spec, live))
        new = _excused(Candidate(json_for_yaml(spec, sort_keys=True), verdict), made.unpartitioned)
    except (AgentError, OSError) as error:
        return _kept(current, Reason.GENERATION_FAILED, f"{error}; see also DevicesAllowed and LibrariesLinked")
    left_out = (_left_out_in_words(vendor.spec_path, generator, made.left_out),) if made.left_out else ()
    if new.verdict.problems or (current and not _may_replace(new.verdict, current.verdict)):
        faults = new.verdict.problems or (f"{', '.join(sorted(new.verdict.missing))} is not in it",)
        why = "; ".join((*faults, *left_out, *made.remarks))
        message = f"the new CDI specification from {generator} failed the check: {why}"
        return _kept(current, Reason.SPEC_REFUSED, message)
    if refused := foreign_specs.refusal(system, vendor, new.verdict.devices, foreign):
        notes.save(f"spec-{vendor.name}", {"inputs": inputs, "colliding": list(new.verdict.devices)})
        return Published(refused)
    if not current or current.text != new.text:
        _write(context, vendor.spec_path, new.text)
        is_as_published = current is not None and noted.get("digest") == sha256(current.text)
        if noted.get("inputs") == inputs and "digest" in noted and not is_as_published:
            record_repair(notes, Repair.SPEC, f"somebody changed {vendor.spec_path}")
    condition = _condition(vendor, new.verdict, made.remarks, left_out)
    if condition.status is Status.TRUE:
        noted = {"inputs": inputs, "digest": sha256(new.text), "message": condition.message}
        noted["reason"] = condition.reason
        noted |= {"unpartitioned": list(made.unpartitioned), "until": time.monotonic() + UNPARTITIONED_FOR}
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


def _generator_name(vendor: MachineVendor) -> str:
    return vendor.tools[0] if vendor.tools else "this agent"


# Claims: the document ALLOCATABLE lists the devices of verified specifications; agent.dra offers no others. It exists
# only while the host's settings ask for Dynamic Resource Allocation.


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


# Modes of a vendor's generator. For each requested one, a further specification is published like that of the GPUs.

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
    vendor: MachineVendor
    mode: CdiMode
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
    owned, deadline = context.owned, time.monotonic() + LIMIT
    served, without_devices, failed, left_out = [], [], [], []
    # A remark on several modes is made only once.
    remarks: dict[str, None] = {}
    for name in request.cdi_modes:
        path = mode_spec_file(vendor.name, name)
        if name not in modes:
            failed.append(
                f"{name}: the image's agent does not support this mode: update it to the host agent's release"
            )
            with contextlib.suppress(OSError, AgentError):
                # If the image was replaced by an older one, there may be a file for this mode. It is removed, because
                # this release cannot tell which of the devices in it are still granted.
                owned.remove(path)
            continue
        mode = _Mode(name, vendor, modes[name], modes[name].request(request, granted), path, modes[name].kind)
        try:
            if not mode.request.devices:
                # Pods must not get devices that are no longer granted.
                owned.remove(path)
                without_devices.append(name)
                continue
            noted, condition = _settle_mode(context, vendor, mode, deadline)
            remarks |= dict.fromkeys(noted["remarks"])
            if noted["left_out"]:
                left_out.append(_left_out_in_words(path, vendor.tools[0], noted["left_out"]))
            if condition.status is not Status.TRUE:
                raise AgentError(condition.message)
            served.append(condition.message)
        # Any exception, because the content of files or a tool's output must not keep the report from being written.
        except Exception as error:
            failed.append(f"{name}: {one_line(str(error))[:ERROR_SHOWN]}{_keep_mode(context, mode)}")
    not_served = [f"ModeNotServed: {'; '.join(failed)}"] if failed else []
    without = [f"no devices for mode {', '.join(without_devices)}"] if without_devices else []
    parts = (*not_served, *served, *remarks, *left_out, *without)
    return "".join(f"; {part}" for part in parts), bool(left_out)


def _settle_mode(
    context: Context, vendor: MachineVendor, mode: _Mode, deadline: float
) -> tuple[dict[str, Any], Condition]:
    """Bring the mode's specification up to date. Return the note about it, and CDISpecCurrent for this mode alone.

    Raises AgentError or OSError; the caller must then call `_keep_mode`.
    """
    if not context.owned.make_way(mode.spec_path):
        raise AgentError(
            f"{mode.spec_path} exists and was not written by the agent, so it was left unchanged",
            "move it away if nothing needs it",
        )
    foreign = foreign_specs.with_same_kind(foreign_specs.foreign_specs(context, vendor), mode)
    noted = _current_mode(context, mode) or _publish_mode(context, mode, foreign, deadline)
    condition = true(KIND, Reason.VERIFIED, f"{mode.spec_path} has {mode.spec_kind}")
    return noted, foreign_specs.with_foreign(condition, noted["devices"], foreign, mode)


def _keep_mode(context: Context, mode: _Mode) -> str:
    """Remove withdrawn nodes from the published specification, because no new specification could be published.

    If no granted device is left in the file, or if the file cannot be edited, the file is removed. Returns what was
    done, as the end of a message; empty if the file is up to date, missing, or not the agent's. Raises nothing.
    """
    owned, path = context.owned, mode.spec_path
    try:
        if not owned.has(path) or not context.system.exists(path) or _current_mode(context, mode):
            return ""
        if _remove_withdrawn_nodes(context.system, mode):
            return "; the published CDI specification is out of date"
        owned.remove(path)
        return f"; removed {path}, which had no granted device left or could not be edited"
    # Any exception, as in publish_modes. The failed publication, for which this was called, is always reported.
    except Exception as error:
        return f"; {path} may be out of date, and was not removed: {one_line(str(error))[:ERROR_SHOWN]}"


def _remove_withdrawn_nodes(system: System, mode: _Mode) -> bool:
    """Remove nodes that are no longer granted from the published file. Return whether the file can stay."""
    from agent.vendors.cdi import narrowed, normalised

    try:
        text = system.read_untrusted(mode.spec_path)[0]
        spec = narrowed(json.loads(text), mode.request)
        if spec is not None and (rest := json_for_yaml(normalised(spec), sort_keys=True)) != text:
            system.write(mode.spec_path, rest)
    except (OSError, ValueError, RecursionError):
        # The file is malformed, or the disk is full. The file can still be removed.
        return False
    return spec is not None


def _mode_inputs(context: Context, mode: _Mode) -> str:
    live = live_numbers(context.system, mode.request.devices)
    return _inputs_digest(context, mode.request, mode.vendor.tools, live, mode.mode.mounts)


def _current_mode(context: Context, mode: _Mode) -> dict[str, Any]:
    """Return the note about the published specification; empty if there is none, or if it or an input has changed."""
    noted, system = context.notes.load(mode.note), context.system
    if not system.exists(mode.spec_path) or noted.get("inputs") != _mode_inputs(context, mode):
        return {}
    return noted if noted.get("digest") == sha256(system.read_untrusted(mode.spec_path)[0]) else {}


def _publish_mode(context: Context, mode: _Mode, foreign: Foreign, deadline: float) -> dict[str, Any]:
    """Generate and publish the specification, and return the note about it. Raises AgentError or OSError."""
    system, notes = context.system, context.notes
    noted, inputs = notes.load(mode.note), _mode_inputs(context, mode)

    def raise_if_refused() -> None:
        if refused := foreign_specs.refusal(system, mode, noted["devices"], foreign):
            raise AgentError(refused.message)

    if noted.get("inputs") == inputs:
        # An earlier run generated a specification from the same inputs, and noted its devices. If a specification with
        # these devices would be refused, it need not be generated again.
        raise_if_refused()
    limit = min(MODE_LIMIT, deadline - time.monotonic())
    if limit < SHORTEST:
        raise AgentError(
            f"not generated yet: too little was left of the {LIMIT:.0f} s for all modes", "the next run generates it"
        )
    failure = Failure.of(context, f"{mode.note}-failed", inputs)
    if failed := failure.noted():
        raise AgentError(str(failed["message"]))
    with failure.saved():
        spec, made = _generate_mode(context, mode, limit)
    noted = {"inputs": inputs, "devices": [each["name"] for each in spec["devices"]]}
    noted |= {"remarks": list(made.remarks), "left_out": list(made.left_out)}
    # Noted before the check, so that a refused specification is not generated again each minute.
    notes.save(mode.note, noted)
    raise_if_refused()
    text = json_for_yaml(spec, sort_keys=True)
    with failure.saved():
        _write(context, mode.spec_path, text)
    noted["digest"] = sha256(text)
    notes.save(mode.note, noted)
    return noted


def _generate_mode(context: Context, mode: _Mode, limit: float) -> tuple[dict[str, Any], Generated]:
    """Return a verified specification, and the generator's result. Raises AgentError or OSError."""
    system, vendor, request = context.system, mode.vendor, mode.request
    directory, live = spec_directory(f"{request.vendor}-{mode.name}"), live_numbers(system, request.devices)
    spec, made = _generated(
        context, directory, lambda: vendor.generate_mode(system, mode.mode, request, directory, limit, live)
    )
    live = live_numbers(system, request.devices)
    problems = vendor.verify_mode(mode.mode, spec, request, *looked_up(system, spec, live))
    if problems or not isinstance(spec, dict):
        raise AgentError(f"the new CDI specification failed the check: {'; '.join(problems)}")
    return spec, made


# Pods that keep outdated driver roots or device numbers until their owner recreates them. The agent only names them.

BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
"""containerd's bundles of the CRI's running containers: `<container id>/config.json` is the OCI specification.

Since containerd 1.2, they are below the directory `state` of containerd's configuration, by default /run/containerd.
"""
NAMESPACE, POD = "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"
"""Annotations that containerd's CRI plugin writes (pkg/cri/annotations)."""
LONGEST_INDEX = 9
"""Digits of the largest index of a driver root."""


def outdated_remark(context: Context) -> str:
    """Return the remark on CDISpecCurrent that names the outdated pods; empty if there are none."""
    pods = outdated_pods(context)
    described = [f"{quoted(pod)} ({', '.join(sorted(outdated))})" for pod, outdated in sorted(pods.items())]
    return (
        f"; PodsOutdated (recreate them: they keep what they were made with): {first_of(described, SHOWN)}"
        if pods
        else ""
    )


def outdated_pods(context: Context) -> dict[str, set[str]]:
    """Return descriptions of the driver roots and device numbers that are outdated, by the pod's `namespace/name`."""
    requests = context.handoff.requests
    # The versions of all driver roots that handoffs have named since the machine's boot.
    versions = context.notes.load("driver-versions")
    versions |= {request.driver_root: request.driver_version for request in requests if request.driver_root}
    context.notes.save("driver-versions", versions)
    granted = {device.path: device for request in requests for device in request.devices}
    current = {request.driver_root for request in requests}
    pods: dict[str, set[str]] = {}
    for container in _containers(context).values():
        outdated = set()
        for root in set(container.get("roots", ())) - current:
            version = f" with driver {versions[root]}" if root in versions else ""
            outdated.add(f"driver root {root.rpartition('/')[2]}{version}")
        for path, (major, minor) in container.get("devices", {}).items():
            if path in granted and (major, minor) != (granted[path].major, granted[path].minor):
                outdated.add(f"{path} as {major}:{minor}")
        if outdated:
            pods.setdefault(container["pod"], set()).update(outdated)
    return pods


def _containers(context: Context) -> dict[str, dict[str, Any]]:
    """Return the containers by id. Each is read only once: its OCI specification never changes while it runs."""
    system, notes = context.system, context.notes
    noted = notes.load("containers")
    names = system.entries(BUNDLES) if system.is_directory(BUNDLES) else ()
    containers = {}
    for name in names:
        container = noted[name] if name in noted else _container(system, name)
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
