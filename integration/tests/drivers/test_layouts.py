"""Layouts of the driver on hosts: trees of real packages that the agent observes and plans. The GPUs are synthetic.

There is no virtual machine: test_hosts.py stages and runs what is only planned here. In the last test, the real
nvidia-ctk makes a specification from a staged driver root.
"""

import json
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.host.apply.driver_roots import stage
from agent.host.observe.host import parse_listing
from agent.host.plan.goal import plan
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import Broken, Library
from agent.model.goal import MachineGoal
from agent.model.paths import TREES, spec_directory
from agent.system.process import host_runner
from agent.vendors.cdi import host_paths
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.machine import NvidiaMachine
from integration.bed.cache import cache_root
from integration.bed.drivers.driver_upgrade import older_version
from integration.bed.drivers.foreign_trees import SOURCE, arm64_root, crowded_root
from integration.bed.drivers.generator import GeneratorMachine, with_simulated_nodes
from integration.bed.drivers.host_roots import LIBRARIES, Layout, host_root
from integration.bed.process import run
from integration.bed.tools import bed_tools, toolkit
from integration.tests.drivers.observed_tree import CONFIG, Tree

pytestmark = pytest.mark.scenario("002")

NVIDIA = NvidiaMachine()
TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu", "i386": "i386-linux-gnu"}
# The names that readelf(1) prints.
PROCESSORS = {"amd64": "Advanced Micro Devices X86-64", "arm64": "AArch64", "i386": "Intel 80386"}


@dataclass(frozen=True)
class Planned:
    """The machine's goal and condition that were planned."""

    goal: MachineGoal
    libraries: Condition
    problems: tuple[str, ...]

    @property
    def files(self) -> dict[str, Library]:
        """Return the planned files by target; empty if no driver root is planned."""
        root = self.goal.grants[0].driver_root
        return {file.target: file for file in root.files} if root else {}


def planned(tree: Tree, module: str) -> Planned:
    facts = tree.look(module)
    (goal,) = plan(CONFIG, facts).goal.machines
    found = nvidia_conditions(facts.vendors[0], goal.grants[0])
    (condition,) = (each for each in found if each.type == ConditionType.LIBRARIES_PRESENT)
    return Planned(goal, condition, facts.all_problems())


@pytest.fixture
def copy() -> Iterator[Path]:
    """A path on the same file system as the cached trees, for hard links to them."""
    with tempfile.TemporaryDirectory(prefix=".layout-", dir=cache_root()) as directory:
        yield Path(directory) / "root"


def linked(root: Path, copy: Path) -> Path:
    run(["cp", "-al", root, copy])
    return copy


def current_version(root: Path, architecture: str = "amd64") -> str:
    """Return the version of the driver in Debian's layout."""
    directory = root / "usr/lib" / TRIPLETS[architecture] / "nvidia/current"
    return (directory / "libcuda.so.1").readlink().name.removeprefix("libcuda.so.")


def packaged(root: Path, version: str, architecture: str = "amd64") -> set[str]:
    """Return the names of the libraries in the driver's packages of that version, from dpkg's records."""
    names: set[str] = set()
    for stanza in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        ours = fields.get("Source", "").startswith(SOURCE) and fields["Architecture"] == architecture
        if ours and fields["Version"].startswith(f"{version}-"):
            names |= _shipped(root, fields["Package"], architecture)
    assert len(names) > 3, f"{root}: no packages of driver {version} for {architecture}"
    return names


def _packages(root: Path, version: str, *sources: str) -> Iterator[tuple[str, str]]:
    """Yield name and architecture of packages built from these source packages in that version."""
    for stanza in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        source = fields.get("Source", fields.get("Package", "")).partition(" ")[0]
        if source in sources and fields["Version"].startswith(version):
            yield fields["Package"], fields["Architecture"]


def _files(root: Path, package: str, architecture: str) -> set[str]:
    """Return the regular files of an installed package. dpkg's list has conffiles too, unlike its digests."""
    directory = root / "var/lib/dpkg/info"
    (record,) = (
        path for name in (f"{package}:{architecture}", package) if (path := directory / f"{name}.list").exists()
    )
    paths = (root / line.lstrip("/") for line in record.read_text().splitlines())
    return {f"/{path.relative_to(root)}" for path in paths if path.is_file() and not path.is_symlink()}


