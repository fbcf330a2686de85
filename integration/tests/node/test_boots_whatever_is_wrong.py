"""A machine starts with its host, and keeps its GPUs as long as possible, whatever is wrong with the agent."""

import json
from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE
from integration.bed.measure.journal import messages
from integration.bed.measure.restarts import MACHINE_UNIT
from integration.bed.measure.watching import uptime
from integration.conftest import Bed
from integration.tests.node.test_survives import expect_by_cdi

pytestmark = pytest.mark.scenario("002")

Measured = Callable[[str, object], None]
CONFIGURATION = "/etc/unbounded-agent/config.toml"


def wait_for_machine(bed: Bed, seconds: int = 240) -> float:
    """Wait until the machine's systemd has started everything; return the seconds since the host's boot."""
    up = f"systemctl is-active --quiet {MACHINE_UNIT} && systemctl -M {MACHINE} is-active --quiet multi-user.target"
    bed.run("sh", "-c", f"until {up}; do sleep 1; done", timeout=seconds)
    return uptime(bed.guest)


def test_a_host_that_reboots_with_a_wrong_configuration_and_then_without_the_agent(
    ready: Bed, measured: Measured
) -> None:
    """Before the second boot, a node that the settings name disappears for good."""
    ready.run("machinectl", "enable", MACHINE)
    ready.guest.write(CONFIGURATION, f"[machines.{MACHINE}]\nspeed = 9\n".encode())
    ready.run("sync")
    ready.host.reboot(timeout=600)
    measured("seconds to a machine with a wrong configuration", f"{wait_for_machine(ready):.0f}")
    ready.wait_served()
    assert "unbounded_agent_config_last_reload_successful 0.0" in ready.page("/metrics")
    journal = messages(ready.run, f"unbounded-agent-prepare@{MACHINE}")
    assert "speed: unknown key" in journal
    conditions = json.loads(ready.run("cat", "/run/unbounded-agent/conditions.json").stdout)[MACHINE]
    assert "LastGoodSettings" in {each["reason"] for each in conditions}
    expect_by_cdi(ready)

    settings = f"/etc/systemd/nspawn/{MACHINE}.nspawn"
    ready.run("systemctl", "stop", "unbounded-agent.service")
    ready.run("rm", "-r", "/opt/unbounded-agent")
    ready.run("sed", "-i", r"s,^Bind=/dev/kmsg,&\nBind=/dev/was-there-before,", settings)
    ready.run("sync")
    ready.host.reboot(timeout=600, may_fail="unbounded-agent")
    measured("seconds to a machine without the agent", f"{wait_for_machine(ready):.0f}")
    lines = ready.run("cat", settings).stdout.splitlines()
    assert "#missing:Bind=/dev/was-there-before" in lines
    report = f"/run/unbounded-agent/machines/{MACHINE}/report"
    mounted = ready.run("findmnt", "-n", "-o", "FSTYPE,OPTIONS", report).stdout
    assert "tmpfs" in mounted
    assert "size=1024k" in mounted
    assert ready.run("cmp", settings, f"/run/unbounded-agent/machines/{MACHINE}/started.nspawn").status == 0
    # Nodes that the driver makes in time are bound, and work: only the agent is missing.
    if "BindReadOnly=/dev/nvidia1" in lines:
        expect_by_cdi(ready)
