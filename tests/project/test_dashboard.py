"""Every query of the dashboard gives an answer, in a real Prometheus that scrapes a simulated fleet."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.fakes.fleet import JOB, scraped_fleet
from tests.project.reference_pages import metrics, name

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = REPOSITORY / "deploy/grafana/unbounded-agent.json"
RECORDING = REPOSITORY / "deploy/prometheus/unbounded-agent.recording.yml"
HOSTS = 31
"""Hosts of each kind that tests.fakes.fleet has. integration.bed.measure.fleet_metrics does the same with 500."""
VARIABLES = {"$job": JOB, "$instance": ".+", "$__rate_interval": "1m"}
"""What Grafana puts into the queries."""


def queries() -> dict[str, str]:
    """Return each query, by the panel's title and the query's letter."""
    text, found = DASHBOARD.read_text(), {}
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    for panel in json.loads(text)["panels"]:
        for target in panel.get("targets", ()):
            title = f"{panel['title']} {target['refId']}"
            assert title not in found, "two panels of one title"
            found[title] = target["expr"]
    return found


def recorded() -> dict[str, str]:
    """Return the expression of each recording rule by its name."""
    (group,) = yaml.safe_load(RECORDING.read_text())["groups"]
    return {rule["record"]: rule["expr"] for rule in group["rules"]}


def test_queries_use_metrics_and_rules_that_exist() -> None:
    metric = re.compile(r"(?:\w+:)?unbounded_agent_\w+(?::\w+)?")
    known = {name(each) for each in metrics()} | set(recorded())
    text = "\n".join((*queries().values(), *recorded().values()))
    used = {re.sub(r"(seconds)_bucket$", r"\1", each) for each in metric.findall(text)}
    assert used - known == set()
    assert set(recorded()) <= used, "a rule that nobody uses costs each Prometheus"
    assert "$" not in text, "a variable without a value"


def test_panels_do_not_overlap() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        for column in range(place["x"], place["x"] + place["w"]):
            for line in range(place["y"], place["y"] + place["h"]):
                assert column < 24
                assert cells.setdefault((column, line), panel["title"]) == panel["title"]


@pytest.mark.processes
def test_every_panel_has_data(tmp_path: Path) -> None:
    """The numbers are the simulation's: the dashboard adds up what the hosts export. Links name columns of tables."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed (apt install prometheus)")
    with scraped_fleet(tmp_path, HOSTS, interval=2) as prometheus:
        found = {title: prometheus.query(expression)[0] for title, expression in queries().items()}
    assert [title for title, answer in found.items() if not answer] == []
    links = {
        panel["title"]: re.findall(r"__data\.fields\.(\w+)", json.dumps(panel["fieldConfig"]))
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        if panel["type"] == "table" and panel["fieldConfig"]["defaults"].get("links")
    }
    assert "Alerts" in links
    for title, names in links.items():
        assert set(names) <= {label for row in found[f"{title} A"] for label in row["metric"]}, title
    numbers = {
        **{"Hosts": HOSTS, "Agents that do not answer": 1, "Machines that are not ready": 2},
        **{"GPUs granted": 8 * HOSTS - 1, "GPUs not granted": 1, "GPUs not advertised": 1},
    }
    assert {title: float(found[f"{title} A"][0]["value"][1]) for title in numbers} == numbers
    reasons = {each["metric"]["reason"] for each in found["Machines that are not ready, by reason A"]}
    assert reasons == {"RestartPending", "NoContainerd"}
