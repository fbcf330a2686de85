"""containerd 1.7 and later ones read a node's configuration, and keep it when the machine half adds its own."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.config.settings import ContainerdSettings
from agent.host.provision.node_files import CERTS, MAIN, containerd_files
from integration.bed.machine.containerds import debian_root, upstream_root
from integration.bed.process import run

pytestmark = pytest.mark.scenario("003")

SETTINGS = ContainerdSettings(
    sandbox_image="registry.example.com/pause:3.10",
    mirrors={"docker.io": ["https://mirror.example.com"]},
    cni_binaries="/opt/cni/bin",
)


@pytest.mark.parametrize("release", ["trixie", pytest.param("upstream", marks=pytest.mark.exhaustive)])
def test_containerd_reads_every_setting(release: str, tmp_path: Path) -> None:
    root = upstream_root() if release == "upstream" else debian_root(release)
    for file in containerd_files(SETTINGS, "# a comment\n"):
        place = tmp_path / file.path.removeprefix("/etc/containerd/").lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
    # The root is in the bed's cache, which must not change: a mount shows the files only to this containerd.
    script = 'mount -t tmpfs none "$1/etc" && mkdir "$1/etc/containerd" && mount --bind "$2" "$1/etc/containerd"'
    script += ' && exec chroot "$1" /usr/bin/containerd --config "$3" config dump'
    printed = run(["unshare", "--mount", "sh", "-ec", script, "sh", root, tmp_path, MAIN])
    settings = dict(leaves(tomllib.loads(printed)["plugins"]))
    assert found(settings, "cni.bin_dirs", "cni.bin_dir") in ("/opt/cni/bin", ["/opt/cni/bin"])
    assert found(settings, "cni.conf_dir") == "/etc/cni/net.d"
    assert found(settings, "sandbox_image", "sandbox") == "registry.example.com/pause:3.10"
    assert found(settings, "config_path") == CERTS
    assert found(settings, "runc.options.SystemdCgroup") is True
    assert found(settings, "default_runtime_name") == "runc"


def leaves(table: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    nested = [(f"{path}.{key}", value) for key, value in table.items()]
    return [
        leaf for name, value in nested for leaf in (leaves(value, name) if isinstance(value, dict) else [(name, value)])
    ]


def found(settings: dict[str, Any], *names: str) -> Any:  # noqa: ANN401
    """Return the first value with one of these names that is not empty."""
    return next(
        (value for name in names for key, value in settings.items() if key.endswith(f".{name}") and value), None
    )
