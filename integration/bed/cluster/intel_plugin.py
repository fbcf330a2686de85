"""Intel's real GPU device plugin for Kubernetes, as integration/go/intel/go.mod pins it, and its image."""

import shutil
from pathlib import Path

from integration.bed.cache import REPOSITORY, cached
from integration.bed.machine.pod_images import write_image
from integration.bed.process import run
from integration.bed.tools import compile_go, go

MODULE = REPOSITORY / "integration" / "go" / "intel"
PLUGIN = "github.com/intel/intel-device-plugins-for-kubernetes"
IMAGE = "registry.invalid/intel-gpu-plugin:local"
# Its path in Intel's image, which otherwise has only licences.
PROGRAM = "usr/local/bin/intel_gpu_device_plugin"


def intel_plugin() -> Path:
    """Return the program, linked statically like Intel's own."""

    def build(output: Path) -> None:
        compile_go(MODULE, f"{PLUGIN}/cmd/gpu_plugin", output / "gpu_plugin", "-s -w")

    return cached("intel-plugin", [MODULE, Path(__file__)], build) / "gpu_plugin"


def intel_plugin_image() -> Path:
    """Return an image archive for `ctr --namespace k8s.io images import`."""

    def build(output: Path) -> None:
        write_image(output, "intel-gpu-plugin", IMAGE, f'["/{PROGRAM}"]', _fill)

    return cached("intel-plugin-image", [str(intel_plugin()), Path(__file__)], build) / "intel-gpu-plugin.tar"


def intel_plugin_version() -> str:
    """Return the version of the module that the program was built from; the program cannot print it."""
    build_info = run([go(), "version", "-m", intel_plugin()])
    (version,) = (line.split()[2] for line in build_info.splitlines() if line.split()[1:2] == [PLUGIN])
    return version.removeprefix("v")


def _fill(root: Path) -> None:
    program = root / PROGRAM
    program.parent.mkdir(parents=True)
    shutil.copy2(intel_plugin(), program)
