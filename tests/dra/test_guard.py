"""Whether a device plugin offers GPUs on the node."""

from typing import Any

import pytest

from agent.dra.service import blocked_message, plugin_resources
from agent.model.extended_resources import is_zero

PREFIX, HARMLESS = "vendor.com/", ("vendor.com/net*",)


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, {}),
        ({"capacity": {"cpu": "4", "vendor.com/gpu": "0"}, "allocatable": {"vendor.com/gpu": "0"}}, {}),
        ({"capacity": {"vendor.com/gpu": "8"}, "allocatable": {"vendor.com/gpu": "0"}}, {"vendor.com/gpu": "8"}),
        ({"allocatable": {"vendor.com/mig-1g.10gb": "1k"}}, {"vendor.com/mig-1g.10gb": "1k"}),
        ({"allocatable": {"vendor.com/net1": "8", "other.com/gpu": "8", "vendor.community/gpu": "1"}}, {}),
        ({"allocatable": None, "capacity": []}, {}),
        ({"allocatable": {"vendor.com/gpu": 2}}, {"vendor.com/gpu": "2"}),
    ],
)
def test_counts_that_are_not_zero_are_found(status: dict[str, Any], found: dict[str, str]) -> None:
    assert plugin_resources({"status": status}, PREFIX, HARMLESS) == found


@pytest.mark.parametrize(("count", "zero"), [("0", True), ("0k", True), ("0.0", True), ("1", False), ("10", False)])
def test_zero_has_many_forms(count: str, zero: bool) -> None:
    assert is_zero(count) is zero


def test_the_reason_has_the_steps() -> None:
    text = blocked_message({"vendor.com/gpu": "8"})
    assert "vendor.com/gpu: 8" in text
    assert "unbounded-agent kube allocation dra" in text
