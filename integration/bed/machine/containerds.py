"""containerd of several releases, each in its own root file system: real programs from Debian and upstream."""

import shutil
from pathlib import Path

from integration.bed import debian
from integration.bed.cache import REPOSITORY, cached
from integration.bed.tools import compile_go

MODULE = REPOSITORY / "integration" / "go" / "containerd"
UPSTREAM = "github.com/containerd/containerd/v2/cmd"
# base-files has the links /lib and /lib64, without which no program finds its loader.
PACKAGES = ("base-files", "containerd", "runc", "crun")


def debian_root(suite: str) -> Path:
    """Return a root with containerd, runc and crun from a Debian suite, unpacked but not configured.

    trixie has containerd 1.7, which reads configurations of version 2; sid has 2.1, which also reads version 3.
    """

    def build(target: Path) -> None:
        debian.debian_tree(target / "root", "extract", PACKAGES, suite=suite)
        for name in ("var/lib/apt", "var/cache", "usr/share"):
            shutil.rmtree(target / "root" / name, ignore_errors=True)

    return cached(f"containerd-{suite}", [suite, *PACKAGES, Path(debian.__file__)], build) / "root"


def upstream_root() -> Path:
    """Return a root with only containerd and ctr of integration/go/containerd/go.mod, and an empty /etc as mount point.

    Its configuration is of version 4.
    """

    def build(target: Path) -> None:
        # Static, because the root has no C library.
        for name in ("containerd", "ctr"):
            compile_go(MODULE, f"{UPSTREAM}/{name}", target / "root/usr/bin" / name, "-s -w")
        (target / "root/etc").mkdir()

    return cached("containerd-upstream", [MODULE, Path(__file__)], build) / "root"
