"""NVIDIA Container Toolkit: generating a CDI spec, and the configuration of nvidia-container-runtime."""

import json
import re
import tomllib
from dataclasses import astuple
from typing import Any

from agent.errors import AgentError, CommandError, DocumentError, UnsupportedError
from agent.handoff import Request
from agent.paths import MACHINE_STATE
from agent.system.files import System
from agent.vendors.cdi_document import devices, object_of
from agent.vendors.machine_protocol import Generated
from agent.vendors.nvidia.cdi import KIND, NO_GPU, NO_GPU_EDITS
from agent.vendors.nvidia.cdi_devices import missing_gpus, without_half_made
from agent.vendors.nvidia.generate_command import NVIDIA_CTK, generate_command, output_file

OLDEST = (1, 18, 0)
"""--disable-hook and --enable-hook appeared in 1.18.0; older ones end with "flag provided but not defined"."""
RECOMMENDED = (1, 19, 1)
"""Its hooks open a container's paths beneath the container's root, closing a race that 1.19.0 still has."""
GENERATE_LIMIT = 40.0
"""Seconds: NVML initialises every GPU when no persistence daemon keeps them initialised."""

MIG_MODE = ("nvidia-smi", "--query-gpu=pci.bus_id,mig.mode.current", "--format=csv,noheader")
MIG_MODE_LIMIT = 10.0
"""Seconds. Asked only for GPUs that the spec lacks."""

VERSION_NOTE = f"{MACHINE_STATE}/nvidia-ctk.json"

REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESHED_SPEC = "/var/run/cdi/nvidia.yaml"
"""Of the toolkit's packages from 1.18 on (deployments/systemd in its source)."""

RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    # Its default mode, auto, makes a spec of its own in memory, in which the driver is found neither at our driver
    # root nor with our hooks: runtimeClassName would bypass the published spec.
    "nvidia-container-runtime": {"mode": "cdi"},
    "nvidia-container-runtime.modes.cdi": {
        "default-kind": KIND,
        "spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "annotation-prefixes": ["cdi.k8s.io/"],
    },
}
"""By table: keys of api/config/v1/runtime.go in the toolkit's source."""


def generate(system: System, request: Request, directory: str) -> Generated:
    """What nvidia-ctk writes for the GPUs that NVML lists now, with NO_GPU and without half-made MIG devices."""
    version = check_version(system)
    try:
        system.run(*generate_command(request.driver_root, directory), timeout=GENERATE_LIMIT)
    except CommandError as error:
        # How it ends without any device, over the `all` that it makes of them.
        unpartitioned = in_mig_mode(system, request.gpus) if "empty device edits" in error.stderr else ()
        if unpartitioned:
            raise AgentError(_without_instance(unpartitioned)) from error
        raise
    try:
        spec = json.loads(system.read(output_file(directory)))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{NVIDIA_CTK} wrote what is not JSON: {error}") from error
    spec, half_made = without_half_made(spec, request)
    unpartitioned = in_mig_mode(system, _not_listed(spec, request))
    remarks = []
    if version < RECOMMENDED:
        remarks.append(f"nvidia-ctk is {_text(version)}: {_text(RECOMMENDED)} mends a race in its hooks, renew it")
    if half_made:
        remarks.append(f"MIG devices that are not complete yet are left out: {', '.join(half_made)}")
    if unpartitioned:
        remarks.append(_without_instance(unpartitioned))
    return Generated(with_no_gpu(spec), tuple(remarks), unpartitioned)


