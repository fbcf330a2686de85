"""The alerts for Prometheus: metrics that exist, a runbook for each, tests for each, and what inhibits what."""

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.conditions import NOT_NEEDED_FOR_READY, Reason
from tests.fakes.waiting import wait_for
from tests.project.reference_pages import metrics, name

REPOSITORY = Path(__file__).resolve().parents[2]
RULES = REPOSITORY / "deploy/prometheus"
RUNBOOKS = REPOSITORY / "docs/runbooks.md"
EXAMPLE = RULES / "alertmanager.example.yml"
URL = "https://docs.example.com/unbounded-agent/runbooks.md"
"""Stands for the place where an installation has its documentation."""


@cache
def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    groups = yaml.safe_load((RULES / "unbounded-agent.rules.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@cache
def cases() -> dict[str, Any]:
    """Return promtool's tests of the alerts."""
    # Not a loader that knows numbers: `0x29` is no hexadecimal number here.
    found: dict[str, Any] = yaml.load((RULES / "unbounded-agent.rules.test.yml").read_text(), yaml.CBaseLoader)
    return found


def test_the_rules_name_only_metrics_that_exist() -> None:
    # Not names with colons, which are those of recorded series.
    name_of_a_metric = re.compile(r"(?<![\w:])unbounded_agent_[a-z_]+(?![\w:])")
    named = {each for path in RULES.glob("*.yml") for each in name_of_a_metric.findall(path.read_text())}
    named = {re.sub(r"_(bucket|sum|count)$", "", each) for each in named}
    assert named
    assert named <= {name(each) for each in metrics()}


def test_every_alert_has_its_section_of_the_runbooks() -> None:
    """It has meaning, check and advice."""
    parts = re.split(r"^## (\w+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    assert parts[1::2] == list(alerts())
    for (alert, rule), text in zip(alerts().items(), parts[2::2], strict=True):
        assert rule["annotations"]["runbook_url"] == f"{URL}#{alert.lower()}"
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert re.findall(r"^Severity: (\w+)", text, re.MULTILINE) == [rule["labels"]["severity"]], alert
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Means", "See", "Do"], alert
    # Running pods do not depend on the agent, so few of its troubles wake a person.
    pages = [alert for alert, rule in alerts().items() if rule["labels"]["severity"] == "page"]
    assert pages == ["UnboundedAgentMachineNotReady", "UnboundedAgentHostsUnobserved"]


def test_a_machine_that_only_waits_pages_only_for_conditions_that_ready_needs() -> None:
    expression = alerts()["UnboundedAgentMachineNotReady"]["expr"]
    (ignored,) = re.findall(r'condition!~"([\w|]+)"', expression)
    assert set(ignored.split("|")) == {str(each) for each in NOT_NEEDED_FOR_READY}
    reasons = {each for listed in re.findall(r'reason!?=?~"([\w|]+)"', expression) for each in listed.split("|")}
    assert reasons
    assert reasons <= set(Reason)


def test_every_alert_is_tested_to_wait_to_fire_and_to_end() -> None:
    for alert in alerts():
        found = [[each for each in test["alert_rule_test"] if each["alertname"] == alert] for test in cases()["tests"]]
        orders = ["".join("f" if each.get("exp_alerts") else "s" for each in checks) for checks in found]
        assert any(re.fullmatch(r"s+f+s.*", order) for order in orders), (alert, orders)


def samples(values: str) -> list[str]:
    """Return the samples of promtool's notation, one for each scrape: `_` for none, `stale` for a series that ends."""
    found = list[str]()
    for each in values.split():
        notation = re.fullmatch(r"(_|\d+)(?:\+(\d+))?(?:x(\d+))?", each)
        if notation is None or notation[3] is None:
            found.append(each)
        elif notation[1] == "_":
            found += ["_"] * int(notation[3])
        else:
            first, step, times = (int(part or 0) for part in notation.groups())
            found += [str(first + step * time) for time in range(times + 1)]
    return found


def lose_scrapes(series: dict[str, Any], lost: set[int]) -> None:
    """Change the series as Prometheus does when scrapes fail: `up` is 0, and every other series ends until the next."""
    replacement = "0" if series["series"].startswith("up{") else "stale"
    found = samples(series["values"])
    series["values"] = " ".join(
        replacement if time in lost and sample != "_" else sample for time, sample in enumerate(found)
    )


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    # It ends soon: to collect its garbage less often saves a quarter of its time.
    environment = {**os.environ, "GOGC": "400"}
    argv = [program, *arguments]
    finished = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.processes
def test_promtool_accepts_the_rules_also_if_scrapes_are_lost(tmp_path: Path) -> None:
    """Without loss, and with losses before and during each firing that the tests have. All else must be the same."""
    promtool("check", "rules", RULES / "unbounded-agent.rules.yml")
    whole, losing = copy.deepcopy(cases()["tests"]), []
    for test in (copy.deepcopy(each) for each in whole if each["interval"] == "1m"):
        test.pop("promql_expr_test", None)
        checks = [each for each in test["alert_rule_test"] if each.get("exp_alerts")]
        minutes = {int(each["eval_time"].removesuffix("m")) for each in checks}
        for series in test["input_series"]:
            lose_scrapes(series, {minute - before for minute in minutes for before in (0, 1, 4)})
        if minutes:
            losing.append(test)
    assert len(losing) > 20
    for check in (each for test in whole for each in test.get("promql_expr_test", ())):
        for sample in check.get("exp_samples", ()):
            sample["value"] = float(sample["value"])
    files = list[Path]()
    for number, test in enumerate(whole + losing):
        # Only the rules that the test needs: promtool would evaluate all others too, for each minute.
        rules = [alerts()[name] for name in {check["alertname"]: None for check in test.get("alert_rule_test", ())}]
        # JSON is YAML, and is written in a fraction of the time.
        (tmp_path / f"rules-{number}.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
        files.append(tmp_path / f"test-{number}.yml")
        recorded = [str(RULES / "unbounded-agent.recording.yml")] if "promql_expr_test" in test else []
        rule_files = [f"rules-{number}.yml", *recorded]
        files[-1].write_text(json.dumps({**cases(), "rule_files": rule_files, "tests": [test]}))
    promtool("test", "rules", *files)


@pytest.mark.processes
def test_the_package_writes_the_rules_with_links_to_the_documentation(tmp_path: Path) -> None:
    """Its script runs with the checkout's files; promtool checks the configuration that the page shows."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    (tmp_path / "default").write_text("RUNBOOKS=https://wiki.example.org/docs/\n")
    script = (REPOSITORY / "deploy/debian/unbounded-agent-monitoring.postinst").read_text()
    places = {
        "/usr/share/unbounded-agent-monitoring": f"{REPOSITORY}/deploy",
        "/etc/default/unbounded-agent-monitoring": f"{tmp_path}/default",
        "/var/lib/unbounded-agent-monitoring": f"{tmp_path}/rules",
        "/run/systemd/system": f"{tmp_path}/no-systemd",
    }
    for path, place in places.items():
        assert path in script
        script = script.replace(path, place)
    subprocess.run(["sh", "-c", script, "postinst", "configure"], check=True, capture_output=True)
    removal = (REPOSITORY / "deploy/debian/unbounded-agent-monitoring.postrm").read_text()
    removal = removal.replace("/var/lib/unbounded-agent-monitoring", f"{tmp_path}/rules")
    # dpkg calls the new release's script so if it could not be unpacked.
    subprocess.run(["sh", "-c", removal, "postrm", "abort-upgrade"], check=True)
    section = (REPOSITORY / "docs/metrics.md").read_text().partition("\n## Prometheus\n")[2]
    configuration = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
    assert "/var/lib/unbounded-agent-monitoring/*.yml" in configuration
    (tmp_path / "prometheus.yml").write_text(configuration.replace("/var/lib/unbounded-agent-monitoring", "rules"))
    promtool("check", "config", tmp_path / "prometheus.yml")
    installed = yaml.safe_load((tmp_path / "rules/unbounded-agent.rules.yml").read_text())["groups"]
    links = [rule["annotations"]["runbook_url"] for group in installed for rule in group["rules"]]
    assert links == [f"https://wiki.example.org/docs/runbooks.md#{alert.lower()}" for alert in alerts()]
    (tmp_path / "default").write_text("RUNBOOKS='https://wiki.example.org/?a=1&b=2'\n")
    wrong = subprocess.run(["sh", "-c", script, "postinst", "configure"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "is not a plain URL" in wrong.stderr) == (1, True)
    subprocess.run(["sh", "-c", removal, "postrm", "remove"], check=True)
    assert not (tmp_path / "rules").exists()


def test_inhibition_names_alerts_and_labels_that_exist() -> None:
    """An alert must not inhibit itself, and only tickets are inhibited."""
    for rule in yaml.safe_load(EXAMPLE.read_text())["inhibit_rules"]:
        # Each is `alertname="A"` or `alertname=~"A|B"`.
        (source,), (target,) = rule["source_matchers"], rule["target_matchers"]
        sources, targets = (set(re.sub(r'^alertname=~?"|"$', "", each).split("|")) for each in (source, target))
        assert sources | targets <= set(alerts())
        assert not sources & targets
        assert {alerts()[each]["labels"]["severity"] for each in targets} == {"ticket"}
        assert set(rule["equal"]) <= {"job", "instance", "machine"}


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[str]:
    """Where an Alertmanager with the example's configuration has its alerts."""
    program = shutil.which("prometheus-alertmanager")
    if program is None:
        pytest.skip("Alertmanager is not installed (apt install prometheus-alertmanager)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    argv = [program, f"--config.file={EXAMPLE}", f"--storage.path={tmp_path}", f"--web.listen-address={address}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*argv, "--cluster.listen-address="], stdout=log, stderr=log, env=os.environ)
    try:
        yield f"http://{address}/api/v2/alerts"
    finally:
        process.terminate()
        process.wait(30)


def request(url: str, body: object = None) -> Any:  # noqa: ANN401
    """Return the answer; None while the server does not listen yet."""
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=5) as found:
            return json.loads(found.read() or b"true")
    except urllib.error.URLError:
        return None


@pytest.mark.processes
def test_alertmanager_inhibits_what_says_nothing_new(alertmanager: str) -> None:
    """Everything happens at once on one host; on another one, only tickets."""
    host, machine = {"job": "unbounded-agent", "instance": "h"}, {"machine": "gpu-node"}
    fired = [
        {"alertname": "MachineNotReady", "severity": "page", **host, **machine},
        *({"alertname": each, **host} for each in ("GPUMissing", "GPUFailed", "Stuck", "DriverMismatch", "Stalled")),
        *({"alertname": each, **host, **machine} for each in ("GPULost", "VersionSkew")),
        {"alertname": "GPULost", **host, "machine": "other"},
        {"alertname": "GPUMissing", **host, "instance": "other"},
    ]
    alerts = [{"labels": {**each, "alertname": f"UnboundedAgent{each['alertname']}"}} for each in fired]
    wait_for(lambda: request(alertmanager, alerts), 30, "no answer")

    def silent() -> set[tuple[str, ...]]:
        found = [each["labels"] for each in request(alertmanager) if each["status"]["inhibitedBy"]]
        return {(each["alertname"], each["instance"], each.get("machine", "")) for each in found}

    wait_for(lambda: len(request(alertmanager)) == len(fired) and len(silent()) >= 3, 30, "no three are inhibited")
    # Not the other machine's lost GPU: the page is about another machine. Nor GPUMissing, which may be of a third one.
    assert silent() == {
        ("UnboundedAgentDriverMismatch", "h", ""),
        ("UnboundedAgentGPULost", "h", "gpu-node"),
        ("UnboundedAgentStalled", "h", ""),
    }
    pages = [each["labels"] for each in request(alertmanager) if {"name": "pager"} in each["receivers"]]
    assert [each["alertname"] for each in pages] == ["UnboundedAgentMachineNotReady"]
