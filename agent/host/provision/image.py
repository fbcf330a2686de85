"""Chooses the image of a node's root file system, inspects it at its source, and makes the root file system from it."""

import contextlib
import gzip
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from agent.config.settings import ImageSettings
from agent.host.apply.steps import Progress
from agent.host.provision.binaries import DAMAGED, entries
from agent.host.provision.node_files import secret_file
from agent.model.errors import AgentError, CommandError, ConfigError, DocumentError
from agent.model.json_document import get, objects, parse_object, require_object
from agent.model.node import NodeImage
from agent.model.paths import PARTIAL
from agent.model.text import portion, sha256
from agent.system import opening
from agent.system.copy import clear
from agent.system.files import System

REGISTRY = "docker://"
ARCHIVE = "docker-archive:"
LAYOUT = re.compile(r"oci:(?P<directory>/[^:]*)(:.*)?")
"""An image in an OCI layout. After the directory comes the image's own name, which may have slashes and colons, like a
name in a registry."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's name of each architecture, by the kernel's name."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SAFE_UMOCI = (0, 4, 7)
"""The first safe version. An image can make earlier ones write anywhere on the host (CVE-2021-29136)."""
ASK_LIMIT = 60.0
"""Seconds for a registry to answer."""
MANIFEST_LIMIT = 4 << 20
"""Bytes of the largest manifest that is read. Registries accept no larger ones."""
UNPACKED = 3
"""Bytes on disk for each compressed byte of a layer. Ubuntu's and CUDA's images have 2.3 to 2.9."""


def choose_image(settings: ImageSettings, own: str) -> str:
    """Return the configured name of a machine's image. The name may have a tag instead of a digest.

    `own` is the name of the agent's own image for the machine (HostVendor.image).
    """
    return settings.name or f"{settings.repository}/{own}:{settings.tag}"


def go_architecture(system: System) -> str:
    """Return Go's name of this host's architecture. Raises AgentError."""
    if name := ARCHITECTURES.get(system.architecture()):
        return name
    raise AgentError(f"architecture {system.architecture()} is not supported", "use a host with amd64 or arm64")


def inspect(settings: ImageSettings, name: str, system: System) -> NodeImage:
    """Return an image's digest, architecture and size, as the image's source has them now. Leaves no files behind.

    Even with a mirror, the image's own registry decides which digest a tag has. Raises AgentError, for example if the
    image is for another architecture.
    """
    architecture, remote = go_architecture(system), name.startswith(REGISTRY)
    _check_umoci(system)
    access = _access_options(settings, name, "", system)

    def ask(what: str, name: str) -> bytes:
        try:
            # run_tool lets skopeo use a proxy and write large files. For a compressed archive, skopeo writes a large
            # temporary file.
            printed = system.run_tool("skopeo", "inspect", what, *access, name, timeout=ASK_LIMIT)
        except CommandError as error:
            raise explained(error, name) from error
        return printed.encode(errors="surrogateescape")

    def pinned(digest: str) -> tuple[str, dict[str, Any]]:
        """Return the name with this digest, and the manifest that its source has for it."""
        at = f"{settings.mirror}/{repository.rpartition('/')[2]}" if settings.mirror else repository
        where = f"{at}@{digest}" if remote else name
        raw = ask("--raw", where) if remote else _blob(name, digest, system)
        if _digest(raw) != digest:
            raise AgentError(f"{where}: the registry sent an image with digest {_digest(raw)}", "use another registry")
        return where, parse_object(where, raw)

    repository, digest = _split(name) if remote else (name, "")
    if remote:
        digest = digest or _digest(ask("--raw", name))
        where, manifest = pinned(digest)
    else:
        raw, where = ask("--raw", name), name
        digest, manifest = _digest(raw), parse_object(name, raw)
    if "manifests" in manifest:
        digest = _digest_for(architecture, name, manifest)
        where, manifest = pinned(digest)
    config = parse_object(name, ask("--config", where))
    image_architecture = get(name, config, "architecture", str)
    if image_architecture != architecture:
        raise AgentError(
            f"{name} is for {image_architecture!a}, and this host is {architecture}",
            "use an image for this host's architecture",
        )
    sizes = objects(name, manifest, "layers", lambda where, layer: get(where, layer, "size", int))
    total = sum(max(each, 0) for each in sizes)
    # Layers in an archive are not compressed: `total` is their size on disk, so estimate their compressed size.
    return NodeImage(where, digest, image_architecture, total // UNPACKED if name.startswith(ARCHIVE) else total)


def _access_options(settings: ImageSettings, name: str, prefix: str, system: System) -> tuple[str, ...]:
    """Return skopeo's options for access to an image's source. Raises ConfigError.

    The options' names begin with `prefix`: "src-" for `skopeo copy`, nothing for `skopeo inspect`.
    """
    for key, path in (("signature_policy", settings.signature_policy), ("ca_directory", settings.ca_directory)):
        if path and not system.exists(path):
            raise ConfigError(f"image.{key}: {path} does not exist", "put it there, or leave the key out")
    if not name.startswith(REGISTRY):
        return ()
    login = (f"--{prefix}authfile", secret_file(settings.credentials, system)) if settings.credentials else ()
    own_ca = (f"--{prefix}cert-dir", settings.ca_directory) if settings.ca_directory else ()
    return (*(login or (f"--{prefix}no-creds",)), *own_ca)


def _check_umoci(system: System) -> None:
    printed = system.run("umoci", "--version")
    found = re.search(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", printed)
    if not found or tuple(map(int, found.groups())) < SAFE_UMOCI:
        what = f"{printed.strip()[:100]!a} lets an image write anywhere on the host (CVE-2021-29136)"
        raise AgentError(what, "install umoci 0.4.7 or later")


def _digest(raw: bytes) -> str:
    return f"sha256:{sha256(raw)}"


def _split(name: str) -> tuple[str, str]:
    """Return an image's repository (its name without tag and digest), and its digest, which may be empty."""
    tagged, _, digest = name.partition("@")
    directory, slash, last = tagged.rpartition("/")
    return f"{directory}{slash}{last.partition(':')[0]}", digest


