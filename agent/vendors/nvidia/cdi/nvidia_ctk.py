"""NVIDIA Container Toolkit: generates a CDI specification, and configures nvidia-container-runtime."""

import json
import re
import tomllib
from dataclasses import astuple
from typing import Any

from agent.model.errors import AgentError, CommandError, DocumentError, UnsupportedError
from agent.model.handoff import Request
from agent.model.paths import MACHINE_STATE
from agent.system.files import System
from agent.vendors.cdi.document import devices, object_of
from agent.vendors.machine_vendor import EDIT_LIMIT, Generated
from agent.vendors.nvidia.cdi.command import NVIDIA_CTK, generate_command, output_file
from agent.vendors.nvidia.cdi.verify import KIND, NO_GPU, NO_GPU_EDITS
from agent.vendors.nvidia.cdi.verify_devices import missing_gpus, without_half_made

OLDEST = (1, 18, 2)
"""--disable-hook and --enable-hook appeared in 1.18.0; before 1.18.2 a container of the runtime `nvidia` with
NVIDIA_VISIBLE_DEVICES=none fails, as that asks for a device without a name."""
RECOMMENDED = (1, 19, 1)
"""Its hooks open a container's paths beneath the container's root, which closes a race that 1.19.0 still has."""
GENERATE_LIMIT = 40.0
"""Seconds: NVML initialises every GPU when no persistence daemon keeps them initialised."""

MIG_MODE = ("nvidia-smi", "--query-gpu=pci.bus_id,mig.mode.current", "--format=csv,noheader")
MIG_MODE_LIMIT = 10.0
"""Seconds. Runs only for GPUs that are missing in the specification."""

VERSION_NOTE = f"{MACHINE_STATE}/nvidia-ctk.json"

REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESHED_SPEC = "/var/run/cdi/nvidia.yaml"
"""Written by the toolkit's packages since 1.18 (deployments/systemd in its source)."""

RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    # Its default mode, auto, makes a specification of its own in memory, which uses neither our driver root nor our
    # hooks: runtimeClassName would bypass the published one.
    "nvidia-container-runtime": {"mode": "cdi"},
    "nvidia-container-runtime.modes.cdi": {
        "default-kind": KIND,
        "spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "annotation-prefixes": ["cdi.k8s.io/"],
    },
}
"""By table: keys of api/config/v1/runtime.go in the toolkit's source."""


def generate(system: System, request: Request, directory: str) -> Generated:
    """Return nvidia-ctk's output for the GPUs that NVML lists now, with NO_GPU and without half-made MIG devices."""
    version = check_version(system)
    try:
        command = generate_command(request.driver_root, directory, request.cdi_hooks)
        system.run(*command, timeout=GENERATE_LIMIT)
    except CommandError as error:
        # Its error if there is no device at all, about the `all` that it makes of them.
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
        remarks.append(f"nvidia-ctk is {_text(version)}: {_text(RECOMMENDED)} fixes a race in its hooks, upgrade it")
    if not_made := [hook for hook in request.cdi_hooks if not _has_hook(spec, hook)]:
        remarks.append(f"nvidia-ctk {_text(version)} does not make the hook {', '.join(not_made)}: upgrade it")
    if half_made:
        remarks.append(f"MIG devices that are not complete yet are left out: {', '.join(half_made)}")
    if unpartitioned:
        remarks.append(_without_instance(unpartitioned))
    return Generated(with_no_gpu(spec), tuple(remarks), unpartitioned)


