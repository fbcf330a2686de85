"""Kills before every call that changes something, and within calls that can be half done."""

from integration.faults_suite.interception import TORN, Strike
from integration.faults_suite.points import Baseline


def crash_points(baseline: Baseline, every: int = 1) -> list[Strike]:
    """Return a kill before each writing call, and one within each call of TORN; with `every`, only one in so many.

    Kills after a call are not needed: the state after a call is the state before the next call.
    """
    points = [Strike(number) for number in range(0, len(baseline.writing), every)]
    torn = [number for number, call in enumerate(baseline.writing) if call.name in TORN]
    return [*points, *(Strike(number, torn=True) for number in torn[::every])]
