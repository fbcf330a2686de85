"""Which image a root file system is made from, what skopeo and umoci are asked, and how failures are explained."""

import gzip
import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.config.settings import ImageSettings
from agent.host.provision.image import choose_image, explained, inspect, unpack
from agent.model.errors import AgentError, ConfigError, ExitCodeError
from agent.model.node import NodeImage
from agent.system.copy import DOOR
from agent.system.files import System
from agent.system.process import Completed
from tests.fakes.archives import entry, packed, raw, record
from tests.fakes.clearing import clear_below, clears
from tests.fakes.host import Host, ScriptedRunner
from tests.fakes.layouts import put_layout
from tests.fakes.waiting import wait_for

NODES = ImageSettings(repository="docker://registry.example.com/nodes", tag="1.2")
NAME = "docker://registry.example.com/nodes/agent:1.2"
PLACE = "docker://registry.example.com/nodes/agent"
MANIFEST = json.dumps({"layers": [{"size": 100}, {"size": 20}]})
ANONYMOUS = ("--no-creds",)


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


PINNED = f"{PLACE}@{digest(MANIFEST)}"


@pytest.fixture
def source(host: Host) -> Host:
    """A host with umoci, and a registry with the image."""
    host.command("umoci", "--version", stdout="umoci version 0.4.7+ds-3+b7\n")
    answer(host, NAME, MANIFEST)
    answer(host, PINNED, MANIFEST)
    return host


def answer(host: Host, name: str, manifest: str, *options: str, architecture: str = "amd64") -> None:
    options = options or ANONYMOUS
    host.command("skopeo", "inspect", "--raw", *options, name, stdout=manifest)
    host.command("skopeo", "inspect", "--config", *options, name, stdout=json.dumps({"architecture": architecture}))


def test_the_image_of_a_machine() -> None:
    assert choose_image(NODES, "agent-ubuntu2404") == "docker://registry.example.com/nodes/agent-ubuntu2404:1.2"
    named = replace(NODES, name="oci:/srv/image:1")
    assert choose_image(named, "agent-ubuntu2404-nvidia") == "oci:/srv/image:1"


@pytest.mark.parametrize(("name", "place"), [(NAME, PLACE), ("docker://localhost:5000/agent",) * 2])
def test_an_image_is_pinned(source: Host, name: str, place: str) -> None:
    """A port is no tag."""
    for each in (name, pinned := f"{place}@{digest(MANIFEST)}"):
        answer(source, each, MANIFEST)
    assert inspect(NODES, name, source) == NodeImage(pinned, digest(MANIFEST), "amd64", 120)


def test_another_architecture_is_refused(source: Host, tmp_path: Path) -> None:
    answer(source, PINNED, MANIFEST, architecture="arm64")
    with pytest.raises(AgentError, match="is for 'arm64', and this host is amd64"):
        inspect(NODES, NAME, source)
    with pytest.raises(AgentError, match="architecture riscv64 is not supported"):
        inspect(NODES, NAME, Host(tmp_path / "other", "riscv64"))


@pytest.mark.parametrize("name", [f"{NAME}@{{}}", f"{PLACE}@{{}}"])
def test_a_pinned_image(source: Host, name: str) -> None:
    """skopeo accepts no name with a tag and a digest. What the tag means is not asked."""
    assert inspect(NODES, name.format(digest(MANIFEST)), source).name == PINNED
    assert not [call for call in source.runner.calls if NAME in call]


def test_a_registry_that_sends_another_image(source: Host) -> None:
    pinned = f"{PLACE}@sha256:{'0' * 64}"
    answer(source, pinned, MANIFEST)
    with pytest.raises(AgentError, match=f"sent an image with digest {digest(MANIFEST)}"):
        inspect(NODES, pinned, source)


def indexed(host: Host, *manifests: tuple[str, str, str, dict[str, str]]) -> None:
    """Answer with an index of images: of each, its content, system, architecture, and what else is known of it."""
    entries = [
        {"digest": digest(content), "platform": {"os": system, "architecture": architecture, **more}}
        for content, system, architecture, more in manifests
    ]
    index = json.dumps({"manifests": entries})
    answer(host, NAME, index)
    answer(host, f"{PLACE}@{digest(index)}", index)


