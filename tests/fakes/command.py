"""Runs a command on a simulated host, as its command line would."""

from importlib import import_module
from typing import TypeAlias

import pytest

from agent.cli.parser import find_command, make_parser
from agent.host.reconcile import Reconciler

Capture: TypeAlias = pytest.CaptureFixture[str]
"""What commands print."""


def command(agent: Reconciler, line: str, *more: str, **services: object) -> int:
    """Run a command, such as `status --wide`, and return its exit code. `more` are words that may have spaces."""
    words = [*line.split(), *more]
    options = make_parser(words[0]).parse_args(words)
    module, _, name = find_command(options)[1].function.partition(":")
    return int(getattr(import_module(f"agent.cli.{module}"), name)(options, agent, **services))
