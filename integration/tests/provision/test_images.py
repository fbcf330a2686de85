"""Root file systems from images, by the real skopeo, umoci and docker-registry, without a virtual machine."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent.config.settings import ImageSettings
from agent.host.provision.binaries import DIRECTORY as BINARIES
from agent.host.provision.image import choose_image, inspect, unpack
from agent.host.provision.node_files import NodeInputs, node_files
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.process import host_runner
from agent.system.tool_runner import tool_runner
from integration.bed.cache import REPOSITORY
from integration.bed.machine.oci_layout import INIT, Entry, Layout, directory, link
from integration.bed.process import run
from integration.bed.registry import PASSWORD, Registry, credentials
from integration.tests.provision.interrupted_unpack import STAGES
from tests.fakes.node_settings import CA, node_settings

pytestmark = pytest.mark.scenario("003")

OTHER = "sha256:" + "0" * 64
NODE = (INIT, Entry("etc/os-release", b"ID=ubuntu\n"))
SYSTEM = System(host_runner, tool_runner=tool_runner)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Images: `node` for amd64, `arm` for arm64, and `both` for both."""
    layout = Layout(tmp_path_factory.mktemp("layout"))
    layout.add("node", NODE)
    layout.add("arm", NODE, architecture="arm64")
    layout.add_index("both", {"arm64": (INIT,), "amd64": NODE})
    layout.add("plain", (Entry("etc/os-release"),))
    return layout


@pytest.fixture(scope="module")
def registry(layout: Layout) -> Iterator[Registry]:
    """A registry with a login, and with the layout's images as nodes/TAG:1."""
    with Registry(login=True) as registry:
        for tag in ("node", "arm", "both"):
            registry.copy(layout.name(tag), f"nodes/{tag}", "1")
        yield registry


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where root file systems are made. At the end, the directory has nothing else."""
    place = tmp_path / "machines/node"
    yield place
    assert set(os.listdir(place.parent) if place.parent.exists() else ()) <= {"node"}


def place(registry: Registry, name: str) -> str:
    return f"docker://127.0.0.1:{registry.port}/{name}"


def settings(registry: Registry, name: str, **more: str) -> ImageSettings:
    login = registry.directory / "auth.json"
    login.touch(0o600)
    login.write_bytes(credentials(registry, "127.0.0.1"))
    access = {"credentials": str(login), "ca_directory": str(registry.client_directory())}
    return ImageSettings.validated({"name": place(registry, name), **access, **more})


def make(settings: ImageSettings, root: Path) -> list[str]:
    """Make a root file system, and return the messages on its progress."""
    told: list[str] = []
    name = choose_image(settings, "agent-ubuntu2404")
    unpack(settings, inspect(settings, name, SYSTEM), str(root), SYSTEM, told.append)
    return told


def failure(settings: ImageSettings, root: Path) -> str:
    """Return the sentence with which making a root file system fails, and what to do next."""
    with pytest.raises(AgentError) as caught:
        make(settings, root)
    assert caught.value.hint
    assert PASSWORD not in str(caught.value)
    assert not root.exists()
    return str(caught.value)


def test_from_a_registry_with_login_and_own_ca(registry: Registry, layout: Layout, root: Path) -> None:
    found = inspect(settings(registry, "nodes/node:1"), place(registry, "nodes/node:1"), SYSTEM)
    manifest = run(["skopeo", "inspect", "--raw", layout.name("node")])
    assert found.digest == found.name.partition("@")[2]
    assert (found.architecture, found.size) == ("amd64", sum(each["size"] for each in json.loads(manifest)["layers"]))
    make(settings(registry, "nodes/node:1"), root)
    assert (root / "etc/os-release").read_bytes() == b"ID=ubuntu\n"
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o700
    with pytest.raises(AgentError, match="exists already"):
        make(settings(registry, "nodes/node:1"), root)


def test_of_several_architectures_the_hosts_is_taken(registry: Registry, layout: Layout, root: Path) -> None:
    make(settings(registry, "nodes/both:1"), root)
    assert (root / "etc/os-release").exists()
    found = inspect(settings(registry, "nodes/both:1"), place(registry, "nodes/both:1"), SYSTEM)
    assert found.digest == inspect(ImageSettings(name=layout.name("both")), layout.name("both"), SYSTEM).digest


def test_from_a_layout_and_from_archives(layout: Layout, tmp_path: Path) -> None:
    archive, compressed = tmp_path / "node.tar", tmp_path / "node.tar.gz"
    run(["skopeo", "--insecure-policy", "copy", layout.name("node"), f"docker-archive:{archive}:nodes:1"])
    run(["sh", "-c", f"gzip <{archive} >{compressed}"])
    names = (layout.name("node"), layout.name("both"), f"docker-archive:{archive}", f"docker-archive:{archive}:nodes:1")
    for number, name in enumerate(names):
        root = tmp_path / f"machines/node{number}"
        make(ImageSettings(name=name), root)
        assert (root / "etc/os-release").read_bytes() == b"ID=ubuntu\n"
    version = run(["skopeo", "--version"]).split()[2]
    if version.startswith("1.9."):
        # skopeo of Debian 12 reads no compressed archives.
        found = failure(ImageSettings(name=f"docker-archive:{compressed}"), tmp_path / "machines/compressed")
        assert "decompress it" in found
    else:
        make(ImageSettings(name=f"docker-archive:{compressed}"), tmp_path / "machines/compressed")


OFFLINE = """
import sys
from agent.config.settings import ImageSettings
from agent.host.provision.binaries import fetch
from agent.host.provision.image import inspect
from agent.host.provision.image import unpack
from agent.model.node import NodeBinary
from agent.system.files import System
from agent.system.process import host_runner
from agent.system.tool_runner import tool_runner

