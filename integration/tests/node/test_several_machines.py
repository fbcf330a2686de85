"""Two machines on one host, each with its own GPUs, and a third that does not exist."""

import json

import pytest

from integration.bed.machine.node import MACHINE, Node
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

SECOND = "second"
CONFIG = f"""
[machines.{MACHINE}]
gpus = "count=3"
[machines.{SECOND}]
gpus = ["0000:02:00.0"]
[machines.missing]
"""
OPEN = """
import os
for minor in range(8):
    try:
        os.close(os.open(f"/dev/nvidia{minor}", os.O_RDWR))
        print(minor)
    except OSError:
        pass
"""


def roots(bed: Bed) -> None:
    """Make both machines from one image, each with its own overlay for changes."""
    image = "/run/image"
    bed.run("mkdir", image)
    # Private: otherwise mounts on the root directory would appear here as well (shared subtrees).
    bed.run("mount", "--bind", "--make-private", f"/var/lib/machines/{MACHINE}", image)
    for machine in (MACHINE, SECOND):
        root, changes = f"/var/lib/machines/{machine}", f"/run/changes-{machine}"
        bed.run("mkdir", "-p", root, changes)
        bed.run("mount", "-t", "tmpfs", "-o", "size=256m", "changes", changes)
        bed.run("mkdir", f"{changes}/upper", f"{changes}/work")
        layers = f"lowerdir={image},upperdir={changes}/upper,workdir={changes}/work"
        bed.run("mount", "-t", "overlay", "-o", layers, "overlay", root)


def opened(bed: Bed, machine: str) -> set[int]:
    """Return the minors of GPU nodes that open in a machine, including nodes that somebody bound from the host."""
    return {int(minor) for minor in Node(bed.guest, machine).run("python3", "-c", OPEN).stdout.split()}


def test_each_machine_has_its_own(installed: Bed) -> None:
    """One is configured by number, and gets none that the other names. The missing machine does not affect them."""
    roots(installed)
    installed.guest.write("/etc/unbounded-agent/config.toml", CONFIG.encode())
    finished = installed.agent("apply", timeout=400, check=False)
    assert finished.status == 1, "one machine is missing"
    ready = {
        machine: found["reason"]
        for machine, found in json.loads(installed.agent("status", "--json").stdout)["machines"].items()
    }
    assert ready == {MACHINE: "AllConditionsTrue", SECOND: "AllConditionsTrue", "missing": "NoSuchMachine"}
    assert opened(installed, MACHINE) == {0, 2, 3}
    assert opened(installed, SECOND) == {1}
    # Binding a node by hand does not give away the other machine's GPU.
    installed.run("machinectl", "--mkdir", "bind", SECOND, "/dev/nvidia0")
    assert opened(installed, SECOND) == {1}
