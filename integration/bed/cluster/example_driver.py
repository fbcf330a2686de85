"""The demo of Kubernetes' example driver for Dynamic Resource Allocation, as integration/go/dra-example pins it."""

import json
from pathlib import Path

from integration.bed.cache import REPOSITORY
from integration.bed.process import run
from integration.bed.tools import go, pinned

MODULE = REPOSITORY / "integration" / "go" / "dra-example"
EXAMPLE_DRIVER = "sigs.k8s.io/dra-example-driver"
DRIVER = "gpu.example.com"
"""The name of the driver in the demo, and of its DeviceClass."""


def demo() -> Path:
    """Return the directory with the manifests `gpu-test1.yaml` to `gpu-test6.yaml`."""
    module = f"{EXAMPLE_DRIVER}@v{pinned(MODULE, EXAMPLE_DRIVER)}"
    downloaded = json.loads(run([go(), "mod", "download", "-json", module], cwd=MODULE))
    return Path(downloaded["Dir"]) / "demo"
