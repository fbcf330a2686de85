"""Versions of the handoff's and the report's format. Pure, and without imports, because it is loaded early."""

OLDEST_HANDOFF = 1
HANDOFF_VERSION = 2
ACCEPTED_HANDOFFS = (OLDEST_HANDOFF, HANDOFF_VERSION)
"""The previous and the current version."""
REPORT_VERSION = 1
