"""The benchmark's comparison of pairs, and its history."""

import json
from pathlib import Path

from integration.bed.measure.history import BARS, draw, keep, runs
from integration.bed.measure.pairs import compared, disturbed, spread

QUIET = [1.0, 1.02, 0.98, 1.01, 1.0]


def test_a_ratio_is_the_median_of_pairs_with_its_quartiles() -> None:
    """The processor becomes four times as slow in the middle: no pair notices."""
    bare = [1.0, 1.0, 1.0, 4.0, 4.0]
    found = compared("x", [1.2, 1.3, 1.1, 4.8, 5.2], bare)
    assert (round(float(found["x"]), 3), found["x_pairs"]) == (1.2, 5)
    assert 1.1 <= float(found["x_low"]) <= float(found["x_high"]) <= 1.3
    assert disturbed(found) == ["x"]


def test_a_quiet_run_is_not_disturbed() -> None:
    assert spread(QUIET) < 0.05
    assert disturbed(compared("x", [each * 2 for each in QUIET], QUIET)) == []
    assert disturbed(compared("x", [2.0], [1.0])) == []


def test_runs_are_kept_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "history"
    assert list(draw(runs(path))) == ["no run was kept"]
    for ratio in (1.5, 1.25, 1.0):
        keep({**compared("setup_vs_floor", [ratio, ratio], [1.0, 1.0]), "setup_seconds": 9.0, "note": "text"}, path)
    keep(compared("setup_vs_floor", [9.0, 9.0, 9.0], [1.0, 2.0, 3.0]), path)
    with path.open("a") as file:
        file.write('{"time": "20')
    assert len(runs(path)) == 4
    assert json.loads(path.read_text().splitlines()[0])["commit"]
    heading, line = draw(runs(path))
    assert line.split() == ["setup_vs_floor", f"{BARS[7]}{BARS[4]}{BARS[0]}x", "1.00", *line.split()[3:]]
    assert "disturbed" in heading
