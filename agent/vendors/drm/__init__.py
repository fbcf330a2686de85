"""Shared code of vendors whose GPUs need only nodes of the kernel's Direct Rendering Manager from the host."""