def in_mig_mode(system: System, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of these GPUs (PCI addresses) in MIG mode, which only NVML knows; none if it does not answer."""
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
    """Return GPUs that no device serves; none for a malformed specification, which is left to the verdict."""
    try:
        return missing_gpus(devices(object_of(spec, "the spec")), request)
    except DocumentError:
        return ()


def _has_hook(spec: object, name: str) -> bool:
    """Return whether the hook is anywhere in it; malformed specifications are left to the verdict."""
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
    """Return the version; raises UnsupportedError if it is too old for us or for the purpose."""
    version = _version(system)
    if version < needed:
        raise UnsupportedError(
            f"nvidia-ctk is {_text(version)}; {_text(needed)} is needed {purpose}",
            f"install nvidia-container-toolkit {_text(RECOMMENDED)} or newer in the image",
        )
    return version


def _version(system: System) -> tuple[int, ...]:
    """Ask each program file once in a boot: a new driver does not change the version, and waits for this."""
    identity = list(astuple(system.identity(NVIDIA_CTK))) if system.exists(NVIDIA_CTK) else []
    try:
        noted = json.loads(system.read(VERSION_NOTE))
    except (OSError, ValueError, RecursionError):
        # Only a note: the program itself knows.
        noted = None
    match noted:
        case {"program": program, "version": [int(major), int(minor), int(patch)]} if identity and program == identity:
            return (major, minor, patch)
        case _:
            pass
    version = parse_version(system.run(NVIDIA_CTK, "--version", timeout=10))
    system.write(VERSION_NOTE, json.dumps({"program": identity, "version": version}).encode(), 0o600)
    return version


def list_devices(system: System, directory: str) -> tuple[str, ...]:
    """Return device names of the CDI specifications in a directory, read as runtimes do; raises CommandError.

    nvidia-ctk warns of invalid ones, but still exits with 0.
    """
    return tuple(system.run(NVIDIA_CTK, "cdi", "list", f"--spec-dir={directory}", timeout=20).split())


def with_no_gpu(spec: object) -> object:
    """Return the specification with the device NO_GPU; one without a list of devices is left to the verdict."""
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return spec | {"devices": [*listed, {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}]}


def parse_version(text: str) -> tuple[int, ...]:
    """Parse `nvidia-ctk --version`: "NVIDIA Container Toolkit CLI version 1.19.1"."""
    # At most nine digits: int() refuses thousands of them.
    match = re.search(r"\bversion v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", text)
    if match is None:
        raise DocumentError(f"{NVIDIA_CTK} --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


def edit_runtime_config(text: str) -> str:
    """Return the text with our keys set and everything else kept; the same text if they are already set."""
    where = "nvidia-container-runtime's config.toml"
    try:
        wanted, before = tomllib.loads(text), tomllib.loads(text)
    # ValueError: not TOML, or a number with more digits than int() accepts.
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not TOML: {error}", "repair or remove it") from error
    try:
        for names, keys in RUNTIME_SETTINGS.items():
            _table(wanted, names.split(".")).update(keys)
        if wanted == before:
            return text
        if len(text) > EDIT_LIMIT:
            raise DocumentError(
                f"{where}: has {len(text)} characters, and the agent edits at most {EDIT_LIMIT}", "shorten or remove it"
            )
        return _with_settings(text, wanted)
    except RecursionError as error:
        raise DocumentError(f"{where}: cannot be edited: its tables are nested too deeply", "repair it") from error


def _with_settings(text: str, wanted: dict[str, Any]) -> str:
    """Return the settings as text, with comments if tomlkit can keep them."""
    # Imported here: it takes longer than a run that changes nothing.
    import tomlkit

    try:
        edited = _edited(text)
        if tomllib.loads(edited) == wanted:
            return edited
    # Any exception: tomlkit fails at dotted keys and unusual table orders, and may write invalid TOML.
    except Exception:
        pass
    return f"# Setting the agent's keys removed the comments.\n{tomlkit.dumps(wanted)}"


def _edited(text: str) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for names, keys in RUNTIME_SETTINGS.items():
        place: Any = document
        for name in names.split("."):
            if name not in place:
                place[name] = tomlkit.table()
            place = place[name]
        place.update(keys)
    return tomlkit.dumps(document)


def _table(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for name in names:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise AgentError(
                f"nvidia-container-runtime's config.toml: {'.'.join(names)} is not a table", "repair or remove it"
            )
    return document


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
