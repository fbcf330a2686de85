"""Chooses the image of a node's root file system, and inspects it at its source."""

import re
from typing import Any

from agent.config.node import ImageSettings
from agent.host.provision.image_errors import explained
from agent.host.provision.secrets import secret_file
from agent.model.digest import sha256
from agent.model.errors import CommandError, ConfigError, ObservationError, UnsupportedError
from agent.model.json_document import get, objects, parse_object, require_object
from agent.model.node import NodeImage
from agent.system.files import System

PLAIN_IMAGE, NVIDIA_IMAGE = "agent-ubuntu2404", "agent-ubuntu2404-nvidia"
"""The names of the images in a repository. Only NVIDIA_IMAGE has the NVIDIA Container Toolkit. Other vendors' GPUs need
no programs in the machine."""
REGISTRY = "docker://"
ARCHIVE = "docker-archive:"
LAYOUT = re.compile(r"oci:(?P<directory>/[^:]*)(:.*)?")
"""An image in an OCI layout. After the directory comes the image's own name, which may have slashes and colons, like a
name in a registry."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's name of each architecture, by the kernel's name."""
BASELINES = {"amd64": (None, "", "v1"), "arm64": (None, "", "v8")}
"""By architecture: the variants of an image that each processor of this architecture can run. None stands for an image
for which the index names no variant."""
SAFE_UMOCI = (0, 4, 7)
"""The first safe version. An image can make earlier ones write anywhere on the host (CVE-2021-29136)."""
ASK_LIMIT = 60.0
"""Seconds for a registry to answer."""
MANIFEST_LIMIT = 4 << 20
"""Bytes of the largest manifest that is read. Registries accept no larger ones."""
UNPACKED = 3
"""Bytes on disk for each compressed byte of a layer. Ubuntu's and CUDA's images have 2.3 to 2.9."""


def choose_image(settings: ImageSettings, nvidia: bool) -> str:
    """Return the configured name of a machine's image. The name may have a tag instead of a digest.

    `nvidia` says whether the machine gets NVIDIA GPUs.
    """
    return settings.name or f"{settings.repository}/{NVIDIA_IMAGE if nvidia else PLAIN_IMAGE}:{settings.tag}"


def go_architecture(system: System) -> str:
    """Return Go's name of this host's architecture. Raises UnsupportedError."""
    if name := ARCHITECTURES.get(system.architecture()):
        return name
    raise UnsupportedError(f"architecture {system.architecture()} is not supported", "use a host with amd64 or arm64")


def inspect(settings: ImageSettings, name: str, system: System) -> NodeImage:
    """Return an image's digest, architecture and size, as the image's source has them now. Leaves no files behind.

    Even with a mirror, the image's own registry decides which digest a tag has. Raises AgentError, for example if the
    image is for another architecture.
    """
    architecture = go_architecture(system)
    _check_umoci(system)
    access = access_options(settings, name, "", system)
    if name.startswith(REGISTRY):
        repository, pin = _split(name)
        if not pin:
            pin = _digest(_raw_manifest(access, name, system))
        digest, manifest = _pinned(access, f"{_mirrored(repository, settings)}@{pin}", system)
        if "manifests" in manifest:
            pin = _digest_for(architecture, name, manifest)
            digest, manifest = _pinned(access, f"{_mirrored(repository, settings)}@{pin}", system)
        pinned = f"{_mirrored(repository, settings)}@{digest}"
    else:
        raw, pinned = _raw_manifest(access, name, system), name
        digest, manifest = _digest(raw), parse_object(name, raw)
        if "manifests" in manifest:
            digest = _digest_for(architecture, name, manifest)
            manifest = parse_object(name, _blob(name, digest, system))
    config = parse_object(name, _inspect(access, pinned, system, "--config"))
    image_architecture = get(name, config, "architecture", str)
    if image_architecture != architecture:
        raise ObservationError(
            f"{name} is for {image_architecture!a}, and this host is {architecture}",
            "use an image for this host's architecture",
        )
    return NodeImage(pinned, digest, image_architecture, _size(name, manifest))


def access_options(settings: ImageSettings, name: str, prefix: str, system: System) -> tuple[str, ...]:
    """Return skopeo's options for access to an image's source. Raises ConfigError.

    The options' names begin with `prefix`: "src-" for `skopeo copy`, nothing for `skopeo inspect`.
    """
    for key, path, found in (
        ("signature_policy", settings.signature_policy, system.is_file(settings.signature_policy)),
        ("ca_directory", settings.ca_directory, system.is_directory(settings.ca_directory)),
    ):
        if path and not found:
            raise ConfigError(f"image.{key}: {path} does not exist", "put it there, or leave the key out")
    if not name.startswith(REGISTRY):
        return ()
    login = (f"--{prefix}authfile", secret_file(settings.credentials, system)) if settings.credentials else ()
    own_ca = (f"--{prefix}cert-dir", settings.ca_directory) if settings.ca_directory else ()
    return (*(login or (f"--{prefix}no-creds",)), *own_ca)


