"""Compares what ran in pairs, one directly after the other, because a processor's speed changes all the time."""

import statistics
from collections.abc import Mapping, Sequence

from integration.bed.measure.bench_script import Measures

DISTURBED = 0.25
"""The bare runs do the same work each time: if they spread more than this, other work has disturbed them."""


def compared(name: str, ours: Sequence[float], bare: Sequence[float]) -> Measures:
    """Return the median of the pairs' ratios under `name`, its quartiles, and whether the runs were disturbed."""
    low, middle, high = _quartiles([one / other for one, other in zip(ours, bare, strict=True)])
    return {
        name: middle,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_pairs": len(ours),
        f"{name}_disturbed": int(spread(bare) > DISTURBED),
    }


def spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles as a share of the median."""
    low, middle, high = _quartiles(values)
    return (high - low) / middle


def disturbed(measures: Mapping[str, object]) -> list[str]:
    """Return the names of the ratios that other work disturbed."""
    suffix = "_disturbed"
    return [name.removesuffix(suffix) for name, value in measures.items() if name.endswith(suffix) and value]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
