"""The machine half's program: unbounded-agent-gpu.service calls `main`; `python3 -m agent.machine` does the same."""

import gc
import os
import sys

from agent.machine.prefetch import start_generators
from agent.system.spawn_runner import MachineRunner


def main() -> int:
    """Run the machine half, and return its exit code (see agent.machine.run)."""
    # Garbage collection would take a twentieth of this program's time, and the program exits in a second or two.
    gc.disable()
    # Programs that are started here must not depend on the current directory.
    os.chdir("/")
    runner = MachineRunner()
    try:
        start_generators(runner)
        # Imported only now that the generators run in the background: the import takes half as long as a generator.
        from agent.machine import run

        return run.main(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