def _digest_for(architecture: str, name: str, index: dict[str, Any]) -> str:

    def entry(where: str, document: dict[str, Any]) -> tuple[object, object, object, str]:
        platform = require_object(f"{where}: platform", document.get("platform", {}))
        digest = get(where, document, "digest", str)
        return platform.get("os"), platform.get("architecture"), platform.get("variant"), digest

    found = objects(name, index, "manifests", entry)
    fitting = [
        (str(variant or ""), digest) for *platform, variant, digest in found if platform == ["linux", architecture]
    ]
    # As containerd and skopeo do, prefer what every processor of the architecture runs: no variant, or the lowest (v1).
    _, digest = min(fitting, key=lambda each: each[0], default=("", ""))
    if not DIGEST.fullmatch(digest):
        # Do not list entries for unknown/unknown: these are attestations, which BuildKit adds to an index.
        listed = ", ".join(sorted({f"{system}/{cpu}" for system, cpu, *_ in found if cpu and cpu != "unknown"}))
        what = f"{name} has no usable image for linux/{architecture}; its index lists {listed[:200]!a}"
        raise AgentError(what, "use an image for this host's architecture")
    return digest


def _blob(name: str, digest: str, system: System) -> bytes:
    """Return the manifest with this digest from an OCI layout.

    Reads the layout's file itself, because skopeo can print a manifest only if the layout has no other manifest.
    """
    found = LAYOUT.fullmatch(name)
    assert found, "only layouts and registries have indices"
    path = f"{found['directory']}/blobs/{digest.replace(':', '/')}"
    try:
        content = system.read(path, MANIFEST_LIMIT)
    except OSError as error:
        raise AgentError(f"{name}: {path}: {error.strerror}", "copy the image there again") from error
    if _digest(content) != digest:
        raise AgentError(f"{name}: {path} is damaged", "copy the image there again")
    return content


# Makes a root file system from an image: skopeo pulls it, umoci unpacks it.
#
# Both work in `<root>.partial`. If they are interrupted, only that directory is left, and the next attempt removes it.
# When the root file system is complete and on disk, a rename gives it its name.


POLICY = "/etc/containers/policy.json"
INIT = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd", "/sbin/init")
"""The programs that systemd-nspawn looks for. The first one that exists becomes the machine's init."""
PULL_LIMIT = 3600.0
UNPACK_LIMIT = 1800.0
SYNC_LIMIT = 1800.0
REMOVE_LIMIT = 300.0
"""Seconds that each of these four steps may take."""
RETRIES = "3"
"""How often skopeo retries after an error of the network: after 1, 2 and 4 seconds."""
MARGIN = 256 << 20
"""Bytes that must stay free on the file system."""
BLOCK = 4096
"""Bytes on disk that an entry of a layer takes in addition to its content: its inode, and its last block."""
WHITEOUT = ".wh."
"""Begins the name of an entry that removes the entry of this name, without the beginning, of an earlier layer."""
TICK = 1.0
"""Seconds between two progress messages."""


