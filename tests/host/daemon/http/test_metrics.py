"""Metrics of outcomes, read by Prometheus' own parsers."""

import itertools
import shutil
import subprocess
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.host.daemon.health import View
from agent.host.daemon.metrics import OPENMETRICS, PREFIX, TEXT, VERSIONS, Metrics, without_evidence
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import MachineOutcome
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import (
    Absent,
    Broken,
    DeviceNode,
    Driver,
    Gpu,
    GpuFacts,
    GpuFault,
    HostCheck,
    MachineFacts,
    Remembered,
    RememberedGpu,
    Seen,
    StagedRoot,
    Unseen,
    UserSpace,
    VendorFacts,
    Verdict,
)
from agent.model.goal import Done
from tests.fakes.facts import library
from tests.fakes.reconciler import GPUS, VENDOR, conditions, outcome

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


def with_facts(**changed: Any) -> View:  # noqa: ANN401
    """Return the view of a host with READY and these facts."""
    ended = outcome(READY)
    return replace(view_of(READY), outcome=replace(ended, facts=replace(ended.facts, **changed)))


def test_a_ready_machine() -> None:
    samples = scrape(view_of(READY))
    assert value(samples, "machine_ready", machine="gpu-node") == 1
    assert value(samples, "machine_gpus", machine="gpu-node") == 2
    assert value(samples, "host_pci_gpus") == 2
    assert value(samples, "host_devices", kind="gpu", status="ok") == 2
    assert value(samples, "host_devices", kind="control", status="ok") == 1
    assert value(samples, "host_devices", kind="uvm", status="ok") is None
    assert value(samples, "driver_version_mismatch", vendor="nvidia") == 0
    assert value(samples, "observation_last_success_timestamp_seconds") == 1.7e9
    assert value(samples, "config_last_reload_success_timestamp_seconds") == 1.6e9
    assert value(samples, "wakeups_total", source="udev") == 3
    assert value(samples, "wakeup_source_watching", source="reports") == 0
    versions = {"vendor": "nvidia", "kernel_version": "550.163.01", "library_version": "550.163.01"}
    assert value(samples, "driver_info", **versions) == 1


def test_each_condition_has_one_series() -> None:
    """Its labels have status and reason, and the gauge machine_ready follows Ready alone."""
    machines = []
    for kind, status in itertools.product(ConditionType, Status):
        one = Condition(kind, status, "Stopped", "message")
        shown = (one,) if kind is ConditionType.READY else conditions(one)
        machines.append(MachineOutcome(f"{kind}-{status}", shown))
    samples = scrape(view_of(*machines))
    for machine in machines:
        name, (kind_of, _, status_of) = machine.name, machine.name.partition("-")
        found = [
            dict(labels) for each, labels in samples if each == "machine_condition" and ("machine", name) in labels
        ]
        assert [each["condition"] for each in found] == list(ConditionType)
        assert {"machine": name, "condition": kind_of, "status": status_of, "reason": "Stopped"} in found
        is_ready = next(each["status"] for each in found if each["condition"] == "Ready") == "True"
        assert value(samples, "machine_ready", machine=name) == is_ready


def test_attack_a_machine_cannot_make_series_without_end() -> None:
    """Reasons and versions come from its report: unknown reasons are not shown, and only some versions."""
    metrics, versions = Metrics(), set()
    for number in range(VERSIONS + 10):
        strange = Condition(ConditionType.RUNTIME_ACTIVE, Status.FALSE, f"Reason{number}", "message")
        machine = MachineOutcome("gpu-node", conditions(strange), agent_version=f"1.0.{number}")
        samples = [(name, dict(labels)) for name, labels in scrape(view_of(machine), metrics)]
        versions |= {labels["version"] for name, labels in samples if name == "machine_agent_info"}
        (shown,) = [labels for _, labels in samples if labels.get("condition") == "RuntimeActive"]
        assert shown["reason"] == "other"
    assert len(versions) == VERSIONS + 1
    assert "other" in versions


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("0.1.0", "0.1.0"),
        ("0.2.0~rc1", "0.2.0~rc1"),
        ("0.1.0+5.g12345678", "0.1.0+5.g12345678"),
        ("0.1.0.dev20261130120000+g12345678.d12345678", "0.1.0.dev20261130120000+g12345678.d12345678"),
        ("my version", "other"),
    ],
)
def test_versions_of_machine_halves(version: str, shown: str) -> None:
    samples = scrape(view_of(replace(READY, agent_version=version)))
    assert value(samples, "machine_agent_info", machine="gpu-node", version=shown) == 1
    assert not [name for name, _ in scrape(view_of(READY)) if name == "machine_agent_info"]


