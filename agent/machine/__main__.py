"""`python3 -m agent.machine`: the machine half, started by unbounded-agent-gpu.service."""

import gc
import os
import sys

from agent.machine.prefetch import start_generators
from agent.system.spawn_runner import MachineRunner


def main() -> int:
    """Return exit code 0 if a report was written or there is no handoff, else 1."""
    # A program that ends in a second or two leaves no garbage worth collecting; the search takes a twentieth of that.
    gc.disable()
    # For the programs that it runs, wherever it was started.
    os.chdir("/")
    runner = MachineRunner()
    try:
        start_generators(runner)
        # Not earlier: loading the rest takes half as long as a generator, and runs in parallel to it.
        from agent.machine import run

        return run.main(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
