"""Generates a CDI specification with the NVIDIA Container Toolkit."""

import json
import posixpath
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import lru_cache
from typing import Any

from agent.model.device import DeviceKind, DeviceNumber, FileIdentity, as_in_sysfs
from agent.model.errors import AgentError, CommandError, DocumentError, ExitCodeError, UnkillableError
from agent.model.handoff import FabricAnswer, Request
from agent.model.json_document import parse_json
from agent.model.text import dotted, first_of, printable
from agent.system.files import System
from agent.vendors.cdi import items, normalised, object_of, objects, strings, with_nodes
from agent.vendors.machine_vendor import CdiMode, Generated, looked_up
from agent.vendors.nvidia import contract
from agent.vendors.nvidia.contract import (
    HEALTH_FIELDS,
    HOOK,
    NO_ANSWER,
    NO_FABRIC,
    NVIDIA_CTK,
    REQUIRES_RESET,
    is_answer,
)
from agent.vendors.nvidia.verify import (
    HOOK_VARIABLE,
    NEEDED_LIBRARIES,
    NO_GPU,
    NO_GPU_EDITS,
    VOID_VARIABLE,
    Sieve,
    devices,
    is_gpu_name,
    library_problems,
    missing_gpus,
    without_incomplete,
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

REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESHED_SPEC = "/var/run/cdi/nvidia.yaml"
"""The specification that units of the toolkit's packages write since 1.18 (deployments/systemd in its source)."""


def output_file(directory: str) -> str:
    """Return the file that nvidia-ctk writes. It may write further files next to it (`.coherent.json`)."""
    return f"{directory}/nvidia.json"


def generate_command(
    driver_root: str, directory: str, hooks: Iterable[str] = (), mode: str = "nvml"
) -> tuple[str, ...]:
    """Return the command that writes the specification for a driver root to a directory.

    `driver_root` must not be a symbolic link. `hooks` are enabled in addition to the two hooks that every container
    needs. Only mode nvml has GPUs to name.
    """
    return (
        NVIDIA_CTK,
        "cdi",
        "generate",
        f"--mode={mode}",
        f"--driver-root={driver_root}",
        "--dev-root=/",
        f"--nvidia-cdi-hook-path={HOOK}",
        "--format=json",
        # Without create-symlinks and update-ldcache, containers cannot find the driver. The other hooks change how
        # containers use a GPU, so they are enabled only if the settings name them: enable-cuda-compat,
        # disable-device-node-modification, and from 1.20 on update-application-profile and apply-cuda-memory-limits.
        # The hook chmod is never enabled: it was for an old crun, and is deprecated.
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        *(f"--enable-hook={hook}" for hook in hooks),
        *(f"--device-name-strategy={each}" for each in ("index", "uuid") if mode == "nvml"),
        f"--output={output_file(directory)}",
    )


def generate(system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
    """Run nvidia-ctk, which finds the GPUs through NVML. Return its specification, with remarks.

    What nvidia-ctk leaves out of the driver root and the device NO_GPU are added. Incomplete MIG devices, and what this
    release does not know, are left out. `live` is as in MachineVendor.verify.
    """
    version = check_version(system)
    answers = _run(system, request, generate_command(request.driver_root, directory, request.cdi_hooks), version)
    silent = [gpu for gpu in request.gpus if gpu not in answers] if answers else []
    spec, sieve = _sifted(system, request, directory, live, is_device=lambda name: name == NO_GPU or is_gpu_name(name))
    spec, incomplete = without_incomplete(spec, request)
    missing = missing_gpus(devices(spec, request), request)
    if missing and not answers:
        answers = query_gpus(system, len(request.gpus), QUERY_LIMIT)
    unpartitioned = _in_mig_mode(answers, missing)
    text = json.dumps(spec)
    not_made = [hook for hook in request.cdi_hooks if f'"{hook}"' not in text]
    present = {path for path in contract.mount_points(request.sockets) if system.exists(path)}
    without_socket = [name for name in request.sockets if not contract.MOUNTS.get(name, {}).keys() & present]
    spec, added = with_additions(with_no_gpu(spec), request, present)
    remarks = {
        f"added what {NVIDIA_CTK} leaves out: {first_of(sorted(added), SHOWN)}": added,
        f"no socket of {', '.join(without_socket)} yet: start the daemon on the host": without_socket,
        "nvidia-ctk failed with all GPUs, so it ran again without "
        f"{', '.join(silent)}, which nvidia-smi cannot query": silent,
        f"nvidia-ctk is {dotted(version)}; upgrade to {dotted(RECOMMENDED)}, which fixes a race in its hooks": (
            version < RECOMMENDED
        ),
        f"nvidia-ctk {dotted(version)} lacks these hooks: {', '.join(not_made)}; upgrade the toolkit": not_made,
        f"MIG devices that are not complete yet are left out: {first_of(incomplete)}": incomplete,
        _without_instance(unpartitioned): unpartitioned,
        _remark_on(sieve): sieve.harmless,
    }
    said = tuple(remark for remark, wanted in remarks.items() if wanted)
    return Generated(spec, said, unpartitioned, tuple(sieve.left_out))


def _run(
    system: System, request: Request, command: tuple[str, ...], version: tuple[int, ...]
) -> Mapping[str, tuple[str, bool]]:
    """Run the command. If it fails, run it again without the GPUs that nvidia-smi cannot query.

    After a second run, return nvidia-smi's answers about the granted GPUs that it can query; return an empty mapping if
    the first run succeeded. Raises AgentError or OSError.
    """
    deadline = time.monotonic() + GENERATE_LIMIT
    try:
        system.run(*command, timeout=GENERATE_LIMIT)
        return {}
    except ExitCodeError as error:
        found = query_gpus(system, len(request.gpus), (deadline - time.monotonic()) / 2)
        # If no GPU gets a CDI device, nvidia-ctk fails with the error below, because the device `all` would be empty.
        unpartitioned = _in_mig_mode(found, request.gpus) if "empty device edits" in error.stderr else ()
        if unpartitioned:
            raise AgentError(_without_instance(unpartitioned)) from error
        answers = {gpu: found[gpu] for gpu in request.gpus if gpu in found}
        if version < SELECTS_DEVICES or len(answers) == len(request.gpus):
            raise
        # The devices that pods can use: GPUs that are not in MIG mode, and MIG devices.
        names = [uuid for uuid, in_mig_mode in answers.values() if not in_mig_mode]
        if len(names) < len(answers):
            names += list_profiles(system, GPU_LIMIT)
        remaining = deadline - time.monotonic()
        if not names or remaining <= 0:
            raise
    system.run(*command, *(f"--device-id={name}" for name in names), timeout=remaining)
    return answers


def _sifted(
    system: System,
    request: Request,
    directory: str,
    live: Mapping[str, DeviceNumber],
    places: Collection[str] = (),
    is_device: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[str, Any], Sieve]:
    """Return what nvidia-ctk wrote into a directory, without what is unknown. Raises OSError or DocumentError."""
    try:
        written = normalised(parse_json(system.read(output_file(directory))))
        sieve = Sieve(request, *looked_up(system, written, live), places, is_device)
        spec = sieve.sift(object_of(written, "the specification"))
        # Two devices must not have the same name.
        devices(spec, request)
        return spec, sieve
    except ValueError as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote invalid JSON: {error}") from error
    except DocumentError as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote a malformed CDI specification: {error.message}") from error


def _remark_on(sieve: Sieve) -> str:
    return f"{NVIDIA_CTK} adds what this agent knows to be harmless: {first_of(tuple(sieve.harmless))}"


def _in_mig_mode(answers: Mapping[str, tuple[str, bool]], gpus: Iterable[str]) -> tuple[str, ...]:
    return tuple(gpu for gpu in gpus if gpu in answers and answers[gpu][1])


def _without_instance(gpus: tuple[str, ...]) -> str:
    return (
        f"no pod can use GPU {', '.join(gpus)}: MIG mode is on and there is no complete instance "
        "(`nvidia-smi mig -cgi PROFILE -C` on the host makes one)"
    )


def check_version(
    system: System, needed: tuple[int, ...] = OLDEST, purpose: str = "for pods with NVIDIA_VISIBLE_DEVICES=none"
) -> tuple[int, ...]:
    """Return nvidia-ctk's version. Raises AgentError, which names `purpose`, if it is older than `needed`."""
    version = _version(system, system.identity(NVIDIA_CTK) if system.exists(NVIDIA_CTK) else None)
    if version < needed:
        raise AgentError(
            f"nvidia-ctk is {dotted(version)}, but {dotted(needed)} is needed {purpose}",
            f"install nvidia-container-toolkit {dotted(RECOMMENDED)} or newer in the image",
        )
    return version


@lru_cache(maxsize=1)
def _version(system: System, identity: FileIdentity | None) -> tuple[int, ...]:
    return parse_version(system.run(NVIDIA_CTK, "--version"))


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the output of `nvidia-ctk --version`: "NVIDIA Container Toolkit CLI version 1.19.1"."""
    # At most nine digits: int() raises ValueError for thousands of them.
    match = re.search(r"\bversion v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", text)
    if match is None:
        raise DocumentError(f"{NVIDIA_CTK} --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


def with_no_gpu(document: dict[str, Any]) -> dict[str, Any]:
    """Return the specification with the device NO_GPU, which replaces one of that name."""
    others = [each for each in objects(document, "devices") if each.get("name") != NO_GPU]
    return document | {"devices": [*others, {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}]}


# The files of a driver root that nvidia-ctk leaves out, and that the agent adds.
#
# nvidia-ctk lists libraries of the native architecture whose names end in the driver's version, and a fixed set of
# other files. Added entries look like those of nvidia-ctk, and are verified in the same way.

MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
"""Options of nvidia-ctk's mounts (internal/discover/mounts.go)."""
INDIRECT = ("libGLX_nvidia.so.", "libGLX_indirect.so.0")
"""The start of a library's name, and the link by which GLVND finds that library for indirect rendering. nvidia-ctk
makes the link only in the native directory (symlinks.go)."""
TRIPLET_32 = "i386-linux-gnu"
SHOWN = 5
"""How many added files a remark names; the others are counted."""


def with_additions(
    document: dict[str, Any], request: Request, present: Set[str] = frozenset()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the completed specification, and the paths of the added files below the driver root.

    `present` has the paths of daemons' sockets that exist in the machine. Raises DocumentError.
    """
    common = object_of(document.get("containerEdits", {}), "containerEdits")
    mounts, hooks, env = objects(common, "mounts"), objects(common, "hooks"), [*items(common, "env")]
    mounted = strings(common, "mounts", "hostPath")
    arguments = [each for hook in hooks for each in map(str, items(hook, "args"))]
    folders = {each for hook in hooks if _kind(hook) == "update-ldcache" for each in map(str, items(hook, "args"))}
    root, libraries = request.driver_root, {f"{each}.{request.driver_version}" for each in NEEDED_LIBRARIES}
    native = (each.target for each in request.files if f"/{TRIPLET_32}/" not in each.target)
    if not {f"{root}/{each}" for each in native if posixpath.basename(each) in libraries} <= mounted:
        # nvidia-ctk, which finds only native libraries, did not find the driver. If the driver's files were added here,
        # `verify` would not notice that.
        return document, ()
    files = [each.target for each in request.files if not each.link and f"{root}/{each.target}" not in mounted]
    added = [(f"{root}/{file}", f"/{file}", MOUNT_OPTIONS) for file in files]
    added += [
        (source, target, contract.MOUNT_OPTIONS)
        for source, target in contract.mount_points(request.sockets).items()
        if source in present and source not in mounted
    ]
    mounts += [
        {"hostPath": source, "containerPath": target, "options": [*options]} for source, target, options in added
    ]
    links = {f"/{file.target}": file.link for file in request.files if file.link}
    wanted_folders = set()
    for file in request.files:
        directory, name = posixpath.split(file.target)
        if file.link:
            continue
        if name.startswith(INDIRECT[0]):
            links[f"/{directory}/{INDIRECT[1]}"] = name
        # The dynamic loader must find these. X servers' modules and VDPAU drivers are loaded by path.
        if ".so" in name and posixpath.basename(posixpath.dirname(directory)) == "lib":
            wanted_folders.add(f"/{directory}")
    made = {each.partition("::")[2] for each in arguments}
    flags = [flag for path in sorted(links.keys() - made) for flag in ("--link", f"{links[path]}::{path}")]
    hooks = _extended(hooks, "create-symlinks", flags, first=True)
    flags = [flag for folder in sorted(wanted_folders - folders) for flag in ("--folder", folder)]
    hooks = _extended(hooks, "update-ldcache", flags)
    variables = (*(f"{each.name}={each.value}" for each in request.environment), VOID_VARIABLE)
    env += [each for each in variables if each not in env]
    return document | {"containerEdits": common | {"mounts": mounts, "hooks": hooks, "env": env}}, tuple(files)


def _kind(hook: dict[str, Any]) -> object:
    return (*items(hook, "args"), "", "")[1]


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


# Asks nvidia-smi for GPUs, their MIG devices, fabric and health, even if NVML cannot open one of the GPUs.

NVIDIA_SMI = "nvidia-smi"
INVALID = 2
"""nvidia-smi's exit code if it does not know an argument or a field (nvidia-smi(1), RETURN VALUE)."""
FABRIC_LIMIT = 10.0
"""Seconds for the query of all GPUs' fabric."""
HEALTH_LIMIT = 10.0
"""Seconds for the query of all GPUs' health. In persistence mode, one second is enough for eight GPUs."""
FABRIC_WORD = re.compile(r"(?:(?:state|status)\s+)?(.*)")
"""A state or status as nvidia-smi prints it. Release 550 prints `state  In Progress` instead of `In Progress`."""
WORD_LIMIT = 64
"""Characters of the longest state or status that is reported. The driver's own words are shorter."""
GPU_LIMIT = 5.0
"""Seconds for the query of one GPU: a GPU that hangs must not use up the time of the other GPUs."""
UUID = re.compile(r"GPU-[0-9a-fA-F-]{36}")
MIG_DEVICE = re.compile(r"\s*MIG (?P<profile>\S+)\s+Device\s+[0-9]+: \(UUID: (?P<uuid>MIG-[0-9A-Za-z/-]+)\)")
"""A MIG device in the output of `nvidia-smi -L`."""


def query_gpus(system: System, count: int, limit: float) -> dict[str, tuple[str, bool]]:
    """Return the UUIDs of `count` GPUs, and whether they are in MIG mode, by PCI address.

    A GPU that NVML cannot open is left out.

    Return nothing if nvidia-smi cannot run, or if not all GPUs could be queried within `limit` seconds.
    """
    try:
        rows = query(system, ("uuid", "mig.mode.current"), range(count), limit, limit / 2)
    except (AgentError, OSError):
        return {}
    return {gpu: (uuid, mode == "Enabled") for gpu, (uuid, mode) in rows.items() if UUID.fullmatch(uuid)}


def query_fabric(system: System, gpus: tuple[str, ...]) -> tuple[FabricAnswer, ...]:
    """Return what GPUs say of their fabric and of persistence mode. A GPU that NVML cannot open is left out.

    If the driver is too old to be asked, the answers are empty. Return nothing if nvidia-smi cannot run.
    """
    fields = ("fabric.state", "fabric.status", "persistence_mode")
    try:
        rows = query(system, fields, range(len(gpus)), FABRIC_LIMIT, FABRIC_LIMIT / 2)
    except ExitCodeError:
        return tuple(FabricAnswer(gpu, "", "") for gpu in gpus)
    except (AgentError, OSError):
        return ()

    def word(text: str) -> str:
        match = FABRIC_WORD.match(printable(text))
        found = match[1][:WORD_LIMIT] if match else ""
        return found if found in NO_FABRIC else _plain(found)

    answers = (FabricAnswer(gpu, *map(word, rows[gpu])) for gpu in gpus if gpu in rows)
    return tuple(each for each in answers if is_answer(each))


def _plain(word: str) -> str:
    """Return a word without the characters that the host refuses, so that no machine can make a command of a word."""
    return re.sub(r"[^A-Za-z0-9 \[\]]", " ", word)


def health_fields(system: System, fields: tuple[str, ...] = HEALTH_FIELDS) -> tuple[str, ...]:
    """Return those of the fields that nvidia-smi knows: a field that it does not know fails the whole query.

    Raises AgentError.
    """
    known = set(re.findall(r'"([A-Za-z0-9_.]+)"', system.run(NVIDIA_SMI, "--help-query-gpu", timeout=HEALTH_LIMIT)))
    return tuple(each for each in fields if each in known)


def query_health(
    system: System, gpus: tuple[str, ...], wanted: Collection[str], fields: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    """Return what the `wanted` ones of the machine's GPUs say of their health, by PCI address and field.

    A word is empty if the GPU did not answer; a field that it does not have is missing. A GPU that NVML cannot open is
    left out. Raises AgentError or OSError if nvidia-smi cannot run.
    """
    # By an index, nvidia-smi opens only one GPU. It counts GPUs in the order of their addresses. NVML does not promise
    # that (nvmlDeviceGetHandleByIndex), so an answer counts for the address that it names.
    indices = [index for index, gpu in enumerate(sorted(gpus)) if gpu in wanted]
    first_limit = HEALTH_LIMIT / 2 if len(indices) == len(gpus) else 0.0
    rows = query(system, fields, indices, HEALTH_LIMIT, first_limit)
    return {
        gpu: {field: _answer(word) for field, word in zip(fields, rows[gpu], strict=True) if word not in NO_FABRIC}
        for gpu in wanted
        if gpu in rows
    }


LINK_LIMIT = 5.0
"""Seconds for the questions about all GPUs' NVLinks."""
LINKED_GPU = re.compile(rf"GPU [0-9]+: .*\(UUID: ({UUID.pattern})\)")
LINK_COUNT = re.compile(r"\s*Link [0-9]+: (Replay|Recovery|CRC) Errors: ([0-9]{1,18})")
"""In the output of `nvidia-smi nvlink -e`, which newer links may have other counters in."""


def count_link_errors(system: System, gpus: tuple[str, ...], wanted: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the errors that the NVLinks of the `wanted` GPUs have counted, by PCI address and kind.

    A GPU is left out if it has no active link or other counters, or does not answer in time. Raises AgentError or
    OSError if no GPU answers.
    """
    deadline = time.monotonic() + LINK_LIMIT
    indices = [index for index, gpu in enumerate(sorted(gpus)) if gpu in wanted]
    rows = query(system, ("uuid",), indices, LINK_LIMIT / 2, LINK_LIMIT / 4 if len(indices) == len(gpus) else 0.0)
    counted: dict[str, dict[str, int]] = {}
    failed: AgentError | OSError | None = None
    for index in indices:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        # As in `query_health`, only this GPU is opened, and the answer names it.
        command = (NVIDIA_SMI, "nvlink", "-e", "-i", str(index))
        try:
            counted |= parse_link_errors(system.run(*command, timeout=min(LINK_LIMIT / 2, remaining)))
        except UnkillableError:
            raise
        except (AgentError, OSError) as error:
            failed = error
    if failed and not counted:
        raise failed
    return {gpu: counted[uuid] for gpu, (uuid,) in rows.items() if gpu in wanted and uuid in counted}


def parse_link_errors(printed: str) -> dict[str, dict[str, int]]:
    """Return the sums over the links of each GPU, by UUID and kind. Pure."""
    counted: dict[str, dict[str, int]] = {}
    uuid = ""
    for line in printed.splitlines():
        if gpu := LINKED_GPU.match(line):
            uuid = gpu[1]
        elif uuid and (count := LINK_COUNT.fullmatch(line)):
            kinds = counted.setdefault(uuid, {})
            kinds[count[1]] = kinds.get(count[1], 0) + int(count[2])
    return counted


def _answer(word: str) -> str:
    if word.strip("[]") == REQUIRES_RESET:
        return REQUIRES_RESET
    return "" if word.startswith(NO_ANSWER) else _plain(printable(word)[:WORD_LIMIT]).strip("[] ")


def query(
    system: System, fields: tuple[str, ...], names: Collection[object], limit: float, first_limit: float
) -> dict[str, list[str]]:
    """Return the values of fields of GPUs, by PCI address. A GPU that NVML cannot open is left out.

    If one GPU has failed, a query of all GPUs, which may take `first_limit` seconds, fails. Then each of the `names` is
    queried by itself, and so they are if `first_limit` is 0. The names are indices, or PCI addresses: to find a GPU by
    its address, nvidia-smi also opens the GPUs with lower indices.

    Raises ExitCodeError if nvidia-smi does not know the fields; AgentError or OSError if it cannot run, or if not all
    GPUs could be queried within `limit` seconds; UnkillableError if a query hangs in the kernel, as the last one.
    """
    deadline = time.monotonic() + limit
    arguments = (f"--query-gpu=pci.bus_id,{','.join(fields)}", "--format=csv,noheader,nounits")
    texts = []
    try:
        if first_limit:
            texts.append(system.run(NVIDIA_SMI, *arguments, timeout=first_limit))
    except ExitCodeError as error:
        if error.status == INVALID:
            raise
    for name in () if texts else names:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            why = f"{NVIDIA_SMI} takes more than {limit:.0f} s"
            raise AgentError(why, "see `dmesg` on the host for the driver")
        try:
            texts.append(system.run(NVIDIA_SMI, f"--id={name}", *arguments, timeout=min(GPU_LIMIT, remaining)))
        except UnkillableError:
            raise
        except (AgentError, OSError):
            pass
    rows = [[each.strip() for each in row.split(",")] for text in texts for row in text.splitlines()]
    whole = [row for row in rows if len(row) == len(fields) + 1 and as_in_sysfs(row[0])]
    return {as_in_sysfs(row[0]): row[1:] for row in whole}


def list_profiles(system: System, limit: float) -> dict[str, str]:
    """Return the profile of each MIG device, such as `1g.10gb`, by UUID. Raises AgentError or OSError."""
    try:
        listed = system.run(NVIDIA_SMI, "-L", timeout=limit)
    except ExitCodeError as error:
        # It cannot open a GPU, but still lists the MIG devices of the others.
        listed = error.stdout
    return {match["uuid"]: match["profile"] for match in map(MIG_DEVICE.match, listed.splitlines()) if match}


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

GPU_KINDS = contract.SHARED | {DeviceKind.GPU, DeviceKind.CAPABILITY, DeviceKind.IMEX_CHANNEL}
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
    spec, sieve = _sifted(system, request, directory, live, mode.mounts)
    paths = {device.path for device in request.devices}
    spec = with_nodes(spec, lambda node: str(node.get("path")) in paths)
    remarks = (_remark_on(sieve),) if sieve.harmless else ()
    return Generated(spec, remarks, left_out=tuple(sieve.left_out))


def verify_mode(
    mode: CdiMode, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
) -> tuple[str, ...]:
    """Return why a mode's specification must not be published. `request` is from `CdiMode.request`."""
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        problems = Sieve(request, live, present, mode.mounts).check(document, mode.kind)
        if mode.driver_files:
            problems += library_problems(common, request)
        elif foreign := sorted(set(common) - {"env", "mounts"}):
            problems.append(f"containerEdits have unexpected {', '.join(foreign)} for this mode")
        served = {node.path for each in devices(document, request) if each.name == ALL for node in each.nodes}
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
    # nvidia-ctk takes the driver's version from the name of libcuda's file.
    files = (posixpath.split(file.target) for file in request.files if not file.link)
    name = f"libcuda.so.{request.driver_version}"
    places = [f"{root}/{place}" for place, each in files if each == name and TRIPLET_32 not in place]
    vendor, _, device_class = mode.kind.partition("/")
    return (
        *generate_command(root, directory, mode=mode.name),
        *(f"--library-search-path={place}" for place in (directory, *places)),
        f"--vendor={vendor}",
        f"--class={device_class}",
    )
