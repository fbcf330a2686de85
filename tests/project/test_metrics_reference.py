"""docs/metrics.md has what the service exports, which stays small."""

import re

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from agent.host.daemon.metrics import TEXT
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import DeviceNode
from tests.fakes import eight_gpus
from tests.project.metrics_reference import metrics, name
from tests.project.reference_pages import DOCS, PAGES

SERIES_LIMIT = 150
"""Series of a host with eight GPUs and one machine. A fleet's Prometheus keeps each of them in memory."""


def test_prose_names_only_metrics_that_exist() -> None:
    written = (DOCS / "metrics.md").read_text().partition(PAGES["metrics.md"][0])[0]
    named = set(re.findall(r"\bunbounded_agent_[a-z_]+\b", written))
    assert named - {name(each) for each in metrics()} == set()


def test_a_host_with_eight_gpus_has_few_series() -> None:
    """With a node of every kind, and an Xid error of every GPU."""
    facts = eight_gpus.facts()
    (vendor,) = facts.vendors
    others = [kind for kind in DeviceKind if kind is not DeviceKind.GPU]
    nodes = tuple(DeviceNode(f"/dev/{kind}", kind, DeviceNumber(511, minor)) for minor, kind in enumerate(others))
    own = (
        tuple(node for node in vendor.devices if node.kind is DeviceKind.GPU)
        if isinstance(vendor.devices, tuple)
        else ()
    )
    view = eight_gpus.view(observed=replace(facts, vendors=(replace(vendor, devices=(*own, *nodes)),)))
    body = eight_gpus.metrics(view).page(view, TEXT).body.decode()
    counts = {family.name: len(family.samples) for family in text_string_to_metric_families(body)}
    assert 100 < sum(counts.values()) <= SERIES_LIMIT, counts
