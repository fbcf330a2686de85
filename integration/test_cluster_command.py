"""integration/cluster as a person uses it: up, kubectl, down."""

import subprocess

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.simulated_host import paused_hosts

pytestmark = pytest.mark.scenario("002")


def cluster(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    argv = [str(REPOSITORY / "integration/cluster"), *arguments]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=timeout)


def test_up_kubectl_down() -> None:
    """It outlives the command that started it, and is gone after `down`."""
    with paused_hosts():
        up = cluster("up", timeout=900)
        assert up.returncode == 0, up.stderr
        try:
            assert "runs already" in cluster("up").stderr
            manifest = REPOSITORY / "integration/bed/manifests/gpu-test.yaml"
            assert cluster("kubectl", "apply", "-f", str(manifest)).returncode == 0
            phase = "--for=jsonpath={.status.phase}=Succeeded"
            waited = cluster("kubectl", "wait", phase, "--timeout=90s", "pod/gpu-test")
            assert waited.returncode == 0, waited.stderr
            assert "NVIDIA-SMI" in cluster("kubectl", "logs", "gpu-test").stdout
        finally:
            down = cluster("down")
        assert down.returncode == 0, down.stderr
        gone = cluster("kubectl", "get", "nodes")
    assert (gone.returncode, "no cluster runs" in gone.stderr) == (1, True)
