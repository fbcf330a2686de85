"""`systemd/install` on a bare Debian without a network: whole or not at all, and with a way back."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.bed import wheels
from integration.bed.cache import REPOSITORY
from integration.bed.packages import TOOLS, Root, debian_root
from integration.bed.process import CommandError

CHECKOUT = "/srv/checkout"
TARGET = "opt/unbounded-agent"
UNIT = "usr/local/lib/systemd/system/unbounded-agent.service"
ENSUREPIP = Path("usr/lib/python3.13/ensurepip")
"""What Debian's python3-venv brings."""


@pytest.fixture
def root() -> Iterator[Root]:
    with debian_root("trixie", *TOOLS) as root:
        checkout = root.path / CHECKOUT.strip("/")
        shutil.copytree(REPOSITORY / "systemd", checkout / "systemd")
        shutil.copy(REPOSITORY / "requirements.lock", checkout)
        (checkout / "agent/system").mkdir(parents=True)
        shutil.copy(REPOSITORY / "agent/system/removal.py", checkout / "agent/system")
        shutil.copy(wheels.agent(), checkout)
        shutil.copytree(wheels.dependencies(), checkout / "wheels")
        yield root


def install(root: Root, *arguments: str) -> str:
    """Run systemd/install; without arguments, with the agent's wheel."""
    environment = ("PIP_NO_INDEX=1", f"PIP_FIND_LINKS={CHECKOUT}/wheels", "PIP_ROOT_USER_ACTION=ignore")
    wheel = f"{CHECKOUT}/{wheels.agent().name}"
    # In a shell, because the first process of the root cannot be killed there.
    shell = ("sh", "-c", '"$@"; exit', "sh")
    return root.run(*shell, "env", *environment, f"{CHECKOUT}/systemd/install", *(arguments or (wheel,)))


def works(root: Root) -> bool:
    return root.run("unbounded-agent", "--version").startswith("unbounded-agent ")


def mark(root: Root, text: str) -> None:
    """Change a unit of the checkout, as another release does."""
    unit = root.path / CHECKOUT.strip("/") / "systemd/unbounded-agent.service"
    unit.write_text(f"{unit.read_text()}# {text}\n")


def installed(root: Root) -> set[str]:
    return {path.name for path in (root.path / TARGET).iterdir()}


def test_upgrade_and_rollback(root: Root) -> None:
    assert "(Python 3.13" in install(root)
    assert works(root)
    assert installed(root) == {".lock", "1", "current"}
    with pytest.raises(CommandError, match="there is no former installation"):
        install(root, "--rollback")

    # The same packages are there already: an upgrade without a change of the lock downloads nothing.
    shutil.rmtree(root.path / CHECKOUT.strip("/") / "wheels")
    for number in (2, 3):
        mark(root, f"release {number}")
        install(root)
        assert works(root)
    assert installed(root) == {".lock", "2", "3", "current", "previous"}
    unit = root.path / UNIT
    assert "# release 3" in unit.read_text()

    for release in (2, 3):
        install(root, "--rollback")
        assert works(root)
        assert unit.read_text().endswith(f"# release {release}\n")
    assert installed(root) == {".lock", "2", "3", "current", "previous"}
    assert [path.name for path in unit.parent.iterdir() if path.name.startswith(".")] == []


def test_half_an_installation_never_stays(root: Root) -> None:
    before = root.files()
    hidden = root.path / "root/ensurepip"
    shutil.move(root.path / ENSUREPIP, hidden)
    with pytest.raises(CommandError, match="install failed; See the lines above"):
        install(root)
    shutil.move(hidden, root.path / ENSUREPIP)
    assert root.files() - before == {f"/{TARGET}", f"/{TARGET}/.lock"}
    assert install(root)

    mark(root, "broken")
    (root.path / "srv/broken-1-py3-none-any.whl").write_text("not a wheel\n")
    for broken in ("/srv/broken-1-py3-none-any.whl", "/srv/missing.whl"):
        with pytest.raises(CommandError, match="the former installation is still in use"):
            install(root, broken)
        assert works(root)
        assert installed(root) == {".lock", "1", "current"}
        assert "# broken" not in (root.path / UNIT).read_text()