ATTESTATION, ARM = ("x", "unknown", "unknown", dict[str, str]()), ("y", "linux", "arm64", {"variant": "v8"})


def test_the_hosts_architecture_of_an_index(source: Host) -> None:
    indexed(source, ATTESTATION, ARM, (MANIFEST, "linux", "amd64", {}))
    assert inspect(NODES, NAME, source) == NodeImage(PINNED, digest(MANIFEST), "amd64", 120)
    indexed(source, ATTESTATION, ARM)
    with pytest.raises(AgentError, match="has no usable image for linux/amd64; its index lists 'linux/arm64'"):
        inspect(NODES, NAME, source)


@pytest.mark.parametrize("variant", [{}, {"variant": ""}, {"variant": "v1"}])
def test_the_variant_of_an_index_that_every_processor_runs(source: Host, variant: dict[str, str]) -> None:
    """Others, such as amd64/v3, are used only if there is nothing else: older processors do not run their programs."""
    newer, usual = ("v3", "linux", "amd64", {"variant": "v3"}), (MANIFEST, "linux", "amd64", variant)
    for entries in ((newer, usual), (usual, newer), ((MANIFEST, *newer[1:]),)):
        indexed(source, *entries)
        assert inspect(NODES, NAME, source).digest == digest(MANIFEST)


@pytest.mark.parametrize("image", ["", ":node", ":registry.example.com:5000/nodes/agent:1"])
def test_an_index_in_a_layout(source: Host, image: str) -> None:
    """The path ends at the first colon, and the image's name may have slashes and further colons."""
    entry = {"digest": digest(MANIFEST), "platform": {"os": "linux", "architecture": "amd64"}}
    name = f"oci:/srv/layout{image}"
    source.command("skopeo", "inspect", "--raw", name, stdout=json.dumps({"manifests": [entry]}))
    source.command("skopeo", "inspect", "--config", name, stdout='{"architecture": "amd64"}')
    source.file(f"/srv/layout/blobs/{digest(MANIFEST).replace(':', '/')}", MANIFEST)
    assert inspect(NODES, name, source).digest == digest(MANIFEST)


@pytest.mark.parametrize(
    "manifest",
    [
        "no JSON", "[]", "{}", '{"layers": {}}', '{"layers": [{"size": "1"}]}', '{"manifests": [{"digest": 1}]}',
        '{"manifests": [{"digest": "sha256:../..", "platform": {"os": "linux", "architecture": "amd64"}}]}',
    ],
)  # fmt: skip
def test_a_strange_manifest_is_an_error(source: Host, manifest: str) -> None:
    answer(source, NAME, manifest)
    answer(source, f"{PLACE}@{digest(manifest)}", manifest)
    with pytest.raises(AgentError, match=r"registry\.example\.com"):
        inspect(NODES, NAME, source)


def test_a_mirror_is_asked_for_the_registrys_digest(source: Host) -> None:
    mirrored = f"docker://mirror.example.com/copies/agent@{digest(MANIFEST)}"
    answer(source, mirrored, MANIFEST)
    settings = replace(NODES, mirror="docker://mirror.example.com/copies")
    assert inspect(settings, NAME, source).name == mirrored


def test_login_and_own_ca(source: Host) -> None:
    """The login is a file that only root can read."""
    source.file("/etc/unbounded-agent/auth.json", '{"auths": {}}')
    source.owners["/etc/unbounded-agent/auth.json"] = (0o600, 0)
    source.make_directory("/etc/ca")
    settings = replace(NODES, credentials="/etc/unbounded-agent/auth.json", ca_directory="/etc/ca")
    options = ("--authfile", "/etc/unbounded-agent/auth.json", "--cert-dir", "/etc/ca")
    answer(source, NAME, MANIFEST, *options)
    answer(source, PINNED, MANIFEST, *options)
    assert inspect(settings, NAME, source).name == PINNED
    source.owners["/etc/unbounded-agent/auth.json"] = (0o644, 0)
    with pytest.raises(ConfigError, match="chmod 0600"):
        inspect(settings, NAME, source)


def test_a_missing_policy_is_never_ignored(source: Host) -> None:
    settings = replace(NODES, signature_policy="/etc/policy.json")
    with pytest.raises(ConfigError, match=r"image.signature_policy: /etc/policy.json does not exist"):
        inspect(settings, NAME, source)


@pytest.mark.parametrize("version", ["0.4.6", "0.3.9+ds", "unknown"])
def test_an_umoci_that_writes_anywhere_is_refused(source: Host, version: str) -> None:
    source.command("umoci", "--version", stdout=f"umoci version {version}\n")
    with pytest.raises(AgentError, match=r"lets an image write anywhere .*install umoci 0.4.7 or later"):
        inspect(NODES, NAME, source)


FATAL = 'time="2026-01-02T03:04:05Z" level=fatal msg="{}"\n'
GET = r"Get \"https://r/v2/\": "
PULLS = "You have reached your pull rate limit. You may increase it by authenticating: https://www.docker.com/increase"


SKOPEO = (
    ("Error reading manifest 1 in x: manifest unknown: manifest unknown", "image.repository and image.tag"),
    ("unauthorized: authentication required", "image.credentials"),
    (f"{GET}x509: certificate signed by unknown authority", "image.ca_directory"),
    ("x509: certificate has expired or is not yet valid", "this host's clock"),
    (f"reading manifest 1 in docker.io/x: toomanyrequests: {PULLS}", "limits how much"),
    ("received unexpected HTTP status: 429 Too Many Requests", "limits how much"),
    ("received unexpected HTTP status: 503 Service Unavailable", "has a fault"),
    ("invalid status code from registry 502 (Bad Gateway)", "has a fault"),
    (f"{GET}Proxy Authentication Required", "HTTPS_PROXY"),
    (f"{GET}proxyconnect tcp: dial tcp 10.0.0.1:3128: connect: connection refused", "HTTPS_PROXY"),
    ("dial tcp: lookup r on 10.0.0.1:53: server misbehaving", "check the network"),
    ("write /x: no space left on device", "free up space"),
    ("loading tar component manifest.json: archive/tar: invalid tar header", "`gunzip`"),
    ("reading blob from docker-archive:/x.tar: unexpected EOF", "the source is damaged, or the connection broke"),
    (f"{GET}http: server gave HTTP response to HTTPS client", "give the registry a certificate"),
    (f"{GET}proxyconnect tcp: tls: first record does not look like a TLS handshake", "HTTPS_PROXY"),
    ("no image found in manifest list for architecture arm64", "for this host's architecture"),
    ("pinging container registry: connect: connection refused", "check the network"),
    ("Source image rejected: Running image x is rejected by policy.", "signature"),
)
UMOCI = "   \u2022 unpacking rootfs ...\n   \u2a2f create rootfs: unknown\n"


@pytest.mark.parametrize(
    ("stderr", "message", "hint"),
    [
        *((FATAL.format(said), said.replace("\\", ""), hint) for said, hint in SKOPEO),
        (UMOCI, "create rootfs: unknown", "correct this"),
        ("", "umoci raw: exit code 1", "again"),
    ],
)
def test_what_a_program_said(stderr: str, message: str, hint: str) -> None:
    error = explained(ExitCodeError(("umoci", "raw"), 1, stderr), "image")
    assert error.message == f"image: {message}"
    assert hint in error.hint


def test_a_signed_url_is_not_told() -> None:
    url = r"https://bucket.example.com/blob?X-Amz-Signature=s3cret&X-Amz-Date=1"
    error = explained(ExitCodeError(("skopeo",), 1, FATAL.format(rf"Get \"{url}\": timeout")), "image")
    assert error.message == 'image: Get "https://bucket.example.com/blob": timeout'


