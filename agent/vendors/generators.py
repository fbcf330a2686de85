"""The commands that make CDI specs, by vendor: the machine half starts them before it loads anything else."""

from collections.abc import Callable, Mapping

from agent.vendors.nvidia.generate_command import generate_command

GENERATORS: Mapping[str, Callable[[str, str], tuple[str, ...]]] = {"nvidia": generate_command}
"""Arguments from a driver root and an output directory."""
