"""Measure what a fleet's metrics cost a Prometheus: `python -m integration.bed.measure.fleet_metrics [HOSTS]`.

The hosts are simulated (tests.fakes.fleet); Prometheus and the queries of the dashboard are real.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.fakes.fleet import JOB, REPOSITORY, Prometheus, scraped_fleet

DASHBOARD = REPOSITORY / "deploy/grafana/unbounded-agent.json"
INTERVAL = 15
"""Seconds between two scrapes."""
ROUNDS = 5


def _slowest(prometheus: Prometheus) -> tuple[float, str, float]:
    """Return the time of the dashboard's slowest query, its panel, and the time of all queries; best of ROUNDS."""
    times: dict[str, float] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$job", JOB).replace("$instance", ".+")
            expression = expression.replace("$__rate_interval", "1m")
            title = f"{panel['title']} {target['refId']}"
            answers = [prometheus.query(expression) for _ in range(ROUNDS)]
            assert answers[0][0], f"{title} has no data"
            times[title] = min(seconds for _, seconds in answers)
    slowest = max(times, key=lambda each: times[each])
    return times[slowest], slowest, sum(times.values())


def main(hosts: int) -> None:
    """Print the measurements."""
    with tempfile.TemporaryDirectory() as directory, scraped_fleet(Path(directory), hosts, INTERVAL) as prometheus:
        samples = prometheus.number(f'max(scrape_samples_scraped{{job="{JOB}"}})')
        all_series = prometheus.number('count({__name__=~".+"})')
        memory = prometheus.resident_bytes() / 2**20
        slowest, panel, together = _slowest(prometheus)
    print(f"hosts: {hosts} simulated ones, and one that does not answer")
    print(f"series of a host: {samples:.0f}; of all hosts, with rules and alerts: {all_series:.0f}")
    print(f"memory of Prometheus after three scrapes: {memory:.0f} MiB")
    print(f"slowest query of the dashboard: {slowest * 1000:.0f} ms ({panel}); all together: {together * 1000:.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
