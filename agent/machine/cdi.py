"""Publishes a vendor's CDI specifications. Each is generated in another directory, verified, and published by a rename.

A vendor has one for its GPUs, and one for each requested mode of its generator. A specification that serves fewer GPUs
never replaces one that serves more, unless the published one is faulty.
"""

import contextlib
import math
import posixpath
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from agent import __version__
from agent.machine import foreign_specs
from agent.machine.containerd import EFFECTIVE_NOTE, adapt_to_containerd, program_identity
from agent.machine.devices import live_numbers
from agent.machine.foreign_specs import Foreign, OwnSpec
from agent.machine.notes import Context, Failure, in_words, record_repair, remove_remains
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Remark, Status, false, not_applicable, true
from agent.model.contract import AllocatableDevice, AllocatableVendor
from agent.model.device import DeviceNumber
from agent.model.errors import AgentError, DocumentError
from agent.model.handoff import GrantedDevice, Repair, Request
from agent.model.json_document import json_for_yaml, parse_json
from agent.model.paths import CDI_DIRECTORIES, MACHINE_HOST_NVIDIA, mode_spec_file, spec_directory, spec_file
from agent.model.text import first_of, json_digest, one_line, quoted, sha256
from agent.system.files import UNUSABLE, System
from agent.system.journal import INFO, WARNING, say
from agent.vendors.cdi import narrowed, normalised
from agent.vendors.machine_vendor import CdiMode, Generated, MachineVendor, Verdict, looked_up

KIND = ConditionType.CDI_SPEC_CURRENT
UNPARTITIONED_FOR = 600.0
"""Seconds for which a GPU that is usable only in partitions, but has none, does not count as missing. The time is
limited, because no event shows that the GPU has become usable without partitions."""
MODE_LIMIT = 8.0
"""Seconds to generate the specification of one mode. No mode does anything slow."""
LIMIT = 10.0
"""Seconds to generate the specifications of all modes. Even a run that also generates the specification of the GPUs
twice stays below TimeoutStartSec= of unbounded-agent-gpu.service. systemd kills a run at that limit, and a killed
run withdraws and reports nothing."""
SHORTEST = 1.0
"""Seconds of LIMIT that must be left to start the generator."""
MODE_SHOWN = 300
"""How many characters of a mode's failure are shown, before what became of its published specification."""


class _Spec(NamedTuple):
    own: OwnSpec
    name: str
    """The name in those of its notes and of its directory."""
    request: Request
    """What it is made from."""
    inputs: Callable[[], tuple[object, Collection[str], Collection[str]]]
    """What the host asks for, the files of which it is made, and paths of which it depends on whether they exist."""
    generate: Callable[[str, Mapping[str, DeviceNumber]], Generated]
    """Generates it with a directory and the numbers of the nodes that exist. Raises AgentError or OSError."""
    verify: Callable[[object, Mapping[str, DeviceNumber], Collection[str]], Verdict]
    """As MachineVendor.verify. Pure."""
    deadline: float = math.inf
    mode: bool = False


class Published(NamedTuple):
    """What came of a specification: CDISpecCurrent for it alone, and the names of the devices that pods can request."""

    condition: Condition
    devices: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """Remarks that its message does not have yet."""
    left_out: str = ""
    """The same for what was left out of it."""


class _Candidate(NamedTuple):
    text: bytes
    verdict: Verdict

    def without(self, gpus: Collection[str]) -> "_Candidate":
        """Return the candidate, in which these unpartitioned GPUs do not count as missing (UNPARTITIONED_FOR)."""
        missing = tuple(gpu for gpu in self.verdict.missing_gpus if gpu not in gpus)
        return self._replace(verdict=self.verdict._replace(missing_gpus=missing))


def publish_spec(
    context: Context, vendor: MachineVendor, request: Request, known: tuple[str, ...] = (), *, at_once: bool = False
) -> Published:
    """Bring the specification of the GPUs up to date. Raises nothing: after an exception, the devices are the `known`.

    If the last result was good, programs are started only after an input, the published file or another program's
    specification has changed. If the last result was not good, the same holds until the next attempt is due (Failure),
    or with `at_once`.
    """
    try:
        return _publish_gpus(context, vendor, request, at_once=at_once)
    # Any exception, as in `attempt`.
    except Exception as error:
        return Published(false(KIND, Reason.FAILED, in_words(error)), known)


