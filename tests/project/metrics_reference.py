"""Makes the reference part of docs/metrics.md from a page that has every metric with samples."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.host.daemon.metrics import PREFIX, TEXT
from tests.fakes import eight_gpus


def generated() -> str:
    """Return the generated part of the page."""
    return "\n| name | type | labels | meaning |\n|---|---|---|---|\n" + "".join(_rows())


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
