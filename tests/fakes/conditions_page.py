"""The table of reasons in docs/conditions.md."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "conditions.md"
ROW = re.compile(r"^\| `(?P<reason>\w+)` \| (?P<status>True|False|Unknown) \| (?P<meaning>.+) \| (?P<advice>.+) \|$")


def rows() -> list[re.Match[str]]:
    return [row for row in map(ROW.match, DOCUMENT.read_text().splitlines()) if row]