def _publish_gpus(context: Context, vendor: MachineVendor, request: Request, *, at_once: bool) -> Published:
    own = OwnSpec(vendor.spec_path, vendor.spec_kind, vendor.rival_spec, vendor.rival_units)
    if at_once:
        context.notes.save(f"spec-failed-{vendor.name}", {})
    if not request.gpus:
        removed = context.owned.remove(own.path)
        if removed:
            context.notes.save(f"spec-{vendor.name}", {"removed": time.time_ns()})
        message = f"no GPU is granted to this machine{f'; removed {own.path}' if removed else ''}"
        return Published(not_applicable(KIND, message))
    spec = _Spec(
        own,
        vendor.name,
        request,
        lambda: (context.generation, (*vendor.tools, *vendor.inputs), vendor.optional_paths(request)),
        lambda directory, live: vendor.generate(context.system, request, directory, live),
        lambda document, live, present: vendor.verify(document, request, live, present),
    )
    foreign = foreign_specs.find_foreign(context, own)
    condition, devices, remarks, left_out = _publish(context, vendor, spec, foreign)
    said = "; ".join(filter(None, (condition.message, left_out, *remarks)))
    others = {*foreign.same_directory, *foreign.preferred}
    # Pods do not get the others' devices from the agent's specification.
    names = tuple(each for each in devices if f"{own.kind}={each}" not in others)
    return Published(foreign_specs.with_foreign(condition._replace(message=said), devices, foreign, own), names)


def publish_modes(context: Context, vendor: MachineVendor, request: Request) -> tuple[str, tuple[str, ...], bool]:
    """Publish the specifications of all requested modes. Raises nothing.

    Returns a remark for CDISpecCurrent, its words, and whether something was left out of a specification that is
    published and served.

    A failure is only a remark, because Ready is about GPUs, and pods get the GPUs from another specification.
    """
    granted = [device for each in context.handoff.requests for device in each.devices]
    deadline = time.monotonic() + LIMIT
    served, without_devices, failed, left_out, served_without = [], [], [], [], False
    # A remark on several modes is made only once.
    remarks, words = dict[str, None](), dict[str, None]()
    for name in request.cdi_modes:
        spec = None
        try:
            mode = vendor.cdi_modes.get(name)
            if mode is None:
                why = "the image's agent does not support this mode: update it to the host agent's release"
                failed.append(f"{name}: {why}")
            else:
                spec = _mode_spec(context, vendor, mode, request, granted, deadline)
            if spec is None or not spec.request.devices:
                # Pods must not get devices that are no longer granted. Of those in a file for an unknown mode, which a
                # newer image may have left, this release cannot tell which still are.
                context.owned.remove(mode_spec_file(vendor.name, name))
                without_devices += [name] if spec else []
                continue
            foreign = foreign_specs.with_same_kind(foreign_specs.foreign_specs(context), spec.own)
            published = _publish(context, vendor, spec, foreign)
            condition = foreign_specs.with_foreign(published.condition, published.devices, foreign, spec.own)
            remarks |= dict.fromkeys(published.remarks)
            words |= dict.fromkeys(published.condition.remarks)
            left_out += [published.left_out] if published.left_out else []
            said = one_line(condition.message)
            if condition.status is Status.TRUE:
                served.append(said)
                served_without |= bool(published.left_out)
            else:
                failed.append(f"{name}: {said}")
        # Any exception, because the content of files or a tool's output must not keep the report from being written.
        except Exception as error:
            kept = _narrow(context, spec, outdated=False) if spec else ""
            failed.append(f"{name}: {one_line(in_words(error))[:MODE_SHOWN]}{kept}")
    not_served = [f"ModeNotServed: {'; '.join(failed)}"] if failed else []
    without = [f"no devices for mode {', '.join(without_devices)}"] if without_devices else []
    parts = (*not_served, *served, *remarks, *left_out, *without)
    words |= {Remark.MODE_NOT_SERVED: None} if failed else {}
    return "".join(f"; {part}" for part in parts), tuple(words), served_without


