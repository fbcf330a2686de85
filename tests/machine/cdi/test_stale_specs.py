"""The agent's CDI specifications are removed when nothing needs them; those of other programs never are."""

import errno
import json
from pathlib import Path

import pytest

from agent.machine.notes import Owned
from agent.machine.run import run
from agent.model.handoff import Request
from agent.model.paths import OWNED
from tests.fakes.machine import EMPTY, REQUEST, Machine, failing, gpu_machine

SPEC = "/etc/cdi/nvidia.yaml"
REMAINS = "/etc/cdi/.nvidia.yaml.unbounded-agent-new"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = gpu_machine(tmp_path / "machine")
    run(machine)
    assert machine.exists(SPEC)
    return machine


def own(machine: Machine, path: str) -> None:
    Owned(machine).claim(path)
    machine.put(path, "{}")


@pytest.mark.parametrize("requests", [(), (EMPTY,), (Request("other", (), ()),)])
def test_the_spec_of_a_vendor_without_a_grant(machine: Machine, requests: tuple[Request, ...]) -> None:
    """The specification is removed even if the handoff does not name the vendor."""
    machine.hand(*requests)
    run(machine)
    assert not machine.exists(SPEC)
    assert SPEC not in json.loads(machine.read(OWNED))["paths"]
    machine.hand(REQUEST)
    run(machine)
    assert machine.exists(SPEC)


def test_what_is_no_longer_wanted(machine: Machine) -> None:
    own(machine, "/etc/cdi/unbounded-agent.json")
    own(machine, "/etc/elsewhere.json")
    machine.put("/etc/cdi/site.json", "{}")
    run(machine)
    assert not machine.exists("/etc/cdi/unbounded-agent.json")
    assert machine.exists("/etc/elsewhere.json"), "no CDI spec"
    assert machine.exists("/etc/cdi/site.json"), "not ours"
    assert machine.exists(SPEC)
    machine.put(REMAINS, '{"half')
    run(machine)
    assert not machine.exists(REMAINS)
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_a_failed_removal_does_not_cost_the_report(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    own(machine, "/etc/cdi/unbounded-agent.json")
    machine.before_write = failing(errno.ENOSPC, OWNED)
    run(machine)
    assert "cannot remove leftovers" in capsys.readouterr().err
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
