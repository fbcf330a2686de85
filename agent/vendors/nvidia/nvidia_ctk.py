"""Generates a CDI specification with the NVIDIA Container Toolkit."""

import contextlib
import json
import posixpath
import re
import time
from collections.abc import Collection, Iterable, Mapping, Set
from itertools import groupby
from typing import Any, NamedTuple

from agent.model.device import DeviceKind, DeviceNumber, as_in_sysfs
from agent.model.errors import AgentError, CommandError, DocumentError, ExitCodeError
from agent.model.handoff import FabricAnswer, GrantedFile, Request
from agent.model.json_document import parse_json
from agent.model.paths import MACHINE_STATE
from agent.model.text import dotted, printable
from agent.system.files import System
from agent.vendors.cdi import devices, items, normalised, object_of, objects, strings, with_nodes
from agent.vendors.machine_vendor import CdiMode, Generated, looked_up
from agent.vendors.nvidia import contract
from agent.vendors.nvidia.command import HOOK, NVIDIA_CTK, generate_command, output_file
from agent.vendors.nvidia.contract import NO_FABRIC, is_answer
from agent.vendors.nvidia.verify import (
    HOOK_VARIABLE,
    NEEDED_LIBRARIES,
    NO_GPU,
    NO_GPU_EDITS,
    VOID_VARIABLE,
    Expectations,
    is_gpu_name,
    library_problems,
    missing_gpus,
    remark_on,
    specification_problems,
    without_incomplete,
    without_unknown,
)

OLDEST = (1, 18, 2)
"""The oldest version that the agent accepts. 1.18.0 introduced --disable-hook and --enable-hook. Before 1.18.2, a
container of the runtime `nvidia` with NVIDIA_VISIBLE_DEVICES=none fails, because the runtime requests a device without
a name."""
RECOMMENDED = (1, 19, 1)
"""The first version whose hooks open paths only beneath a container's root. A race can make hooks of older versions
open paths outside the container's root."""
SELECTS_DEVICES = (1, 19, 0)
"""The first version with --device-id."""
GENERATE_LIMIT = 40.0
"""Seconds to generate a specification, for all attempts together. NVML needs time to initialise each GPU that no
persistence daemon keeps initialised."""
QUERY_LIMIT = 10.0
"""Seconds for the queries that say why a GPU is missing."""

VERSION_CACHE = f"{MACHINE_STATE}/nvidia-ctk.json"

REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESHED_SPEC = "/var/run/cdi/nvidia.yaml"
"""The specification that units of the toolkit's packages write since 1.18 (deployments/systemd in its source)."""


class Answer(NamedTuple):
    """What nvidia-smi says of a GPU."""

    uuid: str
    in_mig_mode: bool


