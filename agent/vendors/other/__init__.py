"""Devices that are no GPUs, which machines get where their settings ask for them."""
