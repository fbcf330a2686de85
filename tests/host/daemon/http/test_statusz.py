"""The page with what the agent knows, from a simulated outcome."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from agent.host.daemon.health import Pass, View
from agent.host.daemon.pages import statusz
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import MachineOutcome
from agent.model.facts import Absent, MachineFacts, Unseen
from tests.fakes.reconciler import GPUS, conditions, outcome

MACHINE = MachineOutcome("gpu-node", conditions(), gpus=GPUS, pending=True)
SEEN = MachineFacts(name="gpu-node", root="/var/lib/machines/gpu-node", unit_state=Unseen("the bus is away"))
OUTCOME = outcome(MACHINE)
VIEW = View(
    version="0.1.0",
    machines=(MACHINE,),
    outcome=replace(OUTCOME, facts=replace(OUTCOME.facts, machines=(SEEN,), systemd_version=257)),
    written=1_700_000_000.0,
    passes=(
        Pass("2023-11-14T22:13:00Z", "start", 1.5, ("write /a",)),
        Pass("2023-11-14T22:13:10Z", "udev", 0.2, failures=("cannot write /b",)),
    ),
    wakeups=(Tally("udev", watching=True, wakeups=1),),
    stuck=("/proc/driver/simulated",),
)


def shown(view: View = VIEW) -> Mapping[str, Any]:
    found = statusz(view)
    assert found.content_type == "application/json"
    document: Mapping[str, Any] = json.loads(found.body)
    return document


def test_the_page_has_the_host() -> None:
    facts = shown()["facts"]
    assert facts["systemdVersion"] == 257
    vendor = facts["vendors"]["nvidia"]
    assert [gpu["pci_address"] for gpu in vendor["gpus"]] == list(GPUS)
    assert vendor["nodes"]["/dev/nvidia1"] == "195:1"
    assert vendor["moduleVersion"] == "550.163.01"
    assert vendor["fabric"] == {"absent": "no NVSwitch"}


def test_the_page_has_a_machine() -> None:
    machine = shown()["machines"]["gpu-node"]
    assert machine["pending"] is True
    assert machine["conditions"]["Ready"]["reason"] == "AllConditionsTrue"
    assert machine["conditions"]["Ready"]["lastTransitionTime"] == "2023-11-14T22:13:20Z"
    assert machine["observed"]["unitState"] == {"unseen": "the bus is away"}
    assert machine["observed"]["handedDriverRoots"] == {"absent": "no record"}
    assert isinstance(SEEN.report, Absent)
    assert machine["observed"]["reportAgeSeconds"] is None


def test_the_page_has_what_the_service_did_and_what_blocks_it() -> None:
    document = shown()
    assert [each["trigger"] for each in document["passes"]] == ["udev", "start"]
    assert document["passes"][0]["failures"] == ["cannot write /b"]
    assert document["passes"][1]["actions"] == ["write /a"]
    assert document["sources"][0]["wakeups"] == 1
    assert document["stuck"] == ["/proc/driver/simulated"]


def test_the_page_exists_before_the_first_pass() -> None:
    document = shown(replace(VIEW, outcome=None, why_stale="the first pass has not finished", passes=()))
    assert document["whyNotObserved"] == "the first pass has not finished"
    assert document["facts"] is document["machines"]["gpu-node"]["observed"] is None
