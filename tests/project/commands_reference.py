"""Makes the reference part of docs/commands.md from the parser.

A path such as docs/json.md in a help text becomes a link.
"""

import argparse
import textwrap
from collections.abc import Iterator

from agent.cli.parser import COMMANDS, JSON, make_parser
from tests.project.configuration_reference import linked

IN_THE_USAGE = (argparse.SUPPRESS, JSON, "the machine's name")
"""Arguments with these texts need no words besides the usage."""


def generated() -> str:
    """Return the generated part of the page."""
    return "".join((*_overview(), *_sections(make_parser())))


def _overview() -> Iterator[str]:
    yield "\n| command | what it does | run as |\n|---|---|---|\n"
    for name, command in COMMANDS.items():
        # `kube` does nothing without a subcommand.
        if not command.hidden and name != "kube":
            anchor = name.replace(" ", "-")
            yield f"| [`{name}`](#{anchor}) | {linked(command.summary)} | {command.user} |\n"


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a section for each command. Examples are only in the commands' own help, and code 2 once in the page."""
    for name, command in COMMANDS.items():
        its_parser = parser
        for word in name.split():
            its_parser = _children(its_parser)[word]
        # The table of all commands says who may run each.
        text = command.text.removesuffix(f" Run as: {command.user}.")
        yield f"\n{'###' if ' ' in name else '##'} `{name}`\n\n{_filled(linked(text))}\n\n"
        yield f"```\n{_usage(its_parser)}\n```\n\n"
        yield from _arguments(its_parser)
        codes = "; ".join(f"{code}: {meaning}" for code, meaning in sorted(command.codes.items()))
        yield _filled(f"- exit code {codes}", "  ") + "\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {name: child for each in found for name, child in each.choices.items()}


def _usage(parser: argparse.ArgumentParser) -> str:
    # In one line: each Python wraps it in its own way.
    return " ".join(parser.format_usage().split()).removeprefix("usage: ").replace(" [-h]", "")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield an item for each argument. `--help`, which all commands have, `--json` and subcommands are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help in IN_THE_USAGE:
            continue
        name = ", ".join(action.option_strings)
        value = str(action.metavar or f"{{{','.join(action.choices or ())}}}") if action.nargs != 0 else ""
        value = f"[={value}]" if name and action.nargs == "?" else f" {value}" if name and value else value
        yield _filled(f"- `{name}{value}`: {linked(action.help or '')}", "  ") + "\n"
