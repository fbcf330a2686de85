"""Intel's and AMD's GPUs next to NVIDIA's, with stand-in drivers and real DRM devices (integration/simulation/drm)."""

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from integration.bed.drivers import drm_gpus
from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure.watching import uptime
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("004")

INTEL_PORT, AMD_PORT, BMC_PORT = 8, 9, 10
"""Empty ports: the host begins with GPUs in 0 to 7."""
USER = 1000
RENDER = 4242
"""The number of the machine's group `render`, deliberately different from the host's."""


def links(bed: Bed, address: str) -> list[str]:
    """Return the host's nodes of a PCI device, card first."""
    script = f"for link in /dev/dri/by-path/pci-{address}-*; do readlink -f $link; done"
    return bed.run("sh", "-c", script).stdout.split()


def spec(bed: Bed, vendor: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bed.node.run("cat", f"/etc/cdi/{vendor}.yaml").stdout)
    return found


def wait_for_specs(bed: Bed, *vendors: str, seconds: float = 200) -> None:
    """Wait until the machine is ready, and has the CDI specifications of only these vendors."""
    wanted = sorted(f"{vendor}.yaml" for vendor in vendors)

    def reached() -> bool:
        listed = bed.run("ls", f"/var/lib/machines/{MACHINE}/etc/cdi", check=False).stdout.split()
        return listed == wanted and bed.last_conditions()["Ready"]["status"] == "True"

    wait(f"specifications of {vendors}", reached, seconds, bed.evidence)


def opened(bed: Bed, cdi: tuple[str, ...], nodes: list[str]) -> set[str]:
    """Return which of the nodes a pod without root's rights can open."""
    found = bed.node.pod(Pod(("gpu-probe", *nodes), cdi=cdi, user=USER)).stdout
    return {path for path, result in json.loads(found)["open"].items() if result == "OK"}


def test_each_node_goes_to_its_own_vendor(ready: Bed) -> None:
    """Two hot-plugged GPUs add two specifications, and each pod opens its GPU's nodes. Then one GPU is removed."""
    bed, at_start = ready, ready.starts()
    bed.node.shell(f"sed -i /^render:/d /etc/group && echo render:x:{RENDER}: >> /etc/group")
    before = set(bed.node.shell("ls /dev/dri").stdout.split())
    drm_gpus.load_drivers(bed.host)
    bed.run("modprobe", "vgem")
    bmc = drm_gpus.plug(bed.host, BMC_PORT, drm_gpus.ASPEED)
    intel = drm_gpus.plug(bed.host, INTEL_PORT, drm_gpus.INTEL)
    amd = drm_gpus.plug(bed.host, AMD_PORT, drm_gpus.AMD)
    wait_for_specs(bed, "amd", "intel", "nvidia")
    bed.node.shell("cdi-validate /etc/cdi/intel.yaml && cdi-validate /etc/cdi/amd.yaml")

    own = {"intel": links(bed, intel), "amd": [*links(bed, amd), "/dev/kfd"]}
    names = {path.removeprefix("/dev/dri/") for paths in own.values() for path in paths}
    assert set(bed.node.shell("ls /dev/dri").stdout.split()) - before == names - {"/dev/kfd"} | {"by-path"}
    nodes = [*own["intel"], *own["amd"], *links(bed, bmc)]
    numbers = f"stat -c '%n %t:%T %g' {shlex.join([*own['intel'], *own['amd']])}"
    assert bed.node.shell(numbers).stdout == bed.run("sh", "-c", numbers).stdout, "the host's groups, as numbers"
    by_path = f"readlink -f /dev/dri/by-path/pci-{intel}-card /dev/dri/by-path/pci-{intel}-render"
    assert bed.node.shell(by_path).stdout.split() == own["intel"]
    groups = {node["gid"] for node in spec(bed, "amd")["devices"][0]["containerEdits"]["deviceNodes"]}
    assert RENDER in groups, "the machine's own group, for runtimes that make nodes"

    assert opened(bed, (f"intel.com/gpu={intel}",), nodes) == set(own["intel"])
    assert opened(bed, ("amd.com/gpu=0",), nodes) == set(own["amd"])

    bed.host.qemu.unplug(INTEL_PORT)
    wait_for_specs(bed, "amd", "nvidia")
    assert not bed.node.run("ls", *own["intel"], f"/dev/dri/by-path/pci-{intel}-card", check=False).stdout
    allowed = bed.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    minors = [re.sub(r"\D", "", path) for path in own["intel"]]
    assert not [minor for minor in minors if re.search(rf"226:{minor}\b", allowed)]
    assert bed.restarted(at_start) == "nothing"