def in_mig_mode(system: System, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these GPUs (PCI addresses) that are in MIG mode, which only NVML knows; none if it does not answer."""
    if not gpus:
        return ()
    try:
        lines = system.run(*MIG_MODE, timeout=MIG_MODE_LIMIT).splitlines()
    except (AgentError, OSError):
        return ()
    on = set()
    for line in lines:
        address, _, mode = line.partition(",")
        if mode.strip() == "Enabled":
            # The domain has eight digits here, and four or more in the kernel.
            on.add(address.strip().lower().lstrip("0"))
    return tuple(gpu for gpu in gpus if gpu.lstrip("0") in on)


def _not_listed(spec: object, request: Request) -> tuple[str, ...]:
    """GPUs that no device of the spec has; none of a malformed one, which is left to the verdict."""
    try:
        return missing_gpus(devices(object_of(spec, "the spec")), request)
    except DocumentError:
        return ()


def _without_instance(gpus: tuple[str, ...]) -> str:
    return (
        f"no pod can use GPU {', '.join(gpus)}: MIG mode is on and there is no complete instance "
        "(`nvidia-smi mig -cgi PROFILE -C` on the host makes one)"
    )


def check_version(
    system: System, needed: tuple[int, ...] = OLDEST, purpose: str = "to choose the hooks of a CDI spec"
) -> tuple[int, ...]:
    """The version; raises UnsupportedError for one that is too old for our arguments, or the purpose."""
    version = _version(system)
    if version < needed:
        raise UnsupportedError(
            f"nvidia-ctk is {_text(version)}; {_text(needed)} is needed {purpose}",
            f"install nvidia-container-toolkit {_text(RECOMMENDED)} or newer in the image",
        )
    return version


def _version(system: System) -> tuple[int, ...]:
    """Asked for once for each program file in a boot: a new driver does not change it, and waits for its spec."""
    identity = list(astuple(system.identity(NVIDIA_CTK))) if system.exists(NVIDIA_CTK) else []
    try:
        noted = json.loads(system.read(VERSION_NOTE))
        if identity and noted["program"] == identity:
            return tuple(map(int, noted["version"]))
    except (OSError, ValueError, KeyError, TypeError):
        # Only a note: the program itself knows.
        pass
    version = parse_version(system.run(NVIDIA_CTK, "--version", timeout=10))
    system.write(VERSION_NOTE, json.dumps({"program": identity, "version": version}).encode(), 0o600)
    return version


def list_devices(system: System, directory: str) -> tuple[str, ...]:
    """Qualified device names of the CDI specs in a directory, read as container runtimes do; raises CommandError.

    It warns of what is not valid, and ends with exit code 0 all the same.
    """
    return tuple(system.run(NVIDIA_CTK, "cdi", "list", f"--spec-dir={directory}", timeout=20).split())


def with_no_gpu(spec: object) -> object:
    """The spec with the device NO_GPU; one without a list of devices is left to the verdict."""
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return spec | {"devices": [*listed, {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}]}


def parse_version(text: str) -> tuple[int, ...]:
    """From `nvidia-ctk --version`: "NVIDIA Container Toolkit CLI version 1.19.1"."""
    match = re.search(r"\bversion v?(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise DocumentError(f"{NVIDIA_CTK} --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


def edit_runtime_config(text: str) -> str:
    """The text with our keys set and all others, also comments, kept; the very same text when they are set already."""
    try:
        present = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DocumentError(
            f"nvidia-container-runtime's config.toml: not TOML: {error}", "repair or remove it"
        ) from error
    if all(_at(present, table.split(".")).get(key) == value for table, key, value in _settings()):
        return text
    # Only here: importing it takes longer than a run that changes nothing.
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise DocumentError(
            f"nvidia-container-runtime's config.toml: cannot be edited: {error}", "repair it"
        ) from error
    for table, key, value in _settings():
        place: Any = document
        for name in table.split("."):
            if name not in place:
                place[name] = tomlkit.table()
            place = place[name]
        place[key] = value
    return tomlkit.dumps(document)


def _settings() -> list[tuple[str, str, Any]]:
    return [(table, key, value) for table, keys in RUNTIME_SETTINGS.items() for key, value in keys.items()]


def _at(document: object, names: list[str]) -> dict[str, Any]:
    for name in names:
        document = document.get(name, {}) if isinstance(document, dict) else {}
    if not isinstance(document, dict):
        raise AgentError(f"nvidia-container-runtime's config.toml: {'.'.join(names)} is not a table")
    return document


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
