"""Run the real nvidia-ctk on a driver root without a virtual machine. The GPU and NVML are simulated.

nvidia-ctk runs in its own mount namespace: /proc/driver/nvidia has one GPU, whose nodes are copies of /dev/null.
"""

import os
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.handoff import GrantedDevice, Request
from agent.system.files import System
from agent.system.process import Completed, host_runner
from agent.vendors.nvidia.contract import NVIDIA_CTK
from integration.bed.drivers.nvml import library_name, nvml

NULL = DeviceNumber(1, 3, 0o666)
INFORMATION = "Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Location: \t {gpu}\nDevice Minor: \t 0\n"
UUID = "GPU-00000000-0000-4000-8000-000000000000"
# Arguments: the driver root, its path in the machine, the directories that become /run/unbounded-agent and
# /proc/driver, the paths of the nodes, `--`, then the command.
NAMESPACE = """
set -e
root=$1 place=$2 state=$3 driver=$4
shift 4
mount -t tmpfs tmpfs /mnt && mkdir /mnt/root /mnt/state /mnt/driver
mount --bind "$root" /mnt/root && mount --bind "$state" /mnt/state && mount --bind "$driver" /mnt/driver
mount -t tmpfs tmpfs /run && mkdir -p "$place" /run/unbounded-agent
mount --bind /mnt/root "$place" && mount --bind /mnt/state /run/unbounded-agent && mount --bind /mnt/driver /proc/driver
mount -t tmpfs tmpfs /dev
mknod -m 666 /dev/null c 1 3
while [ "$1" != -- ]; do
    mkdir -p "$(dirname "$1")" && mknod -m 666 "$1" c 1 3
    shift
done
shift
exec "$@"
"""


class GeneratorMachine(System):
    """A machine that has only nvidia-ctk, and the driver root of a request."""

    def __init__(
        self,
        work: Path,
        driver_root: Path,
        request: Request,
        nvidia_ctk: Path,
        others: Collection[GrantedDevice] = (),
    ) -> None:
        """Replace the NVML of `driver_root`, a staged driver root, with the stand-in.

        The machine has the nodes of the request and of `others`. The request is from `with_simulated_nodes`.
        """
        super().__init__(self._run, str(work))
        (library,) = driver_root.glob(f"usr/lib/x86_64-linux-gnu/{library_name(request.driver_version)}")
        stand_in = nvml(library, request.driver_version)
        library.unlink()
        shutil.copy2(stand_in, library)
        self._state, self._driver = work / "run/unbounded-agent", work / "driver"
        (gpu,) = request.gpus
        information = self._driver / "nvidia/gpus" / gpu / "information"
        information.parent.mkdir(parents=True)
        information.write_text(INFORMATION.format(uuid=UUID, gpu=gpu))
        version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {request.driver_version}  simulated\n"
        (self._driver / "nvidia/version").write_text(version)
        self._state.mkdir(parents=True)
        self._root, self._place, self._nvidia_ctk = driver_root, request.driver_root, nvidia_ctk
        self._nodes = tuple(device.path for device in (*request.devices, *others))
        self.make_directory("/dev")
        os.mknod(work / "dev/null", stat.S_IFCHR | NULL.mode, os.makedev(NULL.major, NULL.minor))

    def _run(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[0] != NVIDIA_CTK:
            raise FileNotFoundError(argv[0])
        places = (str(self._root), self._place, str(self._state), str(self._driver))
        namespace = ("unshare", "--mount", "sh", "-c", NAMESPACE, "sh", *places, *self._nodes, "--")
        return host_runner((*namespace, str(self._nvidia_ctk), *argv[1:]), timeout)


def with_simulated_nodes(request: Request) -> tuple[Request, Mapping[str, DeviceNumber]]:
    """Return the request as it fits the namespace, and the numbers of its nodes by path.

    The namespace has no DRM nodes, and its other nodes are copies of /dev/null.
    """
    dri = (DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER)
    devices = tuple(
        each._replace(major=NULL.major, minor=NULL.minor) for each in request.devices if each.kind not in dri
    )
    return request._replace(devices=devices), {each.path: NULL for each in devices}
