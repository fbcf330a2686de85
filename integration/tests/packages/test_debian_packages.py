"""The packages on bare Debian 12 and 13 and Ubuntu 24.04, without systemd as PID 1, as in the build of an image."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.debian import SUITE
from integration.bed.packages import EPOCH, Root, debian_root, packages
from integration.bed.process import CommandError, run

HOST, MACHINE, DRA = "unbounded-agent", "unbounded-agent-machine", "unbounded-agent-machine-dra"
MONITORING = "unbounded-agent-monitoring"
VERSION, NEXT = "1.0", "1.1"
SUITES = {"bookworm": "3.11", "trixie": "3.13", "noble": "3.12"}
"""Versions of Python, by the code name of the distribution's release."""
SETTINGS = "/etc/unbounded-agent"


@pytest.fixture(params=[*(pytest.param(each, marks=pytest.mark.exhaustive) for each in SUITES if each != SUITE), SUITE])
def root(request: pytest.FixtureRequest) -> Iterator[Root]:
    with debian_root(request.param) as root:
        yield root


def test_installation_upgrade_downgrade_removal(root: Root) -> None:
    before = root.files()
    printed = root.install(packages(VERSION)[HOST])
    assert "error" not in printed.lower()
    shown = root.run("unbounded-agent", "--version")
    assert re.fullmatch(rf"unbounded-agent {re.escape(VERSION)} \(Python 3\.1[123]\.\d+\)", shown)
    with pytest.raises(CommandError, match=r"exit code 2:\n.*no such file"):
        root.run("unbounded-agent", "status")
    (root.path / "etc/unbounded-agent/config.toml").write_text("[machines.gpu-node]\n")
    sample = root.path / "etc/unbounded-agent/config.toml.sample"
    sample.write_text(sample.read_text() + "# mine\n")
    # With everything that the modules import.
    root.run("/usr/bin/python3", "-IS", "-c", IMPORT_ALL)

    enabled = root.path / "etc/systemd/system/multi-user.target.wants/unbounded-agent.service"
    assert not enabled.is_symlink(), "the administrator enables it after writing the configuration"
    root.run("systemctl", "enable", "unbounded-agent.service")
    for version in (NEXT, VERSION):
        root.install(packages(version)[HOST])
        assert root.run("dpkg-query", "--show", "--showformat=${Version} ${Status}", HOST) == (
            f"{version} install ok installed"
        )
        assert enabled.is_symlink()
        assert sample.read_text().endswith("# mine\n")

    root.run("dpkg", "--remove", HOST)
    assert (root.path / "etc/unbounded-agent/config.toml").exists()
    assert not (root.path / "usr/lib/unbounded-agent").exists()
    root.run("dpkg", "--purge", HOST)
    # systemd's own directories.
    assert root.files() - before <= {"/etc/systemd/nspawn", "/run/systemd", "/run/systemd/system.control"}


IMPORT_ALL = """
import pkgutil, sys
sys.path.append("/usr/lib/unbounded-agent/host")
import agent, pydantic_core, yaml
for each in pkgutil.walk_packages(agent.__path__, "agent."):
    if not each.name.endswith(("__main__", "open_nodes")):
        __import__(each.name)
used = {each for each in sys.path if "packages" in each}
assert not used, used
"""

IMPORT_MACHINE_HALF = """
import pkgutil
import agent.dra, agent.machine, tomlkit, yaml
for part in (agent.dra, agent.machine):
    for each in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
        if not each.name.endswith(("__main__", "open_nodes")):
            __import__(each.name)
"""


def test_packages_of_the_distribution_and_of_pip_are_not_used(root: Root) -> None:
    root.install(packages(VERSION)[HOST])
    places = (f"/usr/local/lib/python{version}/dist-packages" for version in SUITES.values())
    for place in ("/usr/lib/python3/dist-packages", *places):
        (root.path / place.strip("/")).mkdir(parents=True, exist_ok=True)
        (root.path / place.strip("/") / "pydantic.py").write_text("raise SystemExit('a foreign one')\n")
    (root.path / "etc/unbounded-agent/config.toml").write_text("[machines]\n")
    (root.path / "etc/unbounded-agent/sitecustomize.py").write_text("raise SystemExit('a foreign one')\n")
    root.run("env", f"PYTHONPATH={SETTINGS}", "unbounded-agent", "plan")


