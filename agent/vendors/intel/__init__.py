"""Intel: GPUs of the kernel drivers i915 and xe."""