def generate(system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
    """Run nvidia-ctk, which finds the GPUs through NVML. Return its specification, with remarks.

    The device NO_GPU is added to the specification. Incomplete MIG devices, and what this release does not know, are
    left out. `live` is as in MachineVendor.verify.
    """
    version = check_version(system)
    remarks = []
    command = generate_command(request.driver_root, directory, request.cdi_hooks)
    answers = _run(system, request, command, version)
    if answers:
        silent = ", ".join(gpu for gpu in request.gpus if gpu not in answers)
        remarks.append(
            f"nvidia-ctk failed with all GPUs, so it ran again without {silent}, which nvidia-smi cannot query"
        )
    written = normalised(read_output(system, directory))
    kept = without_unknown(
        written,
        Expectations(request, *looked_up(system, written, live)),
        lambda name: name == NO_GPU or is_gpu_name(name),
    )
    spec, incomplete = without_incomplete(kept.spec, request)
    missing = _not_listed(spec, request)
    if missing and not answers:
        answers = query_gpus(system, len(request.gpus), QUERY_LIMIT)
    unpartitioned = _in_mig_mode(answers, missing)
    if version < RECOMMENDED:
        remarks.append(
            f"nvidia-ctk is {dotted(version)}; upgrade to {dotted(RECOMMENDED)}, which fixes a race in its hooks"
        )
    if not_made := [hook for hook in request.cdi_hooks if not _has_hook(spec, hook)]:
        remarks.append(f"nvidia-ctk {dotted(version)} lacks these hooks: {', '.join(not_made)}; upgrade the toolkit")
    if incomplete:
        remarks.append(f"MIG devices that are not complete yet are left out: {', '.join(incomplete)}")
    if unpartitioned:
        remarks.append(_without_instance(unpartitioned))
    if kept.harmless:
        remarks.append(remark_on(kept.harmless))
    return Generated(with_no_gpu(spec), tuple(remarks), unpartitioned, kept.left_out)


def _run(system: System, request: Request, command: tuple[str, ...], version: tuple[int, ...]) -> Mapping[str, Answer]:
    """Run the command. If it fails, run it again without the GPUs that nvidia-smi cannot query.

    After a second run, return nvidia-smi's answers about the granted GPUs that it can query; return an empty mapping if
    the first run succeeded. Raises AgentError or OSError.
    """
    deadline = time.monotonic() + GENERATE_LIMIT
    try:
        system.run(*command, timeout=GENERATE_LIMIT)
        return {}
    except ExitCodeError as error:
        remaining = deadline - time.monotonic()
        found = query_gpus(system, len(request.gpus), remaining / 2)
        # If no GPU gets a CDI device, nvidia-ctk fails with the error below, because the device `all` would be empty.
        unpartitioned = _in_mig_mode(found, request.gpus) if "empty device edits" in error.stderr else ()
        if unpartitioned:
            raise AgentError(_without_instance(unpartitioned)) from error
        answers = {gpu: found[gpu] for gpu in request.gpus if gpu in found}
        if version < SELECTS_DEVICES or len(answers) == len(request.gpus):
            raise
        names = device_ids(system, answers)
        remaining = deadline - time.monotonic()
        if not names or remaining <= 0:
            raise
    system.run(*command, *(f"--device-id={name}" for name in names), timeout=remaining)
    return answers


def read_output(system: System, directory: str) -> object:
    """Return the specification that nvidia-ctk wrote into a directory. Raises OSError or DocumentError."""
    try:
        return parse_json(system.read(output_file(directory)))
    except ValueError as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote invalid JSON: {error}") from error


def _in_mig_mode(answers: Mapping[str, Answer], gpus: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(gpu for gpu in gpus if gpu in answers and answers[gpu].in_mig_mode)


def _not_listed(spec: object, request: Request) -> tuple[str, ...]:
    """Return the granted GPUs that no device contains; none if the specification is malformed (`verify` reports it)."""
    try:
        return missing_gpus(devices(object_of(spec, "the specification")), request)
    except DocumentError:
        return ()


def _has_hook(spec: object, name: str) -> bool:
    if isinstance(spec, dict):
        arguments = spec.get("args")
        return (isinstance(arguments, list) and name in arguments) or any(
            _has_hook(each, name) for each in spec.values()
        )
    return isinstance(spec, list) and any(_has_hook(each, name) for each in spec)


def _without_instance(gpus: tuple[str, ...]) -> str:
    return (
        f"no pod can use GPU {', '.join(gpus)}: MIG mode is on and there is no complete instance "
        "(`nvidia-smi mig -cgi PROFILE -C` on the host makes one)"
    )


def check_version(
    system: System,
    needed: tuple[int, ...] = OLDEST,
    purpose: str = "for pods with NVIDIA_VISIBLE_DEVICES=none",
) -> tuple[int, ...]:
    """Return nvidia-ctk's version. Raises AgentError, which names `purpose`, if it is older than `needed`."""
    version = _version(system)
    if version < needed:
        raise AgentError(
            f"nvidia-ctk is {dotted(version)}, but {dotted(needed)} is needed {purpose}",
            f"install nvidia-container-toolkit {dotted(RECOMMENDED)} or newer in the image",
        )
    return version


def _version(system: System) -> tuple[int, ...]:
    """Return nvidia-ctk's version. Raises CommandError, DocumentError or OSError.

    Pods cannot use a new driver before this function returns. To save time, the version is cached, in a file in /run.
    The cached version is valid until a reboot, or until the program changes.
    """
    identity = list(system.identity(NVIDIA_CTK)) if system.exists(NVIDIA_CTK) else []
    try:
        cached = parse_json(system.read(VERSION_CACHE))
    except (OSError, ValueError):
        # Run the program instead.
        cached = None
    match cached:
        case {"program": program, "version": [int(major), int(minor), int(patch)]} if identity and program == identity:
            return (major, minor, patch)
        case _:
            pass
    version = parse_version(system.run(NVIDIA_CTK, "--version"))
    # An error ends the run: if nothing can be written to /run, the specification cannot be written either.
    system.write(VERSION_CACHE, json.dumps({"program": identity, "version": version}).encode(), 0o600)
    return version


def list_devices(system: System, directory: str, timeout: float) -> tuple[str, ...]:
    """Return the names of the devices in all CDI specifications in a directory, as runtimes read them.

    Raises CommandError. Invalid specifications are ignored: nvidia-ctk only warns of them.
    """
    return tuple(system.run(NVIDIA_CTK, "cdi", "list", f"--spec-dir={directory}", timeout=timeout).split())


def with_no_gpu(spec: object) -> object:
    """Return the specification with the device NO_GPU, or as it is if it has no list of devices.

    If nvidia-ctk has written such a device, it is replaced.
    """
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    others = [each for each in listed if not isinstance(each, dict) or each.get("name") != NO_GPU]
    return spec | {"devices": [*others, {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}]}


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the output of `nvidia-ctk --version`: "NVIDIA Container Toolkit CLI version 1.19.1"."""
    # At most nine digits: int() raises ValueError for thousands of them.
    match = re.search(r"\bversion v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", text)
    if match is None:
        raise DocumentError(f"{NVIDIA_CTK} --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


# The files of a driver root that nvidia-ctk leaves out, and that the agent adds.
#
# nvidia-ctk lists libraries of the native architecture whose names end in the driver's version, and a fixed set of
# other files (those of `file_groups.py` with the source CTK). Added entries look like those of nvidia-ctk,
# and are verified in the same way.

MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
"""Options of nvidia-ctk's mounts (internal/discover/mounts.go)."""
INDIRECT = ("libGLX_nvidia.so.", "libGLX_indirect.so.0")
"""The start of a library's name, and the link by which GLVND finds that library for indirect rendering. nvidia-ctk
makes the link only in the native directory (symlinks.go)."""
TRIPLET_32 = "i386-linux-gnu"
FEW = 3
"""Up to this many files of one directory are named one by one; more are counted."""


def with_additions(spec: object, request: Request, present: Set[str] = frozenset()) -> tuple[object, tuple[str, ...]]:
    """Return the completed specification, and the paths of the added files below the driver root.

    A specification that is malformed, or lacks a main library, is returned as it is: `verify` refuses it.
    `present` has the paths of daemons' sockets that exist in the machine.
    """
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        mounted = strings(common, "mounts", "hostPath")
        hooks = objects(common, "hooks")
        linked = {each.partition("::")[2] for hook in hooks for each in items(hook, "args") if isinstance(each, str)}
        ldcache_arguments = {
            each
            for hook in hooks
            if _kind(hook) == "update-ldcache"
            for each in items(hook, "args")
            if isinstance(each, str)
        }
        present_variables = items(common, "env")
    except DocumentError:
        return spec, ()
    root, libraries = request.driver_root, {f"{each}.{request.driver_version}" for each in NEEDED_LIBRARIES}
    native = (each.target for each in request.files if f"/{TRIPLET_32}/" not in each.target)
    if not {f"{root}/{each}" for each in native if posixpath.basename(each) in libraries} <= mounted:
        # nvidia-ctk, which finds only native libraries, did not find the driver. If the driver's files were added here,
        # `verify` would not notice that.
        return spec, ()
    files = [each.target for each in request.files if not each.link and f"{root}/{each.target}" not in mounted]
    links = {path: target for path, target in _links(request).items() if path not in linked}
    mounts = [*objects(common, "mounts"), *(_mount(f"{root}/{file}", f"/{file}") for file in files)]
    mounts += [each for each in contract.mounts(request.sockets, present) if each["hostPath"] not in mounted]
    arguments = [argument for path, target in sorted(links.items()) for argument in ("--link", f"{target}::{path}")]
    hooks = _extended(hooks, "create-symlinks", arguments, first=True)
    folders = {f"/{posixpath.dirname(file.target)}" for file in request.files if not file.link and _is_library(file)}
    arguments = [argument for folder in sorted(folders - ldcache_arguments) for argument in ("--folder", folder)]
    hooks = _extended(hooks, "update-ldcache", arguments)
    variables = [*(f"{each.name}={each.value}" for each in request.environment), VOID_VARIABLE]
    env = [*present_variables, *(each for each in variables if each not in present_variables)]
    return document | {"containerEdits": common | {"mounts": mounts, "hooks": hooks, "env": env}}, tuple(files)


def in_words(added: Iterable[str]) -> str:
    """Return the added files in words: their paths, or their number for a directory with more than FEW of them."""
    parts = []
    for directory, group in groupby(sorted(added, key=lambda path: (posixpath.dirname(path), path)), posixpath.dirname):
        paths = list(group)
        parts += [f"{directory}/ ({len(paths)} files)"] if len(paths) > FEW else paths
    return ", ".join(parts)


def _mount(source: str, target: str) -> dict[str, Any]:
    return {"hostPath": source, "containerPath": target, "options": list(MOUNT_OPTIONS)}


def _links(request: Request) -> dict[str, str]:
    """Return the driver root's links, and a link next to each library that needs one for indirect rendering (INDIRECT).

    Maps each link's path in containers to its target.
    """
    links = {f"/{file.target}": file.link for file in request.files if file.link}
    library, link = INDIRECT
    for file in request.files:
        directory, name = posixpath.split(file.target)
        if name.startswith(library) and not file.link:
            links[f"/{directory}/{link}"] = name
    return links


def _is_library(file: GrantedFile) -> bool:
    """Return whether the dynamic loader must find the file. X servers' modules and VDPAU drivers are loaded by path."""
    directory, name = posixpath.split(file.target)
    return ".so" in name and posixpath.basename(posixpath.dirname(directory)) == "lib"


def _kind(hook: Mapping[str, Any]) -> str:
    arguments = items(dict(hook), "args")
    return arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else ""


def _extended(
    hooks: list[dict[str, Any]], kind: str, arguments: list[str], *, first: bool = False
) -> list[dict[str, Any]]:
    """Return the hooks with the arguments added to the hook of that kind; if there is none, to a new hook of that kind.

    A second hook of the same kind would start one more process in each container. With `first`, a new hook comes before
    the others, because the links that it makes must exist before ldconfig runs.
    """
    if not arguments:
        return hooks
    for index, hook in enumerate(hooks):
        if _kind(hook) == kind:
            return [*hooks[:index], hook | {"args": [*items(hook, "args"), *arguments]}, *hooks[index + 1 :]]
    new = {
        "hookName": "createContainer",
        "path": HOOK,
        "args": [posixpath.basename(HOOK), kind, *arguments],
        "env": [HOOK_VARIABLE],
    }
    return [new, *hooks] if first else [*hooks, new]


# Asks nvidia-smi for GPUs, their MIG devices and their fabric, even if NVML cannot open one of the GPUs.

NVIDIA_SMI = "nvidia-smi"
INVALID = 2
"""nvidia-smi's exit code if it does not know an argument or a field (nvidia-smi(1), RETURN VALUE)."""
FABRIC_LIMIT = 10.0
"""Seconds for the query of all GPUs' fabric."""
FABRIC_WORD = re.compile(r"(?:(?:state|status)\s+)?(.*)")
"""A state or status as nvidia-smi prints it. Release 550 prints `state  In Progress` instead of `In Progress`."""
WORD_LIMIT = 64
"""Characters of the longest state or status that is reported. The driver's own words are shorter."""
GPU_LIMIT = 5.0
"""Seconds for the query of one GPU: a GPU that hangs must not use up the time of the other GPUs."""
UUID = re.compile(r"GPU-[0-9a-fA-F-]{36}")
MIG_DEVICE = re.compile(r"\s*MIG (?P<profile>\S+)\s+Device\s+[0-9]+: \(UUID: (?P<uuid>MIG-[0-9A-Za-z/-]+)\)")
"""A MIG device in the output of `nvidia-smi -L`."""


def query_gpus(system: System, count: int, limit: float) -> dict[str, Answer]:
    """Return what nvidia-smi says of `count` GPUs, by PCI address. A GPU that NVML cannot open is left out.

    Return nothing if nvidia-smi cannot run, or if not all GPUs could be queried within `limit` seconds.
    """
    try:
        rows = _query(system, ("uuid", "mig.mode.current"), count, limit)
    except (AgentError, OSError):
        return {}
    return {gpu: Answer(uuid, mode == "Enabled") for gpu, (uuid, mode) in rows.items() if UUID.fullmatch(uuid)}


def query_fabric(system: System, gpus: tuple[str, ...]) -> tuple[FabricAnswer, ...]:
    """Return what GPUs say of their fabric and of persistence mode. A GPU that NVML cannot open is left out.

    If the driver is too old to be asked, the answers are empty. Return nothing if nvidia-smi cannot run.
    """
    try:
        rows = _query(system, ("fabric.state", "fabric.status", "persistence_mode"), len(gpus), FABRIC_LIMIT)
    except ExitCodeError:
        return tuple(FabricAnswer(gpu, "", "") for gpu in gpus)
    except (AgentError, OSError):
        return ()
    answers = (FabricAnswer(gpu, *map(_fabric_word, rows[gpu])) for gpu in gpus if gpu in rows)
    return tuple(each for each in answers if is_answer(each))


def _fabric_word(text: str) -> str:
    match = FABRIC_WORD.match(printable(text))
    word = match[1][:WORD_LIMIT] if match else ""
    # The host refuses other characters, so that no machine can make a command of a word.
    return word if word in NO_FABRIC else re.sub(r"[^A-Za-z0-9 \[\]]", " ", word)


def _query(system: System, fields: tuple[str, ...], count: int, limit: float) -> dict[str, list[str]]:
    """Return the values of fields of `count` GPUs, by PCI address. A GPU that NVML cannot open is left out.

    If one GPU has failed, a query of all GPUs fails. Each GPU is then queried by itself. It is named by its index: to
    find a GPU by another name, nvidia-smi would also open the GPUs with lower indices.

    Raises ExitCodeError if nvidia-smi does not know the fields; AgentError or OSError if it cannot run, or if not all
    GPUs could be queried within `limit` seconds.
    """
    deadline = time.monotonic() + limit
    query = (f"--query-gpu=pci.bus_id,{','.join(fields)}", "--format=csv,noheader")
    try:
        return _parse(system.run(NVIDIA_SMI, *query, timeout=limit / 2), len(fields))
    except ExitCodeError as error:
        if error.status == INVALID:
            raise
    found: dict[str, list[str]] = {}
    for index in range(count):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise AgentError(f"{NVIDIA_SMI} takes more than {limit:.0f} s", "see `dmesg` on the host for the driver")
        with contextlib.suppress(AgentError, OSError):
            shown = system.run(NVIDIA_SMI, f"--id={index}", *query, timeout=min(GPU_LIMIT, remaining))
            found |= _parse(shown, len(fields))
    return found


def list_profiles(system: System, limit: float) -> dict[str, str]:
    """Return the profile of each MIG device, such as `1g.10gb`, by UUID.

    If nvidia-smi cannot open a GPU, its exit code is not 0, but it still lists the MIG devices of the other GPUs.

    Raises AgentError or OSError.
    """
    try:
        listed = system.run(NVIDIA_SMI, "-L", timeout=limit)
    except ExitCodeError as error:
        listed = error.stdout
    return {match["uuid"]: match["profile"] for match in map(MIG_DEVICE.match, listed.splitlines()) if match}


def device_ids(system: System, answers: dict[str, Answer]) -> tuple[str, ...]:
    """Return the UUIDs of the devices that pods can use: MIG devices, and GPUs in `answers` that are not in MIG mode.

    Raises AgentError or OSError.
    """
    whole = [each.uuid for each in answers.values() if not each.in_mig_mode]
    mig_devices = list_profiles(system, GPU_LIMIT) if len(whole) < len(answers) else ()
    return (*whole, *mig_devices)


def _parse(text: str, count: int) -> dict[str, list[str]]:
    found = {}
    for row in text.splitlines():
        match [each.strip() for each in row.split(",")]:
            case [address, *values] if len(values) == count and as_in_sysfs(address):
                found[as_in_sysfs(address)] = values
            case _:
                pass
    return found


# Generates CDI specifications in nvidia-ctk's other modes: for non-GPU devices, and for managing all GPUs.
#
# The kinds are those of the toolkit's library (getClassOrDefault in pkg/nvcdi/options.go, management.go). Each kind is
# passed to the command, whose default is nvidia.com/gpu in all modes.

ALL = "all"
"""The device with all nodes of a mode. Mode imex also has a device for each channel."""

BLOCKED_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-sandboxutils.so.1")
"""Libraries that nvidia-ctk must not load. It would ask them for the driver's version (`New` in pkg/nvcdi/lib.go). That
would initialise the GPUs, and would hang if a GPU hangs. No mode needs the libraries, because the name of libcuda's
file contains the version too. So the search path starts with a directory of empty files with these names, which cannot
be loaded. Without the empty files, nvidia-ctk might load the libraries that the machine's loader cache lists (seen with
LD_DEBUG=libs and nvidia-ctk 1.18.0, 1.19.1 and 1.20.0)."""


GPU_KINDS = frozenset(
    {
        *(DeviceKind.GPU, DeviceKind.CONTROL, DeviceKind.MODESET, DeviceKind.UVM, DeviceKind.UVM_TOOLS),
        *(DeviceKind.CAPABILITY, DeviceKind.IMEX_CHANNEL),
    }
)
MODES: Mapping[str, CdiMode] = {
    each.name: each
    for each in (
        # The mounts are those of internal/discover/gds.go.
        CdiMode("gds", "nvidia.com/gds", frozenset({DeviceKind.NVIDIA_FS}), ("/run/udev", "/etc/cufile.json")),
        CdiMode("mofed", "nvidia.com/mofed", frozenset({DeviceKind.INFINIBAND})),
        CdiMode("gdrcopy", "nvidia.com/gdrcopy", frozenset({DeviceKind.GDRCOPY})),
        CdiMode("imex", "nvidia.com/imex-channel", frozenset({DeviceKind.IMEX_CHANNEL})),
        # 1.18 lists nvswitch among its modes, but exits with "unknown mode" (`New` in pkg/nvcdi/lib.go).
        CdiMode("nvswitch", "nvidia.com/nvswitch", frozenset({DeviceKind.NVSWITCH}), since=(1, 19, 0)),
        CdiMode("management", "management.nvidia.com/gpu", GPU_KINDS, driver_files=True),
    )
}


def generate_mode(
    system: System,
    mode: CdiMode,
    request: Request,
    directory: str,
    limit: float,
    live: Mapping[str, DeviceNumber],
) -> Generated:
    """Generate a specification with only the nodes in the request, and without what this release does not know.

    nvidia-ctk also lists withdrawn nodes that are still in /dev. These are left out.
    """
    check_version(system, mode.since or OLDEST, f"for mode {mode.name}")
    for library in BLOCKED_LIBRARIES:
        system.write(f"{directory}/{library}", b"")
    try:
        system.run(*mode_command(mode, request, directory), timeout=limit)
    except CommandError as error:
        # Without the arguments, and of the output only the last line: the others list what nvidia-ctk has searched.
        last = error.stderr.rstrip().rpartition("\n")[2]
        raise AgentError(": ".join(filter(None, (NVIDIA_CTK, error.ended, last))), error.hint) from error
    written = normalised(read_output(system, directory))
    kept = without_unknown(written, Expectations(request, *looked_up(system, written, live), mode.mounts))
    remarks = (remark_on(kept.harmless),) if kept.harmless else ()
    paths = {device.path for device in request.devices}
    try:
        spec: object = with_nodes(kept.spec, lambda node: str(node.get("path")) in paths)
    except DocumentError:
        # `verify_mode` reports the malformed specification.
        spec = kept.spec
    return Generated(spec, remarks, left_out=kept.left_out)


def verify_mode(
    mode: CdiMode, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
) -> tuple[str, ...]:
    """Return why a mode's specification must not be published. `request` is from `CdiMode.request`."""
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        expected = Expectations(request, live, present, mode.mounts)
        problems = list(specification_problems(document, mode.kind, expected))
        if mode.driver_files:
            problems += library_problems(common, request)
        elif foreign := sorted(set(common) - {"env", "mounts"}):
            problems.append(f"containerEdits have unexpected {', '.join(foreign)} for this mode")
        listed = devices(document)
        served = {path for name, edits in listed if name == ALL for path in strings(edits, "deviceNodes", "path")}
    except DocumentError as error:
        return (error.message,)
    missing = sorted(device.path for device in request.devices if device.path not in served)
    return (*problems, *(f"device {ALL} has no node {path}" for path in missing))


def mode_command(mode: CdiMode, request: Request, directory: str) -> tuple[str, ...]:
    """Return the command that generates the mode's specification in `directory`.

    `directory` must already contain the empty files named BLOCKED_LIBRARIES. Raises AgentError if the mode needs the
    driver's files and none are granted.
    """
    if mode.driver_files and not request.driver_root:
        raise AgentError(
            f"mode {mode.name} needs the driver's files, but none are granted: see DriverRootStaged on the host"
        )
    # Without a driver root, files are mounted from the machine's own root. nvidia-ctk 1.18 also looks in this root for
    # the nodes of mode mofed.
    root = request.driver_root or "/"
    command = [each for each in generate_command(root, directory) if not each.startswith("--device-name-strategy=")]
    command[command.index("--mode=nvml")] = f"--mode={mode.name}"
    # nvidia-ctk takes the driver's version from the name of libcuda's file.
    files = (posixpath.split(file.target) for file in request.files if not file.link)
    name = f"libcuda.so.{request.driver_version}"
    places = [f"{root}/{place}" for place, each in files if each == name and TRIPLET_32 not in place]
    vendor, _, device_class = mode.kind.partition("/")
    return (
        *command,
        *(f"--library-search-path={place}" for place in (directory, *places)),
        f"--vendor={vendor}",
        f"--class={device_class}",
    )