def unpack(
    settings: ImageSettings, image: NodeImage, root: str, system: System, progress: Progress = lambda _: None
) -> None:
    """Make the directory `root` from an image that `inspect` has found. Raises AgentError, OSError.

    The directory must not exist yet. It appears only once it is complete.
    """
    partial = f"{root}{PARTIAL}"
    if system.exists(root):
        raise AgentError(f"{root} exists already", "remove it, then run the command again")
    system.make_private(os.path.dirname(root))
    clear((partial,), system, REMOVE_LIMIT)
    system.make_private(partial)
    try:
        needed, free = image.size * (1 + UNPACKED) + MARGIN, system.free_bytes(partial)
        if free < needed:
            what = f"{image.name} needs {needed >> 20} MiB, but only {free >> 20} MiB are free"
            raise AgentError(f"{os.path.dirname(partial)}: {what}", "free up space on that file system")
        with _reporting_size(f"{partial}/image", image.size, system, progress):
            _pull(settings, image, partial, system)
        _check_layers(image, partial, system)
        progress(f"unpacking {image.name}")
        _unpack(image, partial, system)
        system.run_tool("sync", "--file-system", system.full_path(partial), timeout=SYNC_LIMIT)
        system.rename(f"{partial}/root", root)
    finally:
        # Free the disk space, which may be gigabytes: the next attempt or the node needs it.
        with contextlib.suppress(AgentError):
            clear((partial,), system, REMOVE_LIMIT)


def _pull(settings: ImageSettings, image: NodeImage, partial: str, system: System) -> None:
    policy = settings.signature_policy or (POLICY if system.is_file(POLICY) else "")
    # All layers become gzip layers, because umoci 0.4 does not know zstd. Layers that are already gzip stay unchanged.
    compression = ("--dest-compress-format", "gzip", "--dest-compress-level", "1")
    directory = system.full_path(partial)
    try:
        system.run_tool(
            "skopeo",
            *(("--policy", policy) if policy else ("--insecure-policy",)),
            *("--tmpdir", directory, "copy", "--quiet", "--retry-times", RETRIES),
            *_access_options(settings, image.name, "src-", system),
            *compression,
            *(image.name, f"oci:{directory}/image:node"),
            timeout=PULL_LIMIT,
        )
    except CommandError as error:
        raise explained(error, image.name) from error


def _check_layers(image: NodeImage, partial: str, system: System) -> None:
    """Read all layers, and refuse what would fill the disk or lead out of the root file system. Raises AgentError.

    What umoci writes is bounded by what is read here: it is at most the decompressed layers, because sparse files,
    whose holes umoci fills, are refused. A few hundred bytes may decompress to any number.
    """

    def blob(where: str, document: dict[str, Any]) -> str:
        digest = get(where, document, "digest", str)
        if not DIGEST.fullmatch(digest):
            raise DocumentError(f"{where}: digest is {digest[:100]!a}")
        return f"{partial}/image/blobs/{digest.replace(':', '/')}"

    def layer(where: str, document: dict[str, Any]) -> tuple[str, str]:
        return blob(where, document), get(where, document, "mediaType", str)

    index = f"{partial}/image/index.json"
    (manifest,) = objects(index, parse_object(index, system.read(index)), "manifests", blob)
    layers = objects(index, parse_object(index, system.read(manifest, MANIFEST_LIMIT)), "layers", layer)
    free, inodes = system.free_bytes(partial) - MARGIN, system.free_files(partial) // 2
    until = time.monotonic() + UNPACK_LIMIT
    for path, kind in layers:
        what, another = f"{image.name}: layer sha256:{os.path.basename(path)[:12]}", "use another image"
        try:
            with opening.plain(system.full_path(path)) as file:
                # As umoci, do not look at the content: the same bytes may be a tar archive, and compressed.
                content = gzip.GzipFile(fileobj=file) if kind.endswith("+gzip") else file
                for name, size, *_ in entries(content):
                    free, inodes = free - BLOCK - size, inodes - 1
                    if time.monotonic() > until:
                        raise AgentError(f"{what}: it took more than {UNPACK_LIMIT:.0f} s to read", another)
                    whiteouts = (part[len(WHITEOUT) :] for part in name.split("/") if part.startswith(WHITEOUT))
                    if any(each in ("", ".", "..") for each in whiteouts):
                        why = f"{name[:200]!a} would remove a directory outside of its own"
                        raise AgentError(f"{what}: {why}", another)
                    if free < 0 or inodes < 0:
                        raise AgentError(
                            f"{image.name} unpacks to more bytes or files than the file system has room for",
                            "free up space on that file system, or use another image",
                        )
        except DAMAGED as error:
            raise AgentError(f"{what} is damaged or unusual: {error}", another) from error


