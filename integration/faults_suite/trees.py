"""The result of a run, in a form that makes two runs comparable."""

import json
import os
import re
import stat
from pathlib import Path

from agent.model.paths import AGES, REMOVED

NEW = ".unbounded-agent-new"
VARYING = (
    (re.compile(r'(?<="publication": \[\n  )\d+'), "INODE"),
    (re.compile(r"\b1[789]\d{8}(\.\d+)?\b"), "TIME"),
    (re.compile(r"\b1[789]\d{17}\b"), "TIME"),
    (re.compile(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "TIME"),
    (re.compile(r'"(inode|ctime_ns|mtime_ns)": \d+'), r'"\1": N'),
    (re.compile(r'"(device|microseconds|started|until|removed)": ?\d+(\.\d+)?'), r'"\1": N'),
    (re.compile(r'("place": "[^"]*", "manifest": )"[0-9a-f]{64}"'), r'\1"DIGEST"'),
    (re.compile(r'"repairs": \{[^}]*\}'), '"repairs": {}'),
    (re.compile(r'"digest": "[0-9a-f]{64}"'), '"digest": "DIGEST"'),
    (re.compile(r'"losses": \[[^]]*\]'), '"losses": []'),
)
"""Parts that differ between runs: times, inode numbers, digests of these, and counts, which may lack a killed run."""


def snapshot(tree: Path) -> dict[str, str]:
    """Return type, mode and content of everything, by path.

    Leaves out the record of files' ages: it differs from run to run, and also has files that only a killed run saw.
    """
    found = {}
    for directory, directories, files in os.walk(tree):
        for name in (*directories, *files):
            place = Path(directory, name)
            status = place.lstat()
            path = f"/{place.relative_to(tree)}"
            if path == AGES:
                continue
            if stat.S_ISLNK(status.st_mode):
                found[path] = f"link to {os.readlink(place)}"
            elif stat.S_ISREG(status.st_mode):
                found[path] = f"{status.st_mode & 0o7777:04o} {normal(place.read_bytes())}"
            else:
                found[path] = f"{stat.S_IFMT(status.st_mode):o} {status.st_mode & 0o7777:04o}"
    return found


def normal(content: bytes) -> str:
    text = content.decode(errors="backslashreplace")
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    return text


INDEX = re.compile(
    r"((?:host-nvidia|driver-roots|trees)/|host\\x2dnvidia-|[Dd]river root "
    r'|"index": |"nvidia": |"(?:roots|indices)": \[)(\d+)(, \d+)*'
)
GENERATION = re.compile(r"\b[0-9a-f]{16}\b")


def numbered(found: dict[str, str], manifests: str) -> dict[str, str]:
    """Replace the indices of driver roots by 0, 1, 2 and so on, and generations by a word.

    In one of two runs, an incomplete driver root may have used up an index. That must not count as a difference.
    """
    paths = (path for path in found if re.fullmatch(f"{manifests}/\\d+.json", path))
    indices = sorted(int(path[len(manifests) + 1 : -5]) for path in paths)
    ranks = {str(index): str(rank) for rank, index in enumerate(indices)}

    def rank(text: str) -> str:
        return INDEX.sub(lambda match: re.sub(r"\d+$", lambda one: ranks.get(one[0], one[0]), match[0]), text)

    # Leave out the directory for removals: the first removal makes it, and it stays there, empty.
    kept = {path: text for path, text in found.items() if path != REMOVED}
    return {rank(path): GENERATION.sub("GENERATION", rank(text)) for path, text in kept.items()}


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return one line for each difference."""
    lines = []
    for path in sorted(expected.keys() | found.keys()):
        before, after = expected.get(path), found.get(path)
        if before != after:
            lines.append(f"{path}: {_short(before, after)}")
    return lines


def _short(before: str | None, after: str | None) -> str:
    if before is None:
        return f"is too much ({(after or '')[:80]!r})"
    if after is None:
        return "is missing"
    pairs = enumerate(zip(before, after, strict=False))
    common = next((number for number, (one, other) in pairs if one != other), min(len(before), len(after)))
    return f"{before[max(0, common - 60) : common + 60]!r} expected, {after[max(0, common - 60) : common + 60]!r} found"


def temporary(tree: Path) -> list[str]:
    """Return a line for each temporary file that a killed writer has left."""
    return [f"{path.relative_to(tree)}: a temporary file is left" for path in tree.rglob(f"*{NEW}")]


def unordered(text: str) -> str:
    """Return the record of a machine's devices in a form that does not differ between runs.

    Its lists are sorted, and the generation of the last repeated binds (`rebound`) is left out. Instead of the time
    since which permissions are kept (`kept_since`), the result says whether there is such a time.
    """
    mode, _, content = text.partition(" ")
    try:
        live = json.loads(content)
    except ValueError:
        return text
    kept = {
        key: sorted(value, key=json.dumps) if isinstance(value, list) else value
        for key, value in live.items()
        if key != "rebound"
    }
    return f"{mode} {json.dumps(kept | {'kept_since': bool(live.get('kept_since'))}, sort_keys=True)}"
