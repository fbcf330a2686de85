"""buildah with its own image storage in the bed's cache, separate from the user's images."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from integration.bed.cache import BUILD, REPOSITORY, cache_root, digest, locked
from integration.bed.process import Argument, CommandError, run


def buildah(*arguments: Argument) -> str:
    """Run one buildah command and return its standard output."""
    return run(["buildah", *arguments], env=_environment())


def build(name: str, base: str, *options: Argument, recipes: Path = REPOSITORY) -> str:
    """Return the image that containerfiles/build makes from containerfiles/NAME on `base`; if "", on its default.

    Layers are cached.
    """
    script = recipes / "containerfiles" / "build"
    # One build at a time, because of the prune below: while another build runs, its newest layer has no name yet, and
    # the prune would remove that layer, or fail because it is in use.
    with locked("buildah"):
        # --build-toolkit: the toolkit is compiled, because not every computer can reach NVIDIA's packages.
        command: list[Argument] = [script, "--with", "buildah", "--build-toolkit", *options, name]
        run([*command, *([base] if base else [])], env=_environment() | BUILD)
        # Remove layers of earlier builds that no image uses now. The container that a killed build left still uses
        # some, which only take space.
        with suppress(CommandError):
            buildah("rmi", "--prune")
        # The script gives the images on all bases one name.
        image = f"localhost/unbounded-agent-bed/{name}:{digest([base])}"
        buildah("tag", f"localhost/unbounded-agent/{name}", image)
    return image


def import_root(image: str, root: Path, *settings: str) -> None:
    """Make an image of one layer from a directory or tar archive; `settings` are options of buildah-config(1)."""
    with working_container("scratch") as container:
        buildah("add", "--quiet", container, root, "/")
        if settings:
            buildah("config", *settings, container)
        buildah("commit", "--quiet", container, image)


def has_image(image: str) -> bool:
    """Return whether the storage has the image: the storage may have been emptied without the rest of the cache."""
    try:
        buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)
    except CommandError:
        return False
    return True


@contextmanager
def working_container(image: str) -> Iterator[str]:
    """Yield a container of the image, to be changed or inspected; remove it afterwards."""
    container = buildah("from", "--pull=never", image)
    try:
        yield container
    finally:
        buildah("rm", container)


def _environment() -> dict[str, str]:
    root = cache_root()
    settings = root / "storage.conf"
    text = f"""[storage]
driver = "overlay"
graphroot = "{root}/containers"
runroot = "/run/unbounded-agent-bed/containers"
"""
    if not settings.exists() or settings.read_text() != text:
        partial = settings.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.rename(settings)
    return {"CONTAINERS_STORAGE_CONF": str(settings), "BUILDAH_ISOLATION": "chroot"}