def _shipped(root: Path, package: str, architecture: str) -> set[str]:
    directory = root / "var/lib/dpkg/info"
    (record,) = (
        path for name in (f"{package}:{architecture}", package) if (path := directory / f"{name}.md5sums").exists()
    )
    paths = [line.split(maxsplit=1)[1] for line in record.read_text().splitlines()]
    wanted = re.compile(rf"usr/lib/{TRIPLETS[architecture]}/.*(lib[^/]+\.so(\.[0-9.]+)?)")
    return {match[1] for path in paths if (match := wanted.fullmatch(path))}


def expect_complete(
    tree: Tree, found: Planned, shipped: set[str], architecture: str = "amd64", reason: str = "Present"
) -> None:
    """Assert that every library in the packages is found by its soname, for this processor and no other."""
    assert (found.libraries.status, found.libraries.reason) == (Status.TRUE, reason), found.libraries
    assert found.problems == ()
    directory = f"usr/lib/{TRIPLETS[architecture]}/"
    here = {target: file for target, file in found.files.items() if target.startswith(directory) and ".so" in target}
    real = {target.rpartition("/")[2]: file for target, file in here.items() if not file.link}
    assert shipped - real.keys() == set()
    # Libraries of NVIDIA's external platforms are in packages of their own.
    assert {name for name in real.keys() - shipped if not name.startswith("libnvidia-egl-")} == set()
    for name, file in real.items():
        header = run(["readelf", "--file-header", "--dynamic", tree.tree / file.source.lstrip("/")])
        assert PROCESSORS[architecture] in header, (name, header)
        match = re.search(r"Library soname: \[(.*)\]", header)
        soname = match[1] if match else name
        by_soname = here[file.target.removesuffix(name) + soname]
        assert name in (by_soname.link, by_soname.target.rpartition("/")[2]), by_soname


@pytest.mark.parametrize(
    ("layout", "suite"),
    [("split", "trixie"), ("flat", "trixie"), pytest.param("split", "bookworm", marks=pytest.mark.exhaustive)],
)
def test_layouts_of_distributions(copy: Path, layout: Layout, suite: str) -> None:
    """Debian 13 and 12 as packaged, and the flat layout, have all libraries of the packages and no 32-bit file."""
    packages = host_root("split", suite)
    version = current_version(packages)
    tree = Tree(linked(host_root(layout, suite), copy))
    found = planned(tree, version)
    expect_complete(tree, found, packaged(packages, version))
    assert "usr/bin/nvidia-smi" in found.files
    assert not [target for target in found.files if "i386" in target]


def test_arm64(copy: Path) -> None:
    """The tree's own ldconfig, emulated, writes the loader cache: amd64's does not know arm64's libraries."""
    packages = arm64_root()
    version = current_version(packages, "arm64")
    tree = Tree(linked(packages, copy), "arm64")
    raw = host_runner((*tree.ldconfig, "-p"), 30).stdout.decode()
    assert "(libc6,AArch64)" in raw
    found = planned(tree, version)
    expect_complete(tree, found, packaged(packages, version, "arm64"), "arm64")
    assert {target.split("/")[2] for target in found.files if target.startswith("usr/lib/")} == {TRIPLETS["arm64"]}
    assert found.goal.handoff.architecture == "aarch64"
    foreign = host_runner(("/sbin/ldconfig", "-v", "-i", "-X", "-r", str(tree.tree), "-C", "/etc/foreign.cache"), 30)
    assert "unknown machine 183" in foreign.stderr.decode(), foreign
    assert not host_runner((*tree.ldconfig, "-p", "-C", "/etc/foreign.cache"), 30).stdout.count(b"libcuda")


def test_both_architectures_of_one_host(copy: Path) -> None:
    """32-bit libraries are handed over too, each architecture in its own directory."""
    packages = crowded_root()
    tree = Tree(linked(packages, copy))
    current = current_version(packages)
    found = planned(tree, current)
    expect_complete(tree, found, packaged(packages, current))
    expect_complete(tree, found, packaged(packages, current, "i386"), "i386")


