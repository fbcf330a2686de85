"""Asks nvidia-smi for GPUs, their MIG devices and their fabric, even if NVML cannot open one of the GPUs."""

import contextlib
import re
import time
from typing import NamedTuple

from agent.model.errors import AgentError, ExitCodeError
from agent.model.handoff import FabricAnswer
from agent.model.pci_address import as_in_sysfs
from agent.model.text import printable
from agent.system.files import System
from agent.vendors.nvidia.fabric_states import NO_FABRIC, is_answer

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


class Answer(NamedTuple):
    """What nvidia-smi says of a GPU."""

    uuid: str
    in_mig_mode: bool


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