def expect_alone(bed: Bed, address: str) -> list[str]:
    """Assert that everything that names nodes has only this Intel GPU; return its nodes."""
    own = links(bed, address)
    minors = {re.sub(r"\D", "", path) for path in own}
    assert set(bed.node.shell("ls -d /dev/nvidia* /dev/dri/[cr]*", check=False).stdout.split()) == set(own)
    numbers = ("stat", "-c", "%n %t:%T", *own)
    assert bed.node.run(*numbers).stdout == bed.run(*numbers).stdout
    devices = {each["name"]: each["containerEdits"]["deviceNodes"] for each in spec(bed, "intel")["devices"]}
    assert set(devices) == {address, own[0].rpartition("/")[2], "all"}
    for listed in devices.values():
        assert {(each["path"], each["major"], str(each["minor"])) for each in listed} == {
            (path, 226, re.sub(r"\D", "", path)) for path in own
        }
    allowed = bed.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    assert set(re.findall(r"/dev/char/(\d+:\d+) ", allowed)) == {f"226:{minor}" for minor in minors}
    bound = bed.run("cat", f"/etc/systemd/nspawn/{MACHINE}.nspawn").stdout
    assert set(re.findall(r"^BindReadOnly=(/dev/.*)$", bound, re.MULTILINE)) == set(own)
    of_driver = "ldconfig -p | grep -e libcuda -e libnvidia; ls /usr/bin/nvidia-smi /etc/cdi/nvidia.yaml"
    assert bed.node.shell(of_driver, check=False).stdout == ""
    everything = bed.run("sh", "-c", "ls -d /dev/nvidia[0-9]* /dev/nvidiactl /dev/dri/card* /dev/dri/renderD*").stdout
    assert opened(bed, (f"intel.com/gpu={address}",), everything.split()) == set(own)
    return own


@pytest.mark.exhaustive
def test_intels_gpu_alone_and_renumbered_by_a_reboot(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """A machine restricted to Intel's GPU loses NVIDIA's at once. After the reboot, Intel's driver loads first."""
    bed = ready
    drm_gpus.load_drivers(bed.host)
    intel = drm_gpus.plug(bed.host, INTEL_PORT, drm_gpus.INTEL)
    bed.guest.write("/etc/unbounded-agent/config.toml", f'[machines.{MACHINE}]\ngpus = ["{intel}"]\n'.encode())
    bed.run("systemctl", "reload", "unbounded-agent.service")
    wait_for_specs(bed, "intel")
    before = expect_alone(bed, intel)

    drm_gpus.load_before_nvidia(bed.host, intel)
    bed.run("sync")
    bed.host.reboot(timeout=600)
    wait_for_specs(bed, "intel", seconds=400)
    measured("seconds from boot to ready", f"{uptime(bed.guest):.0f}")
    after = expect_alone(bed, intel)
    assert not set(before) & set(after)
    drivers = (f"/sys/class/drm/{path.rpartition('/')[2]}/device/driver" for path in before)
    assert set(bed.run("readlink", *drivers).stdout.split()) == {"../../../../bus/pci/drivers/nvidia"}