def _check_umoci(system: System) -> None:
    printed = system.run("umoci", "--version")
    found = re.search(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", printed)
    if not found or tuple(int(each) for each in found.groups()) < SAFE_UMOCI:
        version = found[0] if found else f"of unknown version ({printed.strip()[:100]!a})"
        raise UnsupportedError(
            f"umoci {version} lets an image write anywhere on the host (CVE-2021-29136)", "install umoci 0.4.7 or later"
        )


def _inspect(access: tuple[str, ...], name: str, system: System, what: str) -> bytes:
    """Return what skopeo prints about an image.

    `access` comes from `access_options`. `what` is the option that says what to print.
    """
    try:
        # Use run_tool, which lets skopeo use a proxy and write large files. For a compressed archive, skopeo writes a
        # large temporary file.
        printed = system.run_tool("skopeo", "inspect", what, *access, name, timeout=ASK_LIMIT)
    except CommandError as error:
        raise explained(error, name) from error
    return printed.encode(errors="surrogateescape")


def _raw_manifest(access: tuple[str, ...], name: str, system: System) -> bytes:
    return _inspect(access, name, system, "--raw")


def _pinned(access: tuple[str, ...], name: str, system: System) -> tuple[str, dict[str, Any]]:
    """Return the digest in an image's name, and the manifest that the registry sends for this name.

    Raises ObservationError if the manifest does not have this digest.
    """
    raw, digest = _raw_manifest(access, name, system), name.rpartition("@")[2]
    if _digest(raw) != digest:
        raise ObservationError(f"{name}: the registry sent an image with digest {_digest(raw)}", "use another registry")
    return digest, parse_object(name, raw)


def _digest(raw: bytes) -> str:
    return f"sha256:{sha256(raw)}"


def _split(name: str) -> tuple[str, str]:
    """Split an image's name. Return the repository (the name without tag and digest), and the digest.

    If the name has no digest, the digest is an empty string.
    """
    tagged, _, digest = name.partition("@")
    directory, slash, last = tagged.rpartition("/")
    return f"{directory}{slash}{last.partition(':')[0]}", digest


def _mirrored(repository: str, settings: ImageSettings) -> str:
    return f"{settings.mirror}/{repository.rpartition('/')[2]}" if settings.mirror else repository


def _digest_for(architecture: str, name: str, index: dict[str, Any]) -> str:
    """Return the digest of the image for an architecture, from an index of images for several architectures."""

    def entry(where: str, document: dict[str, Any]) -> tuple[object, object, object, str]:
        platform = require_object(f"{where}: platform", document.get("platform", {}))
        digest = get(where, document, "digest", str)
        return platform.get("os"), platform.get("architecture"), platform.get("variant"), digest

    found = objects(name, index, "manifests", entry)
    fitting = [(variant, digest) for *platform, variant, digest in found if platform == ["linux", architecture]]
    # As containerd and skopeo do, prefer a variant that every processor of the architecture runs, even if another
    # variant comes first in the list.
    baseline = [digest for variant, digest in fitting if variant in BASELINES[architecture]]
    digest = next(iter((*baseline, *(digest for _, digest in fitting))), "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        # Do not list entries for unknown/unknown: these are attestations, which BuildKit adds to an index.
        listed = ", ".join(sorted({f"{system}/{cpu}" for system, cpu, *_ in found if cpu and cpu != "unknown"}))
        raise ObservationError(
            f"{name} has no usable image for linux/{architecture}; its index lists {listed[:200]!a}",
            "use an image for this host's architecture",
        )
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
        raise ObservationError(f"{name}: {path}: {error.strerror}", "copy the image there again") from error
    if _digest(content) != digest:
        raise ObservationError(f"{name}: {path} is damaged", "copy the image there again")
    return content


def _size(name: str, manifest: dict[str, Any]) -> int:
    sizes = objects(name, manifest, "layers", lambda where, layer: get(where, layer, "size", int))
    total = sum(max(each, 0) for each in sizes)
    # Layers in an archive are not compressed: `total` is their size on disk, so estimate their compressed size.
    return total // UNPACKED if name.startswith(ARCHIVE) else total
