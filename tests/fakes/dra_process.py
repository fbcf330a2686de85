"""The driver as a process, as the kubelet meets it: real sockets and files in a directory, without an API server.

Run with the directory as argument. The parent of the process is the kubelet. Claims are the files `claims/<name>.json`
there. If the file `die` exists, the process kills itself after it has noted a claim, before it answers. It imports all
of agent.dra, as the service does.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import time
from pathlib import Path

import agent.dra
from agent.dra.claims import Checkpoint, ClaimReference, NodeClaims, NotAllocatedError, Prepared
from agent.dra.inventory import Device, Health
from agent.dra.kubelet import DriverPlugin, KubeletPeer
from agent.system.files import System
from agent.system.process import host_runner
from tests.fakes.dra_node import GPUS, KUBELET, NODE


class MortalCheckpoint(Checkpoint):
    """Dies between the checkpoint and the answer."""

    tree: Path

    def save(self, claims: Prepared) -> None:
        super().save(claims)
        if (self.tree / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)


def main(tree: Path) -> None:
    for module in pkgutil.iter_modules(agent.dra.__path__, "agent.dra."):
        importlib.import_module(module.name)
    system = System(host_runner, str(tree))
    checkpoint = MortalCheckpoint(system, KUBELET)
    checkpoint.tree = tree

    def fetch(claim: ClaimReference) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads((tree / "claims" / f"{claim.name}.json").read_text())
        except FileNotFoundError as error:
            raise NotAllocatedError(f"claim {claim}: not found") from error
        return found

    devices = {name: Device(name, "vendor", (f"vendor.com/gpu={name}",), "", health=Health.HEALTHY) for name in GPUS}
    claims = NodeClaims(NODE, fetch, lambda: devices, checkpoint)
    kubelet = KubeletPeer()
    kubelet.follow(os.getppid())
    plugin = DriverPlugin(claims.prepare, claims.unprepare, NODE, str(tree / KUBELET[1:]), kubelet.refusal)
    plugin.publish_health(devices.values())
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    while not (tree / "stop").exists():
        plugin.keep_serving()
        time.sleep(0.05)
    plugin.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
