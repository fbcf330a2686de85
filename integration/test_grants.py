"""A machine gets the GPUs that it was given, and the kernel keeps it from the others."""

import pytest

from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

SECOND = "0000:02:00.0"
OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def test_a_machine_with_one_of_eight_gpus(installed: Bed) -> None:
    """By PCI address: its node opens, another one is neither there nor can be made, and the spec names one GPU."""
    installed.guest.write("/etc/unbounded-agent/config.toml", f'[machines.gpu-node]\ngpus = ["{SECOND}"]\n'.encode())
    installed.agent("apply")
    node = installed.node
    uuid = node.run("nvidia-smi", "-L").stdout.split("UUID: ")[1].split(")")[0]
    assert set(each["name"] for each in node.spec()["devices"]) == {"0", uuid, "all", "none"}
    node.run("python3", "-c", OPEN, "/dev/nvidia1")
    # Root in the machine has CAP_MKNOD; that it may not use it here is the unit's device policy.
    made = node.run("mknod", "/dev/nvidia0", "c", "195", "0", check=False)
    assert made.status != 0
    assert "Operation not permitted" in made.stderr


def test_an_unknown_gpu_is_named_and_holds_up_nothing(installed: Bed) -> None:
    """A condition, not a guess; the machine starts with the GPU that is there."""
    text = f'[machines.gpu-node]\ngpus = ["{SECOND}", "0000:7f:00.0"]\n'
    installed.guest.write("/etc/unbounded-agent/config.toml", text.encode())
    finished = installed.agent("apply", check=False)
    assert finished.status == 1
    assert "GPU 0000:7f:00.0 is not on this host" in finished.stdout
    installed.node.run("python3", "-c", OPEN, "/dev/nvidia1")
