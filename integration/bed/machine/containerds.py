"""containerd of several releases, each in its own root file system: real programs from distributions and upstream."""

import shutil
from pathlib import Path

from integration.bed import debian, ubuntu
from integration.bed.cache import REPOSITORY, cached
from integration.bed.tools import chosen, compile_go, module_with, versioned

MODULE = REPOSITORY / "integration" / "go" / "containerd"
UPSTREAM = "github.com/containerd/containerd/v2/cmd"
RUNC = "github.com/opencontainers/runc"
# base-files has the links /lib and /lib64, without which no program finds its loader.
PACKAGES = ("base-files", "containerd", "runc", "crun")


def debian_root(suite: str) -> Path:
    """Return a root with containerd, runc and crun from a suite of Debian, or Ubuntu's, unpacked but not configured.

    trixie has containerd 1.7, which reads configurations of version 2; sid has 2.1, which also reads version 3.
    """
    packages, suffix = versioned(suite, PACKAGES)

    def build(target: Path) -> None:
        if suite == ubuntu.UBUNTU:
            ubuntu.ubuntu_tree(target / "root", packages, "extract")
        else:
            debian.debian_tree(target / "root", "extract", packages, suite=suite)
        for name in ("var/lib/apt", "var/cache", "usr/share"):
            shutil.rmtree(target / "root" / name, ignore_errors=True)

    return cached(f"containerd-{suite}{suffix}", [suite, *packages, Path(debian.__file__)], build) / "root"


def upstream_root() -> Path:
    """Return a root with only containerd and ctr of integration/go/containerd/go.mod, and an empty /etc as mount point.

    Its configuration is of version 4.
    """
    names, module = ["containerd", "ctr"], MODULE
    if version := chosen("CONTAINERD"):
        names.append("containerd-shim-runc-v2")
        module = module_with([f"{UPSTREAM}/{name}@v{version}" for name in names])

    def build(target: Path) -> None:
        # Static, because the root has no C library.
        for name in names:
            compile_go(module, f"{UPSTREAM}/{name}", target / "root/usr/bin" / name, "-s -w")
        (target / "root/etc").mkdir()

    return cached("containerd-upstream", [module, Path(__file__)], build) / "root"


def runc(version: str) -> Path:
    """Return runc of this version, without seccomp: no pod of the tests uses it."""
    module = module_with([f"{RUNC}@v{version}"])

    def build(target: Path) -> None:
        compile_go(module, RUNC, target / "runc", "-s -w", cgo=True)

    return cached("runc", [module, Path(__file__)], build) / "runc"
