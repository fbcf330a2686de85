"""Gets attributes and capacities of NVIDIA's GPUs and MIG devices from nvidia-smi, for Dynamic Resource Allocation."""

import csv
import re
import time
from collections.abc import Mapping, Sequence

from agent.model.contract import AllocatableDevice
from agent.model.device import as_in_sysfs
from agent.model.errors import AgentError, ExitCodeError
from agent.model.text import whole_number
from agent.system.files import System
from agent.vendors.dra_vendor import FACTS_LIMIT, Attribute, DeviceFacts, DraVendor, semantic_version
from agent.vendors.nvidia.contract import HARMLESS_RESOURCES, RESOURCE_PREFIX, gpu_of
from agent.vendors.nvidia.nvidia_ctk import INVALID, NVIDIA_SMI, list_profiles

FIELDS = ("pci.bus_id", "uuid", "name", "memory.total", "driver_version", "compute_cap")
"""The fields to query. Drivers before 510 do not know the last field."""
MIB = 1 << 20
CUDA = re.compile(r"^CUDA (?:UMD )?[Vv]ersion\s*: ([0-9.]+)$", re.MULTILINE)
"""The newest CUDA version that the driver supports, in the output of `nvidia-smi --version`. Since driver 610, the
line `CUDA version` has no number, but refers to the line `CUDA UMD version`."""


def read_facts(
    system: System, devices: Sequence[AllocatableDevice], driver_version: str
) -> Mapping[AllocatableDevice, DeviceFacts]:
    deadline = time.monotonic() + FACTS_LIMIT
    gpus = _query(system, {each.pci_address for each in devices}, deadline)
    profiles = list_profiles(system, _remaining(deadline)) if any(each.partition for each in devices) else {}
    cuda = _cuda_version(system, deadline)
    common: dict[str, Attribute] = {}
    if version := semantic_version(driver_version):
        common["driverVersion"] = version
    if version := semantic_version(cuda):
        common["cudaDriverVersion"] = version
    return {each: _facts(each, gpus.get(each.pci_address, {}), profiles, common) for each in devices}


def _facts(
    device: AllocatableDevice, gpu: Mapping[str, str], profiles: Mapping[str, str], common: Mapping[str, Attribute]
) -> DeviceFacts:
    attributes = dict(common)
    if version := semantic_version(gpu.get("driver_version", "")):
        attributes["driverVersion"] = version
    if version := semantic_version(gpu.get("compute_cap", "")):
        attributes["cudaComputeCapability"] = version
    if name := gpu.get("name"):
        attributes["productName"] = name
    memory = whole_number(gpu.get("memory.total", ""))
    if not device.partition:
        attributes |= _uuid("uuid", gpu)
        return DeviceFacts(attributes, {"memory": memory * MIB} if memory else {}, complete="uuid" in gpu)
    # nvidia-smi cannot be queried for a MIG device's memory, so MIG devices have no capacity. Claims select MIG devices
    # by the attribute `profile`, whose value contains the size of the memory, as in `1g.10gb`.
    uuid = next((uuid for name in device.cdi_names if (uuid := gpu_of(name.partition("=")[2]))), "")
    if uuid:
        attributes["uuid"] = uuid
    profile = profiles.get(uuid)
    if profile:
        attributes["profile"] = profile
    return DeviceFacts(attributes | _uuid("parentUUID", gpu), complete="uuid" in gpu and bool(profile))


def _uuid(name: str, gpu: Mapping[str, str]) -> dict[str, Attribute]:
    return {name: gpu["uuid"]} if gpu.get("uuid") else {}


def _query(system: System, gpus: set[str], deadline: float) -> dict[str, dict[str, str]]:
    """Return the known fields of each GPU by PCI address.

    If one GPU has failed, a query of all GPUs fails. Each GPU is then queried by itself.
    """
    try:
        return _rows(system, deadline)
    except ExitCodeError:
        found: dict[str, dict[str, str]] = {}
        for each in sorted(gpus):
            try:
                found |= _rows(system, deadline, f"--id={each}")
            except ExitCodeError:
                continue
        return found


def _rows(system: System, deadline: float, *options: str) -> dict[str, dict[str, str]]:
    try:
        text = _run(system, deadline, *options, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    except ExitCodeError as error:
        if error.status != INVALID:
            raise
        text = _run(system, deadline, *options, f"--query-gpu={','.join(FIELDS[:-1])}", "--format=csv,noheader,nounits")
    rows = [dict(zip(FIELDS, (each.strip() for each in row), strict=False)) for row in csv.reader(text.splitlines())]
    # A value in brackets means that the driver does not know it: [N/A], [Unknown Error], [GPU is lost].
    known = [{key: value for key, value in row.items() if value and not value.startswith("[")} for row in rows]
    return {address: row for row in known if (address := as_in_sysfs(row.get("pci.bus_id", "")))}


def _cuda_version(system: System, deadline: float) -> str:
    try:
        match = CUDA.search(_run(system, deadline, "--version"))
    except ExitCodeError:
        # Drivers before 520 have no such option.
        return ""
    return match[1] if match else ""


def _run(system: System, deadline: float, *arguments: str) -> str:
    return system.run(NVIDIA_SMI, *arguments, timeout=_remaining(deadline))


def _remaining(deadline: float) -> float:
    """Return the seconds until the deadline. Raises AgentError if it has passed."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise AgentError(f"{NVIDIA_SMI} takes more than {FACTS_LIMIT:.0f} s", "see `dmesg` on the host for the driver")
    return remaining


NVIDIA = DraVendor("nvidia", read_facts, RESOURCE_PREFIX, HARMLESS_RESOURCES)
