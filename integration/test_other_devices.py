"""Devices that are no GPUs, and mounts, in a real machine on a real kernel."""

import time

from integration.conftest import Bed

CONFIG = "/etc/unbounded-agent/config.toml"
LATENCY = "/dev/cpu_dma_latency"
"""A miscellaneous device of kernels with power management; four bytes can be read of it (kernel/power/qos.c)."""
SETTINGS = f"""\
[machines.gpu-node]
devices = ["gdrcopy"]
extra_devices = [{{ path = "{LATENCY}", mode = "r" }}]
extra_mounts = [
    {{ source = "/srv/models", target = "/srv/models" }},
    {{ source = "/srv/absent", target = "/mnt/absent" }},
]
"""
LATE = "/dev/late"


def test_what_settings_name_is_there_and_what_lacks_stops_nothing(installed: Bed) -> None:
    installed.run("mkdir", "/srv/models")
    installed.guest.write("/srv/models/weights", b"some")
    installed.guest.write(CONFIG, SETTINGS.encode())
    installed.agent("apply")
    node = installed.node
    assert node.run("cat", "/srv/models/weights").stdout == "some"
    assert "Read-only file system" in node.run("touch", "/srv/models/weights", check=False).stderr
    node.run("head", "-c", "4", LATENCY)
    assert "Operation not permitted" in node.run("dd", "if=/dev/zero", f"of={LATENCY}", "count=1", check=False).stderr
    conditions = installed.conditions()
    assert conditions["Ready"]["status"] == "True"
    assert "nodes of other devices that are here: 1" in conditions["DevicesAllowed"]["message"]
    told = conditions["DevicesPresent"]["message"].partition("asked for and not there: ")[2]
    assert 'devices "gdrcopy"' in told
    assert "/srv/absent for /mnt/absent" in told


def test_a_device_that_comes_and_goes_while_the_machine_runs(ready: Bed) -> None:
    """Not by an event: the service finds nodes that are named by path in its passes."""
    before = ready.starts()
    ready.guest.write(CONFIG, f'[machines.gpu-node]\nextra_devices = [{{ path = "{LATE}" }}]\n'.encode())
    minor = ready.run("stat", "--format=%T", LATENCY).stdout.strip()
    ready.run("mknod", LATE, "c", "10", str(int(minor, 16)))
    _until(ready, "test", "-c", LATE)
    ready.node.run("head", "-c", "4", LATE)
    ready.run("rm", LATE)
    _until(ready, "test", "!", "-e", LATE)
    # The number is nobody's any more in the machine: the node was one thing, the permission another.
    ready.node.run("mknod", "/run/again", "c", "10", str(int(minor, 16)), check=False)
    assert ready.node.run("head", "-c", "4", "/run/again", check=False).status != 0
    assert ready.restarted(before) == "nothing"


def _until(bed: Bed, *command: str, seconds: float = 240) -> None:
    """Until a command succeeds in the machine. SIGHUP makes the service look."""
    deadline = time.monotonic() + seconds
    while bed.node.run(*command, check=False).status != 0:
        assert time.monotonic() < deadline, bed.run("journalctl", "-u", "unbounded-agent", "-n", "40").stdout
        bed.run("systemctl", "reload", "unbounded-agent.service")
        time.sleep(2)
