"""`python3 -m agent.inside`: the machine half, started by unbounded-agent-gpu.service."""

import gc
import os
import sys

from agent.inside.early import start_generators
from agent.system.machine_runner import MachineRunner


def main() -> int:
    """Exit code 0 when a report was written or there is no handoff, else 1."""
    # A program that ends in a second or two has nothing to collect; looking for it takes a twentieth of that.
    gc.disable()
    # For the programs that it runs, whoever started it from where.
    os.chdir("/")
    runner = MachineRunner()
    try:
        start_generators(runner)
        # Not before: loading the rest takes half as long as a generator, and goes on beside it.
        from agent.inside import run

        return run.main(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
