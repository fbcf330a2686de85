"""Decides how often Python searches for garbage, each time among a hundred thousand objects of the imported modules."""

import gc

SHORT = 100_000
"""New objects between two searches in a command, which ends soon."""
USUAL = (700, 10, 10)
"""Python's default, which means hundreds of searches during the imports alone."""


def for_a_command() -> None:
    """Search hardly ever from now on."""
    gc.set_threshold(SHORT)


def for_a_service() -> None:
    """Search as usual from now on, but not what was loaded until now, which stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*USUAL)


def at_the_end() -> None:
    """Leave everything to the kernel: Python would search three times when it exits."""
    gc.freeze()