def test_two_drivers_side_by_side_in_debian(copy: Path) -> None:
    """The alternatives system chooses the driver; files of another driver in the same directories are left out.

    If the loaded module is the other driver's, not even the host's own programs work, and the condition says so.
    """
    packages = crowded_root()
    current, older = current_version(packages), older_version(packages)
    tree = Tree(linked(packages, copy))
    found = planned(tree, current)
    expect_complete(tree, found, packaged(packages, current))
    assert not [target for target in found.files if older in target]
    mismatch = planned(tree, older)
    assert mismatch.libraries.reason == "VersionMismatch"
    assert older in mismatch.libraries.message
    assert current in mismatch.libraries.message
    assert mismatch.files == {}
    run(["chroot", tree.tree, "update-alternatives", "--set", "nvidia", f"/usr/lib/nvidia/tesla-{older.split('.')[0]}"])
    run(tree.ldconfig)
    chosen = planned(tree, older)
    # Only the current driver has firmware, Xorg's modules and profiles installed.
    expect_complete(tree, chosen, packaged(packages, older), reason="PartlyOtherVersion")
    assert f"/lib/firmware/nvidia/{current}/gsp_ga10x.bin" in chosen.libraries.message
    assert not [target for target in chosen.files if current in target]


def test_two_drivers_in_the_loader_cache(copy: Path) -> None:
    """After the runfile, the loader prefers another version in /usr/local/lib, but the module decides."""
    packages = crowded_root()
    current, older = current_version(packages), older_version(packages)
    tree = Tree(linked(packages, copy))
    _put_libraries(tree, older, "usr/local/lib")
    listed = host_runner((*tree.ldconfig, "-p"), 30).stdout.decode()
    first = next(line for line in listed.splitlines() if line.startswith("\tlibcuda.so.1 ") and "x86-64" in line)
    assert first.endswith(" => /usr/local/lib/libcuda.so.1")
    found = planned(tree, current)
    expect_complete(tree, found, packaged(packages, current))
    assert not [file for file in found.files.values() if file.source.startswith("/usr/local/")]
    other = planned(tree, older)
    expect_complete(tree, other, packaged(packages, older), reason="PartlyOtherVersion")
    assert not [target for target in other.files if current in target]


@pytest.mark.parametrize("module", ["current", "older"])
def test_a_cuda_compatibility_directory(copy: Path, module: str) -> None:
    """A libcuda of another version is first in the loader cache. It is never used, even if it matches the module."""
    packages = crowded_root()
    current, older = current_version(packages), older_version(packages)
    tree = Tree(linked(packages, copy))
    compat = "usr/local/cuda/compat"
    _put_libraries(tree, older, compat, "libcuda.so.*", "libnvidia-ptxjitcompiler.so.*", "libnvidia-nvvm.so.*")
    tree.file("/etc/ld.so.conf.d/000-cuda-compat.conf", f"/{compat}\n")
    run(tree.ldconfig)
    listed = host_runner((*tree.ldconfig, "-p"), 30).stdout.decode()
    assert listed.index(f"=> /{compat}/libcuda.so.1") < listed.index("=> /lib/x86_64-linux-gnu/libcuda.so.1")
    found = planned(tree, current if module == "current" else older)
    if module == "current":
        expect_complete(tree, found, packaged(packages, current))
        assert not [file for file in found.files.values() if "compat" in file.source]
    else:
        assert found.libraries.reason == "VersionMismatch", found.libraries
        assert found.files == {}


