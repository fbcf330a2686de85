"""Fixtures of the tests in this directory."""

from tests.fakes.joined_machine import api, client, joined, machine

__all__ = ["api", "client", "joined", "machine"]
