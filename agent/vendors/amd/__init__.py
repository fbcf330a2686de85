"""AMD: GPUs of the kernel driver amdgpu."""
