"""Write the reference part of docs/metrics.md from a page that has every metric with samples: `make docs`."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.host.daemon.http.families import PREFIX
from agent.host.daemon.http.metrics import TEXT
from tests.fakes import eight_gpus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- Generated from the service's metrics by `make docs`. Do not edit below this line. -->\n"


def page(text: str) -> str:
    """Return the page with its generated part replaced. Raises ValueError if the line before that part is missing."""
    written, mark, _ = text.partition(BEGIN)
    if not mark:
        raise ValueError(f"{PAGE} does not contain the line {BEGIN!r}")
    return written + BEGIN + "\n| name | type | labels | meaning |\n|---|---|---|---|\n" + "".join(_rows())


def _rows() -> Iterator[str]:
    for family in sorted(metrics(), key=lambda each: each.name):
        # A metric without samples in the example would lack its labels here.
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, f"tests.fakes.eight_gpus has no sample of {family.name}"
        names = ", ".join(f"`{label}`" for label in sorted(labels))
        yield f"| `{name(family)}` | {family.type} | {names} | {family.documentation} |\n"


def metrics() -> list[Metric]:
    """Return the agent's own metrics, without prometheus_client's process_*."""
    view = eight_gpus.view()
    body = eight_gpus.metrics(view).page(view, TEXT).body.decode()
    return [family for family in text_string_to_metric_families(body) if family.name.startswith(PREFIX)]


def name(family: Metric) -> str:
    """Return the name that queries use; a histogram's series count as the histogram."""
    return family.name + ("_total" if family.type == "counter" else "")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
