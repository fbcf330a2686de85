"""Measure how long `up` takes for a root file system, next to the bare tools, without a virtual machine.

Both pull the machine's image from a registry, fetch the kubelet and kubectl at the same time, verify these programs,
unpack the image, put in the node's files, sync and rename. The machine's boot and the join are not measured: they would
be the same for both.
"""

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from agent.config.settings import ImageSettings
from agent.host.apply.steps import apply
from agent.host.provision.apply import performers
from agent.host.provision.binaries import DIRECTORY as PROGRAMS
from agent.host.provision.image import inspect
from agent.host.provision.node_files import NodeInputs, make_record, node_files
from agent.host.provision.plan import FetchBinaries, FillRoot, PublishRoot, StageRoot
from agent.model.node import NodeBinary, NodeFile
from agent.model.paths import machine_root, staged_root
from agent.system.files import System
from agent.system.network import HostNetwork
from agent.system.process import host_runner
from agent.system.tool_runner import tool_runner
from integration.bed import process
from integration.bed.cluster.empty_host import Mirror
from integration.bed.cluster.kubernetes import kubernetes
from integration.bed.machine.machine_image import CONTAINERFILE, machine_image
from integration.bed.machine.node import MACHINE
from integration.bed.measure.bench_script import Measures
from integration.bed.measure.pairs import compared
from integration.bed.registry import Registry
from integration.bed.run_directory import run_directory
from integration.bed.vm.transfer import HOST_FROM_GUEST
from tests.fakes.node_settings import CA, node_settings

PAIRS = 5
LOCAL = "127.0.0.1"
MODULE = "integration.bed.measure.bench_join"
INPUTS = NodeInputs("node", "192.0.2.10", CA)
BARE = r"""
set -euo pipefail
cd "$1"
digest=$(skopeo inspect --cert-dir ca --format '{{.Digest}}' "$2")
skopeo --insecure-policy copy --quiet --src-cert-dir ca "${2%:*}@$digest" oci:image:node & pull=$!
while read -r sum name; do
    curl --silent --show-error --fail --output "$name" "$3/$name"
    echo "$sum  $name" | sha256sum --check --quiet
done <programs
wait $pull
umoci raw unpack --image image:node root
while read -r _ name; do install -D --mode=755 "$name" "root/usr/local/bin/$name"; done <programs
cp --recursive files/. root
rm -r image
sync --file-system root
mv root node
"""
"""Arguments: a directory with `ca`, `programs` and `files`; the image; the programs' URL."""


def measure_join(pairs: int = PAIRS) -> Measures:
    """Measure pairs of runs. The two runs of a pair come directly after each other."""
    with Registry() as registry, Mirror(kubernetes()) as mirror:
        registry.push(machine_image(), f"nodes/{CONTAINERFILE}")
        directory = run_directory("join")
        url = f"{mirror.url.replace(HOST_FROM_GUEST, LOCAL)}/release/v{mirror.version}/bin/linux/amd64"
        sources = (directory, f"docker://{LOCAL}:{registry.port}/nodes/{CONTAINERFILE}:latest", url)
        ours, bare = [], []
        try:
            for _ in range(pairs):
                bare.append(_seconds(["bash", "-c", BARE, "bare", *sources], directory, registry, mirror))
                ours.append(_seconds([sys.executable, "-m", MODULE, *sources], directory, registry, mirror))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    absolute = {"join_seconds": statistics.median(ours), "join_bare_seconds": statistics.median(bare)}
    return absolute | compared("join_vs_bare", ours, bare)


def _files() -> tuple[NodeFile, ...]:
    return node_files(MACHINE, node_settings(), INPUTS)


def _seconds(argv: list[process.Argument], directory: Path, registry: Registry, mirror: Mirror) -> float:
    """Fill the directory with inputs, and return how long a program takes to make a root file system there."""
    shutil.rmtree(directory)
    directory.mkdir()
    shutil.copytree(registry.client_directory(), directory / "ca")
    (directory / "programs").write_text("".join(f"{digest} {name}\n" for name, digest in mirror.digests.items()))
    # The agent gives the path of the CA directory to skopeo, but itself looks for that path below `directory`. With
    # this link, both find the CA directory.
    link = directory / str(directory).lstrip("/")
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(directory, link.parent))
    for file in _files():
        path = directory / "files" / file.path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    process.run(["sync", "--file-system", directory])
    begun = time.monotonic()
    process.run(argv)
    seconds = time.monotonic() - begun
    (root,) = (each for each in (directory / "node", directory / machine_root(MACHINE).lstrip("/")) if each.exists())
    assert all((root / file).exists() for file in ("usr/local/bin/kubelet", "etc/kubernetes/kubelet.json", "usr/bin"))
    return seconds


def up(directory: str, image: str, url: str) -> None:
    """Make the root file system by the steps of `up`, below the directory."""
    host = System(host_runner, directory, tool_runner=tool_runner)
    settings = ImageSettings.validated({"name": image, "ca_directory": f"{directory}/ca"})
    found, files = inspect(settings, image, host), _files()
    programs = tuple(
        NodeBinary(name, f"{url}/{name}", digest, f"{PROGRAMS}/{name}")
        for digest, name in map(str.split, host.read_text("/programs").splitlines())
    )
    unpacked, staged = staged_root(MACHINE, found.digest), staged_root(MACHINE, "filled")
    record = make_record(node_settings(), INPUTS, found, programs, files)
    steps = (
        StageRoot(settings, found, unpacked),
        FetchBinaries(programs),
        FillRoot(unpacked, staged, programs, files),
        PublishRoot(MACHINE, staged, record),
    )
    apply(steps, host, performers=performers(HostNetwork()))


if __name__ == "__main__":
    up(*sys.argv[1:])
