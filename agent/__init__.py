"""Makes a host's GPUs usable inside a systemd-nspawn machine: observe facts, plan the goal, apply the difference."""

__version__ = "0.2.0+checkout"
"""The next release. Packages, wheels and images name their build here instead (deploy/version)."""
