"""Tells which extended resources of a node give pods GPUs, and which counts are zero. Pure."""

import fnmatch
from collections.abc import Sequence


def gives_gpus(name: str, prefix: str, harmless: Sequence[str]) -> bool:
    """Return whether a resource has a vendor's prefix, and matches none of the patterns (fnmatch) in `harmless`."""
    return name.startswith(prefix) and not any(fnmatch.fnmatchcase(name, each) for each in harmless)


def is_zero(count: str) -> bool:
    """Return whether a quantity such as `0`, `0k` or `8` is zero: whether it has no digit other than 0.

    A thousand is `1k`: the API server writes a quantity with the largest suffix that leaves a whole number.
    """
    return not any(each in "123456789" for each in count)
