"""NVIDIA's GPUs, driver and CDI specifications."""
