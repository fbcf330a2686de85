"""Kubernetes and etcd, built in the versions that the go.mod files in integration/go/kubernetes* pin."""

import sys
from pathlib import Path

from integration.bed.cache import REPOSITORY, cached
from integration.bed.tools import compile_go, pinned

MODULES = REPOSITORY / "integration" / "go"
RELEASE, NEXT_RELEASE = "kubernetes", "kubernetes-1.37"
"""Directories in MODULES: of the release that clusters have, and of the next one, which only exhaustive tests build."""
MODULE = MODULES / RELEASE
KUBERNETES = "k8s.io/kubernetes"
PACKAGES = (
    *(
        f"{KUBERNETES}/cmd/{name}"
        for name in ("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    ),
    "unbounded-agent/integration/go/kubernetes/etcd",
)


def kubernetes(release: str = RELEASE) -> Path:
    """Return a directory with kubelet, kubectl, etcd and the control plane, linked statically.

    Without Go's build cache, a build takes seven minutes on two cores. So no file that changes often is among the
    inputs, whose changes cause a new build. `release` is RELEASE or NEXT_RELEASE.
    """
    # hack/lib/version.sh sets these variables in a release build, from the checkout; here the version is the module's.
    version = "k8s.io/component-base/version"
    module = MODULES / release
    number = pinned(module, KUBERNETES)
    major, minor, _ = number.split(".", 2)
    settings = {"gitVersion": f"v{number}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {version}.{name}={value}" for name, value in settings.items())])

    def build(output: Path) -> None:
        for package in PACKAGES:
            compile_go(module, package, output / package.rsplit("/", 1)[1], flags)

    return cached(release, [module, flags, *PACKAGES], build)


if __name__ == "__main__":
    # Prints the directory of the release that the argument names; without an argument, of the one that clusters have.
    print(kubernetes(*sys.argv[1:]))