name, root, program, digest, programs = sys.argv[1:]
settings, system = ImageSettings(name=name), System(host_runner, tool_runner=tool_runner)
unpack(settings, inspect(settings, name, system), root, system)
fetch(NodeBinary("kubelet", program, digest, "/usr/local/bin/kubelet"), programs, system)
"""


def test_an_offline_bundle_needs_no_network(layout: Layout, root: Path, tmp_path: Path) -> None:
    """In a network namespace whose only interface is down."""
    program = tmp_path / "bundle/kubelet"
    program.parent.mkdir()
    program.write_bytes(b"a program")
    digest = hashlib.sha256(b"a program").hexdigest()
    arguments = (layout.name("node"), root, program, digest, tmp_path / "programs")
    run(["unshare", "--net", sys.executable, "-c", OFFLINE, *arguments], cwd=REPOSITORY)
    assert (root / "etc/os-release").read_bytes() == b"ID=ubuntu\n"
    assert (tmp_path / "programs" / digest).read_bytes() == b"a program"


def test_layers_with_zstd(layout: Layout, tmp_path: Path, root: Path) -> None:
    """umoci 0.4 does not know them."""
    name = f"oci:{tmp_path}/zstd:node"
    options = ("--insecure-policy", "copy", "--dest-compress-format", "zstd")
    run(["skopeo", *options, layout.name("node"), name])
    assert "tar+zstd" in run(["skopeo", "inspect", "--raw", name])
    make(ImageSettings(name=name), root)
    assert (root / "etc/os-release").exists()


def test_a_mirror_has_the_same_image(registry: Registry, layout: Layout, root: Path, tmp_path: Path) -> None:
    """The registry itself says what a tag means. For a pinned image it is not even asked: here, it does not exist."""
    with Registry() as mirror:
        authorities = tmp_path / "authorities"
        authorities.mkdir()
        for each in (registry, mirror):
            (authorities / f"{each.port}.crt").write_bytes(each.authority)
        both = {"ca_directory": str(authorities), "mirror": place(mirror, "copies")}
        # The mirror has another image under the same name, and not the registry's.
        mirror.copy(layout.name("plain"), "copies/node", "1")
        assert "manifest unknown" in failure(settings(registry, "nodes/node:1", **both), root)
        digest = mirror.copy(layout.name("node"), "copies/node", "other-tag")
        pinned = ImageSettings.validated({"name": f"docker://127.0.0.1:9/nodes/node:1@{digest}", **both})
        assert inspect(pinned, pinned.name, SYSTEM).name == place(mirror, f"copies/node@{digest}")
        make(settings(registry, "nodes/node:1", **both), root)
    assert (root / "etc/os-release").exists()


def test_a_signature_policy(registry: Registry, root: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "reject"}]}')
    assert "image.signature_policy" in failure(settings(registry, "nodes/node:1", signature_policy=str(policy)), root)
    missing = settings(registry, "nodes/node:1", signature_policy="/nonexistent/policy.json")
    assert "image.signature_policy: /nonexistent/policy.json does not exist" in failure(missing, root)
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    make(settings(registry, "nodes/node:1", signature_policy=str(policy)), root)


@pytest.mark.parametrize(
    ("name", "more", "message", "hint"),
    [
        ("nodes/node:none", {}, "manifest unknown", "image.tag"),
        ("none/node:1", {}, "manifest unknown", "image.repository"),
        (f"nodes/node@{OTHER}", {}, "manifest unknown", "check image.name"),
        ("nodes/arm:1", {}, "is for 'arm64', and this host is amd64", "architecture"),
        ("nodes/node:1", {"credentials": ""}, "authentication required", "image.credentials"),
        ("nodes/node:1", {"ca_directory": ""}, "x509: certificate signed by unknown authority", "image.ca_directory"),
        ("nodes/node:1", {"ca_directory": "/nonexistent"}, "image.ca_directory: /nonexistent does not exist", "put it"),
    ],
)
def test_what_goes_wrong_with_a_registry(
    registry: Registry, root: Path, name: str, more: dict[str, str], message: str, hint: str
) -> None:
    found = failure(settings(registry, name, **more), root)
    assert message in found
    assert hint in found


def test_what_goes_wrong_with_other_sources(layout: Layout, root: Path, tmp_path: Path) -> None:
    for name, message in (
        ("docker://127.0.0.1:9/nodes:1", "connection refused"),
        (layout.name("none"), "no descriptor found"),
        (layout.name("arm"), "is for 'arm64', and this host is amd64"),
        (layout.name("plain"), "has no init"),
        (f"oci:{tmp_path}/none:node", "no such file or directory"),
        (f"docker-archive:{tmp_path}/none.tar", "no such file or directory"),
    ):
        assert message in failure(ImageSettings(name=name), root)


def test_an_index_without_the_hosts_architecture(root: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add_index("arm", {"arm64": NODE, "riscv64": NODE})
    found = failure(ImageSettings(name=layout.name("arm")), root)
    assert "has no usable image for linux/amd64; its index lists 'linux/arm64, linux/riscv64'" in found


def test_a_damaged_layer_or_manifest(root: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(("layer", "manifest")):
        layout = Layout(tmp_path / f"layout{number}")
        digests = layout.add_index("node", {"amd64": (*NODE, Entry("padding", os.urandom(1 << 20)))})
        blobs = layout.place / "blobs/sha256"
        largest = max(blobs.iterdir(), key=lambda each: each.stat().st_size)
        damaged = largest if kind == "layer" else blobs / digests["amd64"].partition(":")[2]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")
        found = failure(ImageSettings(name=layout.name("node")), root)
        assert "damaged" in found


def test_a_full_disk(layout: Layout, tmp_path: Path) -> None:
    """A file system of 300 MiB is too small for an image that needs 400 MiB; with 200 MiB, none is begun."""
    disk = tmp_path / "disk"
    disk.mkdir()
    large = Layout(tmp_path / "layout")
    # Zeros: 1 MiB compressed, 400 MiB on disk.
    large.add("large", (INIT, *(Entry(f"zeros/{each}", bytes(50 << 20)) for each in range(8))))
    run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", disk])
    try:
        found = failure(ImageSettings(name=large.name("large")), disk / "node")
        assert "more bytes or files than the file system has room for" in found
        assert "free up space" in found
        assert os.listdir(disk) == []
        (disk / "filled").write_bytes(bytes(100 << 20))
        found = failure(ImageSettings(name=layout.name("node")), disk / "node")
        assert "needs 256 MiB, but only 200 MiB" in found
    finally:
        run(["umount", disk])


@pytest.fixture(scope="module")
def content() -> bytes:
    """60 MiB that no layer compresses, so that a program takes long enough to be killed in it."""
    return os.urandom(60 << 20)


@pytest.fixture(scope="module")
def slow(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """An image with these bytes in 60 files. To make it takes as long as to unpack it."""
    layout = Layout(tmp_path_factory.mktemp("slow") / "layout")
    layout.add("node", NODE, [Entry(f"data/{each}", content[each << 20 :][: 1 << 20]) for each in range(60)])
    return layout


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_every_stage(stage: str, slow: Layout, content: bytes, root: Path) -> None:
    """After a SIGKILL, no program goes on, nothing looks complete that is not, and the next attempt succeeds."""
    module = "integration.tests.provision.interrupted_unpack"
    killed = subprocess.run([sys.executable, "-m", module, stage, slow.name("node"), root], cwd=REPOSITORY)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while _running(str(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(str(root))
    assert root.exists() == (stage == "after rename")
    assert os.listdir(root.parent) != []
    if not root.exists():
        make(ImageSettings(name=slow.name("node")), root)
    assert [(root / f"data/{each}").read_bytes() for each in range(60)] == [
        content[each << 20 :][: 1 << 20] for each in range(60)
    ]
    shutil.rmtree(root.with_name("node.partial"), ignore_errors=stage != "after rename")


def _running(place: str) -> list[str]:
    """Return the command lines of processes that name a place."""
    lines = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if place in line and each.parent.name != str(os.getpid()):
            lines.append(line)
    return lines


INPUTS = NodeInputs("gpu-1", "10.0.0.7", CA, own_network=True)
FILES = node_files("gpu", node_settings(), INPUTS)
WRITTEN = [f"{BINARIES}/kubelet", *(file.path for file in FILES)]
"""Every path that `up` writes."""


def _hostile(path: str, depth: int, target: str) -> tuple[Entry, ...]:
    """Return entries in which the first `depth` components of a path are directories, and the next is a link."""
    parts = path.strip("/").split("/")
    above = ["/".join(parts[:count]) for count in range(1, depth + 1)]
    return (*(directory(each) for each in above), link("/".join(parts[: depth + 1]), target))


@pytest.mark.parametrize("path", WRITTEN)
def test_links_in_an_image_lead_nowhere_on_the_host(path: str, tmp_path: Path) -> None:
    """Each component of a path that is written may be a link, absolute or by .., to the host's place of that name."""
    host = tmp_path / "host"
    for number, depth in enumerate(range(len(path.strip("/").split("/")))):
        parts = path.strip("/").split("/")[: depth + 1]
        outside = host.joinpath(*parts) if depth + 1 < path.count("/") else host / "new-file"
        (host / path.strip("/")).parent.mkdir(parents=True, exist_ok=True)
        for kind, target in enumerate((str(outside), "../" * 40 + str(outside).strip("/"))):
            layout = Layout(tmp_path / f"layout{number}-{kind}")
            layout.add("hostile", (INIT, *_hostile(path, depth, target)))
            root = tmp_path / f"machines/node{number}-{kind}"
            make(ImageSettings(name=layout.name("hostile")), root)
            writer = System(host_runner).image(str(root))
            writer.write(path, b"ours")
            assert writer.read(path, 100) == b"ours"
    assert [each for each in host.rglob("*") if not each.is_dir()] == []


