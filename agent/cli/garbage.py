"""Sets how often Python collects garbage. A full collection searches the hundred thousand objects of all modules."""

import gc

COMMAND_THRESHOLD = 100_000
"""New objects between two collections in a command, which ends soon."""
DEFAULT_THRESHOLDS = (700, 10, 10)
"""Python's defaults, with which there are hundreds of collections during the imports alone."""


def for_a_command() -> None:
    """Hardly ever collect garbage in this process."""
    gc.set_threshold(COMMAND_THRESHOLD)


def for_a_service() -> None:
    """Collect garbage as often as Python does by default, but never search the objects that exist now: they stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*DEFAULT_THRESHOLDS)


def at_the_end() -> None:
    """Keep Python from collecting garbage, which it does three times when it exits. The kernel frees the memory."""
    gc.freeze()