def test_translated_messages(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a German host, ldconfig's header is German. The agent runs it in the C locale and can read the listing."""
    packages = crowded_root()
    tree = Tree(linked(packages, copy))
    german = run([*tree.ldconfig, "-p"], env={"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"})
    assert "libs found in cache" not in german.partition("\n")[0]
    assert isinstance(parse_listing(german), Broken)
    for name in ("LANG", "LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    expect_complete(tree, planned(tree, current_version(packages)), packaged(packages, current_version(packages)))


def _put_libraries(tree: Tree, version: str, directory: str, *patterns: str) -> None:
    """Put a version's libraries into another directory, with soname links, but without the alternatives' links."""
    target = tree.tree / directory
    target.mkdir(parents=True, exist_ok=True)
    for place in (LIBRARIES, LIBRARIES / "nvidia" / f"tesla-{version.split('.')[0]}"):
        for pattern in patterns or ("lib*.so.*",):
            for file in (tree.tree / place).glob(pattern):
                if file.name.endswith(f".so.{version}") and not file.is_symlink():
                    (target / file.name).hardlink_to(file)
    run(tree.ldconfig)


# ---- what pods get through the real nvidia-ctk

NO_PART_OF_PODS = re.compile(
    # Documentation, and files that set up the host.
    r"/usr/share/(doc|bug|lintian|man|initramfs-tools)/.*|.*\.1\.gz|/etc/init\.d/.*|/usr/lib/systemd/.*"
    # For the administrator of the kernel module, and Debian's checks; the firmware itself does count.
    r"|/usr/lib/nvidia/(check-for|alternate|pre-install).*|.*/nvidia-bug-report\.sh|.*/nvidia\.ids"
)


def test_pods_get_everything_that_the_driver_ships(copy: Path, tmp_path: Path) -> None:
    """Each 64-bit and 32-bit file of the packages is in the specification: nvidia-ctk lists it or the agent adds it."""
    packages = crowded_root()
    current = current_version(packages)
    tree = Tree(linked(packages, copy))
    found = planned(tree, current)
    assert found.libraries.message == f"{len(found.files)} files of driver {current} from the host's loader cache"
    spec = specified(tree, found, tmp_path)
    mounts = {each["hostPath"]: each["containerPath"] for each in spec["containerEdits"]["mounts"]}
    (request,) = found.goal.handoff.requests
    sources = {f"{request.driver_root}/{target}": file.source for target, file in found.files.items()}
    given = {sources[path] for path in mounts}
    shipped: set[str] = set()
    # Separate packages have separate versions.
    versions = {SOURCE: current, "nvidia-persistenced": current, "nvidia-egl-gbm": "", "egl-wayland": ""}
    for source, version in versions.items():
        of_source = set(_packages(packages, version, source))
        assert of_source, source
        shipped |= {path for each in of_source for path in _files(packages, *each)}
    missing = {path for path in shipped - given if not NO_PART_OF_PODS.fullmatch(path)}
    assert missing == set(), sorted(missing)
    expect_groups(mounts.values(), current)
    assert {each for each in mounts.values() if each.startswith(f"/usr/lib/{TRIPLETS['i386']}/")}


def specified(tree: Tree, found: Planned, work: Path) -> dict[str, Any]:
    """Stage the driver root; return the specification by the real nvidia-ctk and the agent: verified, and valid CDI."""
    (grant,) = found.goal.grants
    assert grant.driver_root
    stage(grant.driver_root, tree)
    (request,) = found.goal.handoff.requests
    request, live = with_simulated_nodes(request)
    staged = tree.tree / TREES.lstrip("/") / str(grant.driver_root.index)
    machine = GeneratorMachine(work, staged, request, toolkit() / "nvidia-ctk")
    machine.make_directory(spec_directory("nvidia"))
    spec = NVIDIA.generate(machine, request, spec_directory("nvidia"), live).spec
    present = {path for path in host_paths(spec) if (staged / path.removeprefix(f"{request.driver_root}/")).exists()}
    verdict = NVIDIA.verify(spec, request, live, present)
    assert (verdict.problems, verdict.missing_gpus, verdict.not_in_spec) == ((), (), ())
    assert isinstance(spec, dict)
    (work / "spec.json").write_text(json.dumps(spec))
    run([bed_tools() / "cdi-validate", work / "spec.json"])
    return spec


def expect_groups(container_paths: Collection[str], version: str) -> None:
    """Assert that one file of each group is where its users look for it."""
    assert set(container_paths) >= {
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
        "/etc/OpenCL/vendors/nvidia.icd",
        "/usr/share/nvidia/nvoptix.bin",
        f"/usr/share/nvidia/nvidia-application-profiles-{version}-rc",
        "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
        f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{version}",
        "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",
        f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin",
        f"/usr/lib/{TRIPLETS['amd64']}/nvidia/wine/nvngx.dll",
        f"/usr/lib/{TRIPLETS['amd64']}/libnvidia-api.so.1",
        *(
            f"/usr/lib/{triplet}/vdpau/libvdpau_nvidia.so.{version}"
            for triplet in (TRIPLETS["amd64"], TRIPLETS["i386"])
        ),
        *(f"/usr/bin/{name}" for name in ("nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control")),
    }
    assert "/usr/bin/nvidia-modprobe" not in container_paths