def test_without_evidence_nothing_is_claimed() -> None:
    machine = without_evidence(READY, "the loop hangs")
    samples = scrape(View("0.1.0", (machine,), None, observed=1.7e9))
    assert value(samples, "machine_ready", machine="gpu-node") == 0
    stale = {"machine": "gpu-node", "status": "Unknown", "reason": "StaleEvidence"}
    for each in ConditionType:
        assert value(samples, "machine_condition", condition=each, **stale) == 1
    shown = {name for name, _ in samples}
    assert not shown & {"host_pci_gpus", "host_devices", "machine_gpus", "driver_info", "driver_version_mismatch"}
    assert not shown & {"gpu_info", "machine_gpus_expected", "machine_report_timestamp_seconds", "driver_roots"}
    assert value(samples, "observation_last_success_timestamp_seconds") == 1.7e9


BOUND = Gpu(GPUS[0], "nvidia", driver="nvidia", minor=0)
RENDER_NODE = DeviceNode("/dev/dri/renderD128", DeviceKind.DRI_RENDER, DeviceNumber(226, 128), GPUS[0])


@pytest.mark.parametrize(
    ("gpu", "devices", "status"),
    [
        (Gpu(GPUS[0], "nvidia"), (), "unbound"),
        (replace(BOUND, why_lost="Xid 79"), (), "failed"),
        (replace(BOUND, why_lost="Xid 79", detached=True), (), "detached"),
        (BOUND, (), "missing"),
        (BOUND, VENDOR.devices, "ok"),
        (BOUND, Unseen("/dev: time limit"), "unknown"),
        (BOUND, Broken("/dev/nvidia0 is a file"), "unknown"),
        (Gpu(GPUS[0], "intel", driver="i915"), (RENDER_NODE,), "ok"),
        (BOUND, (RENDER_NODE,), "missing"),
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
    statuses = ("ok", "missing", "unbound", "failed", "detached", "unused", "unknown")
    counted = {each: value(samples, "host_devices", kind="gpu", status=each) for each in statuses}
    assert sum(number for number in counted.values() if number is not None) == value(samples, "host_pci_gpus")
    return {each: number for each, number in counted.items() if number != 0 and number is not None}


def test_a_stopped_machine_stays_stopped_while_systemd_does_not_answer() -> None:
    """UnboundedAgentMachineNotReady paged after ten minutes of its silence. A machine that failed was not stopped."""
    metrics, shown = Metrics(), []
    for state, has_run in (
        *(("inactive", True), (Unseen("no answer"), False), ("active", False), (Unseen("no answer"), False)),
        *(("failed", True), ("inactive", False)),
    ):
        machine = MachineFacts(name="gpu-node", root="/", unit_state=state, has_run=has_run)
        shown.append(value(scrape(with_facts(machines=(machine,)), metrics), "machine_stopped", machine="gpu-node"))
    assert shown == [1, 1, 0, 0, 0, 0]


*OTHERS, NOW_READY = conditions()
UNDATED = (Condition(ConditionType.READY, Status.FALSE, "Reason", "message"),)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("machine_gpus", {}, 2),
        ("machine_gpus_expected", {"expected": 3}, 3),
        ("machine_gpus_lost", {"lost": GPUS[:1]}, 1),
        ("machine_gpus_advertised", {}, None),  # Unknown is not 0.
        ("machine_gpus_advertised", {"advertised": 0}, 0),
        ("machine_report_timestamp_seconds", {}, None),
        ("machine_report_timestamp_seconds", {"reported": 1.7e9}, 1.7e9),
        ("machine_ready_last_transition_timestamp_seconds", {}, 1.7e9),
        ("machine_ready_last_transition_timestamp_seconds", {"conditions": UNDATED}, None),
        ("machine_recent_ready_losses", {"conditions": (*OTHERS, NOW_READY._replace(losses=(1.7e9, 1.8e9)))}, 2),
    ],
)
def test_values_of_a_machine(name: str, change: dict[str, Any], expected: float | None) -> None:
    assert value(scrape(view_of(replace(READY, **change))), name, machine="gpu-node") == expected


