"""Names that NVIDIA's Kubernetes device plugin gives to sockets, resources and devices. Pure.

The names are from github.com/NVIDIA/k8s-device-plugin: getPluginSocketPath in internal/plugin/server.go, AnnotatedID in
internal/rm/devices.go. SOCKETS also matches the sockets of Google's plugin, which are called nvidiaGPU-TIME.sock.
"""

import re

RESOURCE_PREFIX = "nvidia.com/"
"""Prefix of the resources `nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.10gb` and so on. The plugin's
settings can change what follows the prefix."""
HARMLESS_RESOURCES = ("nvidia.com/hostdev*",)
"""Network devices, which NVIDIA's Network Operator gives to pods."""
SOCKETS = "nvidia*.sock"
SPEC_KIND = "k8s.device-plugin.nvidia.com/gpu"
SPEC = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
"""The plugin writes this file at its start if its device list strategy is `cdi-...` (CreateSpecFile in
internal/cdi/cdi.go)."""
IDENTITY = re.compile(r"((?:GPU|MIG)-[0-9A-Za-z/-]+)(?:::[0-9]+)?")
"""A UUID as NVML writes it (for MIG before R470: MIG-GPU-UUID/1/0). With time-slicing and MPS, `::` and the number of
a replica follow."""


def gpu_of(name: str) -> str:
    """Return the UUID in the name of a GPU or MIG device; empty for any other name, such as an index or `all`."""
    match = IDENTITY.fullmatch(name)
    return match[1] if match else ""
