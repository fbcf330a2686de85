"""Runs the machine half: reads the handoff, settles it, and reports conditions that say what is wrong.

To settle a handoff, or a part of it, is to change the machine so that it matches what the handoff grants.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agent import __version__
from agent.machine import cdi, containerd, devices, kubelet
from agent.machine.libraries import link_libraries
from agent.machine.notes import (
    EARLY,
    ERROR_SHOWN,
    LONGEST,
    Context,
    InBackground,
    attempt,
    next_attempt,
    node_condition_set,
    node_cordon,
    publications,
    repair_counts,
)
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Remark, Status, false, not_applicable, worst
from agent.model.contract import AllocatableVendor, HealthQuestions, parse_health_questions
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, DocumentError, ExitCodeError, UnkillableError
from agent.model.handoff import (
    DRA,
    OTHER_DEVICES,
    SIZE_LIMIT,
    FabricAnswer,
    Handoff,
    HealthAnswer,
    Publication,
    Report,
    Request,
    Silence,
    parse_handoff,
    render_report,
    with_remark,
)
from agent.model.paths import (
    ALLOCATABLE,
    CONDITIONS_NAME,
    FABRIC_NAME,
    HANDOFF_NAME,
    HEALTH_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    NODE_CORDON_MARK,
    NODE_FILES,
    PCI_DEVICES,
    REPORT_NAME,
)
from agent.model.text import json_digest, one_line
from agent.system.deadlines import bounded
from agent.system.files import System
from agent.system.journal import ERROR, INFO, WARNING, say, say_changes
from agent.system.process import host_runner
from agent.system.processes import find_holders
from agent.vendors.machine_vendor import MachineVendor

HANDOFF = f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
REPORT = f"{MACHINE_REPORT_DIRECTORY}/{REPORT_NAME}"
# The id of the machine's boot, not of the host's: nspawn mounts a new one at each start (setup_boot_id in nspawn.c).
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOOK_AGAIN = 0.2
"""Seconds between two looks for a newer handoff while GPUs are asked for their health."""
ROUNDS = 5
"""How many handoffs one run may settle. The run itself checks for a new handoff, because systemd's path unit misses
changes while the service runs."""


class Outcome(NamedTuple):
    """The result of settling one request, or all requests."""

    conditions: tuple[Condition, ...]
    devices: tuple[str, ...] = ()
    """Names of the CDI devices that pods can request."""
    allocatable: AllocatableVendor | None = None
    """Only in the result of one request for GPUs: the devices that claims can have; None without Dynamic Resource
    Allocation."""
    fabric: tuple[FabricAnswer, ...] = ()
    """What the GPUs say of their registration with the fabric."""


def main() -> int:
    """Run the machine half, log errors, and return the exit code, which unbounded-agent-gpu.service passes on.

    The code is 1 if an error kept a report from being written, or containerd from being restarted; otherwise 0. A
    missing handoff is not an error.
    """
    try:
        return run(System(host_runner))
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1


def run(system: System) -> int:
    """Settle handoffs until a report answers the newest one, in at most ROUNDS rounds. Return exit code 0.

    Raises AgentError or OSError if the handoff is unusable, no report can be written, or containerd cannot be
    restarted.
    """
    outcome, failed = None, ""
    try:
        for settled in _rounds(system):
            outcome = settled
    except (AgentError, OSError) as error:
        failed = str(error)
        raise
    finally:
        # containerd is restarted only after all rounds, and even if no report could be written, because pods need the
        # new configuration all the same. It is ordered after this service, so once it has stopped, it starts again only
        # when this run ends, and until then no pod can start. Without --no-block, systemctl would wait for that start.
        # The stop does not wait (job_compare in systemd's job.c).
        if outcome and any(each.reason == Reason.RESTART_PENDING for each in outcome.conditions):
            try:
                system.run("systemctl", "--no-block", "try-restart", containerd.UNIT)
            except (AgentError, OSError):
                # The caller gets only this error.
                if failed:
                    say(ERROR, failed)
                raise
    return 0


def _rounds(system: System) -> Iterator[Outcome]:
    """Settle each new handoff, yield the outcome, and then report it, in at most ROUNDS rounds.

    When everything is settled and reported, GPUs are asked for their health, at most once. A newer handoff does not
    wait for their answers.
    """
    reported: FileIdentity | None = None
    asking: InBackground[bool] | None = None
    report_again: Callable[[], None] | None = None
    for rounds_left in reversed(range(ROUNDS)):
        try:
            # The file's identity is compared, not its content: after the host has bound missing nodes, it publishes the
            # handoff again with the same content, and this run must check the nodes again.
            published = system.identity(HANDOFF)
            while published == reported and asking and not asking.ends_within(LOOK_AGAIN):
                published = system.identity(HANDOFF)
            if published == reported:
                break
            handoff = _read_handoff(system, published)
        except FileNotFoundError:
            why = "this machine is not configured, or unbounded-agent.service has not published anything for it yet"
            say(INFO, f"{HANDOFF} does not exist: on the host, {why}")
            break
        context = Context.of(system, handoff)
        _let_node_be_seen(context)
        outcome = settle(context)
        # An error must not keep the report from being written. Without the note, each run logs everything.
        logged: dict[str, object] = {}
        with contextlib.suppress(OSError):
            logged = context.notes.load("logged")
        logged = {**say_changes(logged, outcome.conditions)}
        with contextlib.suppress(OSError):
            context.notes.save("logged", logged)
        yield outcome
        # If the host has published the handoff again during this round, the outcome is not reported: the host may have
        # bound the nodes that this outcome calls missing. In the last round, the outcome is reported in any case.
        newest = published
        with contextlib.suppress(FileNotFoundError):
            newest = system.identity(HANDOFF)
        if newest == published or not rounds_left:
            report_again = partial(report, context, outcome, Publication(published.inode, published.mtime_ns))
            report_again()
            reported = published
        for path in context.unsynced:
            try:
                system.sync(path)
            except OSError as error:
                say(WARNING, f"cannot sync {path}: {error}")
        if reported == published and asking is None and (questions := _due_questions(context, outcome)):
            asking = InBackground(partial(_ask, context, questions, outcome.fabric))
    if asking and asking.result() and report_again:
        report_again()


def _let_node_be_seen(context: Context) -> None:
    """Once per boot, let agent.machine.node_cordon look at the Node that `up` has made.

    Another root of this machine may have cordoned it, such as one that `up --rebuild` has removed.
    """
    system, notes = context.system, context.notes
    with contextlib.suppress(OSError):
        if not notes.load("node-seen") and system.exists(NODE_FILES):
            if not system.exists(NODE_CORDON_MARK):
                system.write(NODE_CORDON_MARK, b"", 0o600)
            notes.save("node-seen", {"asked": True})


def _read_handoff(system: System, published: FileIdentity) -> Handoff:
    """Return the handoff. If it cannot be used, report that to the host, and raise DocumentError. Raises OSError."""
    content = system.read(HANDOFF, SIZE_LIMIT)
    try:
        return parse_handoff(content)
    except DocumentError as error:
        publication = Publication(published.inode, published.mtime_ns)
        # The caller logs the error in any case.
        with contextlib.suppress(AgentError, OSError):
            boot_id = system.read(BOOT_ID, 64).decode().strip()
            refusal = Report("", (), (), boot_id, __version__, {}, publication=publication, refused=str(error))
            _write_report(system, refusal)
        raise


def report(context: Context, outcome: Outcome, publication: Publication) -> None:
    """Write the report. Every run writes it, even without a change, because it is also the machine's heartbeat."""
    system, changed = context.system, tuple[str, ...]()
    # An error must not keep the report from being written. The next run compares again.
    with contextlib.suppress(OSError):
        changed = kubelet.changed_files(context)
    document = Report(
        context.generation,
        outcome.conditions,
        outcome.devices,
        system.read(BOOT_ID, 64).decode().strip(),
        __version__,
        repair_counts(context.notes),
        next((each.advertised for each in outcome.conditions if each.advertised is not None), None),
        changed,
        publication,
        outcome.fabric,
        _known_health(context),
        cordon=node_cordon(context.notes),
    )
    _write_report(system, document)


