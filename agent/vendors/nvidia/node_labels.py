"""Labels of Nodes with NVIDIA GPUs, as the GPU Operator and GPU Feature Discovery name them. Pure."""

from agent.vendors.host_vendor import DriverForPods

PRESENT = "nvidia.com/gpu.present"
"""Both the GPU Operator and the device plugin's Helm chart select Nodes by this label."""
DRIVER = "nvidia.com/cuda.driver-version"
CUDA = "nvidia.com/cuda.runtime-version"


def node_labels(driver: DriverForPods | None) -> dict[str, str]:
    """Return the labels. For a version that is unknown, there is no label."""
    labels = {PRESENT: "true"}
    if driver is not None:
        parts = ("major", "minor", "revision")
        labels |= _versions(DRIVER, driver.version, parts) | _versions(CUDA, driver.interfaces.get("CUDA", ""), parts)
    return labels


def _versions(prefix: str, version: str, parts: tuple[str, ...]) -> dict[str, str]:
    """Return labels for the whole version and for each of its numbers; none for an empty version."""
    numbers = dict(zip(parts, version.split("."), strict=False))
    return {f"{prefix}.{part}": number for part, number in {**numbers, "full": version}.items() if version}
