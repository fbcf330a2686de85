"""Metrics of outcomes, read by Prometheus' own parsers; names agree with the documentation and the rules."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.host.daemon.http.gauges import PREFIX, View
from agent.host.daemon.http.metrics import ACTIONS, OPENMETRICS, TEXT, Metrics, result, without_evidence
from agent.host.daemon.wakeups.poller import Tally
from agent.host.outcome import MachineOutcome
from agent.model.actions import (
    Action,
    ChangeDevices,
    Done,
    ProtectDriverRoots,
    PublishDriverRoot,
    ReloadUnits,
    RemoveDriverRoot,
    RemoveFile,
    RemoveStaleStaging,
    StageDriverRoot,
    WriteFile,
)
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import (
    Absent,
    Broken,
    DeviceNode,
    Driver,
    Gpu,
    MachineFacts,
    Seen,
    Unseen,
    UserSpace,
    VendorFacts,
)
from agent.model.handoff import Repair
from tests.fakes.reconciler import GPUS, VENDOR, conditions, outcome

REPOSITORY = Path(__file__).resolve().parents[4]
RULES = REPOSITORY / "deploy/prometheus"
READY = MachineOutcome("gpu-node", conditions(), gpus=GPUS)
WAKEUPS = (Tally("udev", watching=True, wakeups=3, losses=1), Tally("reports", losses=2))
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(view: View, metrics: Metrics | None = None) -> Samples:
    """Return every sample of the text format."""
    body = (metrics or Metrics()).page(view, TEXT).body.decode()
    return {
        (sample.name.removeprefix(f"{PREFIX}_"), frozenset(sample.labels.items())): sample.value
        for family in parse_text(body)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def view_of(*machines: MachineOutcome, vendor: VendorFacts = VENDOR) -> View:
    return View(
        "0.1.0", machines, outcome(*machines, vendor=vendor), observed=1.7e9, config_loaded=1.6e9, wakeups=WAKEUPS
    )


def test_a_ready_machine() -> None:
    samples = scrape(view_of(READY))
    assert value(samples, "machine_ready", machine="gpu-node") == 1
    assert value(samples, "machine_gpus", machine="gpu-node") == 2
    assert value(samples, "host_pci_gpus") == 2
    assert value(samples, "host_devices", kind="gpu", status="ok") == 2
    assert value(samples, "host_devices", kind="control", status="ok") == 1
    assert value(samples, "host_devices", kind="uvm", status="ok") == 0
    assert value(samples, "driver_version_mismatch", vendor="nvidia") == 0
    assert value(samples, "observation_last_success_timestamp_seconds") == 1.7e9
    assert value(samples, "config_last_reload_success_timestamp_seconds") == 1.6e9
    versions = {"vendor": "nvidia", "kernel_version": "550.163.01", "library_version": "550.163.01"}
    assert value(samples, "driver_info", **versions) == 1


@given(st.sampled_from(ConditionType), st.sampled_from(Status))
def test_conditions_are_state_sets(kind: ConditionType, status: Status) -> None:
    """Exactly one status of each condition is 1, and the gauge machine_ready follows Ready alone."""
    machine = MachineOutcome("gpu-node", conditions(Condition(kind, status, "Reason", "message")))
    if kind is ConditionType.READY:
        machine = MachineOutcome("gpu-node", (Condition(kind, status, "Reason", "message"),))
    samples = scrape(view_of(machine))
    for each in ConditionType:
        states = [
            value(samples, "machine_condition", machine="gpu-node", condition=each, status=other) for other in Status
        ]
        assert sorted(state for state in states if state is not None) == [0, 0, 1]
    assert value(samples, "machine_condition", machine="gpu-node", condition=kind, status=status) == 1
    is_ready = value(samples, "machine_condition", machine="gpu-node", condition="Ready", status="True")
    assert value(samples, "machine_ready", machine="gpu-node") == is_ready


def test_repairs_of_a_machine_are_what_it_reports() -> None:
    counted = MachineOutcome("gpu-node", conditions(), repairs={Repair.LINKS: 0, Repair.SPEC: 2})
    samples = scrape(view_of(counted))
    assert value(samples, "machine_repairs_total", machine="gpu-node", what="spec") == 2
    assert value(samples, "machine_repairs_total", machine="gpu-node", what="links") == 0
    silent = scrape(view_of(without_evidence(counted, "no pass")))
    assert not [labels for name, labels in silent if name == "machine_repairs_total"]


def test_transitions_are_dated() -> None:
    name = "machine_condition_last_transition_timestamp_seconds"
    assert value(scrape(view_of(READY)), name, machine="gpu-node", condition="Ready") == 1.7e9
    undated = MachineOutcome("gpu-node", (Condition(ConditionType.READY, Status.FALSE, "Reason", "message"),))
    assert value(scrape(view_of(undated)), name, machine="gpu-node", condition="Ready") is None


def test_without_evidence_nothing_is_claimed() -> None:
    machine = without_evidence(READY, "the loop hangs")
    samples = scrape(View("0.1.0", (machine,), None, observed=1.7e9))
    assert value(samples, "machine_ready", machine="gpu-node") == 0
    for each in ConditionType:
        assert value(samples, "machine_condition", machine="gpu-node", condition=each, status="Unknown") == 1
    shown = {name for name, _ in samples}
    assert not shown & {"host_pci_gpus", "host_devices", "machine_gpus", "driver_info", "driver_version_mismatch"}
    assert value(samples, "observation_last_success_timestamp_seconds") == 1.7e9


def test_series_end_with_their_machine() -> None:
    metrics = Metrics()
    scrape(view_of(READY, replace(READY, name="other")), metrics)
    assert not any(("machine", "other") in labels for _, labels in scrape(view_of(READY), metrics))


@pytest.mark.parametrize(
    ("gpu", "devices", "status"),
    [
        (Gpu(GPUS[0], "nvidia"), (), "unbound"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0, lost="Xid 79"), (), "lost"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0, lost="Xid 79", detached=True), (), "detached"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0), (), "missing"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0), VENDOR.devices, "ok"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0), Unseen("/dev: time limit"), "unknown"),
        (Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0), Broken("/dev/nvidia0 is a file"), "unknown"),
        (
            Gpu(GPUS[0], "intel", driver="i915"),
            (DeviceNode("/dev/dri/renderD128", DeviceKind.DRI_RENDER, DeviceNumber(226, 128), GPUS[0]),),
            "ok",
        ),
        (
            Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0),
            (DeviceNode("/dev/dri/renderD128", DeviceKind.DRI_RENDER, DeviceNumber(226, 128), GPUS[0]),),
            "missing",
        ),
    ],
)
def test_each_gpu_has_one_status(gpu: Gpu, devices: Seen[tuple[DeviceNode, ...]], status: str) -> None:
    vendor = replace(VENDOR, gpus=(gpu,), devices=devices)
    assert gpus_by_status(view_of(READY, vendor=vendor)) == {status: 1}
    nobodys = MachineOutcome("gpu-node", conditions(), gpus=())
    assert gpus_by_status(view_of(nobodys, vendor=vendor)) == {status if status in ("ok", "detached") else "unused": 1}


def gpus_by_status(view: View) -> dict[str, float]:
    """Return the statuses with GPUs; every status is exported."""
    samples = scrape(view)
    statuses = ("ok", "missing", "unbound", "lost", "detached", "unused", "unknown")
    counted = {each: value(samples, "host_devices", kind="gpu", status=each) for each in statuses}
    assert sum(number for number in counted.values() if number is not None) == value(samples, "host_pci_gpus")
    return {each: number for each, number in counted.items() if number != 0 and number is not None}


@pytest.mark.parametrize(
    ("state", "has_run", "stopped"),
    [("inactive", True, 1), ("failed", True, 0), ("inactive", False, 0), ("active", False, 0)],
)
def test_a_machine_that_failed_was_not_stopped(state: str, has_run: bool, stopped: int) -> None:
    view = view_of(READY)
    assert view.outcome
    machine = MachineFacts("gpu-node", root="/", unit_state=state, has_run=has_run)
    facts = replace(view.outcome.facts, machines=(machine,))
    samples = scrape(replace(view, outcome=replace(view.outcome, facts=facts)))
    assert value(samples, "machine_stopped", machine="gpu-node") == stopped


def test_lost_gpus_are_counted() -> None:
    samples = scrape(view_of(replace(READY, lost=GPUS)))
    assert value(samples, "machine_gpus_lost", machine="gpu-node") == 2


@pytest.mark.parametrize(
    ("module", "library", "mismatch"),
    [
        ("550.163.01", "550.163.01", 0),
        ("550.90.07", "550.163.01", 1),
        (Absent("not loaded"), "550.163.01", 0),
        ("550.90.07", Unseen("time limit"), 0),
    ],
)
def test_a_mismatch_needs_two_known_versions(module: Seen[str], library: Seen[str], mismatch: int) -> None:
    driver = replace(VENDOR, driver=Driver(module, UserSpace(library, ())))
    assert value(scrape(view_of(READY, vendor=driver)), "driver_version_mismatch", vendor="nvidia") == mismatch


def test_counters_start_at_zero_and_add_up() -> None:
    metrics = Metrics()
    samples = scrape(view_of(READY), metrics)
    for each in ("converged", "changed", "partial", "failed"):
        assert value(samples, "reconcile_total", result=each) == 0
    metrics.passed("start", outcome(READY))
    actions = (Done("write", "a file"), Done("write", "remove a line of /b"), Done("reload", "systemd's units"))
    metrics.passed("timer", replace(outcome(READY), actions=actions))
    metrics.passed("timer", outcome(READY, failures=("no", "neither")))
    metrics.failed("retry", 0.2)
    metrics.reloaded(False)
    samples = scrape(view_of(READY), metrics)
    counted = {
        each: value(samples, "reconcile_total", result=each) for each in ("converged", "changed", "partial", "failed")
    }
    assert counted == {"converged": 1, "changed": 1, "partial": 1, "failed": 1}
    assert value(samples, "actions_total", kind="write") == 2
    assert value(samples, "actions_total", kind="reload") == 1
    assert value(samples, "actions_total", kind="remove") == 0, "the sentence does not count"
    assert value(samples, "actions_total", kind="other") == 0
    assert value(samples, "failures_total") == 2
    assert value(samples, "config_reloads_total", result="failed") == 1
    assert value(samples, "reconcile_duration_seconds_count", trigger="timer") == 2
    assert value(samples, "reconcile_duration_seconds_bucket", trigger="retry", le="0.25") == 1


def test_sources_of_events() -> None:
    samples = scrape(view_of(READY))
    assert value(samples, "wakeups_total", source="udev") == 3
    assert value(samples, "wakeup_source_losses_total", source="udev") == 1
    assert value(samples, "wakeup_source_watching", source="udev") == 1
    assert value(samples, "wakeup_source_watching", source="reports") == 0


def test_every_action_has_a_kind() -> None:
    kinds = {
        WriteFile: "write",
        RemoveFile: "remove",
        StageDriverRoot: "stage",
        PublishDriverRoot: "mount",
        ProtectDriverRoots: "mount",
        RemoveDriverRoot: "remove",
        RemoveStaleStaging: "remove",
        ReloadUnits: "reload",
        ChangeDevices: "change",
    }
    assert {each: each.kind for each in get_args(Action)} == kinds
    assert {*kinds.values(), "other"} == set(ACTIONS)


def test_results() -> None:
    assert result(outcome(READY)) == "converged"
    assert result(replace(outcome(READY), actions=(Done("write", "write /a (1 bytes)"),))) == "changed"
    assert result(outcome(READY, failures=("no",))) == "partial"
    assert result(outcome(READY, vendor=replace(VENDOR, devices=Unseen("time limit")))) == "partial"
    assert result(outcome(READY, vendor=replace(VENDOR, devices=Absent("no driver")))) == "converged"


def test_both_formats_hold_the_same() -> None:
    metrics = Metrics()
    text, openmetrics = (metrics.page(view_of(READY), accept) for accept in (TEXT, OPENMETRICS))
    assert text.content_type.startswith("text/plain; version=0.0.4")
    assert openmetrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = [
        {sample.name for family in families for sample in family.samples if sample.name.startswith(PREFIX)}
        for families in (parse_text(text.body.decode()), parse_openmetrics(openmetrics.body.decode()))  # type: ignore[no-untyped-call]
    ]
    assert names[0] == names[1]
    assert names[0]
    assert openmetrics.body.endswith(b"# EOF\n")


def metrics_in_code() -> set[str]:
    """Return all families of a full page, except prometheus_client's own process_*."""
    metrics = Metrics()
    metrics.passed("start", outcome(READY))
    families = parse_text(metrics.page(view_of(READY), TEXT).body.decode())
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith(PREFIX)
    }


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the metrics that texts name; a histogram's series count as the histogram."""
    found = {name for text in texts for name in re.findall(rf"\b{PREFIX}_[a-z_]+\b", text)}
    return {re.sub(r"(duration_seconds)_(bucket|sum|count)$", r"\1", name) for name in found}