class Tools(ScriptedRunner):
    """Simulates the programs that make a root file system below `tree`."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self.tree = tree
        self.modes: list[int] = []
        """The permission bits of skopeo's directory while skopeo runs."""
        self.pulling: Callable[[], None] = lambda: None
        self.entries: dict[str, Any] = {"sbin/init": 0o755}
        self.layers: tuple[bytes, ...] = ()
        self.media_type = ""
        self.index = ""
        self.failing = ""

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.calls.append(argv)
        if argv[0] == self.failing:
            return Completed(1, b"", b"no space left on device\n")
        if clears(argv):
            return clear_below(self.tree, argv)
        if argv[0] == "skopeo":
            self.modes.append(Path(argv[argv.index("--tmpdir") + 1]).stat().st_mode & 0o777)
            self.pulling()
            layout = Path(argv[-1].removeprefix("oci:").removesuffix(":node"))
            put_layout(layout, *self.layers, media_type=self.media_type)
            if self.index:
                (layout / "index.json").write_text(self.index)
        if argv[0] == "umoci":
            for name, mode in self.entries.items():
                file = Path(argv[-1]) / name
                file.parent.mkdir(parents=True)
                file.touch(mode)
        return Completed(0, b"", b"")


ROOT = "/var/lib/machines/.node.unbounded-agent-0123456789abcdef"
IMAGE = NodeImage(PINNED, digest(MANIFEST), "amd64", 120)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.fixture
def system(tools: Tools) -> System:
    return System(tools, str(tools.tree))


