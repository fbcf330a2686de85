"""Makes the reference part of docs/commands.md from the parser.

A path such as docs/json.md in a help text becomes a link.
"""

import argparse
import textwrap
from collections.abc import Iterator, Mapping

from agent.cli.parser import COMMANDS, GPU_COMMANDS, JSON, KUBE_COMMANDS, Command, make_parser
from tests.project.configuration_reference import linked

IN_THE_USAGE = (argparse.SUPPRESS, JSON, "the machine's name")
"""Arguments with these texts need no words besides the usage."""
SUBCOMMANDS: Mapping[str, Mapping[str, Command]] = {"gpus": GPU_COMMANDS, "kube": KUBE_COMMANDS}


def generated() -> str:
    """Return the generated part of the page."""
    return "".join((*_overview(), *_sections(make_parser(), COMMANDS, "##")))


def _overview() -> Iterator[str]:
    yield "\n| command | what it does | run as |\n|---|---|---|\n"
    for name, command in _all(COMMANDS, ""):
        if not command.hidden:
            anchor = name.replace(" ", "-")
            yield f"| [`{name}`](#{anchor}) | {linked(command.summary)} | {command.user} |\n"


def _all(commands: Mapping[str, Command], before: str) -> Iterator[tuple[str, Command]]:
    for name, command in commands.items():
        below = SUBCOMMANDS.get(name, {}) if not before else {}
        if not below or name == "gpus":
            yield f"{before}{name}", command
        yield from _all(below, f"{name} ")


def _sections(parser: argparse.ArgumentParser, commands: Mapping[str, Command], level: str) -> Iterator[str]:
    """Yield a section for each command. Examples are only in the commands' own help, and code 2 once in the page."""
    parsers = _children(parser)
    for name, command in commands.items():
        title = parsers[name].prog.removeprefix("unbounded-agent ")
        # The table of all commands says who may run each.
        text = command.text.removesuffix(f" Run as: {command.user}.")
        yield f"\n{level} `{title}`\n\n{_filled(linked(text))}\n\n"
        yield f"```\n{_usage(parsers[name])}\n```\n\n"
        yield from _arguments(parsers[name])
        codes = "; ".join(f"{code}: {meaning}" for code, meaning in sorted(command.codes.items()))
        yield _filled(f"- exit code {codes}", "  ") + "\n"
        yield from _sections(parsers[name], SUBCOMMANDS.get(title, {}), f"{level}#")


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
