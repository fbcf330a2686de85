"""The specifications of all versions of the NVIDIA Container Toolkit that the agent accepts are published.

The real nvidia-ctk of each version makes them in each mode. The GPU, NVML and the nodes are simulated, and there is no
virtual machine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.model.errors import AgentError
from agent.model.handoff import GrantedDevice
from agent.model.paths import spec_directory
from agent.vendors.cdi import host_paths, normalised
from agent.vendors.nvidia.machine import NvidiaMachine
from agent.vendors.nvidia.nvidia_ctk import MODES
from integration.bed.drivers.generator import NULL, GeneratorMachine
from integration.bed.drivers.host_roots import host_root
from integration.bed.toolkits import NEWEST, PINNED, VERSIONS, toolkit_of
from integration.tests.drivers.test_cdi_documents import copy as copy  # the fixture
from integration.tests.drivers.test_cdi_documents import staged_root, validate

pytestmark = pytest.mark.scenario("002")

OTHERS = tuple(
    GrantedDevice(f"/dev/{name}", kind, NULL.major, NULL.minor)
    for name, kind in {
        "nvidia-fs0": "nvidia-fs",
        "infiniband/rdma_cm": "infiniband",
        "infiniband/uverbs0": "infiniband",
        "gdrdrv": "gdrcopy",
        "nvidia-caps-imex-channels/channel0": "imex-channel",
        "nvidia-nvswitch0": "nvswitch",
        "nvidia-nvswitchctl": "nvswitch",
    }.items()
)
VOID = "/var/run/nvidia-container-devices/void"


@pytest.mark.parametrize(
    "version", [each if each == NEWEST else pytest.param(each, marks=pytest.mark.exhaustive) for each in VERSIONS]
)
def test_every_mode_is_published(
    copy: Path, tmp_path: Path, version: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing is left out of them."""
    record_property("NVIDIA Container Toolkit", version)
    staged, request, live = staged_root(host_root("split", "trixie"), copy)
    nvidia = NvidiaMachine()
    machine = GeneratorMachine(tmp_path, staged, request, toolkit_of(version) / "nvidia-ctk", OTHERS)

    def published(spec: object) -> tuple[Any, set[str]]:
        """Return the specification, and which of its mounts exist in the machine."""
        paths = {path: staged / path.removeprefix(f"{request.driver_root}/") for path in host_paths(spec)}
        return normalised(spec), {path for path, file in paths.items() if file.exists()} | {"/dev/null"}

    directory = spec_directory("nvidia")
    machine.make_directory(directory)
    made = nvidia.generate(machine, request, directory, live)
    spec, present = published(made.spec)
    verdict = nvidia.verify(spec, request, {**live, "/dev/null": NULL}, present)
    assert (verdict.problems, verdict.missing_gpus, made.left_out) == ((), (), ())
    specs = [spec]
    for name, mode in MODES.items():
        wanted = mode.request(request, (*request.devices, *OTHERS))
        nodes = {device.path: NULL for device in wanted.devices}
        place = spec_directory(f"nvidia-{name}")
        machine.make_directory(place)
        try:
            made = nvidia.generate_mode(machine, mode, wanted, place, 30, nodes)
        except AgentError:
            assert (name, version) == ("nvswitch", "1.18.2")
            continue
        spec, present = published(made.spec)
        assert nvidia.verify_mode(mode, spec, wanted, {**nodes, "/dev/null": NULL}, present) == ()
        assert made.left_out == ()
        specs.append(spec)
    targets = [{mount["containerPath"] for mount in each["containerEdits"].get("mounts", [])} for each in specs]
    if version in PINNED:
        assert [VOID in each for each in targets] == [version == NEWEST] * len(specs), "it is really that version"
    validate(tmp_path, *specs)
