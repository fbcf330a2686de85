"""Generates a CDI specification with the NVIDIA Container Toolkit."""

import json
import re

from agent.model.errors import AgentError, CommandError, DocumentError, UnsupportedError
from agent.model.handoff import Request
from agent.model.paths import MACHINE_STATE
from agent.system.files import System
from agent.vendors.cdi.document import devices, object_of
from agent.vendors.machine_vendor import Generated
from agent.vendors.nvidia.cdi.command import NVIDIA_CTK, generate_command, output_file
from agent.vendors.nvidia.cdi.verify import NO_GPU, NO_GPU_EDITS
from agent.vendors.nvidia.cdi.verify_devices import missing_gpus, without_incomplete

OLDEST = (1, 18, 2)
"""The oldest version that the agent accepts. 1.18.0 introduced --disable-hook and --enable-hook. Before 1.18.2 a
container of the runtime `nvidia` with NVIDIA_VISIBLE_DEVICES=none fails: its runtime requests a device without a name.
"""
RECOMMENDED = (1, 19, 1)
"""The first version whose hooks cannot be led out of a container's root by a race (they open paths beneath it)."""
GENERATE_LIMIT = 40.0
"""Seconds to generate a specification. NVML initialises every GPU if no persistence daemon keeps it initialised."""

MIG_MODE = ("nvidia-smi", "--query-gpu=pci.bus_id,mig.mode.current", "--format=csv,noheader")
MIG_MODE_LIMIT = 10.0
"""Seconds for nvidia-smi, which runs only if GPUs are missing from the specification."""

VERSION_CACHE = f"{MACHINE_STATE}/nvidia-ctk.json"

REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESHED_SPEC = "/var/run/cdi/nvidia.yaml"
"""The specification that units of the toolkit's packages write since 1.18 (deployments/systemd in its source)."""


def generate(system: System, request: Request, directory: str) -> Generated:
    """Run nvidia-ctk, which finds the GPUs through NVML. Return its specification, with remarks.

    NO_GPU is added, and incomplete MIG devices are removed.
    """
    version = check_version(system)
    try:
        command = generate_command(request.driver_root, directory, request.cdi_hooks)
        system.run(*command, timeout=GENERATE_LIMIT)
    except CommandError as error:
        # If no GPU gets a CDI device, nvidia-ctk fails with this error: its device `all` would have no edits.
        unpartitioned = in_mig_mode(system, request.gpus) if "empty device edits" in error.stderr else ()
        if unpartitioned:
            raise AgentError(_without_instance(unpartitioned)) from error
        raise
    spec, incomplete = without_incomplete(read_output(system, directory), request)
    unpartitioned = in_mig_mode(system, _not_listed(spec, request))
    remarks = []
    if version < RECOMMENDED:
        remarks.append(
            f"nvidia-ctk is {_text(version)}; upgrade to {_text(RECOMMENDED)}, which fixes a race in its hooks"
        )
    if not_made := [hook for hook in request.cdi_hooks if not _has_hook(spec, hook)]:
        remarks.append(f"nvidia-ctk {_text(version)} lacks these hooks: {', '.join(not_made)}; upgrade the toolkit")
    if incomplete:
        remarks.append(f"MIG devices that are not complete yet are left out: {', '.join(incomplete)}")
    if unpartitioned:
        remarks.append(_without_instance(unpartitioned))
    return Generated(with_no_gpu(spec), tuple(remarks), unpartitioned)


def read_output(system: System, directory: str) -> object:
    """Return the specification that nvidia-ctk wrote into a directory. Raises OSError or DocumentError."""
    try:
        return json.loads(system.read(output_file(directory)))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote invalid JSON: {error}") from error


def in_mig_mode(system: System, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of these GPUs (PCI addresses) are in MIG mode; none if nvidia-smi fails."""
    if not gpus:
        return ()
    try:
        lines = system.run(*MIG_MODE, timeout=MIG_MODE_LIMIT).splitlines()
    except (AgentError, OSError):
        return ()
    enabled = set()
    for line in lines:
        address, _, mode = line.partition(",")
        if mode.strip() == "Enabled":
            # nvidia-smi writes the domain with eight digits, the kernel with at least four.
            enabled.add(address.strip().lower().lstrip("0"))
    return tuple(gpu for gpu in gpus if gpu.lstrip("0") in enabled)


def _not_listed(spec: object, request: Request) -> tuple[str, ...]:
    """Return the granted GPUs that no device contains; none for a malformed specification, which `verify` reports."""
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
    """Return nvidia-ctk's version. Raises UnsupportedError if it is older than `needed`; `purpose` says why."""
    version = _version(system)
    if version < needed:
        raise UnsupportedError(
            f"nvidia-ctk is {_text(version)}, but {_text(needed)} is needed {purpose}",
            f"install nvidia-container-toolkit {_text(RECOMMENDED)} or newer in the image",
        )
    return version


def _version(system: System) -> tuple[int, ...]:
    """Return nvidia-ctk's version. Raises CommandError, DocumentError or OSError.

    Pods cannot use a new driver before this returns, so the version is cached. The cache is in /run; it is valid until
    a reboot, or until the program changes.
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
    version = parse_version(system.run(NVIDIA_CTK, "--version", timeout=10))
    # An error ends the run: if nothing can be written to /run, the specification cannot be written either.
    system.write(VERSION_CACHE, json.dumps({"program": identity, "version": version}).encode(), 0o600)
    return version


def list_devices(system: System, directory: str) -> tuple[str, ...]:
    """Return the names of the devices in all CDI specifications in a directory, as runtimes read them.

    Raises CommandError. Invalid specifications are ignored: nvidia-ctk only warns of them.
    """
    return tuple(system.run(NVIDIA_CTK, "cdi", "list", f"--spec-dir={directory}", timeout=20).split())


def with_no_gpu(spec: object) -> object:
    """Return the specification with the device NO_GPU added, or as it is if it has no list of devices."""
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return spec | {"devices": [*listed, {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}]}


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the output of `nvidia-ctk --version`: "NVIDIA Container Toolkit CLI version 1.19.1"."""
    # At most nine digits: int() raises ValueError for thousands of them.
    match = re.search(r"\bversion v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", text)
    if match is None:
        raise DocumentError(f"{NVIDIA_CTK} --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