@pytest.mark.parametrize(
    ("signal", "said"),
    [
        ("TERM", "the former installation is still in use"),
        pytest.param("KILL", None, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_upgrade_keeps_the_way_back(root: Root, signal: str, said: str | None) -> None:
    """The signal comes while units are already those of the new release, as when somebody waits for the service."""
    install(root)
    mark(root, "release 2")
    install(root)
    mark(root, "release 3")
    program = root.path / "usr/sbin/systemd-tmpfiles"
    program.write_text(f'#!/bin/sh\nrm "$0"\nkill -{signal} $PPID\nsleep 1\n')
    program.chmod(0o755)
    with pytest.raises(CommandError, match=said):
        install(root)
    if said:
        assert (root.path / UNIT).read_text().endswith("# release 2\n")
        assert installed(root) == {".lock", "1", "2", "current", "previous"}
    else:
        install(root, "--rollback")
        assert works(root)
        assert (root.path / UNIT).read_text().endswith("# release 2\n")
    install(root)
    assert (root.path / UNIT).read_text().endswith("# release 3\n")
    install(root, "--rollback")
    assert works(root)
    assert (root.path / UNIT).read_text().endswith("# release 2\n")


@pytest.mark.exhaustive
def test_an_installation_whose_files_cannot_be_placed_is_undone(root: Root) -> None:
    """A directory is in the way of the last file."""
    install(root)
    tmpfiles = root.path / "usr/lib/tmpfiles.d/unbounded-agent.conf"
    tmpfiles.unlink()
    (tmpfiles / "in-the-way").mkdir(parents=True)
    mark(root, "refused")
    with pytest.raises(CommandError, match="the former installation is still in use"):
        install(root)
    assert works(root)
    assert "# refused" not in (root.path / UNIT).read_text()
    assert installed(root) == {".lock", "1", "current"}


@pytest.mark.exhaustive
def test_remains_are_removed(root: Root) -> None:
    """What a killed run left, an environment of an older release, and one of another Python."""
    root.run("python3", "-m", "venv", "--without-pip", f"/{TARGET}")
    (root.path / TARGET / "7/bin").mkdir(parents=True)
    install(root)
    assert installed(root) == {".lock", "8", "current"}
    assert works(root)

    libraries = root.path / TARGET / "8/lib"
    (libraries / "python3.13").rename(libraries / "python3.11")
    install(root)
    assert works(root)
    with pytest.raises(CommandError, match="the former installation does not work; nothing was changed"):
        install(root, "--rollback")
    assert works(root)


@pytest.mark.exhaustive
def test_the_documented_removal_leaves_no_file(root: Root) -> None:
    before = root.files()
    install(root)
    for directory in ("etc/unbounded-agent", "var/lib/unbounded-agent/trees/0", "run/unbounded-agent"):
        (root.path / directory).mkdir(parents=True, exist_ok=True)
        (root.path / directory / "file").touch()
    page = (REPOSITORY / "docs/install.md").read_text().partition("3. Unmount the driver roots")[2]
    found = re.search(r"^   ```\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    assert found
    # No systemd runs here that could stop units.
    root.run("sh", "-ec", f"cd {CHECKOUT}\n" + re.sub(r"^ *systemctl .*\n", "", found[1], flags=re.MULTILINE))
    left = {each for each in root.files() - before if not (root.path / each.strip("/")).is_dir()}
    assert left == set()


@pytest.mark.parametrize("arguments", [("--roll",), ("one.whl", "two.whl")])
def test_wrong_arguments(root: Root, arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="Install the host half, as root"):
        install(root, *arguments)