def test_each_gpu_is_described_and_the_storage_is_counted() -> None:
    """Links take no space; free space that could not be observed is not shown."""
    lost = RememberedGpu("0000:03:00.0", "nvidia", "Tesla T4", "GPU-3", ("gpu-node",), lost=1.7e9)
    fault = GpuFault("Xid48", "a double-bit ECC error", 1.6e9, Verdict.NEEDS_RESET, 1.6e9)
    faults = GpuFacts(faults={GPUS[1]: fault})
    files = (library("usr/lib/a.so.1", "/a", size=70), library("usr/lib/a.so", "", link="a.so.1", size=6))
    root = StagedRoot(0, "nvidia", "550", files)
    samples = scrape(with_facts(remembered=Remembered((lost,)), gpus=faults, staged=(root,), state_free=1 << 30))
    states = {(dict(labels)["gpu"], dict(labels)["state"]) for name, labels in samples if name == "gpu_info"}
    assert states == {(GPUS[0], "granted"), (GPUS[1], "granted"), ("0000:03:00.0", "lost")}
    identity = {"vendor": "nvidia", "model": "Tesla T4", "uuid": "GPU-3", "machine": "gpu-node"}
    assert value(samples, "gpu_info", gpu="0000:03:00.0", state="lost", health="not-known", **identity) == 1
    assert value(samples, "gpu_fatal_error_timestamp_seconds", gpu=GPUS[1], error="Xid48") == 1.6e9
    assert (value(samples, "driver_roots"), value(samples, "driver_root_bytes")) == (1, 70)
    assert value(samples, "state_free_bytes") == 1 << 30
    assert value(samples, "went_back") == 0
    assert value(scrape(with_facts(went_back="1.1 failed")), "went_back") == 1
    assert value(scrape(view_of(READY)), "state_free_bytes") is None


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


RESULTS = [
    (outcome(READY), "converged"),
    (replace(outcome(READY), actions=(Done("write", "write /a (1 bytes)"),)), "changed"),
    (outcome(READY, failures=("no",)), "partial"),
    (outcome(READY, vendor=replace(VENDOR, devices=Unseen("time limit"))), "partial"),
    (outcome(READY, vendor=replace(VENDOR, devices=Absent("no driver"))), "converged"),
    (None, "failed"),
]


def test_counters_start_at_zero_and_add_up() -> None:
    results = ("converged", "changed", "partial", "failed")
    for ended, result in RESULTS:
        metrics = Metrics()
        assert value(scrape(view_of(READY), metrics), "reconcile_total", result=result) == 0
        metrics.passed(ended, 0.2)
        samples = scrape(view_of(READY), metrics)
        assert [value(samples, "reconcile_total", result=each) for each in results] == [
            each == result for each in results
        ]
    metrics = Metrics()
    actions = (Done("write", "a file"), Done("write", "remove a line of /b"), Done("reload", "systemd's units"))
    metrics.passed(replace(outcome(READY), actions=actions), 0.2)
    metrics.passed(outcome(READY, failures=("no", "neither")), 0.01)
    metrics.reloaded(False)
    samples = scrape(view_of(READY), metrics)
    kinds = ("write", "reload", "remove")
    assert [value(samples, "actions_total", kind=kind) for kind in kinds] == [2, 1, 0], "no sentence counts"
    assert value(samples, "failures_total") == 2
    assert value(samples, "config_reloads_total", result="failed") == 1
    assert value(samples, "reconcile_duration_seconds_count") == 2
    assert [value(samples, "reconcile_duration_seconds_bucket", le=le) for le in ("0.1", "0.5")] == [1, 2]


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


@pytest.mark.processes
def test_promtool_accepts_the_exposition() -> None:
    """Prometheus' own lint checks names, units and help texts."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    body = Metrics().page(view_of(READY), TEXT).body
    finished = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_each_check_of_the_host_has_one_series() -> None:
    """Not one for each machine."""
    check = HostCheck("DiskHealthy", Status.UNKNOWN, Reason.CHECK_NOT_RUN, "it has not run yet")
    samples = scrape(with_facts(checks=(check,)))
    found = [dict(labels) for name, labels in samples if name == "host_check"]
    assert found == [{"check": "DiskHealthy", "status": "Unknown", "reason": "CheckNotRun"}]
