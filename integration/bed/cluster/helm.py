"""Helm, and the chart of NVIDIA's device plugin, as the go.mod files in integration/go pin them.

Helm is in Kubernetes' module, so that both have the same versions of their libraries: Go compiles these only once.
"""

import json
from pathlib import Path

from integration.bed.cache import cached
from integration.bed.cluster import kubernetes
from integration.bed.process import run
from integration.bed.tools import DEVICE_PLUGIN, MODULE, compile_go, go, pinned

HELM = "helm.sh/helm/v3"


def rendered(chart: Path, namespace: str, values: Path) -> str:
    """Return the chart's objects with these values, in YAML. Raises CommandError with Helm's words."""
    return run([_helm(), "template", "release", chart, f"--namespace={namespace}", f"--values={values}"])


def device_plugin_chart() -> Path:
    """Return the directory of the chart, which is part of the device plugin's Go module."""
    module = f"{DEVICE_PLUGIN}@v{pinned(MODULE, DEVICE_PLUGIN)}"
    downloaded = json.loads(run([go(), "mod", "download", "-json", module], cwd=MODULE))
    return Path(downloaded["Dir"]) / "deployments" / "helm" / "nvidia-device-plugin"


def _helm() -> Path:
    """Return the program, linked statically."""

    def build(output: Path) -> None:
        compile_go(kubernetes.MODULE, f"{HELM}/cmd/helm", output / "helm", "-s -w")

    return cached("helm", [kubernetes.MODULE, Path(__file__)], build) / "helm"
