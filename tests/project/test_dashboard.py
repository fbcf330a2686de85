"""Every query of the dashboard gives an answer, in a real Prometheus that scrapes a simulated fleet."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.fleet import JOB, Prometheus, available, scraped_fleet
from tests.project.reference_pages import metrics, name

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = REPOSITORY / "deploy/grafana/unbounded-agent.json"
RECORDING = REPOSITORY / "deploy/prometheus/unbounded-agent.recording.yml"
HOSTS = 50
"""integration.bed.measure.fleet_metrics does the same with 500."""
VARIABLES = {"$job": JOB, "$instance": ".+", "$__rate_interval": "1m"}
"""What Grafana puts into the queries."""
SERIES_LIMIT = 150


def queries() -> dict[str, str]:
    """Return each query, by the panel's title and the query's letter."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            assert f"{panel['title']} {target['refId']}" not in found, "two panels of one title"
            found[f"{panel['title']} {target['refId']}"] = expression
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


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not available():
        pytest.skip("Prometheus is not installed (apt install prometheus)")
    with scraped_fleet(tmp_path_factory.mktemp("prometheus"), HOSTS, interval=2) as found:
        yield found


@pytest.mark.processes
def test_every_panel_has_data(prometheus: Prometheus) -> None:
    found = {title: prometheus.query(expression)[0] for title, expression in queries().items()}
    assert [title for title, answer in found.items() if not answer] == []


@pytest.mark.processes
def test_links_name_columns_of_their_tables(prometheus: Prometheus) -> None:
    links = {
        panel["title"]: re.findall(r"__data\.fields\.(\w+)", json.dumps(panel["fieldConfig"]))
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        if panel["type"] == "table" and panel["fieldConfig"]["defaults"].get("links")
    }
    assert "Alerts" in links
    for title, names in links.items():
        rows, _ = prometheus.query(queries()[f"{title} A"])
        assert set(names) <= {label for row in rows for label in row["metric"]}, title


@pytest.mark.processes
def test_the_numbers_of_the_fleet(prometheus: Prometheus) -> None:
    """They are the simulation's: the dashboard adds up what the hosts export."""

    def shown(title: str) -> Any:  # noqa: ANN401
        (answer,), _ = prometheus.query(queries()[f"{title} A"])
        return int(float(answer["value"][1]))

    assert shown("Hosts") == HOSTS
    assert shown("Agents that do not answer") == 1
    assert shown("Machines that are not ready") == HOSTS // 25
    assert shown("GPUs granted") == 8 * HOSTS - HOSTS // 50
    assert shown("GPUs not granted") == HOSTS // 50
    assert shown("GPUs not advertised") == HOSTS // 50
    reasons, _ = prometheus.query(queries()["Machines that are not ready, by reason A"])
    assert {each["metric"]["reason"] for each in reasons} == {"RestartPending", "NoContainerd"}
    series = prometheus.number(f'max(scrape_samples_scraped{{job="{JOB}"}})')
    assert 100 < series <= SERIES_LIMIT