def _mode_spec(
    context: Context,
    vendor: MachineVendor,
    mode: CdiMode,
    request: Request,
    granted: Collection[GrantedDevice],
    deadline: float,
) -> _Spec:
    system, needed = context.system, mode.request(request, granted)

    def generate(directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        limit = min(MODE_LIMIT, deadline - time.monotonic())
        return vendor.generate_mode(system, mode, needed, directory, limit, live)

    def verify(spec: Any, live: Mapping[str, DeviceNumber], present: Collection[str]) -> Verdict:  # noqa: ANN401
        problems = vendor.verify_mode(mode, spec, needed, live, present)
        return Verdict(problems, devices=() if problems else tuple(each["name"] for each in spec["devices"]))

    return _Spec(
        OwnSpec(mode_spec_file(vendor.name, mode.name), mode.kind),
        f"{vendor.name}-{mode.name}",
        needed,
        lambda: (needed, vendor.tools, mode.mounts),
        generate,
        verify,
        deadline,
        mode=True,
    )


def _publish(context: Context, vendor: MachineVendor, spec: _Spec, foreign: Foreign) -> Published:
    system, notes, own = context.system, context.notes, spec.own
    if not context.owned.make_way(own.path):
        what = f"{own.path} exists and was not written by the agent, so it was left unchanged"
        return Published(false(KIND, Reason.FOREIGN_FILE, f"{what}: move it away if nothing needs it"))
    live = live_numbers(system, spec.request.devices)
    asked, files, optional = spec.inputs()
    identities = {path: system.identity(path) for path in files if path and system.is_file(path)}
    present = [path for path in optional if system.exists(path)]
    # The versions of the agent and of containerd decide what the specification may contain.
    inputs = json_digest([__version__, asked, identities, live, present, program_identity(system)])
    current, noted = _current(system, spec, live), notes.load(f"spec-{spec.name}")
    if noted.get("inputs") == inputs:
        if current and time.monotonic() < noted.get("until", 0.0):
            current = current.without(noted["unpartitioned"])
        faultless = current and not current.verdict.problems and not current.verdict.missing
        if current and faultless and noted.get("digest") == sha256(current.text):
            words = (Remark.EDITS_LEFT_OUT,) if noted["left_out"] else ()
            condition = Condition(KIND, Status.TRUE, noted["reason"], noted["message"], remarks=words)
            return Published(condition, current.verdict.devices, tuple(noted["remarks"]), noted["left_out"])
        # If an earlier run generated a specification from the same inputs, but it was refused, its devices are noted.
        # If a specification with these devices would be refused again, it need not be generated again.
        if refused := foreign_specs.refusal(system, own, noted.get("colliding", ()), foreign):
            return Published(refused)
    if failed := _failure(context, spec, inputs, current).noted():
        gpus, words = tuple(failed["gpus"]), tuple(failed["remarks"])
        condition = Condition(KIND, Status.FALSE, failed["reason"], failed["message"], gpus=gpus, remarks=words)
        return Published(condition, current.verdict.devices if current and not current.verdict.problems else ())
    try:
        published = _attempt(context, vendor, spec, foreign, current, inputs)
    except (AgentError, OSError) as error:
        # The specification was generated, but it, or a note about it, could not be written.
        published = _kept(context, spec, _current(system, spec, live), Reason.FAILED, str(error))
    condition = published.condition
    if condition.status is Status.FALSE and condition.reason not in (Reason.NAMES_COLLIDE, Reason.NOT_TRIED):
        said = "; ".join(filter(None, (condition.message, published.left_out, *published.remarks)))
        failure = _failure(context, spec, inputs, _current(system, spec, live))
        failure.save(reason=condition.reason, message=said, gpus=condition.gpus, remarks=condition.remarks)
    return published


def _current(system: System, spec: _Spec, live: dict[str, DeviceNumber]) -> _Candidate | None:
    """Return the published specification; None if it is missing or malformed, not a regular file, or too large.

    It is also too large if it mounts too many files.

    Raises OSError if the specification exists but cannot be read now. Then it must not be replaced, because it may
    serve more GPUs than a new one.
    """
    try:
        text = system.read_untrusted(spec.own.path)[0]
        document = parse_json(text)
        found = looked_up(system, document, live)
    except (FileNotFoundError, ValueError, DocumentError):
        return None
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        return None
    return _Candidate(text, spec.verify(document, *found))


def _failure(context: Context, spec: _Spec, inputs: str, current: _Candidate | None) -> Failure:
    found = (sha256(current.text), current.verdict.problems) if current else ()
    return Failure.of(context, f"spec-failed-{spec.name}", inputs, found)


def _attempt(
    context: Context, vendor: MachineVendor, spec: _Spec, foreign: Foreign, current: _Candidate | None, inputs: str
) -> Published:
    system, notes, own, note = context.system, context.notes, spec.own, f"spec-{spec.name}"
    if vendor.driver_files and not (spec.mode or spec.request.driver_root):
        # The generator is not run: to it, an empty --driver-root= would mean the machine's own root.
        message = "GPUs are granted, but no driver files: see DriverRootStaged on the host"
        return _kept(context, spec, current, Reason.NO_DRIVER_ROOT, message)
    if spec.deadline - time.monotonic() < SHORTEST:
        why = f"not generated yet: too little was left of the {LIMIT:.0f} s for all modes (the next run generates it)"
        return _kept(context, spec, current, Reason.NOT_TRIED, why)
    live = live_numbers(system, spec.request.devices)
    try:
        document, made = _generated(context, spec, live)
        # The verified data is published, not the generator's text, which another parser may read differently.
        verdict = spec.verify(document, *looked_up(system, document, live))
        new = _Candidate(json_for_yaml(document, sort_keys=True), verdict).without(made.unpartitioned)
    except (AgentError, OSError) as error:
        why = f"{error}{'' if spec.mode else '; see also DevicesAllowed and LibrariesLinked'}"
        return _kept(context, spec, current, Reason.GENERATION_FAILED, why)
    verdict, generator, left_out = new.verdict, vendor.tools[0] if vendor.tools else "this agent", ""
    if made.left_out:
        left_out = f"EditsLeftOut: this agent does not know all that {generator} writes, and has left out of "
        left_out += f"{own.path}: {first_of(made.left_out)}"
    words = (Remark.EDITS_LEFT_OUT,) if left_out else ()
    is_worse = current and not (current.verdict.problems or verdict.missing <= current.verdict.missing)
    if verdict.problems or is_worse:
        faults = first_of(verdict.problems, separator="; ") or f"{first_of(sorted(verdict.missing))} is not in it"
        why = "; ".join(filter(None, (faults, left_out, *made.remarks)))
        message = f"the new CDI specification failed the check: {why}"
        refusal = _kept(context, spec, current, Reason.SPEC_REFUSED, message)
        return refusal._replace(condition=refusal.condition._replace(remarks=words))
    if refused := foreign_specs.refusal(system, own, verdict.devices, foreign):
        notes.save(note, {"inputs": inputs, "colliding": list(verdict.devices)})
        return Published(refused)
    if not current or current.text != new.text:
        context.owned.claim(own.path)
        # The name of the temporary file, which is in the same directory, does not end in .yaml or .json. So runtimes do
        # not read it. If they did, devices that are in both files would be unusable.
        system.stream(own.path, (new.text,), durable=False)
        context.unsynced.append(own.path)
        noted = notes.load(note)
        is_as_published = current is not None and noted.get("digest") == sha256(current.text)
        if noted.get("inputs") == inputs and "digest" in noted and not is_as_published:
            record_repair(notes, Repair.SPEC, f"somebody changed {own.path}")
    condition = _condition(spec, verdict, generator)._replace(remarks=words)
    if condition.status is Status.TRUE:
        condition = condition._replace(reason=Reason.EDITS_LEFT_OUT if left_out else Reason.VERIFIED)
        said = {"reason": condition.reason, "message": condition.message, "left_out": left_out}
        result = {**said, "remarks": list(made.remarks)}
        excused = {"unpartitioned": list(made.unpartitioned), "until": time.monotonic() + UNPARTITIONED_FOR}
        notes.save(note, {"inputs": inputs, "digest": sha256(new.text), **result, **excused})
    return Published(condition, verdict.devices, made.remarks, left_out)


def _condition(spec: _Spec, verdict: Verdict, generator: str) -> Condition:
    if verdict.missing:
        names = [*(f"GPU {gpu}" for gpu in verdict.missing_gpus), *verdict.missing_partitions]
        log = ", and the driver's lines in `dmesg` on the host" if verdict.missing_gpus else ""
        message = f"{generator} does not list {first_of(names)}: see DevicesAllowed{log}; the others are served"
        gpus = dict.fromkeys((*verdict.missing_gpus, *verdict.missing_partitions.values()))
        reason = Reason.GPU_MISSING if verdict.missing_gpus else Reason.PARTITION_MISSING
        return false(KIND, reason, message, gpus)
    message = f"{spec.own.path} has {spec.own.kind if spec.mode else f'{len(verdict.devices)} device names'}"
    if verdict.not_in_spec:
        message += f"; NotInSpec (the generator leaves them out): {first_of(verdict.not_in_spec)}"
    return true(KIND, Reason.VERIFIED, message)


def _generated(context: Context, spec: _Spec, live: Mapping[str, DeviceNumber]) -> tuple[object, Generated]:
    """Return a new specification that this machine's containerd accepts, and the generator's result."""
    system, directory = context.system, spec_directory(spec.name)
    system.make_directory(directory)
    try:
        # A generator would follow a link, and hang on a FIFO.
        _empty(system, directory)
        made = spec.generate(directory, live)
    finally:
        _empty(system, directory)
    document, adapted = adapt_to_containerd(context, normalised(made.spec))
    return document, made._replace(remarks=(*made.remarks, *adapted))


def _empty(system: System, directory: str) -> None:
    for name in system.entries(directory):
        system.remove_tree(f"{directory}/{name}")


def _kept(context: Context, spec: _Spec, current: _Candidate | None, reason: Reason, message: str) -> Published:
    """Return the result of a run that cannot publish a new specification. The current one, if any, stays."""
    if spec.mode:
        # After the reason FAILED, the file may already be the new one.
        kept = _narrow(context, spec, outdated=reason != Reason.FAILED)
        return Published(false(KIND, reason, f"{one_line(message)[:MODE_SHOWN]}{kept}"))
    if current is None:
        return Published(false(KIND, reason, f"{message}. There is no usable CDI specification"))
    if current.verdict.problems:
        faults = first_of(current.verdict.problems, separator="; ")
        why = f"{message}. The published CDI specification stays, but is out of date: {faults}"
        return Published(false(KIND, reason, why))
    why = f"{message}. The last good CDI specification stays in use"
    return Published(false(KIND, reason, why), current.verdict.devices)


def _narrow(context: Context, spec: _Spec, *, outdated: bool) -> str:
    """Remove withdrawn nodes from a mode's published specification, because no new one could be published.

    If no granted device is left in the file, or if the file cannot be edited, the file is removed. Returns what became
    of it, as the end of a message; empty if it is missing, or not the agent's, or has not changed and is not known to
    be `outdated`. Raises nothing.
    """
    system, owned, path = context.system, context.owned, spec.own.path
    try:
        if not owned.has(path) or not system.exists(path):
            return ""
        # The file may be malformed, or the disk full. The file can still be removed.
        with contextlib.suppress(OSError, ValueError):
            text = system.read_untrusted(path)[0]
            rest = narrowed(parse_json(text), spec.request)
            if rest is not None:
                content = json_for_yaml(normalised(rest), sort_keys=True)
                if content != text:
                    system.write(path, content)
                    outdated = True
                return "; the published CDI specification is out of date" if outdated else ""
        owned.remove(path)
        return f"; removed {path}, which had no granted device left or could not be edited"
    # Any exception: the failed publication, for which this was called, is always reported.
    except Exception as error:
        return f"; {path} may be out of date, and was not removed: {in_words(error)}"


def remove_stale_specs(context: Context) -> None:
    """Remove the agent's specifications for modes that are no longer requested.

    Temporary files that killed writers left next to notes and specifications are removed too. Errors are only logged.
    """
    system, owned, requests = context.system, context.owned, context.handoff.requests
    modes = (mode_spec_file(request.vendor, mode) for request in requests for mode in request.cdi_modes)
    wanted = (*map(spec_file, VENDORS), *modes)
    try:
        for path in sorted(owned.paths):
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


def allocatable_vendor(
    context: Context, vendor: MachineVendor, request: Request, verified: Collection[str], spec_condition: Condition
) -> AllocatableVendor:
    """Return the vendor's devices that claims can have, and why some are missing (the document ALLOCATABLE).

    `verified` has the names of the verified specification's devices. It is empty if there is no verified specification.
    `spec_condition` is CDISpecCurrent.
    """
    problem = "" if spec_condition.status is Status.TRUE else one_line(spec_condition.message)
    devices: tuple[AllocatableDevice, ...] = ()
    if verified:
        try:
            spec = parse_json(context.system.read_untrusted(vendor.spec_path)[0])
            devices = vendor.allocatable(spec, request, frozenset(verified))
        except (AgentError, OSError, ValueError) as error:
            # Somebody replaced the specification after it was verified. The next run repairs it.
            problem = f"{vendor.spec_path}: {one_line(str(error))}"
    return AllocatableVendor(vendor.name, devices, problem, request.driver_version)


# Pods that keep outdated driver roots or device numbers until their owner recreates them. The agent only names them.

STATE = "/run/containerd"
"""The directory `state` of containerd's configuration, if it names no other."""
BUNDLES = "io.containerd.runtime.v2.task/k8s.io"
"""containerd's bundles of the CRI's running containers, below its state since 1.2: `<container id>/config.json` is the
OCI specification."""
NAMESPACE, POD = "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"
"""Annotations that containerd's CRI plugin writes (pkg/cri/annotations)."""
LONGEST_INDEX = 9
"""Digits of the largest index of a driver root."""


def outdated_remark(context: Context) -> str:
    """Return the remark on CDISpecCurrent that names the outdated pods; empty if there are none."""
    pods = sorted(outdated_pods(context).items())
    described = [f"{quoted(pod)} ({', '.join(sorted(outdated))})" for pod, outdated in pods]
    what = f"; PodsOutdated (recreate them: they keep what they were made with): {first_of(described)}"
    return what if pods else ""


def outdated_pods(context: Context) -> dict[str, set[str]]:
    """Return descriptions of the driver roots and device numbers that are outdated, by the pod's `namespace/name`."""
    system, notes, requests = context.system, context.notes, context.handoff.requests
    # The versions of all driver roots that handoffs have named since the machine's boot.
    versions = notes.load("driver-versions")
    versions |= {request.driver_root: request.driver_version for request in requests if request.driver_root}
    notes.save("driver-versions", versions)
    granted = {device.path: (device.major, device.minor) for request in requests for device in request.devices}
    current = {request.driver_root for request in requests}
    # Each container is read only once: its OCI specification never changes while it runs.
    noted, containers = notes.load("containers"), dict[str, Any]()
    bundles = f"{notes.load(EFFECTIVE_NOTE).get('state') or STATE}/{BUNDLES}"
    for name in system.entries(bundles) if system.is_directory(bundles) else ():
        container = noted[name] if name in noted else _container(system, f"{bundles}/{name}")
        if container is not None:
            containers[name] = container
    notes.save("containers", containers)
    pods: dict[str, set[str]] = {}
    for container in containers.values():
        outdated = set()
        for root in set(container.get("roots", ())) - current:
            version = f" with driver {versions[root]}" if root in versions else ""
            outdated.add(f"driver root {root.rpartition('/')[2]}{version}")
        for path, (major, minor) in container.get("devices", {}).items():
            if granted.get(path, (major, minor)) != (major, minor):
                outdated.add(f"{path} as {major}:{minor}")
        if outdated:
            pods.setdefault(container["pod"], set()).update(outdated)
    return pods


def _container(system: System, bundle: str) -> dict[str, Any] | None:
    """Return a container's pod, driver roots and device numbers; None if they cannot be read, as during its removal.

    The result is empty for a container without driver roots and devices.
    """
    try:
        specification = parse_json(system.read(f"{bundle}/config.json"))
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
    pod = f"{annotations.get(NAMESPACE, '?')}/{annotations.get(POD, posixpath.basename(bundle))}"
    return {"pod": pod, "roots": sorted(inside + index for index in indices), "devices": numbers}
