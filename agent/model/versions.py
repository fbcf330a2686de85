"""Versions of the handoff's and the report's format. Pure, and without imports, because it is loaded early."""

HANDOFF_VERSION = 1
REPORT_VERSION = 1
