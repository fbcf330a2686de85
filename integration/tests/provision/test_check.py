"""The cluster's part of "Check an installation" in docs/quick-start.md, with a real API server."""

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.cluster.control_plane import ControlPlane
from integration.bed.process import CommandError

PAGE = REPOSITORY / "docs" / "quick-start.md"
NODE = "gpu-node"
STATUS = {
    "allocatable": {"nvidia.com/gpu": "8", "cpu": "4"},
    "capacity": {"nvidia.com/gpu": "8", "cpu": "4"},
    "conditions": [{"type": "Ready", "status": "True"}, {"type": "GPUReady", "status": "True"}],
}


def commands() -> list[list[str]]:
    """Return the arguments of the section's kubectl commands."""
    section = PAGE.read_text().partition("\n## Check an installation\n")[2]
    return [shlex.split(line, comments=True) for line in re.findall(r"^kubectl (.*)$", section, re.MULTILINE)]


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane((), controllers=False) as control_plane:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        control_plane.kubectl("create", "--filename=-", stdin=json.dumps(node))
        yield control_plane


def test_the_check_after_an_installation(control_plane: ControlPlane) -> None:
    runtime_class, gpus, ready = commands()
    with pytest.raises(CommandError, match="not found"):
        control_plane.kubectl(*runtime_class)
    assert control_plane.kubectl(*gpus).splitlines()[1].split() == [NODE, "<none>"]
    assert control_plane.kubectl(*ready).splitlines()[1].split() == [NODE, "<none>"]

    manifest = (REPOSITORY / "agent/manifests/runtime-class.yaml").read_text()
    control_plane.kubectl("apply", "--filename=-", stdin=manifest)
    patch = json.dumps({"status": STATUS})
    control_plane.kubectl("patch", "node", NODE, "--subresource=status", f"--patch={patch}")
    assert control_plane.kubectl(*runtime_class)
    assert control_plane.kubectl(*gpus).splitlines()[1].split() == [NODE, "8"]
    assert control_plane.kubectl(*ready).splitlines()[1].split() == [NODE, "True"]