def _write_report(system: System, document: Report) -> None:
    # If it were made here, the host would not see what is in it, and later runs would find nothing wrong.
    if not system.is_directory(MACHINE_REPORT_DIRECTORY):
        raise AgentError(
            f"{MACHINE_REPORT_DIRECTORY} is missing, so nothing can be reported",
            "the host binds it: run `unbounded-agent apply` there, then restart the machine",
        )
    system.write(REPORT, render_report(document))


def settle(context: Context) -> Outcome:
    """Settle all requests, and merge their conditions into one of each type."""
    system, handoff = context.system, context.handoff
    cdi.remove_stale_specs(context)
    conditions = [*devices.note_unknown_nodes(context)]
    requests = (*handoff.requests, *devices.withdrawn_requests(context))
    outcomes = [_settle_request(context, each) for each in requests]
    for request, outcome in zip(requests, outcomes, strict=True):
        conditions += [each._replace(vendors=(request.vendor,)) for each in outcome.conditions]
    if handoff.allocation == DRA:
        vendors = [each.allocatable for each in outcomes if each.allocatable]
        conditions.append(attempt(ConditionType.GPUS_ADVERTISED, lambda: kubelet.settle_offer(context, vendors)))
    else:
        with contextlib.suppress(OSError):
            system.remove(ALLOCATABLE)
    merged = _merged(conditions)
    if any(request.gpus for request in handoff.requests):
        kind, what = ConditionType.CDI_SPEC_CURRENT, "which pods are outdated"
        merged = _remarked(merged, kind, what, lambda: cdi.outdated_remark(context), (Remark.PODS_OUTDATED,))
    if context.notes.may_have(devices.WITHDRAWN):
        kind, what = ConditionType.DEVICES_ALLOWED, "which processes still have nodes open that are no longer granted"
        merged = _remarked(merged, kind, what, lambda: devices.left_open_remark(context))
    try:
        if system.exists(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"):
            merged += (node_condition_set(context.notes),)
    except OSError as error:
        merged += (false(ConditionType.NODE_CONDITION_SET, Reason.FAILED, str(error)),)
    names = tuple(device for outcome in outcomes for device in outcome.devices)
    return Outcome(merged, names, fabric=tuple(answer for outcome in outcomes for answer in outcome.fabric))


def _merged(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Merge the conditions of each type into one, as `worst` does. `used_plugins` says which conditions count.

    If one of the conditions has the reason WrongNode, the merged condition has this reason, because it makes the host
    bind nodes.
    """
    by_type: dict[ConditionType, list[Condition]] = {}
    for each in conditions:
        by_type.setdefault(each.type, []).append(each)
    merged = []
    for same_type in by_type.values():
        found = worst(kubelet.used_plugins(same_type))
        wrong_node = any(each.reason == Reason.WRONG_NODE for each in same_type)
        merged.append(found._replace(reason=Reason.WRONG_NODE) if wrong_node else found)
    return tuple(merged)


def _remarked(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    what: str,
    find: Callable[[], str],
    words: Sequence[str] = (),
) -> tuple[Condition, ...]:
    """Add the remark that `find` returns, and its words, to the condition `kind`; without one, change nothing."""
    try:
        remark = find()
    # Any exception: the report must be written even if files of pods or processes have unexpected content.
    except Exception as error:
        remark, words = f"; cannot tell {what}: {one_line(str(error))[:ERROR_SHOWN]}", ()
    return with_remark(conditions, kind, remark, words) if remark else conditions


def _newest(system: System) -> Handoff | None:
    """Return the current handoff, which may be newer than the one that this run settles; None if it cannot be read."""
    try:
        return parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
    except (AgentError, OSError):
        return None


def _settle_request(context: Context, request: Request) -> Outcome:
    if request.vendor == OTHER_DEVICES:
        return Outcome(devices.settle_others(context, request, _newest(context.system)))
    vendor = VENDORS.get(request.vendor)
    if vendor is None:
        message = f"the image's agent does not support vendor {request.vendor}: update it to the host agent's release"
        return Outcome((false(ConditionType.CDI_SPEC_CURRENT, Reason.UNKNOWN_VENDOR, message),))
    opened = InBackground(lambda: attempt(ConditionType.DEVICES_ALLOWED, lambda: _devices(context, vendor, request)))
    configured = attempt(
        ConditionType.RUNTIME_CONFIGURED, lambda: containerd.configure_runtime(context, vendor, request)
    )
    active = InBackground(
        lambda: attempt(ConditionType.RUNTIME_ACTIVE, lambda: containerd.check_active(context, configured))
    )
    linked = attempt(ConditionType.LIBRARIES_LINKED, lambda: _linked(context, vendor, request))
    # nvidia-smi needs the libraries. The GPUs are asked while the generator has them open too.
    fabric = InBackground(lambda: _fabric(context, vendor, request))
    published = cdi.publish_spec(context, vendor, request)
    modes = cdi.publish_modes(context, vendor, request) if request.cdi_modes else ("", (), False)
    modes_remark, words, left_out = modes
    # Nodes are withdrawn only now: as long as a published specification lists a node, new pods may get the node.
    removed, not_withdrawn = devices.withdraw_nodes(context, request, _newest(context.system))
    if (removed or not_withdrawn) and published.condition.status is not Status.TRUE:
        # Try again. The generator lists every GPU that has a node, so it omits the withdrawn GPUs only now that their
        # nodes are gone. If there is a condition `not_withdrawn`, some nodes may be gone even though `removed` is empty
        # (the removal of a node could not be noted), so try again in this case too. But that condition may last, so an
        # attempt then waits as usual.
        published = cdi.publish_spec(context, vendor, request, published.devices, at_once=bool(removed))
    spec_condition = published.condition
    if left_out and spec_condition.reason == Reason.VERIFIED:
        spec_condition = spec_condition._replace(reason=Reason.EDITS_LEFT_OUT)
    (spec_condition,) = with_remark((spec_condition,), spec_condition.type, modes_remark, words)
    conditions: tuple[Condition, ...] = (linked, configured, active.result(), opened.result(), spec_condition)
    names, allocatable = published.devices, None
    if context.handoff.allocation == DRA:
        allocatable = cdi.allocatable_vendor(context, vendor, request, names, spec_condition)
    else:
        advertised = attempt(
            ConditionType.GPUS_ADVERTISED,
            lambda: kubelet.check_advertised(context, vendor, request, published.devices),
        )
        conditions += (advertised,)
    conditions += kubelet.settle_markers(context, vendor, request, conditions)
    if len(context.handoff.requests) > 1:
        # The names are qualified, because each vendor has a device `all`, and a report must not have a name twice.
        names = tuple(f"{vendor.spec_kind}={name}" for name in names)
    conditions += (not_withdrawn,) if not_withdrawn else ()
    return Outcome(conditions, names, allocatable, fabric.result())


def _devices(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    # Unmount nodes that the host has removed, and do that before the check. Once the check's condition reports nodes
    # with wrong numbers, the host binds new nodes at once, and these must not be unmounted.
    paths = (*(device.path for device in request.devices), *vendor.bound_directories(request))
    devices.unmount_removed(context.system, paths)
    devices.link_nodes(context, request)
    return devices.check_devices(context, request, vendor.kernel_paths)


def _linked(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    if vendor.driver_files:
        return link_libraries(context, request, vendor.data_directories)
    devices.link_dri_nodes(context, request)
    # `link_libraries` is not called: as this request has no driver root, it would take the links to another vendor's
    # libraries for stale ones, and remove them.
    return not_applicable(ConditionType.LIBRARIES_LINKED, "no driver files are granted to this machine")


def _fabric(context: Context, vendor: MachineVendor, request: Request) -> tuple[FabricAnswer, ...]:
    """Return what the GPUs say of their registration with the fabric.

    To ask a GPU is to open it. So the GPUs are asked only when the host publishes something: a handoff, or the same one
    again, as `gpus attach` does after a reset, the states of GPUs, or what their fabric depends on. Until all are
    registered, they are asked again, ever more rarely (`next_attempt`). Nor are they asked more often because the
    Fabric Manager dies again and again, although the host publishes each of its starts.
    """
    if not request.gpus:
        return ()
    # `manager` is what the fabric of the GPUs depends on, in words of the host half; empty if it says nothing.
    generation, manager, note, first = context.generation, "", f"fabric-{vendor.name}", None
    try:
        with contextlib.suppress(FileNotFoundError):
            path = f"{MACHINE_HANDOFF_DIRECTORY}/{FABRIC_NAME}"
            manager = context.system.read(path, SIZE_LIMIT).decode(errors="replace")
        cause, now = json_digest([generation, manager, publications(context)]), time.monotonic()
        noted = context.notes.load(note)
        # Notes of earlier agents have other keys. They count as missing.
        if {"generation", "manager"} <= noted.keys():
            answers = tuple(FabricAnswer(*each) for each in noted["answers"])
            same, until = noted["cause"] == cause, noted["until"]
            started_again = noted["generation"] == generation and noted["manager"] != manager
            waits = (same or started_again) and now < until
            if waits or (same and vendor.fabric_settled(request, answers)):
                return answers
            if same or (started_again and now - until <= LONGEST):
                first = noted["since"]
        answers = vendor.query_fabric(context.system, request)
        since, until = next_attempt(first, now)
        asked = {"cause": cause, "generation": generation, "manager": manager, "since": since, "until": until}
        context.notes.save(note, {**asked, "answers": [list(each) for each in answers]})
        return answers
    # Any exception, as in `attempt`. No answer is no verdict.
    except Exception as error:
        say(WARNING, f"cannot tell whether the GPUs are registered with the fabric: {error}")
        return ()


# Asks the GPUs for their health, at the interval of the host's configuration.
#
# A question opens a GPU. So a GPU is asked only if it is in persistence mode, or a pod has it open: any other would be
# initialised for the question, and shut down again. Nor is a GPU asked that the host withholds: whoever opens it is one
# more process that keeps it from being reset or unplugged. One program asks at a time.

HEALTH = "health"
"""Name of the note: when GPUs were `asked` last, the `answers` by GPU (`_Heard`), the `fields` that each driver root's
tool knows, the process that is `hanging`, with its start, and of the `links` of each GPU when they had counted how many
errors, with what that says."""
HOLDERS_LIMIT = 10.0
"""Seconds to search the machine's processes for those of pods that have a GPU open."""


class _Heard(NamedTuple):
    """What is noted of one GPU: the fields of HealthAnswer, and the inode of the link to the GPU's driver.

    Each time that the driver is bound, the link is a new one, and what the GPU said before means nothing.
    """

    said: Mapping[str, str] = {}
    since: float = 0.0
    asked: float = 0.0
    silence: str = ""
    binding: int | None = None

    def then(self, said: Mapping[str, str] | None, silence: str, asked: float) -> "_Heard":
        """Return what to note after a question. `said` is as in MachineVendor.query_health; None without an answer.

        `asked` is when the question began. What the GPU said before counts until it says something else. No answer is
        no verdict, and ends none; nor is it an answer that a field is missing now.
        """
        if silence or said is None:
            return self._replace(silence=silence or Silence.NO_ANSWER)
        words = {field: word for field, word in said.items() if word}
        kept = {field: word for field, word in self.said.items() if field not in words}
        since = self.since if self.asked and words | kept == self.said else asked
        if kept or (said and not words):
            return self._replace(said=words | kept, since=since, silence=Silence.NO_ANSWER)
        return _Heard(words, since, asked, "", self.binding)


def _questions(system: System) -> HealthQuestions | None:
    """Return the host's questions; None if it has none. Raises AgentError or OSError."""
    try:
        return parse_health_questions(system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{HEALTH_NAME}", SIZE_LIMIT))
    except FileNotFoundError:
        return None


def _due_questions(context: Context, outcome: Outcome) -> HealthQuestions | None:
    """Return the host's questions if it is time to ask them.

    It is not in the first run of a boot, for which containerd waits, nor if containerd is restarted after this run.
    """
    try:
        questions, noted, now = _questions(context.system), context.notes.load(HEALTH), time.monotonic()
        if questions and not noted:
            asked = now - questions.interval
            context.notes.save(HEALTH, {"asked": asked, "answers": {}, "fields": {}, "hanging": []})
        waits = not noted or any(each.reason == Reason.RESTART_PENDING for each in outcome.conditions)
        return questions if questions and not waits and now - noted["asked"] >= questions.interval - EARLY else None
    # Any exception, as in `attempt`: an agent of another release may have written the note.
    except Exception as error:
        say(WARNING, f"cannot tell whether to ask the GPUs for their health: {error}")
        return None


def _known_health(context: Context) -> tuple[HealthAnswer, ...]:
    """Return the last answers of the granted GPUs; none if the host asks nothing, or if they cannot be read."""
    # Any exception: the report must be written.
    with contextlib.suppress(Exception):
        if _questions(context.system):
            heard = _heard(context, context.notes.load(HEALTH))
            return tuple(HealthAnswer(gpu, *each[:4]) for gpu, each in heard.items() if each.silence or each.asked)
    return ()


def _heard(context: Context, noted: Mapping[str, Any]) -> dict[str, _Heard]:
    """Return what is noted of the granted GPUs and still counts."""
    heard = {}
    for gpu in (gpu for request in context.handoff.requests for gpu in request.gpus):
        binding = context.system.link_inode(f"{PCI_DEVICES}/{gpu}/driver")
        before = _Heard(*noted.get("answers", {}).get(gpu, ()))
        heard[gpu] = before if before.binding == binding else _Heard(binding=binding)
    return heard


def _ask(context: Context, questions: HealthQuestions, fabric: tuple[FabricAnswer, ...]) -> bool:
    """Ask the GPUs, and note the answers. Return whether one says something new."""
    try:
        noted = {**context.notes.load(HEALTH), "asked": time.monotonic()}
        # Noted before the first question: this run may be killed meanwhile, and the next one must not ask at once.
        context.notes.save(HEALTH, noted)
        before, after, began = _heard(context, noted), dict[str, _Heard](), time.time()
        # With another binding of the driver, links count from 0.
        noted["links"] = {
            gpu: each for gpu, each in noted.get("links", {}).items() if gpu in before and before[gpu].asked
        }
        for request in context.handoff.requests:
            vendor = VENDORS.get(request.vendor)
            if vendor and request.gpus and request.driver_root:
                said, silences = _ask_vendor(context, vendor, request, questions, fabric, noted)
                after |= {gpu: before[gpu].then(said.get(gpu), silences[gpu], began) for gpu in request.gpus}
        answers = {gpu: list(each) for gpu, each in (before | after).items()}
        context.notes.save(HEALTH, {**noted, "answers": answers})
        return any((each.said, each.silence) != (before[gpu].said, before[gpu].silence) for gpu, each in after.items())
    # Any exception, as in `attempt`. No answer is no verdict.
    except Exception as error:
        say(WARNING, f"cannot ask the GPUs for their health: {error}")
        return False


def _ask_vendor(
    context: Context,
    vendor: MachineVendor,
    request: Request,
    questions: HealthQuestions,
    fabric: tuple[FabricAnswer, ...],
    noted: dict[str, Any],
) -> tuple[Mapping[str, Mapping[str, str]], Mapping[str, str]]:
    """Return what GPUs say of their health, and a Silence for each that must not be asked, otherwise an empty text.

    What the tool can be asked, and a program that cannot be killed, are added to `noted`.
    """
    system, hanging = context.system, noted["hanging"]
    hangs = dict.fromkeys(request.gpus, Silence.PROGRAM_HANGS)
    if hanging and hanging[1] and _start_of(system, hanging[0]) == hanging[1]:
        return {}, hangs
    noted["hanging"] = []
    silences = _silences(context, vendor, request, questions.withheld, fabric)
    wanted = [gpu for gpu in request.gpus if not silences[gpu]]
    try:
        root = f"{request.driver_root} {request.driver_version}"
        if wanted and root not in noted["fields"]:
            noted["fields"] = {root: vendor.health_fields(system)}
        fields = tuple(noted["fields"][root]) if wanted else ()
        said = vendor.query_health(system, request, wanted, fields) if fields else {}
        links = _link_words(system, vendor, request, tuple(said), noted) if said else {}
        return {gpu: {**words, **links.get(gpu, {})} for gpu, words in said.items()}, silences
    except UnkillableError as error:
        say(WARNING, f"no GPU is asked for its health until process {error.pid} has ended: {error}")
        noted["hanging"] = [error.pid, _start_of(system, error.pid)]
        return {}, hangs
    except (AgentError, OSError) as error:
        say(WARNING, f"the GPUs do not say how they are: {error}")
        return {}, silences


def _link_words(
    system: System, vendor: MachineVendor, request: Request, wanted: Collection[str], noted: dict[str, Any]
) -> Mapping[str, Mapping[str, str]]:
    """Return what the errors of GPUs' links since the last question say. They are added to `noted`.

    Where nothing is counted now, what was said before counts. Raises UnkillableError.
    """
    counted: Mapping[str, Mapping[str, int]] = {}
    try:
        counted = vendor.count_link_errors(system, request, wanted)
    except UnkillableError:
        raise
    except ExitCodeError:
        # As of a tool that does not know the question.
        pass
    except (AgentError, OSError) as error:
        say(WARNING, f"the errors of the GPUs' links are not known: {error}")
    now = time.monotonic()
    for gpu, counts in counted.items():
        before = noted["links"].get(gpu)
        words = vendor.link_words(before[1], counts, now - before[0]) if before else {}
        noted["links"][gpu] = [now, {**counts}, {**words}]
    return {gpu: words for gpu, (_, _, words) in noted["links"].items()}


def _silences(
    context: Context,
    vendor: MachineVendor,
    request: Request,
    withheld: Collection[str],
    fabric: tuple[FabricAnswer, ...],
) -> dict[str, str]:
    """Return why a GPU must not be asked, by GPU; an empty text if it may be."""
    heard = _heard(context, context.notes.load(HEALTH))
    nothing = _Heard()
    initialised = {each.gpu for each in fabric if vendor.in_persistence_mode(each, heard.get(each.gpu, nothing).said)}
    idle = set(request.gpus) - initialised - set(withheld)
    numbers = {(each.major, each.minor): each.pci_address for each in request.devices if each.pci_address in idle}
    try:
        search = partial(find_holders, context.system, numbers)
        holders = bounded("/proc", search, HOLDERS_LIMIT).holders if numbers else ()
        initialised.update(gpu for each in holders if each.pod_uid for gpu in each.paths)
    except OSError as error:
        say(WARNING, f"cannot tell which GPUs pods have open: {error}")
    silences = dict.fromkeys(request.gpus, str(Silence.NOT_IN_USE)) | dict.fromkeys(initialised, "")
    return silences | dict.fromkeys(withheld, str(Silence.WITHHELD))


def _start_of(system: System, process: int) -> str:
    """Return when a process started, in ticks since the host's boot (proc_pid_stat(5)); empty if it has ended."""
    try:
        state, *fields = system.read_text(f"/proc/{process}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else fields[18]