def test_a_root_file_system_appears_at_once(system: System, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull() -> None:
        system.write(f"{ROOT}.partial/image/blobs/sha256/0", bytes(2 << 20))
        wait_for(lambda: told)

    told: list[str] = []
    tools.pulling = pull
    monkeypatch.setattr("agent.host.provision.image.TICK", 0.01)
    unpack(NODES, replace(IMAGE, size=3 << 20), ROOT, system, told.append)
    assert system.exists(f"{ROOT}/sbin/init")
    assert system.entries("/var/lib/machines") == (os.path.basename(ROOT),)
    assert system.mode("/var/lib/machines") == 0o700
    partial = f"{tools.tree}{ROOT}.partial"
    assert [argv[0] for argv in tools.calls] == [DOOR[0], "skopeo", "umoci", "sync", DOOR[0]]
    compression = ("--dest-compress-format", "gzip", "--dest-compress-level", "1")
    options = ("--insecure-policy", "--tmpdir", partial, "copy", "--quiet", "--retry-times", "3", "--src-no-creds")
    assert tools.calls[1:4] == [
        ("skopeo", *options, *compression, PINNED, f"oci:{partial}/image:node"),
        ("umoci", "raw", "unpack", "--image", f"{partial}/image:node", f"{partial}/root"),
        ("sync", "--file-system", partial),
    ]
    assert tools.modes == [0o700], "programs in it may be setuid and vulnerable"
    assert told == ["pulled 2 of 3 MiB (66 %)", f"unpacking {PINNED}"]
    with pytest.raises(AgentError, match="exists already"):
        unpack(NODES, IMAGE, ROOT, system)


def test_the_hosts_signature_policy(system: System, tools: Tools) -> None:
    system.write("/etc/containers/policy.json", b"{}")
    unpack(NODES, IMAGE, ROOT, system)
    assert tools.calls[1][1:3] == ("--policy", "/etc/containers/policy.json")
    system.rename(ROOT, "/var/lib/machines/node")
    system.write("/etc/own-policy.json", b"{}")
    unpack(replace(NODES, signature_policy="/etc/own-policy.json"), IMAGE, ROOT, system)
    assert tools.calls[-4][1:3] == ("--policy", "/etc/own-policy.json")


def test_a_pull_has_the_registrys_login_and_ca(tools: Tools, tmp_path: Path) -> None:
    host = Host(tmp_path, runner=tools)
    host.file("/etc/auth.json", "{}")
    host.owners["/etc/auth.json"] = (0o600, 0)
    host.make_directory("/etc/ca")
    unpack(replace(NODES, credentials="/etc/auth.json", ca_directory="/etc/ca"), IMAGE, ROOT, host)
    options = " ".join(tools.calls[1])
    assert " --src-authfile /etc/auth.json --src-cert-dir /etc/ca " in options
    assert "--src-no-creds" not in options


@pytest.mark.parametrize("program", ["skopeo", "umoci", "sync"])
def test_a_failure_leaves_nothing(system: System, tools: Tools, program: str) -> None:
    tools.failing = program
    with pytest.raises(AgentError, match="no space left on device"):
        unpack(NODES, IMAGE, ROOT, system)
    assert system.entries("/var/lib/machines") == ()


def test_an_image_without_init(system: System, tools: Tools) -> None:
    tools.entries = {"sbin/init": 0o644}
    with pytest.raises(AgentError, match="it cannot boot as a machine"):
        unpack(NODES, IMAGE, ROOT, system)
    assert system.entries("/var/lib/machines") == ()


def test_an_image_that_is_too_large(system: System, tools: Tools) -> None:
    image = NodeImage(PINNED, digest(MANIFEST), "amd64", 1 << 50)
    with pytest.raises(AgentError, match=r"needs 4294967552 MiB, but only [0-9]+ MiB are free"):
        unpack(NODES, image, ROOT, system)
    assert "skopeo" not in {argv[0] for argv in tools.calls}


def sparse(size: int) -> bytes:
    """Return an archive with one file that is a hole, as GNU tar makes it."""
    found = entry("hole", tarfile.GNUTYPE_SPARSE)
    header = bytearray(found.tobuf(tarfile.GNU_FORMAT))
    # The hole ends with a part of no bytes, and 12 digits of base 8 have no room for the size.
    header[386:410] = (1 << 95 | size).to_bytes(12, "big") + b"%011o\0" % 0
    header[483:495] = (1 << 95 | size).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def recorded(key: str, value: str) -> bytes:
    """Return an archive with a file of which a record of PAX says this."""
    return packed(entry("a", pax_headers={key: value}), form=tarfile.PAX_FORMAT)


def headed(major: str) -> bytes:
    """Return an archive in which a header has this in a field that only some formats have. It precedes a hole."""
    found = bytearray(packed(entry("a")) + b"")[:1024]
    header = bytearray(entry("b").tobuf(tarfile.GNU_FORMAT))
    header[329:337] = major.encode()
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(found) + bytes(header) + sparse(1 << 50)


END, HIDDEN = bytes(1024), raw("hidden", b"x" * 600)
"""Zeros end an archive. If only the agent takes them for that, what follows is hidden from it."""
UNUSUAL = {
    "two descriptions": raw("x", record("size", "0"), b"x") + raw("x", record("comment", "a"), b"x") + raw("a", END),
    "two names": raw("x", record("path", "harmless"), b"x") + raw("L", b".wh...\0", b"L") + raw("a"),
    "two names, the other way round": raw("L", b"harmless\0", b"L") + raw("x", record("path", "b"), b"x") + raw("a"),
    "a description for Solaris": raw(".wh.a", record("path", "harmless") + record("size", "0"), b"X") + raw("a", END),
    "a global description": raw(".wh.a", record("path", ".wh.a") + record("size", "0"), b"g") + raw("a", END),
    "a directory by one of its names": raw("a/", END, b"\0"),
    "a kind of file that is not known": raw("a", END, b"Z"),
    "a size after a zero": raw("a", END, s124=b"\0" + b"%010o" % len(END)),
    "a record with a sign": raw("x", b"+" + record("size", "1024"), b"x") + raw("a", s124=b"%011o" % 0) + END,
    "a record without an end": raw("x", record("size", "0")[:-1] + b" ", b"x") + raw("a", END),
    "a size with a sign": raw("x", record("size", "+0"), b"x") + raw("a", END),
    "the format of star": raw("a", s345=b"b" * 130, s476=b"%011o " % 0 * 2, s508=b"tar\0"),
}
"""Layers of which umoci, or another program, reads other entries than tarfile does."""


def test_a_layer_s_compression_is_what_the_manifest_says(system: System, tools: Tools) -> None:
    """umoci asks only the manifest. The same bytes may be a tar archive, and compressed with gzip."""
    tools.layers = (gzip.compress(packed(entry("sbin/init"))),)
    tools.media_type = "application/vnd.oci.image.layer.v1.tar"
    with pytest.raises(AgentError, match="damaged or unusual"):
        unpack(NODES, IMAGE, ROOT, system)


ZEROS = entry("zeros", size=1 << 50).tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)
IN_PADDING = raw("x", record("comment", "a"), b"x", padding=record("size", "0")) + raw("a", bytes(1024)) + ZEROS
OUTSIDE, LARGE = "would remove a directory outside of its own", "more bytes or files"
BOMBS = {
    "a hole": (sparse(1 << 50), "'hole' is a sparse file"),
    "a small hole": (sparse(100), "'hole' is a sparse file"),
    "zeros": (ZEROS, LARGE),
    "the parent": (packed(entry("a/.wh...")), OUTSIDE),
    "the directory itself": (packed(entry("a/.wh..")), OUTSIDE),
    "no name": (packed(entry("./.wh.")), OUTSIDE),
    "in a directory": (packed(entry(".wh.../x")), OUTSIDE),
    "no archive": (bytes(range(256)) * 4, "is damaged"),
    "sparse by a record": (recorded("GNU.sparse.offset", "0"), "is a sparse file"),
    "no path": (recorded("path", ""), "has an unusual path or size"),
    "no size": (recorded("size", ""), "has an unusual path or size"),
    "a name in the padding": (raw("L", b".wh..", b"L", padding=b"harmless") + raw("a"), OUTSIDE),
    "a record in the padding": (IN_PADDING, LARGE),
    "a long description": (raw("x", record("comment", "a" * 70000), b"x") + raw("a"), "more than 64 KiB"),
    "no end": (raw("a", b"b" * 600)[:-100], "unexpected end"),
    "a header that only Python refuses": (headed("xxxxxxx\0"), "is damaged"),
    **{kind: (layer + HIDDEN + END, "is damaged or unusual: ") for kind, layer in UNUSUAL.items()},
}
LAYERS = {
    **{kind: (gzip.compress(layer), why) for kind, (layer, why) in BOMBS.items()},
    "not compressed": (ZEROS, LARGE),
    "cut off": (gzip.compress(packed(entry("a")))[:-20], "is damaged"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_an_image_that_would_do_harm_is_not_unpacked(system: System, tools: Tools, kind: str) -> None:
    """`umoci` fills holes with zeros, so that a few hundred bytes fill the disk."""
    layer, why = LAYERS[kind]
    tools.layers = (gzip.compress(packed(entry("sbin/init"))), layer)
    with pytest.raises(AgentError, match=why):
        unpack(NODES, IMAGE, ROOT, system)
    assert "umoci" not in {argv[0] for argv in tools.calls}
    assert system.entries("/var/lib/machines") == ()


def test_an_image_with_too_many_files(system: System, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.layers = (gzip.compress(packed(*(entry(str(number)) for number in range(20)))),)
    real = os.statvfs(tools.tree)
    few = os.statvfs_result((*real[:5], 100, 30, 30, *real[8:]))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    with pytest.raises(AgentError, match="more bytes or files"):
        unpack(NODES, IMAGE, ROOT, system)


def test_usual_layers_are_unpacked(system: System, tools: Tools) -> None:
    """With what removes entries of earlier layers, and the empty layer that Docker makes."""
    names = ("etc/.wh.shadow", "etc/.wh..wh..opq", ".wh..wh.plnk", "usr/share/..wh", "usr/bin/[")
    long = entry("a" * 300, tarfile.SYMTYPE, linkname="b" * 300)
    described = entry("a" * 300, mtime=1.5, pax_headers={"SCHILY.xattr.user.x": "1\n2=3"})
    large = raw("a", b"x" * 600, s124=(1 << 95 | 600).to_bytes(12, "big"))
    tools.layers = (
        gzip.compress(packed(*map(entry, names))),
        packed(long),
        gzip.compress(packed(described, form=tarfile.PAX_FORMAT)),
        gzip.compress(large + raw("dir/", kind=b"5", s124=bytes(12)) + bytes(1024)),
        gzip.compress(bytes(1024)),
    )
    unpack(NODES, IMAGE, ROOT, system)
    assert system.exists(ROOT)


def test_a_layout_that_leads_elsewhere(system: System, tools: Tools) -> None:
    tools.index = '{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}'
    with pytest.raises(AgentError, match="digest is"):
        unpack(NODES, IMAGE, ROOT, system)