def test_purge_leaves_what_a_running_machine_needs(root: Root) -> None:
    root.install(packages(VERSION)[HOST])
    needed = {
        "etc/systemd/nspawn/gpu-node.nspawn": "# Written by unbounded-agent; changes are overwritten.\n",
        "etc/systemd/system/systemd-nspawn@gpu-node.service.d/90-unbounded-agent.conf": "[Service]\n",
        "etc/systemd/system/systemd-nspawn@gpu-node.service.d/95-local.conf": "[Service]\n",
        "run/systemd/system.control/systemd-nspawn@gpu-node.service.d/50-DeviceAllow.conf": "[Service]\n",
        "var/lib/unbounded-agent/trees/0/library": "",
    }
    for name, text in needed.items():
        (root.path / name).parent.mkdir(parents=True, exist_ok=True)
        (root.path / name).write_text(text)
    running = root.path / "run/systemd/machines/gpu-node"
    running.parent.mkdir(parents=True, exist_ok=True)
    running.touch()
    printed = root.run("sh", "-c", f"dpkg --purge {HOST} 2>&1")
    assert "the machine gpu-node is running or starting" in printed
    assert all((root.path / name).exists() for name in needed)

    running.unlink()
    root.install(packages(VERSION)[HOST])
    root.run("dpkg", "--purge", HOST)
    assert [name for name in needed if (root.path / name).exists()] == [
        "etc/systemd/system/systemd-nspawn@gpu-node.service.d/95-local.conf"
    ], "only what is not ours"
    assert not (root.path / "var/lib/unbounded-agent").exists()


def test_purge_leaves_a_node_that_reset_must_remove(root: Root) -> None:
    root.install(packages(VERSION)[HOST])
    record = root.path / "var/lib/unbounded-agent/nodes/gpu-node.json"
    record.parent.mkdir()
    record.touch()
    assert "`unbounded-agent reset gpu-node` was not run" in root.run("sh", "-c", f"dpkg --purge {HOST} 2>&1")
    assert record.exists()


def test_units_and_rules_are_valid(root: Root) -> None:
    root.install(packages(VERSION)[HOST])
    names = ("", "-modules", "-prepare@gpu-node")
    units = [f"/usr/lib/systemd/system/unbounded-agent{name}.service" for name in names]
    (root.path / "usr/lib/systemd/system/unbounded-agent-prepare@gpu-node.service").symlink_to(
        "unbounded-agent-prepare@.service"
    )
    found = root.run("sh", "-c", f"systemd-analyze verify --man=no {' '.join(units)} 2>&1 || true")
    assert [line for line in found.splitlines() if "unbounded-agent" in line] == []


def test_machine_half(root: Root) -> None:
    """It needs only the distribution's Python packages, and its units start with the machine."""
    before = root.files()
    root.install(packages(VERSION)[MACHINE])
    assert not [path for path in root.files() if "unbounded-agent-dra" in path or "/agent/dra" in path]
    assert f'__version__ = "{VERSION}"' in (root.path / "usr/lib/unbounded-agent/agent/__init__.py").read_text()
    root.install(packages(VERSION)[DRA])
    wanted = {path.rpartition("/")[2] for path in root.files() - before if ".wants/" in path}
    units = REPOSITORY / "systemd" / "machine"
    assert wanted == {path.name for path in units.glob("*.*") if path.is_file() and "[Install]" in path.read_text()}
    path = "PYTHONPATH=/usr/lib/unbounded-agent:/usr/lib/python3/dist-packages"
    root.run("env", path, "/usr/bin/python3", "-P", "-S", "-c", IMPORT_MACHINE_HALF)
    assert any(each.startswith("/usr/lib/unbounded-agent/agent/machine/__pycache__/") for each in root.files())
    with pytest.raises(CommandError, match="conflicting packages"):
        root.install(packages(VERSION)[HOST])
    root.run("dpkg", "--purge", HOST)
    root.run("dpkg", "--purge", DRA, MACHINE)
    assert root.files() - before == set()


def test_monitoring(root: Root) -> None:
    """For the server that runs Prometheus, which has none of the other packages."""
    before = root.files()
    root.install(packages(VERSION)[MONITORING])
    place = root.path / "usr/share/unbounded-agent-monitoring"
    for name in ("prometheus", "grafana"):
        files = {path.name: path.read_bytes() for path in (REPOSITORY / "deploy" / name).iterdir()}
        assert {path.name: path.read_bytes() for path in (place / name).iterdir()} == files
    (root.path / "etc/default/unbounded-agent-monitoring").write_text("RUNBOOKS=https://wiki.example.org/docs\n")
    root.run("dpkg-reconfigure", MONITORING)
    rules = root.path / "var/lib/unbounded-agent-monitoring"
    assert (
        "https://wiki.example.org/docs/runbooks.md#unboundedagentdown"
        in (rules / "unbounded-agent.rules.yml").read_text()
    )
    assert {path.name for path in rules.iterdir()} == {f"unbounded-agent.{each}.yml" for each in ("rules", "recording")}
    root.run("dpkg", "--purge", MONITORING)
    assert root.files() - before == set()


