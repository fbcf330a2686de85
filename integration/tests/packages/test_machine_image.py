"""Images whose machine half comes from its packages, the key of NVIDIA's packages, and releases that are left out."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.machine import buildah
from integration.bed.machine.machine_image import base_image, base_suite
from integration.bed.packages import TOOLS, Root, debian_root, packages, repository
from integration.bed.process import CommandError, run

IMAGE = "agent-ubuntu2404"
"""The image without NVIDIA's toolkit. The bed's machines are made from the one with it."""
MACHINE = "unbounded-agent-machine"
CONTAINERFILES = REPOSITORY / "containerfiles"
TOOLKIT = "nvidia-container-toolkit-base"
OWN_TIMERS = {"unbounded-agent-gpu.timer", "unbounded-agent-node-condition.timer"}


def test_an_image_of_packages() -> None:
    directory = packages("1.0")[MACHINE].parent
    image = buildah.build(IMAGE, base_image(base_suite()), "--packages", directory)
    with buildah.working_container(image) as container:
        root = Root(Path(buildah.buildah("mount", container).strip()))
        shown = root.run("dpkg-query", "--show", "--showformat=${Package} ${Version}\\n", f"{MACHINE}*").splitlines()
        assert [f"{MACHINE} 1.0", f"{MACHINE}-dra 1.0"] == shown
        units = [each for each in (REPOSITORY / "systemd/machine").iterdir() if each.is_file()]
        expected = {each.name for each in units if "[Install]" in each.read_text()}
        assert expected
        for unit in {*expected, "containerd.service"}:
            assert root.run("systemctl", "is-enabled", unit) == "enabled", unit
        root.run("env", "PYTHONPATH=/usr/lib/unbounded-agent", "python3", "-P", "-c", "import agent.machine.run")
        assert list((root.path / "tmp").iterdir()) == []
        enabled = root.run("systemctl", "list-unit-files", "--state=enabled", "--no-legend", "*.timer")
        assert {line.split()[0] for line in enabled.splitlines()} == OWN_TIMERS, "a node needs no other"


@pytest.fixture
def root() -> Iterator[Root]:
    """Yield a root with gpg. Its python3 copies /root/key instead of a download; its apt-get only records arguments."""
    with debian_root("trixie", *TOOLS) as root:
        (root.path / "usr/local/bin/python3").write_text('#!/bin/sh\nexec cp /root/key "$4"\n')
        (root.path / "usr/local/bin/apt-get").write_text('#!/bin/sh\necho "$@" >>/root/apt-get\n')
        for name in ("python3", "apt-get"):
            (root.path / "usr/local/bin" / name).chmod(0o755)
        yield root


def install_toolkit(root: Root, fingerprint: str) -> None:
    """Run containerfiles/install-toolkit as if NVIDIA's key had this fingerprint."""
    script = (CONTAINERFILES / "install-toolkit").read_text()
    nvidia = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
    assert script.count(nvidia) == 1
    (root.path / "root/install-toolkit").write_text(script.replace(nvidia, fingerprint))
    for name in ("bound-packages", "upper-bounds"):
        shutil.copy(CONTAINERFILES / name, root.path / "root")
    root.run("env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin", "sh", "/root/install-toolkit")


def test_the_key_of_packages_is_checked(root: Root) -> None:
    keyring = root.path / "usr/share/keyrings/nvidia-container-toolkit.asc"
    fingerprints = []
    for name in ("a", "b"):
        generate = f"gpg --batch --passphrase '' --quick-generate-key {name}@example.org rsa2048 sign"
        root.run("sh", "-c", f"{generate} && gpg --armor --export {name}@example.org >/root/key-{name}")
        lines = root.run("gpg", "--list-keys", "--with-colons", f"{name}@example.org").splitlines()
        fingerprints.append(next(line.split(":")[9] for line in lines if line.startswith("fpr")))
    keys = {name: (root.path / f"root/key-{name}").read_bytes() for name in ("a", "b")}

    for served in (keys["b"], keys["a"] + keys["b"], b"<html>not found</html>\n"):
        (root.path / "root/key").write_bytes(served)
        with pytest.raises(CommandError, match=r"error: .*gpgkey has the key"):
            install_toolkit(root, fingerprints[0])
        assert not keyring.exists()
        assert "nvidia" not in (root.path / "root/apt-get").read_text()

    (root.path / "root/key").write_bytes(keys["a"])
    install_toolkit(root, fingerprints[0])
    assert keyring.read_bytes() == keys["a"]
    assert TOOLKIT in (root.path / "root/apt-get").read_text()


def test_apt_leaves_out_what_is_bounded(tmp_path: Path) -> None:
    """The bounds of other suites and of the host's packages do not count."""
    debs = []
    for version in ("1.19.0-1", "1.20.3-1", "1.20.10-1"):
        (tmp_path / version / "DEBIAN").mkdir(parents=True)
        control = f"Package: {TOOLKIT}\nVersion: {version}\nArchitecture: all\nMaintainer: a\nDescription: b\n"
        (tmp_path / version / "DEBIAN/control").write_text(control)
        debs.append(tmp_path / f"{TOOLKIT}_{version}_all.deb")
        run(["dpkg-deb", "--build", tmp_path / version, debs[-1]])
    with debian_root("trixie") as root:
        repository(root.path / "srv/repository", *debs)
        for source in (root.path / "etc/apt").glob("sources.list*"):
            shutil.rmtree(source) if source.is_dir() else source.unlink()
        (root.path / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/repository ./\n")
        shutil.copy(CONTAINERFILES / "bound-packages", root.path / "srv")

        def installed(*bounds: str) -> str:
            (root.path / "srv/upper-bounds").write_text("".join(f"{bound}\n" for bound in ("# a comment", *bounds)))
            bound = "dpkg --purge $0 >&2; apt-get update >&2 && /srv/bound-packages"
            said = root.run("sh", "-c", f"{bound} && apt-get install --yes $0 >&2", TOOLKIT)
            return f"{said.strip()} {root.run('dpkg-query', '--show', '--showformat=${Version}', TOOLKIT)}".strip()

        said = f"upper-bounds leaves out {TOOLKIT} from"
        both = "1.20.3-1 1.20.10-1"
        assert installed(f"machine {TOOLKIT} 1.20.3~") == f"{said} 1.20.3~ on: {both} 1.19.0-1"
        assert (
            installed(f"machine {TOOLKIT} 1.20.4~", f"host {TOOLKIT} 1.0") == f"{said} 1.20.4~ on: 1.20.10-1 1.20.3-1"
        )
        assert installed(f"machine {TOOLKIT} 1.20.3~ noble") == "1.20.10-1"
        trixie = installed(f"machine {TOOLKIT} 1.20.3~ trixie", f"machine {TOOLKIT} 2~")
        assert trixie == f"{said} 1.20.3~ on: {both} 1.19.0-1"
