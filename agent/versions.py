"""Versions of the handoff's form. Pure, and apart from all else: read before anything heavier is imported."""

HANDOFF_VERSION = 1
ACCEPTED_HANDOFFS = (1,)
"""N and N-1, once there is an N-1."""
