"""Generates a CDI specification with the NVIDIA Container Toolkit."""

import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent.model.device import DeviceNumber
from agent.model.errors import AgentError, DocumentError, ExitCodeError, UnsupportedError
from agent.model.handoff import Request
from agent.model.paths import MACHINE_STATE
from agent.model.text import dotted
from agent.system.files import System
from agent.vendors.cdi.document import devices, object_of
from agent.vendors.cdi.normalise import normalised
from agent.vendors.machine_vendor import Generated, looked_up
from agent.vendors.nvidia.cdi.command import NVIDIA_CTK, generate_command, output_file
from agent.vendors.nvidia.cdi.leave_out import remark_on, without_unknown
from agent.vendors.nvidia.cdi.verify import NO_GPU, NO_GPU_EDITS
from agent.vendors.nvidia.cdi.verify_devices import is_gpu_name, missing_gpus, without_incomplete
from agent.vendors.nvidia.cdi.verify_edits import Expectations

if TYPE_CHECKING:
    from agent.vendors.nvidia.nvidia_smi import Answer

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


def generate(system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
    """Run nvidia-ctk, which finds the GPUs through NVML. Return its specification, with remarks.

    The device NO_GPU is added to the specification. Incomplete MIG devices, and what this release does not know, are
    left out. `live` is as in MachineVendor.verify.
    """
    from agent.vendors.nvidia.nvidia_smi import query_gpus  # Imported here: most runs generate nothing.

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


def _run(
    system: System, request: Request, command: tuple[str, ...], version: tuple[int, ...]
) -> "Mapping[str, Answer]":
    """Run the command. If it fails, run it again without the GPUs that nvidia-smi cannot query.

    After a second run, return nvidia-smi's answers about the granted GPUs that it can query; return an empty mapping if
    the first run succeeded. Raises AgentError or OSError.
    """
    from agent.vendors.nvidia.nvidia_smi import device_ids, query_gpus

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
        return json.loads(system.read(output_file(directory)))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote invalid JSON: {error}") from error


def _in_mig_mode(answers: "Mapping[str, Answer]", gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the PCI addresses `gpus` whose GPUs are in MIG mode, according to nvidia-smi's answers."""
    return tuple(gpu for gpu in gpus if gpu in answers and answers[gpu].in_mig_mode)


def _not_listed(spec: object, request: Request) -> tuple[str, ...]:
    """Return the granted GPUs that no device contains; none if the specification is malformed (`verify` reports it)."""
    try:
        return missing_gpus(devices(object_of(spec, "the specification")), request)
    except DocumentError:
        return ()


def _has_hook(spec: object, name: str) -> bool:
    """Return whether a specification, or a part of one, has the hook. `verify` reports malformed parts."""
    if isinstance(spec, dict):
        return name in (items if isinstance(items := spec.get("args"), list) else ()) or any(
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
    """Return nvidia-ctk's version. Raises UnsupportedError, which names `purpose`, if it is older than `needed`."""
    version = _version(system)
    if version < needed:
        raise UnsupportedError(
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
        cached = json.loads(system.read(VERSION_CACHE))
    except (OSError, ValueError, RecursionError):
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