@pytest.mark.exhaustive
def test_upgrade_of_debian() -> None:
    """From 12 to 13 the agent goes on with the new Python, without anything that has to be built again."""
    with debian_root("bookworm") as root:
        root.install(packages(VERSION)[HOST])
        for name in ("etc/resolv.conf", "etc/hosts"):
            (root.path / name).write_text(Path("/", name).read_text())
        sources = root.path / "etc/apt/sources.list"
        sources.write_text("deb http://deb.debian.org/debian trixie main\n")
        shell = "apt-get update --quiet && apt-get full-upgrade --yes --quiet --no-install-recommends"
        root.run("sh", "-c", f"{shell} -o Dpkg::Options::=--force-unsafe-io -o APT::Sandbox::User=root")
        assert "Python 3.13" in root.run("unbounded-agent", "--version")
        root.run("/usr/bin/python3", "-IS", "-c", IMPORT_ALL)
        caches = "/usr/lib/unbounded-agent/host/agent/__pycache__/"
        compiled = {name for name in root.files() if name.startswith(caches)}
        assert {name.split(".")[-2] for name in compiled} == {"cpython-313"}


def test_same_bytes(tmp_path: Path) -> None:
    """Another directory, time zone, umask, language and age of the checkout change nothing."""
    script = 'umask 077; exec "$0" "$1"'
    command: list[str | Path] = ["sh", "-c", script, REPOSITORY / "deploy" / "build-packages", tmp_path]
    unit = REPOSITORY / "systemd" / "unbounded-agent.service"
    times = (unit.stat().st_atime, unit.stat().st_mtime)
    os.utime(unit, (0, 0))
    try:
        run(command, env={"VERSION": VERSION, "SOURCE_DATE_EPOCH": EPOCH, "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"})
    finally:
        os.utime(unit, times)
    for path in packages(VERSION).values():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_other_architecture() -> None:
    """Nothing is compiled: its wheels are packed."""
    found = packages(VERSION, "arm64")
    for name in (MACHINE, DRA, MONITORING):
        assert found[name].read_bytes() == packages(VERSION)[name].read_bytes()
    contents = run(["dpkg", "--contents", found[HOST]])
    versions = re.findall(r"_pydantic_core\.cpython-(\d+)-aarch64-linux-gnu\.so", contents)
    assert versions == ["311", "312", "313"]
    assert "x86_64" not in contents


def test_contents_are_those_of_the_lock() -> None:
    """The SBOM names each file with a hash of the lock; the dependencies name the Pythons."""
    deb = packages(VERSION)[HOST]
    script = 'dpkg --fsys-tarfile "$0" | tar --extract --to-stdout "./$1"'
    document = json.loads(run(["sh", "-c", script, deb, "usr/share/unbounded-agent/sbom.cdx.json"]))
    lock = (REPOSITORY / "requirements.lock").read_text()
    hashes = [each["content"] for component in document["components"] for each in component["hashes"]]
    assert [each for each in hashes if f"sha256:{each}" not in lock] == []
    names = {component["name"].lower().replace("_", "-") for component in document["components"]}
    assert names == set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) - {"win-inet-pton"}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    supported = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    depends = run(["dpkg", "--field", deb, "Depends"])
    last = int(supported[-1].partition(".")[2])
    assert f"python3 (>= {supported[0]}), python3 (<< 3.{last + 1}~)" in depends
    contents = run(["dpkg", "--contents", deb])
    assert re.findall(r"_pydantic_core\.cpython-3(\d+)-", contents) == [each[2:] for each in supported]


def test_manual_pages_need_only_fonts_that_terminals_have() -> None:
    """go-md2man uses the font C for code, and man warned of each place."""
    script = 'dpkg --fsys-tarfile "$0" | tar --extract --to-stdout "./usr/share/man/$1" | gunzip'
    for page in ("man8/unbounded-agent.8.gz", "man5/unbounded-agent.toml.5.gz"):
        text = run(["sh", "-c", script, packages(VERSION)[HOST], page])
        assert set(re.findall(r"\\f(.)", text)) <= set("BIRP"), page


def test_lintian() -> None:
    assert run(["lintian", "--allow-root", "--fail-on=error,warning", *packages(VERSION).values()]) == ""
