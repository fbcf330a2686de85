"""Names that NVIDIA's Kubernetes device plugin, and others for its GPUs, give to sockets, resources and devices. Pure.

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
UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
IDENTITY = re.compile(f"((?:GPU|MIG)-{UUID}|MIG-GPU-{UUID}/[0-9]+/[0-9]+)(?:(?:::|-)[0-9]+)?")
"""A UUID as NVML writes it (for MIG before R470: MIG-GPU-UUID/1/0). A number may follow, because several containers can
share a GPU: after `::` with time-slicing and MPS, after `-` with HAMi's plugin."""


def gpu_of(name: str) -> str:
    """Return the UUID in the name of a GPU or MIG device; empty for any other name, such as an index or `all`."""
    match = IDENTITY.fullmatch(name)
    return match[1] if match else ""
