"""Makes families of metrics with the agent's prefix."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "unbounded_agent"


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge without samples."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def value(name: str, text: str, number: float) -> GaugeMetricFamily:
    """Return a gauge with one sample, which has no labels."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=number)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Return a counter without samples; `name` is without `_total`."""
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
