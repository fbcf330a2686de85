"""Asks nvidia-smi for GPUs and their MIG devices, even if NVML cannot open one of the GPUs."""

import re
import time
from typing import NamedTuple

from agent.model.errors import AgentError, ExitCodeError
from agent.model.pci_address import as_in_sysfs
from agent.system.files import System

NVIDIA_SMI = "nvidia-smi"
QUERY = ("--query-gpu=pci.bus_id,uuid,mig.mode.current", "--format=csv,noheader")
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

    If one GPU has failed, a query of all GPUs fails. Each GPU is then queried by itself. It is named by its index: to
    find a GPU by another name, nvidia-smi would also open the GPUs with lower indices.
    """
    deadline = time.monotonic() + limit
    try:
        return _parse(system.run(NVIDIA_SMI, *QUERY, timeout=limit / 2))
    except ExitCodeError:
        pass
    except (AgentError, OSError):
        return {}
    found: dict[str, Answer] = {}
    for index in range(count):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return {}
        try:
            found |= _parse(system.run(NVIDIA_SMI, f"--id={index}", *QUERY, timeout=min(GPU_LIMIT, remaining)))
        except (AgentError, OSError):
            continue
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


def _parse(text: str) -> dict[str, Answer]:
    found = {}
    for row in text.splitlines():
        address, _, rest = row.partition(",")
        uuid, _, mode = rest.partition(",")
        if as_in_sysfs(address.strip()) and UUID.fullmatch(uuid.strip()):
            found[as_in_sysfs(address.strip())] = Answer(uuid.strip(), mode.strip() == "Enabled")
    return found
