"""Kubernetes and etcd, built in the versions that the go.mod files in integration/go/kubernetes* pin."""

import json
import re
import shutil
import sys
from pathlib import Path

from integration.bed.cache import REPOSITORY, cached
from integration.bed.process import run
from integration.bed.tools import compile_go, go, go_environment, pinned

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
    inputs, whose changes cause a new build. `release` is RELEASE, NEXT_RELEASE, or another version.
    """
    # hack/lib/version.sh sets these variables in a release build, from the checkout; here the version is the module's.
    version = "k8s.io/component-base/version"
    module = module_of(release)
    number = pinned(module, KUBERNETES)
    major, minor, _ = number.split(".", 2)
    settings = {"gitVersion": f"v{number}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {version}.{name}={value}" for name, value in settings.items())])

    def build(output: Path) -> None:
        for package in PACKAGES:
            compile_go(module, package, output / package.rsplit("/", 1)[1], flags)

    return cached(release, [module, flags, *PACKAGES], build)


def module_of(release: str) -> Path:
    """Return the Go module of a release; for a version without one, made from NEXT_RELEASE's and Kubernetes' own."""
    if (MODULES / release).is_dir():
        return MODULES / release
    template = MODULES / NEXT_RELEASE

    def build(output: Path) -> None:
        shutil.copytree(template / "etcd", output / "etcd")
        with_go = go_environment() | {"GOFLAGS": "-mod=mod"}
        downloaded = run([go(), "mod", "download", "-json", f"{KUBERNETES}@v{release}"], cwd=output, env=with_go)
        own = Path(json.loads(downloaded)["GoMod"]).read_text()
        # Kubernetes has its staging modules from its source tree; each is published as v0.x of the same release.
        staged = re.findall(r"^\s*(\S+) => \./staging/", own, re.MULTILINE)
        published = f"v0.{release.partition('.')[2]}"
        lines = [
            *("module unbounded-agent/integration/go/kubernetes", *re.findall(r"^go \S+$", own, re.MULTILINE)),
            *(
                f"require {name} {version}"
                for name, version in re.findall(r"^\s*(\S+/etcd/server/v3) (v\S+)", own, re.M)
            ),
            f"require {KUBERNETES} v{release}",
            *(f"replace {name} => {name} {published}" for name in staged),
        ]
        (output / "go.mod").write_text("\n".join(lines) + "\n")
        run([go(), "list", "-deps", *PACKAGES], cwd=output, env=with_go)

    return cached(f"go-module-kubernetes-{release}", [template, release], build)


if __name__ == "__main__":
    # Prints the directory of the release that the argument names; without an argument, of the one that clusters have.
    print(kubernetes(*sys.argv[1:]))
