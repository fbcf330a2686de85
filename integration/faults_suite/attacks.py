"""Run and count the tests that attack: those in tests/ with `attack` in their names.

An attack succeeds if its test fails. Attacks that need a real machine run on the bed, with integration/test.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def attacks() -> tuple[int, list[str]]:
    """Return how many attacks ran, and which of them succeeded."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "attacks.xml")
        command = (sys.executable, "-m", "pytest", "tests", "-q", "-k", "attack", f"--junit-xml={report}")
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if not report.is_file():
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    succeeded = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return sum(case.find("skipped") is None for case in cases), succeeded
