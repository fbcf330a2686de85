"""Non-GPU devices, which machines get if their settings ask for them."""
