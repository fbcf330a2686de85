"""`integration/faults [--quick] [--json]`: crashes, failing calls, damage, broken GPUs, and what attackers send."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.pool import Pool

from integration.faults_suite.attacks import attacks
from integration.faults_suite.crashes import crash_points
from integration.faults_suite.damage import Damage, damage, damages
from integration.faults_suite.faults import faults
from integration.faults_suite.fuzz import Fuzz, fuzz
from integration.faults_suite.gpu_faults import KINDS, SEED, try_harmless, try_kind
from integration.faults_suite.interception import Strike
from integration.faults_suite.parsers import PARSERS
from integration.faults_suite.points import Baseline, Finding, record_baseline, strike
from integration.faults_suite.stories import PLACES, STEADY, STORIES

INPUTS, QUICK_INPUTS = 20_000, 200
"""Mutated inputs for each parser."""
QUICK_CRASHES, QUICK_FAULTS, QUICK_DAMAGE = 11, 101, 23
"""A quick run tries one in this many. Prime numbers: others could always skip the same part of a repeated sequence."""


@dataclass(slots=True)
class Totals:
    """How much the suite tried, and the results."""

    crash_points: int = 0
    converged: int = 0
    faults: int = 0
    faults_wrong: int = 0
    gpu_faults: int = 0
    gpu_faults_wrong: int = 0
    false_ready: int = 0
    """How often a machine was Ready, or Ready without a remark, with a GPU that no pod must get."""
    attacks: int = 0
    attacks_succeeded: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def as_json(self) -> dict[str, int]:
        return {
            "crash_points": self.crash_points,
            "converged": self.converged,
            "faults": self.faults,
            "faults_wrong": self.faults_wrong,
            "gpu_faults": self.gpu_faults,
            "gpu_faults_wrong": self.gpu_faults_wrong,
            "false_ready": self.false_ready,
            "attacks": self.attacks,
            "attacks_succeeded": self.attacks_succeeded,
        }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="integration/faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of each scenario, in minutes, without attacks")
    parser.add_argument("--json", action="store_true", help="print the totals as one object, in the last line")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="what the GPUs' faults are made from (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    totals = run(options.seed, quick=options.quick, report=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(totals.as_json) if options.json else summary(totals))
    return 1 if totals.findings else 0


def summary(totals: Totals) -> str:
    return (
        f"{totals.converged} of {totals.crash_points} crash points converge; "
        f"{totals.faults_wrong} of {totals.faults} faults came out wrong; "
        f"{totals.gpu_faults_wrong} of {totals.gpu_faults} faults of GPUs did, {totals.false_ready} times falsely Ready"
        + (f"; {totals.attacks_succeeded} of {totals.attacks} attacks succeeded" if totals.attacks else "")
    )


def run(seed: int = SEED, *, quick: bool, report: Callable[[str], None] = lambda _: None) -> Totals:
    """Run everything, and report each scenario with its findings."""
    totals = Totals()
    # More processes than processors, because the host half's scenarios sleep half of the time. The fork comes before
    # anything here starts a thread: threads do not survive a fork.
    with multiprocessing.get_context("fork").Pool(2 * (os.cpu_count() or 1)) as pool:
        for name in STORIES:
            _crashes_and_faults(pool, totals, report, name, *((QUICK_CRASHES, QUICK_FAULTS) if quick else (1, 1)))
        for name in STEADY:
            _damage_files(pool, totals, report, name, QUICK_DAMAGE if quick else 1)
        _break_gpus(pool, totals, report, seed)
        _fuzz_parsers(pool, totals, report, QUICK_INPUTS if quick else INPUTS)
    if not quick:
        _attack(totals, report)
    return totals


def _attack(totals: Totals, report: Callable[[str], None]) -> None:
    totals.attacks, succeeded = attacks()
    totals.attacks_succeeded = len(succeeded)
    totals.findings += [Finding("attack", name, ("it succeeds: run this test",)) for name in succeeded]
    report(f"attacks: {totals.attacks}, {len(succeeded)} succeed: {', '.join(succeeded) or 'none'}")


def _crashes_and_faults(
    pool: Pool, totals: Totals, report: Callable[[str], None], name: str, crash_step: int, fault_step: int
) -> None:
    """Try one in `crash_step` crash points of the scenario, and one in `fault_step` of its faults."""
    began = time.monotonic()
    baseline = pool.apply(_baseline, (name,))
    totals.findings += [Finding(name, "without any strike", baseline.faults)] if baseline.faults else []
    points, failing = crash_points(baseline, crash_step), faults(baseline, fault_step)
    unconverged, wrong = _strike_all(pool, name, points), _strike_all(pool, name, failing)
    totals.crash_points += len(points)
    totals.converged += len(points) - len(unconverged)
    totals.faults += len(failing)
    totals.faults_wrong += len(wrong)
    totals.findings += [*unconverged, *wrong]
    report(
        f"{name}: {len(points)} crash points, {len(unconverged)} do not converge; {len(failing)} faults, "
        f"{len(wrong)} wrong ({time.monotonic() - began:.0f} s)"
    )
    for finding in (*unconverged, *wrong):
        report(str(finding))


def _damage_files(pool: Pool, totals: Totals, report: Callable[[str], None], name: str, every: int) -> None:
    began = time.monotonic()
    tried = damages(pool.apply(_baseline, (name,)).state, PLACES[name], every)
    wrong = _strike_all(pool, name, tried)
    totals.faults += len(tried)
    totals.faults_wrong += len(wrong)
    totals.findings += wrong
    report(f"{name}: {len(tried)} damaged files, {len(wrong)} wrong ({time.monotonic() - began:.0f} s)")
    for finding in wrong:
        report(str(finding))


def _break_gpus(pool: Pool, totals: Totals, report: Callable[[str], None], seed: int) -> None:
    began = time.monotonic()
    harmless = pool.apply_async(try_harmless)
    tried = list(pool.imap(try_kind, [(name, seed) for name in KINDS], chunksize=1))
    findings = [finding for each in (*tried, harmless.get()) for finding in each.findings]
    totals.gpu_faults += sum(each.faults for each in tried)
    totals.gpu_faults_wrong += len(findings)
    totals.false_ready += sum(each.false_ready for each in tried)
    totals.findings += findings
    if totals.false_ready and not findings:
        totals.findings.append(Finding("GPU", f"seed {seed}", (f"{totals.false_ready} times falsely Ready",)))
    report(
        f"GPUs: {totals.gpu_faults} faults of {len(KINDS)} kinds, and {harmless.get().faults} harmless lines; "
        f"{len(findings)} wrong, {totals.false_ready} times falsely Ready ({time.monotonic() - began:.0f} s)"
    )
    for finding in findings:
        report(str(finding))


def _fuzz_parsers(pool: Pool, totals: Totals, report: Callable[[str], None], inputs: int) -> None:
    began = time.monotonic()
    wrong = [found for found in pool.imap(fuzz, [Fuzz(name, inputs) for name in PARSERS], chunksize=1) if found]
    # The totals count parsers and not inputs, whose number is arbitrary.
    totals.faults += len(PARSERS)
    totals.faults_wrong += len(wrong)
    totals.findings += wrong
    report(
        f"parsers: {inputs} inputs for each of {len(PARSERS)}, {len(wrong)} parsers wrong "
        f"({time.monotonic() - began:.0f} s)"
    )
    for finding in wrong:
        report(str(finding))


def _strike_all(pool: Pool, name: str, strikes: Sequence[Strike | Damage]) -> list[Finding]:
    return [found for found in pool.imap(_try, [(name, each) for each in strikes], chunksize=4) if found]


@lru_cache(maxsize=2)
def _baseline(name: str) -> Baseline:
    """Return the scenario's baseline, recorded once in each process."""
    return record_baseline(STORIES.get(name) or STEADY[name])


def _try(task: tuple[str, Strike | Damage]) -> Finding | None:
    name, what = task
    if isinstance(what, Damage):
        return damage(STEADY[name], _baseline(name), what)
    return strike(STORIES[name], _baseline(name), what)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
