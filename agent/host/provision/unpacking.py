"""Makes a root file system from an image: skopeo pulls it, umoci unpacks it.

Both work in `<root>.partial`. If they are interrupted, only that directory is left, and the next attempt removes it.
When the root file system is complete and on disk, a rename gives it its name.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from agent.config.node import ImageSettings
from agent.host.provision.image import UNPACKED, access_options
from agent.host.provision.image_errors import explained
from agent.model.errors import AgentError, ApplyError, CommandError
from agent.model.node import NodeImage
from agent.model.paths import PARTIAL
from agent.system.clearing import clear
from agent.system.files import System
from agent.system.root_writer import RootWriter

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
TICK = 1.0
"""Seconds between two progress messages."""

Progress = Callable[[str], None]
"""Takes a sentence for the user."""


def unpack(
    settings: ImageSettings, image: NodeImage, root: str, system: System, progress: Progress = lambda _: None
) -> None:
    """Make the directory `root` from an image that `inspect` has found. Raises AgentError, OSError.

    The directory must not exist yet. It appears only once it is complete.
    """
    partial = f"{root}{PARTIAL}"
    if system.exists(root):
        raise ApplyError(f"{root} exists already", "remove it, then run the command again")
    _make_private(os.path.dirname(root), system)
    clear((partial,), system, REMOVE_LIMIT)
    _make_private(partial, system)
    try:
        _check_space(image, partial, system)
        with _reporting_size(f"{partial}/image", image.size, system, progress):
            _pull(settings, image, partial, system)
        progress(f"unpacking {image.name}")
        _unpack(image, partial, system)
        system.run_tool("sync", "--file-system", system.full_path(partial), timeout=SYNC_LIMIT)
        system.rename(f"{partial}/root", root)
    finally:
        # Free the disk space, which may be gigabytes: the next attempt or the node needs it.
        with contextlib.suppress(AgentError):
            clear((partial,), system, REMOVE_LIMIT)


def _make_private(directory: str, system: System) -> None:
    """Make a directory that other users may not enter, unless the directory exists already.

    Others may not enter it because programs in it may be setuid and vulnerable.
    """
    if not system.is_directory(directory):
        system.make_directory(directory)
        os.chmod(system.full_path(directory), 0o700)


def _check_space(image: NodeImage, partial: str, system: System) -> None:
    needed, free = image.size * (1 + UNPACKED) + MARGIN, system.free_bytes(partial)
    if free < needed:
        raise ApplyError(
            f"{os.path.dirname(partial)}: {image.name} needs {needed >> 20} MiB, but only {free >> 20} MiB are free",
            "free up space on that file system",
        )


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
            *access_options(settings, image.name, "src-", system),
            *compression,
            *(image.name, f"oci:{directory}/image:node"),
            timeout=PULL_LIMIT,
        )
    except CommandError as error:
        raise explained(error, image.name) from error


def _unpack(image: NodeImage, partial: str, system: System) -> None:
    directory = system.full_path(partial)
    try:
        # Do not use `umoci unpack`, which reads all files again for digests that nobody needs.
        system.run_tool(
            "umoci", "raw", "unpack", "--image", f"{directory}/image:node", f"{directory}/root", timeout=UNPACK_LIMIT
        )
    except CommandError as error:
        raise explained(error, image.name) from error
    writer = RootWriter(f"{directory}/root")
    if not any(writer.is_program(path) for path in INIT):
        raise ApplyError(
            f"{image.name} has no init ({', '.join(INIT)}): it cannot boot as a machine",
            "use an image that containerfiles/ builds, or one with systemd",
        )


@contextlib.contextmanager
def _reporting_size(layout: str, size: int, system: System, progress: Progress) -> Iterator[None]:
    """Report how much of a layout is on disk, every TICK seconds until the block ends."""
    done = threading.Event()

    def watch() -> None:
        last = 0
        while not done.wait(TICK):
            if (now := _bytes(layout, system) >> 20) != last:
                progress(f"pulled {now} of {size >> 20} MiB")
                last = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes(layout: str, system: System) -> int:
    """Return the size of the files in an OCI layout in bytes, including those that skopeo is still writing."""
    total = 0
    for directory in (layout, f"{layout}/blobs/sha256"):
        with contextlib.suppress(OSError):
            for name in system.entries(directory):
                # skopeo may rename a temporary file at any moment.
                with contextlib.suppress(OSError):
                    total += system.identity(f"{directory}/{name}").size
    return total