@pytest.mark.parametrize(
    "target", ["/etc", "../../../../../../../../../../etc", "/proc/self/root/etc", "/proc/1/root/etc"]
)
def test_a_root_whose_etc_is_the_hosts(target: str, tmp_path: Path, root: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add("hostile", (INIT, link("etc", target)))
    make(ImageSettings(name=layout.name("hostile")), root)
    writer = System(host_runner).image(str(root))
    name = f"/etc/unbounded-agent-test-{os.getpid()}"
    # A link to itself is an error, any other one leads to a place in the root.
    with suppress(OSError):
        writer.write(name, b"ours")
    with pytest.raises(OSError, match=r"No such file|symbolic links"):
        writer.read("/etc/hostname", 1000)
    assert not Path(name).exists()


def test_fifos_devices_and_links_in_place_of_files(tmp_path: Path, root: Path) -> None:
    """Opening a FIFO would wait forever; opening a device acts on it: here, 4:64 is a serial port."""
    kinds = (
        {"kind": tarfile.FIFOTYPE},
        {"kind": tarfile.CHRTYPE, "device": (4, 64)},
        {"kind": tarfile.BLKTYPE, "device": (7, 0)},
        {"kind": tarfile.SYMTYPE, "link": str(tmp_path / "new")},
        {"kind": tarfile.LNKTYPE, "link": "sbin/init"},
    )
    entries = [Entry(f"etc/{number}", **kind) for number, kind in enumerate(kinds)]  # type: ignore[arg-type]
    layout = Layout(tmp_path / "layout")
    layout.add("hostile", (INIT, *entries))
    make(ImageSettings(name=layout.name("hostile")), root)
    assert stat.S_ISFIFO((root / "etc/0").stat().st_mode)
    assert stat.S_ISCHR((root / "etc/1").stat().st_mode)
    writer = System(host_runner).image(str(root))
    for number in range(len(kinds)):
        if number < 3:
            with pytest.raises(OSError, match="not a regular file"):
                writer.read(f"/etc/{number}", 100)
        writer.write(f"/etc/{number}", b"ours", 0o600)
        found = (root / f"etc/{number}").lstat()
        assert (stat.S_ISREG(found.st_mode), stat.S_IMODE(found.st_mode)) == (True, 0o600)
    assert (root / "sbin/init").read_bytes() == INIT.content
    assert not (tmp_path / "new").exists()


def test_layers_that_climb_out(tmp_path: Path, root: Path) -> None:
    """umoci itself keeps names with .., and a later layer's files below an earlier layer's link, within the root."""
    host = tmp_path / "host"
    host.mkdir()
    up = "../" * 40
    layout = Layout(tmp_path / "layout")
    layout.add(
        "hostile",
        (INIT, link("out", str(host)), link(".", str(host))),
        (Entry(f"{up}{str(host).strip('/')}/one"), Entry("out/two"), Entry("three")),
    )
    try:
        make(ImageSettings(name=layout.name("hostile")), root)
    except AgentError:
        assert not root.exists()
    assert os.listdir(host) == []
