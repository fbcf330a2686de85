"""The commands that make CDI specs, by vendor: the machine half starts them before it loads anything else."""

from collections.abc import Callable, Mapping

from agent.vendors.nvidia.generate_command import generator_commands

GENERATORS: Mapping[str, Callable[[str, str], tuple[tuple[str, ...], ...]]] = {"nvidia": generator_commands}
"""Arguments of each, from a driver root and an output directory."""
