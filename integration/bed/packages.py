"""The Debian packages of this checkout and of releases, and bare roots to install them in, without systemd as PID 1."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.bed import debian, ubuntu
from integration.bed.architecture import CHOSEN
from integration.bed.cache import REPOSITORY, cache_root, cached
from integration.bed.process import Argument, BedError, CommandError, run

RELEASES = {"0.1.0": "52ba4d40654fcabdbdec8774e2cffcc84a53342f"}
"""Releases by their commits, to upgrade from. No commit can name itself, so each follows its tag
(tests/project/test_release.py)."""
DEPENDENCIES = (
    *("python3", "python3-h2", "python3-protobuf", "python3-tomlkit", "python3-yaml"),
    *("systemd", "systemd-container", "kmod", "mount", "libgcc-s1"),
)
"""What the packages depend on. Each root has these from the start, because a test's root has no network."""
TOOLS = ("python3-venv", "gpg", "gpg-agent")
"""What some tests need in addition: venv to install from a checkout, and gpg to sign a package source."""
INPUTS = (
    *("agent", "deploy/build-packages", "deploy/debian", "deploy/generate", "deploy/grafana", "deploy/prometheus"),
    *("deploy/version", "docs", "systemd"),
    *("requirements.lock", "requirements-dev.lock", "LICENSE", "README.md", "CHANGELOG.md"),
)
EPOCH = "1700000000"
"""The time of the packages' files, in the past. With the commit's time, each commit would change the packages."""
ENTER = 'mount -t proc proc "$0/proc" && exec chroot "$0" env --ignore-environment "$@"'
ENVIRONMENT = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "HOME=/root")


def packages(version: str, architecture: str = CHOSEN.debian) -> dict[str, Path]:
    """Return the packages of a release by their names; for any other version those of this checkout, with that version.

    Raises BedError if the checkout does not have the release's commit.
    """

    def build(target: Path) -> None:
        with _source(version) as source:
            command: list[Argument] = [source / "deploy" / "build-packages", "--arch", architecture, target]
            run(command, env={"VERSION": version, "SOURCE_DATE_EPOCH": EPOCH})

    checkout: list[Path | str] = [REPOSITORY / name for name in INPUTS]
    inputs = [version, *([RELEASES[version]] if version in RELEASES else checkout)]
    directory = cached(f"packages-{version}-{architecture}", inputs, build)
    return {path.name.partition("_")[0]: path for path in directory.glob("*.deb")}


@contextmanager
def _source(version: str) -> Iterator[Path]:
    """Yield this checkout, or a repository with the files of a release's commit."""
    commit = RELEASES.get(version)
    if commit is None:
        yield REPOSITORY
        return
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=".release-") as name:
        archive, source = Path(name) / "source.tar", Path(name) / "source"
        try:
            run(["git", "-c", "safe.directory=*", "archive", f"--output={archive}", commit], cwd=REPOSITORY)
        except CommandError as error:
            here = f"{REPOSITORY} does not have the commit of release {version}"
            raise BedError(f"{here}; run `git fetch origin {commit}` there") from error
        run(["git", "init", "--quiet", source])
        run(["tar", "--extract", "--file", archive, "--directory", source])
        # build-packages takes what git lists.
        run(["git", "add", "--all", "--force"], cwd=source)
        yield source


Edit = tuple[str, str, str]
"""A file of the agent's package, a text that it has, and what replaces the text."""
CODE = "usr/lib/unbounded-agent/host/agent"


def release(directory: Path, version: str, *edits: Edit) -> Path:
    """Return the host half's package of this checkout as another version, in `directory`, with changes in its files."""
    tree, deb = directory / f"tree-{version}", directory / f"unbounded-agent_{version}.deb"
    run(["dpkg-deb", "--raw-extract", packages("1.0")["unbounded-agent"], tree])
    for name, old, new in (
        ("DEBIAN/control", "\nVersion: 1.0\n", f"\nVersion: {version}\n"),
        (f"{CODE}/__init__.py", '__version__ = "1.0"', f'__version__ = "{version}"'),
        *edits,
    ):
        text = (tree / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (tree / name).write_text(text.replace(old, new, 1))
    run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", tree, deb])
    shutil.rmtree(tree)
    return deb


def repository(directory: Path, *debs: Path) -> None:
    """Make a directory of packages into a source for apt(8), without signatures."""
    directory.mkdir()
    for deb in debs:
        shutil.copy(deb, directory)
    (directory / "Packages").write_text(run(["dpkg-scanpackages", "--multiversion", "."], cwd=directory) + "\n")


class Root:
    """A root file system in which commands see only their own processes, as in the build of an image."""

    def __init__(self, path: Path) -> None:
        """Use the tree at `path`."""
        self.path = path

    def run(self, *argv: Argument) -> str:
        """Run a command and return its standard output. Raises CommandError."""
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
        return run([*unshare, self.path, *ENVIRONMENT, *argv])

    def install(self, *debs: Path) -> str:
        """Install packages as dpkg(1) does, even older versions. Raises CommandError if a dependency is missing."""
        for deb in debs:
            shutil.copy(deb, self.path / "root")
        return self.run("sh", "-c", 'cd /root && exec dpkg --install "$@" 2>&1', "sh", *(deb.name for deb in debs))

    def files(self) -> set[str]:
        """Return all paths, except logs, caches, dpkg's own records, and /root, where `install` puts the packages."""
        pruned = " -o ".join(f"-path {each}" for each in ("/proc", "/var/log", "/var/cache", "/var/lib/dpkg", "/root"))
        return set(self.run("sh", "-c", f"find / -xdev '(' {pruned} ')' -prune -o -print").splitlines())


@contextmanager
def debian_root(suite: str, *more: str) -> Iterator[Root]:
    """Yield a bare Debian or Ubuntu with the packages' dependencies, and with `more`. Changes are lost at the end."""
    included = [*DEPENDENCIES, *more]

    def build(target: Path) -> None:
        if suite == ubuntu.UBUNTU:
            ubuntu.ubuntu_tree(target / "root", included)
        else:
            debian.debian_tree(target / "root", "minbase", included, suite=suite)

    tools = [Path(str(module.__file__)) for module in ((debian, ubuntu) if suite == ubuntu.UBUNTU else (debian,))]
    # Each suite and set of packages has its own name in the cache. With one name for all, a build of one could remove
    # the results of the others.
    base = cached("-".join(("package-root", suite, *more)), [*included, *tools], build) / "root"
    # The directory is not in /tmp, because that may be a tmpfs, or itself an overlay.
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=".package-root-") as name:
        upper, work, merged = (Path(name) / part for part in ("upper", "work", "merged"))
        for each in (upper, work, merged):
            each.mkdir()
        options = f"lowerdir={base},upperdir={upper},workdir={work}"
        run(["mount", "-t", "overlay", "overlay", "-o", options, merged])
        try:
            yield Root(merged)
        finally:
            run(["umount", merged])
