"""What happens before each start of a machine."""

import pytest

from agent.errors import ConfigError
from agent.live import parse_live
from agent.paths import live_file, report_directory
from agent.prepare import prepare
from tests.gpu_host import MACHINE, reconciler, units
from tests.recorded import Host

MOUNT = (
    "mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec", "unbounded-agent-report",
    report_directory(MACHINE),
)  # fmt: skip


def test_the_machine_gets_a_report_directory_and_fresh_settings(gpu_host: Host) -> None:
    gpu_host.command(*MOUNT)
    outcome = prepare(MACHINE, reconciler(gpu_host))
    assert MOUNT in gpu_host.runner.calls
    assert parse_live(gpu_host.read(live_file(MACHINE))) == outcome.machines[0].starts_with


def test_a_failed_mount_costs_the_report_and_not_the_machine(gpu_host: Host) -> None:
    gpu_host.command(*MOUNT, status=32, stderr="mount: permission denied")
    prepare(MACHINE, reconciler(gpu_host))
    assert gpu_host.exists(live_file(MACHINE))


def test_a_running_machine_keeps_its_report_and_what_it_was_started_with(gpu_host: Host) -> None:
    """`systemctl start` of a running machine pulls prepare@ in as well."""
    gpu_host.write(live_file(MACHINE), b"0123")
    units(gpu_host, "active")
    prepare(MACHINE, reconciler(gpu_host))
    assert MOUNT not in gpu_host.runner.calls
    assert gpu_host.read(live_file(MACHINE)) == b"0123"


def test_a_driver_that_never_comes_costs_its_wait_and_not_the_machine(gpu_host: Host) -> None:
    gpu_host.command(*MOUNT)
    gpu_host.rebind("0000:02:00.0", "")
    said: list[str] = []
    agent = reconciler(gpu_host, driver_wait=1)
    agent.progress = said.append
    prepare(MACHINE, agent)
    assert "wait for the driver of 0000:02:00.0, at most 1 s" in said
    assert "go on without 0000:02:00.0" in said
    assert gpu_host.exists(live_file(MACHINE))


def test_another_machine_is_refused_by_name(gpu_host: Host) -> None:
    with pytest.raises(ConfigError, match="machine elsewhere is not configured"):
        prepare("elsewhere", reconciler(gpu_host))
