"""Kubernetes and etcd, built in the versions that integration/go/kubernetes/go.mod pins."""

from pathlib import Path

from integration.bed.cache import REPOSITORY, cached
from integration.bed.tools import compile_go, pinned

MODULE = REPOSITORY / "integration" / "go" / "kubernetes"
KUBERNETES = "k8s.io/kubernetes"
PACKAGES = (
    *(
        f"{KUBERNETES}/cmd/{name}"
        for name in ("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    ),
    "unbounded-agent/integration/go/kubernetes/etcd",
)


def kubernetes() -> Path:
    """Return a directory with kubelet, kubectl, etcd and the control plane, linked statically.

    Without Go's build cache this takes seven minutes on two cores, so files that change often are not among the inputs.
    """
    # hack/lib/version.sh sets these variables in a release build, from the checkout; here the version is the module's.
    version = "k8s.io/component-base/version"
    number = pinned(MODULE, KUBERNETES)
    major, minor, _ = number.split(".", 2)
    settings = {"gitVersion": f"v{number}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {version}.{name}={value}" for name, value in settings.items())])

    def build(output: Path) -> None:
        for package in PACKAGES:
            compile_go(MODULE, package, output / package.rsplit("/", 1)[1], flags)

    return cached("kubernetes", [MODULE, flags, *PACKAGES], build)


if __name__ == "__main__":
    print(kubernetes())
