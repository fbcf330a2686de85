"""The pages for people, for probes and for those who debug, from simulated outcomes."""

import json
import logging
from collections.abc import Mapping
from html.parser import HTMLParser
from http import HTTPStatus
from typing import Any

from msgspec.structs import replace

from agent.host.daemon.health import Pass, View, changes, host_changes, status_line
from agent.host.daemon.metrics import without_evidence
from agent.host.daemon.pages import HTML, check_pages, front_page, machine_checks, statusz
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import MachineOutcome, Outcome
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, unknown
from agent.model.facts import GPU_TEST, GpuFacts, GpuFault, HostCheck, MachineFacts, Unseen, Verdict
from agent.system.journal_fields import CONDITION_ID, VERDICT_ID
from tests.fakes import eight_gpus
from tests.fakes.reconciler import GPUS, conditions, outcome

EMPTY = View("0.1.0", (), written=1.7e9)
HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"
NOT_YET = MachineOutcome("gpu-node", ())


class Reader(HTMLParser):
    """Collects tags, attributes, text, and the rows of tables. Fails on tags that are closed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1] += data

    def close(self) -> None:
        super().close()
        assert self._open == []


def read(view: View) -> Reader:
    page = front_page("gpu-host-1", view)
    assert page.content_type == HTML
    reader = Reader()
    reader.feed(page.body.decode())
    reader.close()
    assert not {"script", "img", "link", "iframe", "form"} & set(reader.tags)
    assert all(link.startswith("/") for link in reader.links)
    return reader


def test_a_host_with_eight_gpus() -> None:
    view = eight_gpus.view()
    page = read(view)
    assert "unbounded-agent on gpu-host-1" in page.text
    assert "Machine gpu-node: ready" in page.text
    assert "8 of 8 GPUs granted; 8 advertised; its agent is 0.1.0; last report at 2023-11-14T22:13:20Z." in page.text
    assert {row[0] for row in page.rows} >= {*ConditionType, *eight_gpus.ADDRESSES}
    gpu = next(row for row in page.rows if row[0] == eight_gpus.ADDRESSES[3])
    uuid = "GPU-00000000-0000-4000-8000-000000000003"
    assert gpu[1:] == ["granted", "gpu-node", "NVIDIA H100 80GB HBM3", uuid]
    expected = ["/", "/metrics", "/healthz?verbose", "/readyz?verbose", "/readyz/machines/gpu-node?verbose"]
    assert page.links == expected
    text = front_page("h", view).body.decode()
    assert len(text) < 16_000
    # It is for a phone too, and does not reload itself.
    assert "http-equiv" not in text
    for each in ('content="width=device-width"', "@media (max-width: 50rem)", '<td data-label="Reason">', "<time>"):
        assert each in text


def test_what_is_wrong_comes_first() -> None:
    lost = Condition(ConditionType.GPUS_COMPLETE, Status.FALSE, "GPULost", "one is lost")
    stopped = Condition(ConditionType.MACHINE_RUNNING, Status.FALSE, "Stopped", "somebody stopped it")
    page = read(replace(EMPTY, machines=(MachineOutcome("gpu-node", conditions(lost, stopped)),)))
    assert "Machine gpu-node: not ready" in page.text
    assert [row[0] for row in page.rows[1:4]] == ["Ready", "MachineRunning", "GPUsComplete"]
    assert page.rows[2][1:3] == ["\u2717 False", "Stopped"]


def test_attack_texts_of_a_machine_stay_texts() -> None:
    strange = Condition(ConditionType.RUNTIME_ACTIVE, Status.FALSE, "Failed", HOSTILE)
    machine = MachineOutcome("gpu-node", conditions(strange), agent_version=HOSTILE)
    facts = replace(eight_gpus.facts(), problems=(HOSTILE,))
    outcome = Outcome(facts, (machine,), failures=(HOSTILE,))
    page = read(View(HOSTILE, (machine,), outcome, why_stale=HOSTILE))
    assert page.text.count("<script>alert(1)</script>&\"'\\x1b[31m") >= 5


def test_without_evidence_nothing_is_claimed() -> None:
    why = "no pass has ended for 180 s"
    page = read(replace(EMPTY, machines=(without_evidence(eight_gpus.view().machines[0], why),), why_stale=why))
    assert "This host is not observed now: no pass has ended for 180 s." in page.text
    assert {row[2] for row in page.rows[1:]} == {"StaleEvidence"}
    assert "Machine gpu-node: not ready" in page.text
    assert not {row[0] for row in page.rows} & set(eight_gpus.ADDRESSES)
    assert "granted" not in page.text


def test_a_host_without_machines_or_gpus() -> None:
    assert "no machine is configured" in read(EMPTY).text
    assert "Machine new: not evaluated" in read(replace(EMPTY, machines=(MachineOutcome("new", ()),))).text
    bare = Outcome(replace(eight_gpus.facts(), vendors=()), ())
    assert "This host has no GPU." in read(replace(EMPTY, outcome=bare)).text


def test_a_fault_has_the_commands_that_fix_it() -> None:
    stopped = Condition(ConditionType.MACHINE_RUNNING, Status.FALSE, "Stopped", "somebody stopped it")
    view = replace(EMPTY, machines=(MachineOutcome("gpu-node", conditions(stopped)),))
    fixes = {"gpu-node": {ConditionType.MACHINE_RUNNING: ("unbounded-agent start gpu-node", HOSTILE)}}
    page = read(replace(view, fixes=fixes))
    row = next(each for each in page.rows if each[0] == "MachineRunning")
    assert row[4].startswith("somebody stopped itunbounded-agent start gpu-node<script>")
    assert "unbounded-agent start" not in read(view).text


# ---- probes, `systemctl status` and the log


def test_what_is_unknown_is_not_called_not_ready() -> None:
    """`status` and the exit codes of --check tell the two apart."""
    waiting = unknown(ConditionType.DEVICES_ALLOWED, Reason.HANDOFF_PENDING, "")
    stopped = false(ConditionType.MACHINE_RUNNING, Reason.STOPPED, "")
    machines = [MachineOutcome("a", conditions(waiting)), MachineOutcome("b", conditions(waiting, stopped))]
    assert status_line(machines) == "a: unknown: DevicesAllowed HandoffPending; b: not ready: MachineRunning Stopped"


def test_before_its_first_pass_a_machine_is_not_evaluated() -> None:
    assert status_line([NOT_YET]) == "gpu-node: not evaluated"
    # Many machines still fit in after a long path.
    assert len(status_line([NOT_YET], ["x" * 1000])) < 400
    path = "/readyz/machines/gpu-node"
    page = check_pages(path, machine_checks(NOT_YET))[path]
    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert page.body == b"[-]Ready not evaluated\nreadyz/machines/gpu-node check failed\n"


def test_one_cause_is_one_line_of_the_journal() -> None:
    """A missing machine had 16 lines, one for each condition."""
    why = "/var/lib/machines/gpu-node does not exist"
    unknown_ones = [unknown(kind, Reason.NO_SUCH_MACHINE, why) for kind in ConditionType]
    missing = [
        false(kind, Reason.NO_SUCH_MACHINE, why) for kind in (ConditionType.MACHINE_RUNNING, ConditionType.READY)
    ]
    machine = MachineOutcome("gpu-node", conditions(*unknown_ones, *missing))
    found = list(changes(machine, None))
    assert {fields["MACHINE"] for _, _, fields in found} == {"gpu-node"}
    assert (found[-1][2]["CONDITION"], found[-1][2]["REASON"]) == ("Ready", "NoSuchMachine")
    lines = [sentence for _, sentence, _ in found]
    assert lines[0].startswith("gpu-node: DriverLoaded, ")
    assert lines[0].endswith(f" are Unknown: NoSuchMachine: {why}")
    assert [line.partition(": NoSuch")[0] for line in lines[1:]] == [
        "gpu-node: MachineRunning is False",
        "gpu-node: Ready is False",
    ]
    assert list(changes(machine, machine)) == []


def test_a_check_of_the_host_is_said_once_for_each_change() -> None:
    facts = outcome().facts
    good = replace(facts, checks=(HostCheck("DiskHealthy", Status.TRUE, Reason.CHECK_PASSED, "90 % free"),))
    bad = replace(facts, checks=(HostCheck("DiskHealthy", Status.FALSE, Reason.CHECK_FAILED, "1 % free"),))
    same = replace(facts, checks=(replace(bad.checks[0], message="2 % free"),))
    ((level, sentence, fields),) = host_changes(bad, None)
    assert (level, sentence) == (logging.WARNING, "host check DiskHealthy is False, CheckFailed: 1 % free")
    assert fields == {"MESSAGE_ID": CONDITION_ID, "CONDITION": "DiskHealthy", "REASON": "CheckFailed"}
    assert list(host_changes(same, bad)) == []
    ((level, _, fields),) = host_changes(good, bad)
    assert (level, fields["REASON"]) == (logging.INFO, "CheckPassed")
    assert list(host_changes(good, facts)) == []


def test_a_verdict_of_a_gpu_is_said_once_for_each_change() -> None:
    """Whoever said so: a test and the GPU itself leave no line in the kernel log."""
    facts, address = outcome().facts, GPUS[0]
    fault = GpuFault("TestFailed", "its test failed", 1.7e9, Verdict.NEEDS_RESET, 1.7e9, GPU_TEST)
    broken = replace(facts, gpus=GpuFacts({address: fault}))
    for last in (None, facts):
        ((level, sentence, fields),) = host_changes(broken, last)
        assert (level, sentence) == (logging.WARNING, f"GPU {address} needs a reset: its test failed")
        expected = {"MESSAGE_ID": VERDICT_ID, "GPU": address, "VERDICT": "needs-reset", "REASON": "TestFailed"}
        assert fields == expected
    assert list(host_changes(broken, broken)) == []
    ((level, sentence, fields),) = host_changes(facts, broken)
    assert (level, sentence, fields["VERDICT"]) == (logging.INFO, f"GPU {address} is healthy", "healthy")
    assert list(host_changes(facts, None)) == []


def test_a_line_about_single_gpus_has_a_field_for_each() -> None:
    bad = false(ConditionType.GPUS_HEALTHY, Reason.GPU_NEEDS_RESET, "two of them", GPUS)
    ((_, _, fields),) = changes(MachineOutcome("gpu-node", (bad,)), None)
    assert fields["GPU"].split() == [*GPUS]


def test_the_front_page_has_the_checks_of_the_host() -> None:
    ended = outcome()
    checks = (HostCheck("DiskHealthy", Status.FALSE, Reason.CHECK_FAILED, HOSTILE),)
    view = replace(EMPTY, outcome=replace(ended, facts=replace(ended.facts, checks=checks)))
    assert "DiskHealthy: False, CheckFailed: <script>alert(1)</script>" in read(view).text


# ---- /statusz


def test_the_debug_page_has_the_host_its_machines_and_what_the_service_did() -> None:
    machine = MachineOutcome("gpu-node", conditions(), gpus=GPUS, pending=True)
    seen = MachineFacts(name="gpu-node", root="/var/lib/machines/gpu-node", unit_state=Unseen("the bus is away"))
    found = outcome(machine)
    passes = (
        Pass("2023-11-14T22:13:00Z", "start", 1.5, ("write /a",)),
        Pass("2023-11-14T22:13:10Z", "udev", 0.2, failures=("cannot write /b",)),
    )
    view = View(
        version="0.1.0",
        machines=(machine,),
        outcome=replace(found, facts=replace(found.facts, machines=(seen,), systemd_version=257)),
        written=1_700_000_000.0,
        passes=passes,
        wakeups=(Tally("udev", watching=True, wakeups=1),),
        stuck=("/proc/driver/simulated",),
    )
    document: Mapping[str, Any] = json.loads(statusz(view).body)
    facts, shown = document["facts"], document["machines"]["gpu-node"]
    assert facts["systemd_version"] == 257
    (vendor,) = facts["vendors"]
    assert [gpu["pci_address"] for gpu in vendor["gpus"]] == list(GPUS)
    assert {node["path"]: node["number"]["minor"] for node in vendor["devices"]}["/dev/nvidia1"] == 1
    assert vendor["driver"]["fabric"] == {"absent": "no NVSwitch"}
    assert "files" not in vendor["driver"]["user_space"]
    assert (shown["pending"], shown["conditions"][-1]["lastTransitionTime"]) == (True, "2023-11-14T22:13:20Z")
    (observed,) = facts["machines"]
    assert (observed["unit_state"], observed["live_age"]) == ({"unseen": "the bus is away"}, "inf")
    assert [(each["trigger"], each["failures"]) for each in document["passes"]] == [
        ("udev", ["cannot write /b"]),
        ("start", []),
    ]
    assert (document["sources"][0]["wakeups"], document["stuck"]) == (1, ["/proc/driver/simulated"])
    page = read(view)
    assert [row[1:] for row in page.rows[-2:]] == [["udev", "cannot write /b"], ["start", "write /a"]]
    before = json.loads(statusz(replace(view, outcome=None, why_stale="the first pass has not finished")).body)
    assert (before["whyNotObserved"], before["facts"]) == ("the first pass has not finished", None)
