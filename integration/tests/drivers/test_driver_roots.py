"""Drivers in other places than Debian's and Ubuntu's: they are found, planned, and listed by the real nvidia-ctk.

Without a virtual machine, on simulated layouts (moved_drivers.py); test_talos_driver.py carries one to a pod.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.model.conditions import Status
from integration.bed.cache import cache_root
from integration.bed.drivers.foreign_trees import crowded_root
from integration.bed.drivers.moved_drivers import (
    CONTAINER,
    TALOS,
    Places,
    apply_rpm_changes,
    driver_container,
    fedora,
    move_driver,
    talos,
)
from integration.bed.process import run
from integration.tests.drivers.observed_tree import Tree
from integration.tests.drivers.test_layouts import TRIPLETS, Planned, current_version, linked, planned, specified

pytestmark = pytest.mark.scenario("001")

NATIVE, I386 = (f"usr/lib/{TRIPLETS[architecture]}" for architecture in ("amd64", "i386"))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on the same file system as the cached trees, for hard links to them."""
    with tempfile.TemporaryDirectory(prefix=".driver-root-", dir=cache_root()) as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Moved:
    """A host before and after its driver was moved."""

    tree: Tree
    version: str
    debian: Planned
    places: Places

    @property
    def expected(self) -> set[str]:
        """Return the targets of Debian's layout, except those that this layout leaves out."""
        return {target for target in self.debian.files if self.places(target)}


def moved(place: Path, places: Places) -> Moved:
    tree = Tree(linked(crowded_root(), place / "root"))
    version = current_version(crowded_root())
    debian = planned(tree, version)
    move_driver(tree.tree, debian.files.values(), places)
    return Moved(tree, version, debian, places)


def expect_found(found: Planned, where: str) -> None:
    assert (found.libraries.status, found.problems) == (Status.TRUE, ()), found.libraries
    assert f" from {where}" in found.libraries.message


def test_talos(place: Path, tmp_path: Path) -> None:
    """Talos has no loader cache, and its paths do not appear in the specification."""
    host = moved(place, talos)
    (host.tree.tree / "etc/ld.so.cache").unlink()
    found = planned(host.tree, host.version)
    expect_found(found, f"/{TALOS}, /{TALOS}64 (Talos)")
    assert set(found.files) == host.expected
    assert found.files[f"{NATIVE}/libcuda.so.{host.version}"].source == f"/{TALOS}/libcuda.so.{host.version}"
    spec = specified(host.tree, found, tmp_path)
    assert TALOS not in json.dumps(spec)
    expect_as_on_debian(spec, host, place, tmp_path)


def test_a_driver_container(place: Path, tmp_path: Path) -> None:
    """A driver container has its own loader cache, which the host's ldconfig can print."""
    host = moved(place, driver_container)
    run(["cp", "-r", *(host.tree.tree / "etc").glob("ld.so.conf*"), host.tree.tree / CONTAINER / "etc"])
    run(["chroot", host.tree.tree, "ldconfig"])
    run(["chroot", host.tree.tree, "ldconfig", "-r", f"/{CONTAINER}"])
    found = planned(host.tree, host.version)
    expect_found(found, f"/{CONTAINER} (GPU Operator's driver container)")
    assert set(found.files) == host.expected
    expect_as_on_debian(specified(host.tree, found, tmp_path), host, place, tmp_path)


def test_fedora(place: Path, tmp_path: Path) -> None:
    """Libraries are in lib64 and, for 32 bits, lib; Vulkan's files have paths, and a real file has a soname's name."""
    host = moved(place, fedora)
    apply_rpm_changes(host.tree.tree, host.version)
    run(["chroot", host.tree.tree, "ldconfig"])
    found = planned(host.tree, host.version)
    expect_found(found, "the host's loader cache")
    icd = "usr/share/vulkan/icd.d/nvidia_icd.{}json"
    renamed = {f"{directory}/libGLX_nvidia.so.{host.version}" for directory in (NATIVE, I386)}
    manifests = {icd.format("x86_64."): NATIVE, icd.format("i686."): I386}
    assert set(found.files) == host.expected - renamed - {icd.format("")} | set(manifests)
    spec = specified(host.tree, found, tmp_path)
    edits = spec["containerEdits"]
    in_pods = {each["containerPath"] for each in edits["mounts"]} | set(links_in_pods(spec))
    for target, directory in manifests.items():
        library = json.loads(found.files[target].text)["ICD"]["library_path"]
        assert library == f"/{directory}/libGLX_nvidia.so.0"
        assert library in in_pods
    assert "/etc/vulkan/icd.d/nvidia_icd.x86_64.json" in in_pods
    assert "/usr/lib64" not in json.dumps(spec)


def expect_as_on_debian(spec: dict[str, Any], host: Moved, place: Path, tmp_path: Path) -> None:
    """Assert that pods get the same files, under the same names, as on a host with Debian's own layout."""
    tree = Tree(linked(crowded_root(), place / "debian"))
    found = planned(tree, host.version)
    (tmp_path / "debian").mkdir()
    usual = specified(tree, found, tmp_path / "debian")
    everything = {*mounts(usual), *links_in_pods(usual)}
    # Also the links that nvidia-cdi-hook and the agent make: they are not among the driver root's files.
    left_out = {f"/{target}" for target in host.debian.files if not host.places(target)}
    left_out |= {each for each in everything if not host.places(each.lstrip("/"))}
    assert {*mounts(spec), *links_in_pods(spec)} == everything - left_out
    assert spec["devices"] == usual["devices"]


def mounts(spec: dict[str, Any]) -> list[str]:
    """Return the paths of mounts in containers."""
    return [each["containerPath"] for each in spec["containerEdits"]["mounts"]]


def links_in_pods(spec: dict[str, Any]) -> list[str]:
    """Return the links that nvidia-cdi-hook makes."""
    arguments = (argument for hook in spec["containerEdits"]["hooks"] for argument in hook["args"])
    return [argument.partition("::")[2] for argument in arguments if "::" in argument]
