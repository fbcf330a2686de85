"""Versions of the handoff's form, and of the report's. Pure, and apart from all else: read before anything heavier."""

OLDEST_HANDOFF = 1
HANDOFF_VERSION = 2
ACCEPTED_HANDOFFS = (OLDEST_HANDOFF, HANDOFF_VERSION)
"""N-1 and N."""
REPORT_VERSION = 1
