"""Makes Prometheus metrics of the last observation, and of the service's own state."""

from collections.abc import Iterable, Iterator
from platform import python_version

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.host.daemon.http.families import counter, gauge, value
from agent.host.daemon.http.host_gauges import host_families
from agent.host.daemon.http.machine_gauges import Stops, Versions, condition_families, machine_families
from agent.host.daemon.http.view import View
from agent.host.daemon.wakeups.poller import Tally


def families(view: View, versions: Versions, stops: Stops) -> Iterator[Metric]:
    """Yield the metrics of one view."""
    build = gauge(
        "build_info", "Constant 1, with the versions of the host half and of Python.", "version", "python_version"
    )
    build.add_metric([view.version, python_version()], 1)
    yield build
    yield from condition_families(view.machines)
    if view.outcome is not None:
        yield from machine_families(view.outcome, versions, stops)
        yield from host_families(view.outcome)
    if view.observed:
        yield value(
            "observation_last_success_timestamp_seconds",
            "When a pass last observed the devices of all vendors.",
            view.observed,
        )
    yield from _service_families(view)
    yield from _wakeup_families(view.wakeups)


def _service_families(view: View) -> Iterator[Metric]:
    yield value(
        "stuck_operations",
        "Reads of drivers' files, and commands, that missed their deadline and still hang.",
        len(view.stuck),
    )
    discarded = counter(
        "state_discarded", "How often a file of the agent's own state was discarded, because it was damaged.", "file"
    )
    for file, times in view.discarded.items():
        discarded.add_metric([file], times)
    yield discarded
    yield value(
        "config_last_reload_successful",
        "0 if the configuration was invalid when it was last read, so that the last good one is in force, or if its "
        "metrics.address could not be bound.",
        view.config_good,
    )
    yield value(
        "config_last_reload_success_timestamp_seconds", "When the configuration in force was read.", view.config_loaded
    )


def _wakeup_families(tallies: Iterable[Tally]) -> Iterator[Metric]:
    caused = counter("wakeups", "Passes that events caused, by source. Several sources may cause one pass.", "source")
    lost = counter(
        "wakeup_source_losses", "How often a source of events broke, or could not be opened at the start.", "source"
    )
    watching = gauge("wakeup_source_watching", "1 while the source reports events.", "source")
    for tally in tallies:
        caused.add_metric([tally.name], tally.wakeups)
        lost.add_metric([tally.name], tally.losses)
        watching.add_metric([tally.name], tally.watching)
    yield from (caused, lost, watching)


class Gauges(Collector):
    """The gauges of one view, for a registry."""

    def __init__(self, view: View, versions: Versions, stops: Stops) -> None:
        self._view, self._versions, self._stops = view, versions, stops

    def collect(self) -> Iterator[Metric]:
        return families(self._view, self._versions, self._stops)
