"""Non-GPU devices, which machines get if their settings request them."""
