"""NVIDIA: what its driver shows on a host, and what a machine needs of it."""
