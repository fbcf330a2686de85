"""Gets attributes and capacities of NVIDIA's GPUs and MIG devices from nvidia-smi, for Dynamic Resource Allocation."""

import re
import time
from collections.abc import Mapping, Sequence

from agent.model.contract import AllocatableDevice
from agent.model.errors import AgentError, ExitCodeError
from agent.model.text import whole_number
from agent.system.files import System
from agent.vendors.dra_vendor import FACTS_LIMIT, Attribute, DeviceFacts, DraVendor, semantic_version
from agent.vendors.nvidia.contract import HARMLESS_RESOURCES, RESOURCE_PREFIX, gpu_of
from agent.vendors.nvidia.nvidia_ctk import NVIDIA_SMI, list_profiles, query

FIELDS = ("uuid", "name", "memory.total", "driver_version", "compute_cap")
"""The fields to query, which drivers since 510 know."""
MIB = 1 << 20
CUDA = re.compile(r"^CUDA (?:UMD )?[Vv]ersion\s*: ([0-9.]+)$", re.MULTILINE)
"""The newest CUDA version that the driver supports, in the output of `nvidia-smi --version`. Since driver 610, the
line `CUDA version` has no number, but refers to the line `CUDA UMD version`."""


def read_facts(
    system: System, devices: Sequence[AllocatableDevice], driver_version: str
) -> Mapping[AllocatableDevice, DeviceFacts]:
    deadline = time.monotonic() + FACTS_LIMIT

    def remaining() -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise AgentError(
                f"{NVIDIA_SMI} takes more than {FACTS_LIMIT:.0f} s", "see `dmesg` on the host for the driver"
            )
        return left

    addresses, left = sorted({each.pci_address for each in devices}), remaining()
    rows = query(system, FIELDS, addresses, left, left)
    # A value in brackets means that the driver does not know it: [N/A], [Unknown Error], [GPU is lost].
    gpus = {
        gpu: {key: value for key, value in zip(FIELDS, values, strict=False) if value and not value.startswith("[")}
        for gpu, values in rows.items()
    }
    profiles = list_profiles(system, remaining()) if any(each.partition for each in devices) else {}
    try:
        cuda = CUDA.search(system.run(NVIDIA_SMI, "--version", timeout=remaining()))
    except ExitCodeError:
        # A failed GPU must not cost the others what was read of them.
        cuda = None
    versions = {"driverVersion": driver_version, "cudaDriverVersion": cuda[1] if cuda else ""}
    return {each: _facts(each, gpus.get(each.pci_address, {}), profiles, versions) for each in devices}


def _facts(
    device: AllocatableDevice, gpu: Mapping[str, str], profiles: Mapping[str, str], versions: Mapping[str, str]
) -> DeviceFacts:
    texts = {
        "driverVersion": gpu.get("driver_version", versions["driverVersion"]),
        "cudaDriverVersion": versions["cudaDriverVersion"],
        "cudaComputeCapability": gpu.get("compute_cap", ""),
    }
    attributes: dict[str, Attribute] = {
        name: version for name, text in texts.items() if (version := semantic_version(text))
    }
    if "name" in gpu:
        attributes["productName"] = gpu["name"]
    if not device.partition:
        memory = whole_number(gpu.get("memory.total", ""))
        attributes |= {"uuid": gpu["uuid"]} if "uuid" in gpu else {}
        return DeviceFacts(attributes, {"memory": memory * MIB} if memory else {}, complete="uuid" in gpu)
    # nvidia-smi cannot be queried for a MIG device's memory, so MIG devices have no capacity. Claims select MIG devices
    # by the attribute `profile`, whose value contains the size of the memory, as in `1g.10gb`.
    uuid = next((uuid for name in device.cdi_names if (uuid := gpu_of(name.partition("=")[2]))), "")
    known = {"uuid": uuid, "profile": profiles.get(uuid, ""), "parentUUID": gpu.get("uuid", "")}
    attributes |= {name: text for name, text in known.items() if text}
    return DeviceFacts(attributes, complete=bool(known["profile"] and known["parentUUID"]))


NVIDIA = DraVendor("nvidia", read_facts, RESOURCE_PREFIX, HARMLESS_RESOURCES)
