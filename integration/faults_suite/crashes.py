"""Kills before every call that changes something, and within calls that can be half done."""

from integration.faults_suite.interception import TORN, Strike
from integration.faults_suite.points import Baseline


def crash_points(baseline: Baseline, every: int = 1) -> list[Strike]:
    """Return kills before writing calls, and within those of TORN; with `every`, one in so many.

    No kill comes after a call: the state is then the same as before the next call.
    """
    points = [Strike(number) for number in range(0, len(baseline.writing), every)]
    torn = [number for number, call in enumerate(baseline.writing) if call.name in TORN]
    return [*points, *(Strike(number, torn=True) for number in torn[::every])]
