"""The Ansible role on a simulated fleet: three bare Debian roots, and Debian's Ansible in a fourth."""

import re
from collections.abc import Iterator

import pytest
import yaml

from integration.bed.fleet import Fleet, fleet, put
from integration.bed.packages import Root, packages
from integration.bed.process import CommandError

HOSTS = ("gpu-1", "gpu-2", "gpu-3")
PACKAGE = "unbounded-agent"
CONFIGURATION = "etc/unbounded-agent/config.toml"
NO_MACHINES = "[machines]\n"
SUMMARY = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+)", re.MULTILINE)


def summary(printed: str) -> dict[str, tuple[int, int]]:
    """Return how many tasks changed something, and how many failed, by host."""
    return {name: (int(changed), int(failed)) for name, changed, failed in SUMMARY.findall(printed)}


def version(host: Root) -> str:
    shown = host.run("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", PACKAGE)
    return shown.removeprefix("installed ")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Fleet]:
    with fleet(HOSTS) as found:
        yield found


def variables(hosts: Fleet, number: str, **more: object) -> str:
    """Write a file with the role's variables, and return the option that names it."""
    package = put(hosts.controller, packages(number)[PACKAGE])
    text = yaml.safe_dump({"unbounded_agent_package": package, "unbounded_agent_config": NO_MACHINES, **more})
    (hosts.controller.path / "srv/variables.yml").write_text(text)
    return "--extra-vars=@/srv/variables.yml"


def test_first_host(hosts: Fleet) -> None:
    """A trial run changes nothing, the first run installs, and the second one changes nothing."""
    options = (variables(hosts, "1.0", unbounded_agent_secrets={"token": "secret words"}), "--limit=gpu-1")
    host = hosts.hosts["gpu-1"]
    before = host.files()
    planned = summary(hosts.playbook(*options, "--check", "--diff"))
    assert planned["gpu-1"][0] >= 1
    assert planned["gpu-1"][1] == 0
    assert not {name for name in host.files() - before if "unbounded" in name}

    printed = hosts.playbook(*options, "--diff")
    assert summary(printed)["gpu-1"][0] >= 3
    assert "secret words" not in printed
    assert version(host) == "1.0"
    assert (host.path / CONFIGURATION).read_text() == NO_MACHINES
    token = host.path / "etc/unbounded-agent/token"
    assert token.read_text() == "secret words"
    assert token.stat().st_mode & 0o777 == 0o600
    assert (host.path / "etc/systemd/system/multi-user.target.wants/unbounded-agent.service").is_symlink()

    assert summary(hosts.playbook(*options))["gpu-1"] == (0, 0)
    assert summary(hosts.playbook(*options, "--check"))["gpu-1"] == (0, 0)


def test_an_invalid_configuration_reaches_no_host(hosts: Fleet) -> None:
    options = variables(hosts, "1.0", unbounded_agent_config="[machines.gpu-node]\nspeed = 1\n")
    with pytest.raises(CommandError, match=r"speed: unknown key"):
        hosts.playbook(options, "--limit=gpu-1")
    assert (hosts.hosts["gpu-1"].path / CONFIGURATION).read_text() == NO_MACHINES


@pytest.mark.exhaustive
def test_up_gets_the_programs_that_it_needs(hosts: Fleet) -> None:
    """Whether it then makes nodes depends on the configuration, which has none here."""
    host = hosts.hosts["gpu-1"]
    with pytest.raises(CommandError, match="no machine has node settings"):
        hosts.playbook(variables(hosts, "1.0", unbounded_agent_up=True), "--limit=gpu-1")
    assert "skopeo version" in host.run("skopeo", "--version")
    assert "umoci version" in host.run("umoci", "--version")


@pytest.mark.exhaustive
def test_rolling_upgrade(hosts: Fleet) -> None:
    """One command line upgrades one host after the other, and back."""
    hosts.playbook(variables(hosts, "1.0"))
    assert [version(host) for host in hosts.hosts.values()] == ["1.0"] * 3
    for number in ("1.1", "1.0"):
        printed = hosts.playbook(variables(hosts, number), unbounded_agent_check="true")
        assert [version(host) for host in hosts.hosts.values()] == [number] * 3
        played = re.findall(r"^TASK \[unbounded_agent : Install the copy\] \*+\n(.*)$", printed, re.MULTILINE)
        assert played == [f"changed: [{name}]" for name in HOSTS], "one after the other"
        assert all(failed == 0 for _, failed in summary(printed).values())


@pytest.mark.exhaustive
def test_the_first_host_that_fails_stops_the_upgrade(hosts: Fleet) -> None:
    """The second host has a machine that does not become ready; the third one keeps its release."""
    hosts.playbook(variables(hosts, "1.0"))
    options = variables(hosts, "1.1", unbounded_agent_config="", unbounded_agent_check_seconds=1)
    bad = hosts.hosts["gpu-2"].path / CONFIGURATION
    bad.write_text("[machines.gpu-node]\n")
    try:
        with pytest.raises(CommandError) as stopped:
            hosts.playbook(options, unbounded_agent_check="true")
    finally:
        bad.write_text(NO_MACHINES)
    assert summary(str(stopped.value)).get("gpu-2", (0, 0))[1] == 1
    assert [version(host) for host in hosts.hosts.values()] == ["1.1", "1.1", "1.0"]