def test_code_documentation_and_rules_agree() -> None:
    code = metrics_in_code()
    assert names_in([(REPOSITORY / "docs/metrics.md").read_text()]) == code
    rules = names_in(path.read_text() for path in RULES.glob("*.yml"))
    assert rules
    assert rules <= code


def rules() -> dict[str, str]:
    """Return each alert's text by its name."""
    parts = re.split(r"^ +- alert: (\w+)$", (RULES / "unbounded-agent.rules.yml").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_alert_has_its_section_of_the_runbooks() -> None:
    sections = re.findall(r"^## (\w+)$", (REPOSITORY / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert sections == list(rules())
    for alert, text in rules().items():
        assert f"runbook: docs/runbooks.md#{alert.lower()}\n" in text
        assert re.search(r"severity: (page|ticket)\n", text)


def test_every_section_of_the_runbooks_has_meaning_check_and_advice() -> None:
    parts = re.split(r"^## (\w+)$", (REPOSITORY / "docs/runbooks.md").read_text(), flags=re.MULTILINE)
    severities = {alert: re.findall(r"severity: (\w+)", text) for alert, text in rules().items()}
    for alert, text in zip(parts[1::2], parts[2::2], strict=True):
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Means", "See", "Do"], alert
        assert re.findall(r"^Severity: (\w+)", text, re.MULTILINE) == severities[alert], alert


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    tests = (RULES / "unbounded-agent.rules.test.yml").read_text()
    for alert in rules():
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n", tests), alert
        assert re.search(rf"alertname: {alert}\}}\n", tests), alert


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "file"),
    [("check", "unbounded-agent.rules.yml"), ("test", "unbounded-agent.rules.test.yml")],
)
def test_promtool_accepts_the_rules(command: str, file: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    finished = subprocess.run([promtool, command, "rules", file], cwd=RULES, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.processes
def test_promtool_accepts_the_exposition() -> None:
    """Prometheus' own lint checks names, units and help texts."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    body = Metrics().page(view_of(READY), TEXT).body
    finished = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr
