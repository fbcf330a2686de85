"""A sample of the fault suite finds nothing wrong; integration/faults tries everything.

See docs/reliability.md. This needs no virtual machine. The attacks are unit tests, which the gate runs in any case.
"""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_nothing_is_left_wrong_by_kills_failing_calls_damage_and_strange_input() -> None:
    """The output names what is wrong by scenario, number of the call, call and difference."""
    command = (sys.executable, "-m", "integration.faults_suite", "--quick", "--json")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(done.stdout.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    totals = json.loads(done.stdout.splitlines()[-1])
    assert totals["converged"] == totals["crash_points"] > 200
    assert totals["faults"] > 200
    assert totals["faults_wrong"] == 0
    assert totals["gpu_faults"] >= 100
    assert totals["gpu_faults_wrong"] == totals["false_ready"] == 0
