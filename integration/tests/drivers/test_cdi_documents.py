"""Published CDI specifications, checked by the Container Device Interface's own library.

The real nvidia-ctk makes them from driver roots that were staged from trees of real packages. The GPU and NVML are
simulated, and there is no virtual machine.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.host.apply.driver_roots import stage
from agent.host.plan.goal import plan
from agent.model.device import DeviceNumber
from agent.model.handoff import Request
from agent.model.paths import TREES as DRIVER_TREES
from agent.model.paths import spec_directory
from agent.vendors.cdi import host_paths, normalised
from agent.vendors.nvidia.machine import NvidiaMachine
from agent.vendors.nvidia.nvidia_ctk import with_no_gpu
from integration.bed import ubuntu
from integration.bed.cache import cache_root
from integration.bed.drivers.foreign_trees import crowded_root
from integration.bed.drivers.generator import GeneratorMachine, with_simulated_nodes
from integration.bed.drivers.host_roots import host_root
from integration.bed.process import complete, run
from integration.bed.tools import CDI_LIBRARY, MODULE, bed_tools, chosen, pinned, toolkit
from integration.tests.drivers.observed_tree import CONFIG, Tree
from tests.fakes.cdi_specs import VERSIONS
from tests.fakes.machine import SPEC

pytestmark = pytest.mark.scenario("002")

NVIDIA = NvidiaMachine()
TREES = {
    "Debian 13": lambda: host_root("split", "trixie"),
    "Debian 12": lambda: host_root("split", "bookworm"),
    "Ubuntu's layout": lambda: host_root("flat", "trixie"),
    "Ubuntu's own": lambda: host_root("flat", ubuntu.UBUNTU),
    "Debian unstable": lambda: host_root("split", "sid"),
    "two drivers, 32 bits": crowded_root,
}
GATE = ("Debian 13", "two drivers, 32 bits")
"""The trees that the gate tests. Layouts are tested by test_layouts.py, too."""


@pytest.fixture
def copy() -> Iterator[Path]:
    """A path on the same file system as the cached trees, for hard links to them."""
    with tempfile.TemporaryDirectory(prefix=".documents-", dir=cache_root()) as directory:
        yield Path(directory) / "root"


def validate(directory: Path, *specs: object) -> None:
    """Raise if the library rejects a specification, or would accept it with a lower version."""
    paths = [directory / f"{index}.json" for index in range(len(specs))]
    for path, spec in zip(paths, specs, strict=True):
        path.write_text(json.dumps(spec))
    # An assertion: to integration/canary, `run` would say that the bed failed.
    validated = complete([bed_tools() / "cdi-validate", *paths])
    assert validated.returncode == 0, f"cdi-validate: {validated.stderr}"


def rejected(directory: Path, spec: object) -> str:
    """Return the library's error message."""
    with pytest.raises(Exception, match="cdi-validate") as caught:
        validate(directory, spec)
    return str(caught.value)


def installed_version(root: Path) -> str:
    """Return the version of the driver that the tree's loader finds."""
    found = {path.resolve().name for path in (root / "usr/lib/x86_64-linux-gnu").glob("nvidia/current/libcuda.so.1")}
    found = found or {path.resolve().name for path in (root / "usr/lib/x86_64-linux-gnu").glob("libcuda.so.1")}
    (name,) = found
    return name.removeprefix("libcuda.so.")


def staged_root(root: Path, copy: Path) -> tuple[Path, Request, Mapping[str, DeviceNumber]]:
    """Stage the driver of a tree in a copy of that tree.

    Returns the driver root, and the request and the nodes of a machine that has it.
    """
    run(["cp", "-al", root, copy])
    tree = Tree(copy)
    (goal,) = plan(CONFIG, tree.look(installed_version(root))).goal.machines
    driver_root = goal.grants[0].driver_root
    assert driver_root
    stage(driver_root, tree)
    request, live = with_simulated_nodes(goal.handoff.requests[0])
    return tree.tree / DRIVER_TREES.lstrip("/") / str(driver_root.index), request, live


@pytest.mark.parametrize(
    "name",
    [each if each in GATE else pytest.param(each, marks=pytest.mark.exhaustive) for each in TREES],
)
def test_specs_of_every_tree(
    copy: Path, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    root = TREES[name]()
    record_property("NVIDIA driver", installed_version(root))
    staged, request, live = staged_root(root, copy)
    machine = GeneratorMachine(tmp_path, staged, request, toolkit() / "nvidia-ctk")
    machine.make_directory(spec_directory("nvidia"))
    spec: Any = normalised(NVIDIA.generate(machine, request, spec_directory("nvidia"), live).spec)
    present = {path for path in host_paths(spec) if (staged / path.removeprefix(f"{request.driver_root}/")).exists()}
    verdict = NVIDIA.verify(spec, request, live, present)
    assert (verdict.problems, verdict.missing_gpus) == ((), ())
    uuids = [each for each in verdict.devices if each.startswith("GPU-")]
    assert sorted(verdict.devices) == sorted(["0", *uuids, "all", "none"]), "by index and by UUID"
    assert len(uuids) == 1
    validate(tmp_path, spec)


def test_recorded_specs(tmp_path: Path) -> None:
    """The recordings have DRM nodes and their groups, MIG devices, and the device for no GPU."""
    recorded = [json.loads(path.read_text()) for path in sorted(SPEC.parent.glob("*.json"))]
    specs = [with_no_gpu(each.get("spec", each)) for each in recorded]
    assert len(specs) >= 3
    validate(tmp_path, *(normalised(each) for each in specs))


def test_versions_are_the_ones_that_the_library_requires(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every feature that needs a newer version than 0.5.0 gets that version and no higher one."""
    record_property("CDI library", chosen("CDI_LIBRARY") or pinned(MODULE, CDI_LIBRARY))
    validate(tmp_path, *(normalised(document) for document, _ in VERSIONS.values()))


def test_the_library_rejects_invalid_documents(tmp_path: Path) -> None:
    """The other tests prove something only if the library can fail."""
    document: Any = normalised(VERSIONS["recorded with DRM nodes"][0])
    assert "must be at least v0.7.0" in rejected(tmp_path, document | {"cdiVersion": "0.6.0"})
    assert "and 0.7.0 is enough" in rejected(tmp_path, document | {"cdiVersion": "1.0.0"})
    document["devices"][0]["containerEdits"] = {}
    assert "empty device edits" in rejected(tmp_path, normalised(document))
