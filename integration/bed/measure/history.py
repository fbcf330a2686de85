"""Keeps the results of all runs of the benchmark, and draws them."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from integration.bed.cache import REPOSITORY, cache_root
from integration.bed.measure.pairs import disturbed

BARS = "▁▂▃▄▅▆▇█"
DISTURBED = "x"
"""Drawn in place of a bar if other work disturbed the run, so that its value says nothing."""
RUNS = 60
"""Runs that are drawn at most."""
DRAWN = ("_vs_", "idle_wakeups", "idle_cpu_seconds", "resident_mib")
"""A measurement is drawn if its name has one of these parts: its values can be compared between runs. Seconds of an
emulated processor cannot be compared."""
PARTS_OF_A_RATIO = ("_low", "_high", "_pairs", "_disturbed")


def history_file() -> Path:
    """Return the file that has a line for each run: a JSON object."""
    return cache_root() / "bench-history.jsonl"


def keep(measures: Mapping[str, object], path: Path) -> None:
    """Append a run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit, "measures": measures}
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def runs(path: Path) -> list[dict[str, dict[str, float]]]:
    """Return all runs, the oldest first. A line that was cut off, because its run was killed, is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def draw(entries: Sequence[Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    """Yield a line for each measurement: its course, its best value, and its last one with the quartiles."""
    entries = entries[-RUNS:]
    names = dict.fromkeys(name for entry in entries for name in entry["measures"] if _is_drawn(name))
    if not names:
        yield "no run was kept"
        return
    yield f"{'measurement':28} {'runs':{len(entries)}}  least  last (quartiles); {DISTURBED}: disturbed"
    for name in names:
        values = [None if name in disturbed(each["measures"]) else each["measures"].get(name) for each in entries]
        good = [value for value in values if value is not None]
        if not good:
            yield f"{name:28} {DISTURBED * len(entries)}  no undisturbed run"
            continue
        last = entries[-1]["measures"]
        text = f"{last[name]:.2f}" if name in last else "-"
        if f"{name}_low" in last:
            text += f" ({last[f'{name}_low']:.2f} to {last[f'{name}_high']:.2f})"
        course = "".join(
            _mark(each["measures"], name, value, good) for each, value in zip(entries, values, strict=True)
        )
        yield f"{name:28} {course}  {min(good):<6.2f} {text}"


def _is_drawn(name: str) -> bool:
    return any(part in name for part in DRAWN) and not name.endswith(PARTS_OF_A_RATIO)


def _mark(measures: Mapping[str, float], name: str, value: float | None, good: Sequence[float]) -> str:
    if value is None:
        return DISTURBED if name in measures else " "
    low, high = min(good), max(good)
    return BARS[round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0]
