"""Code for vendors whose GPUs need only device nodes of the kernel's Direct Rendering Manager from the host."""
