"""Makes the reference part of docs/commands.md from the parser.

A path such as docs/json.md in a help text becomes a link.
"""

import argparse
import textwrap
from collections.abc import Iterator, Mapping

from agent.cli.commands import COMMANDS, GPU_COMMANDS, KUBE_COMMANDS, Command
from agent.cli.parser import BAD_INPUT, make_parser
from tests.project.configuration_reference import linked

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
    parsers = _children(parser)
    for name, command in commands.items():
        title = parsers[name].prog.removeprefix("unbounded-agent ")
        text = textwrap.fill(linked(command.text), 120, break_on_hyphens=False)
        yield f"\n{level} `{title}`\n\n{text}\n\n"
        yield f"```\n{_usage(parsers[name])}\n```\n"
        if rows := list(_arguments(parsers[name])):
            yield "\n| argument | meaning |\n|---|---|\n" + "".join(rows)
        yield "\n| exit code | meaning |\n|---|---|\n"
        for code, meaning in sorted({2: BAD_INPUT, **command.codes}.items()):
            yield f"| {code} | {meaning} |\n"
        examples = "\n".join(command.examples)
        yield f"\n```\n{examples}\n```\n"
        yield from _sections(parsers[name], SUBCOMMANDS.get(title, {}), f"{level}#")


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {name: child for each in found for name, child in each.choices.items()}


def _usage(parser: argparse.ArgumentParser) -> str:
    # In one line: each Python wraps it in its own way.
    return " ".join(parser.format_usage().split()).removeprefix("usage: ").replace(" [-h]", "")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a row for each argument. `--help`, which all commands have, and subcommands are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(action.option_strings)
        value = str(action.metavar or f"{{{','.join(action.choices or ())}}}") if action.nargs != 0 else ""
        value = f"[={value}]" if name and action.nargs == "?" else f" {value}" if name and value else value
        yield f"| `{name}{value}` | {linked(action.help or '')} |\n"
