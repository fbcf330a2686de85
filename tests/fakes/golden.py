"""Texts that tests compare in full, in tests/data/golden, so that a reviewer sees each change of a line.

After a change that is meant: run the tests with UPDATE_GOLDEN=1, then read `git diff tests/data/golden`.
"""

import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "data/golden"
UPDATE = "UPDATE_GOLDEN"


def expect_golden(name: str, content: str) -> None:
    """Compare the content with the file of this name, or write the file if the environment says so."""
    file = GOLDEN / name
    if os.environ.get(UPDATE):
        file.write_text(content)
    assert content == file.read_text(), f"{file}: if this change is meant, run this test with {UPDATE}=1"
