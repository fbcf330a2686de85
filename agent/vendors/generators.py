"""The command that makes a CDI spec, by vendor: the machine half starts it before it loads anything else."""

from collections.abc import Callable, Mapping

from agent.vendors.nvidia.generate_command import generate_command

GENERATORS: Mapping[str, Callable[[str, str], tuple[str, ...]]] = {"nvidia": generate_command}
"""Arguments of each, from a driver root and an output directory."""