def _unpack(image: NodeImage, partial: str, system: System) -> None:
    directory = system.full_path(partial)
    try:
        # Do not use `umoci unpack`, which reads all files again for digests that nobody needs.
        system.run_tool(
            "umoci", "raw", "unpack", "--image", f"{directory}/image:node", f"{directory}/root", timeout=UNPACK_LIMIT
        )
    except CommandError as error:
        raise explained(error, image.name) from error
    root = system.image(f"{partial}/root")
    if not any(root.is_program(path) for path in INIT):
        what = f"{image.name} has no init ({', '.join(INIT)}): it cannot boot as a machine"
        raise AgentError(what, "use an image that containerfiles/ builds, or one with systemd")


@contextlib.contextmanager
def _reporting_size(layout: str, size: int, system: System, progress: Progress) -> Iterator[None]:
    """Report how much of a layout is on disk, every TICK seconds until the block ends."""
    done = threading.Event()

    def watch() -> None:
        last = 0
        while not done.wait(TICK):
            total = 0
            # Including what skopeo is still writing. It may rename a temporary file at any moment.
            for directory in (layout, f"{layout}/blobs/sha256"):
                with contextlib.suppress(OSError):
                    for name in system.entries(directory):
                        with contextlib.suppress(OSError):
                            total += system.identity(f"{directory}/{name}").size
            if total >> 20 != last:
                last = total >> 20
                progress(f"pulled {portion(total, size)}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# Explains failures of skopeo and umoci.


NETWORK_HINT = (
    "check the network to the registry, and the proxy (HTTPS_PROXY, NO_PROXY); without a network, use an oci: or "
    "docker-archive: image"
)
HINTS = (
    (r"no space left on device", "free up space on the file system of /var/lib/machines"),
    (
        r"loading tar component|invalid tar header",
        "decompress it with `gunzip` if it is compressed (skopeo 1.9 cannot); otherwise copy it there again",
    ),
    (r"unexpected EOF", "the source is damaged, or the connection broke: run the command again"),
    (
        r"toomanyrequests|[Tt]oo [Mm]any [Rr]equests|([Ss]tatus( ?[Cc]ode)?:?|from registry) (429|5[0-9]{2})\b",
        "the registry limits how much it sends, or has a fault: wait, then run the command again; or use image.mirror",
    ),
    (r"proxyconnect|Proxy Authentication Required", NETWORK_HINT),
    (
        r"unauthorized|authentication required|denied|status code 403",
        "check the file of image.credentials: `skopeo login --authfile FILE REGISTRY` writes one",
    ),
    (
        r"manifest unknown|name unknown|not found|no descriptor found|no such (file|image)",
        "check image.name, or image.repository and image.tag; with image.mirror, whether the image is there",
    ),
    (
        r"x509|tls: |certificate",
        "put the registry's CA as a file *.crt into the directory image.ca_directory, and check this host's clock",
    ),
    (r"gave HTTP response to HTTPS client", "give the registry a certificate, or use an oci: or docker-archive: image"),
    (r"rejected|signature", "the signature policy refuses the image: see image.signature_policy"),
    (r"[Dd]igest|[Mm]anifest does not match", "the source is damaged: copy the image there again"),
    (r"no image found in (manifest list|image index)", "use an image for this host's architecture"),
    (r"dial |lookup |[Pp]roxy|refused|time(d )?out|deadline|reset by peer|EOF", NETWORK_HINT),
)
"""What to do, by a pattern for the program's message. The first pattern that matches counts."""
LOG_LINE = re.compile(r'^time="[^"]*" level=(?P<level>\w+) msg="?(?P<text>.*?)"?\s*$')
"""A line of skopeo's log, in the format of logrus."""
MARK = re.compile(r"^[^\x20-\x7e]+ *")
"""The symbol that umoci puts before a message."""
QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
"""A URL with a query, which may have a signature that gives access."""


def explained(error: CommandError, what: str) -> AgentError:
    """Return a program's failure as one sentence about `what`, with the next step as the hint.

    The sentence has the program's last message. If the program printed none, the sentence has the message of `error`
    instead, which contains the program's arguments.
    """
    lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
    if not lines:
        return AgentError(f"{what}: {error.message}", error.hint or "run the command again")
    found = LOG_LINE.match(lines[-1])
    text = found["text"].replace('\\"', '"').replace("\\n", " ") if found else MARK.sub("", lines[-1])
    text = QUERY.sub(r"\1", " ".join(text.split()))[-600:]
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "")
    return AgentError(f"{what}: {text}", hint or "correct this, then run the command again")
