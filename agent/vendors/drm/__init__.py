"""What vendors share whose GPUs need nodes of the kernel's Direct Rendering Manager and nothing else of the host."""
