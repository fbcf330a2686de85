"""A host whose driver is where Talos has it, without an entry in the loader cache: its files reach a pod."""

import json
from typing import Any

import pytest

from agent.host.state.records import MANIFEST
from agent.model.paths import MANIFESTS, handoff_file
from integration.bed.drivers.host_roots import LIBRARIES
from integration.bed.drivers.moved_drivers import TALOS, talos
from integration.bed.machine.node import MACHINE
from integration.bed.measure.restarts import AGENT
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, look

pytestmark = pytest.mark.scenario("001")

# Once the driver has moved: remove the dangling links of Debian's alternatives system, and directories that Talos does
# not have. The last line fails if the loader cache still has the driver.
REST = """
find /usr /etc -xdev -xtype l -delete
rm -rf /usr/lib/nvidia /{libraries}/nvidia
ldconfig
! ldconfig -p | grep libcuda
"""


NAMED = f"""
[driver]
library_directories = ["/{TALOS}", "/{TALOS}64"]
binary_directories = ["/usr/local/glibc/usr/bin"]
data_directories = ["/usr/local/glibc/etc", "/usr/local/glibc/usr/share", "/usr/local/share"]
"""
"""Settings that name where Talos has the driver."""


def move(bed: Bed) -> str:
    """Move the driver on the host, with the paths that the agent has staged; return the driver's version."""
    (request,) = json.loads(bed.guest.read(handoff_file(MACHINE)))["requests"]
    manifest = f"{MANIFESTS}/{request['driver_root'].rpartition('/')[2]}.json"
    root = MANIFEST.parse(manifest, bed.guest.read(manifest))
    lines = ["set -e"]
    elsewhere = [file for file in root.files if file.source != f"/{talos(file.target)}"]
    for file in elsewhere:
        if place := talos(file.target):
            lines.append(f"mkdir -p /{place.rpartition('/')[0]}")
            lines.append(f"ln -s {file.link} /{place}" if file.link else f"ln {file.source} /{place}")
    lines += [f"rm -f {source}" for source in sorted({file.source for file in elsewhere if file.source})]
    bed.run("sh", "-c", "\n".join(lines) + REST.format(libraries=LIBRARIES), timeout=120)
    return root.version


def in_pods(spec: dict[str, Any]) -> set[str]:
    return {each["containerPath"] for each in spec["containerEdits"]["mounts"]}


def wait_found(bed: Bed, place: str, seconds: float = 200) -> str:
    """Wait until the driver is found in that place, and return the condition's message."""

    def found() -> str:
        message: str = bed.last_conditions()["LibrariesPresent"]["message"]
        return message if f"({place})" in message else ""

    return wait(f"the driver is found in {place}", found, seconds, bed.evidence)


def staged(bed: Bed) -> set[str]:
    """Return the indices of the driver roots that the published specification mounts from."""
    return {each["hostPath"].split("/")[3] for each in bed.node.spec()["containerEdits"]["mounts"]}


@pytest.mark.exhaustive
def test_a_pod_sees_its_gpu(ready: Bed) -> None:
    """The driver moves while a machine runs, which keeps its copy of that version until a setting names the place."""
    before, starts = ready.node.spec(), ready.starts()
    version = move(ready)
    assert f"driver {version} from /{TALOS}, /{TALOS}64 (Talos)" in wait_found(ready, "Talos")
    ready.wait_ready()
    assert staged(ready) == {"0"}
    ready.guest.write("/etc/unbounded-agent/config.toml", (CONFIGURATION + NAMED).encode())
    ready.run("systemctl", "reload", AGENT)
    wait_found(ready, "driver.library_directories")
    wait("only the new driver root is left", lambda: staged(ready) == {"1"}, 200, ready.evidence)
    ready.wait_ready()
    spec = ready.node.spec()
    assert in_pods(spec) == {path for path in in_pods(before) if talos(path.lstrip("/"))}
    ready.node.run("ls", "--", *(each["hostPath"] for each in spec["containerEdits"]["mounts"]))
    # As the device plugin's strategies do: cdi-cri and cdi-annotations first, then envvar.
    expect_gpus(look(ready.node, cdi=("1",)).probe, {1})
    expect_gpus(look(ready.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "2"}).probe, {2})
    assert ready.restarted(starts) == "nothing"
