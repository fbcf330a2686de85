"""Runs commands for other processes, inside the service."""

import json
from collections.abc import Callable, Sequence
from contextvars import copy_context
from http import HTTPStatus

from agent.cli.asking import answerable, installation
from agent.cli.printing import CAPTURED
from agent.cli.terminal import ASKING_TERMINAL
from agent.host.daemon.http.server import Page
from agent.system.damage import encounters

DECLINED = Page(HTTPStatus.CONFLICT, b"run the command yourself\n")


def run_command(arguments: Sequence[str]) -> int:
    """Run a command as a process of its own would, and return its exit code."""
    from agent.cli.main import main

    return main(arguments)


class Answers:
    """Answers the requests that agent.cli.asking sends.

    Each command makes its own reconciler, so it observes everything itself.
    """

    def __init__(self, validated: Callable[[], bool], command: Callable[[Sequence[str]], int] = run_command) -> None:
        """`validated` returns whether the current configuration can be loaded without the validator.

        `command` runs a command and returns its exit code.

        Remember which version of the agent is installed now, to decline requests from processes of another version.
        """
        self._validated, self._command, self._installation = validated, command, installation()

    def page(self, query: str) -> Page:
        """Return the command's output and exit code as JSON, or DECLINED. Runs in a thread of the HTTP server.

        `query` is the request: JSON, in hexadecimal digits.
        """
        try:
            request = json.loads(bytes.fromhex(query))
            arguments, width_and_colour = request["arguments"], (int(request["width"]), bool(request["colour"]))
            if request["installation"] != self._installation or not answerable(arguments):
                return DECLINED
        except (KeyError, TypeError, ValueError):
            return DECLINED
        if not self._validated():
            # The command would load the validator, which would stay in the service's memory.
            return DECLINED
        before = encounters()
        try:
            code, output = copy_context().run(self._run, arguments, width_and_colour)
        except SystemExit:
            # An argument is wrong. After DECLINED, the process that asks runs the command itself, and argparse prints
            # the message to the user there.
            return DECLINED
        if encounters() != before:
            # A record is damaged, and the service names it only in its journal. After DECLINED, the process that asks
            # runs the command itself, and names the record to the user.
            return DECLINED
        document = {"code": code, "output": output}
        return Page(HTTPStatus.OK, json.dumps(document).encode() + b"\n", "application/json")

    def _run(self, arguments: Sequence[str], width_and_colour: tuple[int, bool]) -> tuple[int, list[tuple[str, str]]]:
        output: list[tuple[str, str]] = []
        CAPTURED.set(output)
        ASKING_TERMINAL.set(width_and_colour)
        return self._command(arguments), output
