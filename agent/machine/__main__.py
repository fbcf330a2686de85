"""The machine half's program: unbounded-agent-gpu.service calls `main`; `python3 -m agent.machine` does the same."""

import sys

from agent.machine.prefetch import EarlyRunner, start_generators


def main() -> int:
    """Run the machine half, and return its exit code (see agent.machine.run)."""
    runner = EarlyRunner()
    try:
        start_generators(runner)
        # Imported only now that the generators run in the background: the import takes half as long as a generator.
        from agent.machine import run

        return run.main(runner)
    finally:
        runner.close()


if __name__ == "__main__":
    sys.exit(main())
