"""Names that NVIDIA's Kubernetes device plugin gives to sockets, resources and devices. Pure.

From github.com/NVIDIA/k8s-device-plugin: getPluginSocketPath in internal/plugin/server.go, AnnotatedID in
internal/rm/devices.go. The sockets of Google's plugin are called nvidiaGPU-TIME.sock.
"""

import re

RESOURCE_PREFIX = "nvidia.com/"
"""`nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.10gb`; the rest can be renamed in its settings."""
SOCKETS = "nvidia*.sock"
SPEC_KIND = "k8s.device-plugin.nvidia.com/gpu"
SPEC = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
"""Written at its start with a device list strategy `cdi-...` (CreateSpecFile in internal/cdi/cdi.go)."""
IDENTITY = re.compile(r"((?:GPU|MIG)-[0-9A-Za-z/-]+)(?:::[0-9]+)?")
"""A UUID of NVML (MIG-GPU-UUID/1/0 before R470); with time-slicing and MPS followed by the replica's number."""


def gpu_of(name: str) -> str:
    """Return the UUID of a GPU or MIG device; "" for any other name, such as an index or `all`."""
    match = IDENTITY.fullmatch(name)
    return match[1] if match else ""
