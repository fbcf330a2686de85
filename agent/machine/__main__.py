"""`python3 -m agent.machine`: the machine half, started by unbounded-agent-gpu.service."""

import gc
import os
import sys

from agent.machine.prefetch import start_generators
from agent.system.spawn_runner import MachineRunner


def main() -> int:
    """Run the machine half. Return exit code 0 if a report was written or there is no handoff, otherwise 1."""
    # Collecting garbage takes a twentieth of the time of this program, which exits in a second or two.
    gc.disable()
    # Programs that are started here must not depend on the current directory.
    os.chdir("/")
    runner = MachineRunner()
    try:
        start_generators(runner)
        # Imported after the start of the generators, to run in parallel: it takes half as long as a generator.
        from agent.machine import run

        return run.main(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
