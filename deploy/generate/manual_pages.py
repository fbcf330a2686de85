"""Print a manual page in Markdown, for go-md2man(1): `python -m deploy.generate.manual_pages PAGE`.

unbounded-agent.8 is made from the parser of the command line, unbounded-agent.toml.5 from docs/configuration.md.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from agent import __version__
from agent.cli.parser import make_parser
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE, STATE

CONFIGURATION = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
CONTENTS = re.compile(r"^- .*\[\w+\]\(#\w.*\n", re.MULTILINE)
"""A line of links to the keys' headings, which a manual page does not need."""


def commands() -> str:
    """Return unbounded-agent(8)."""
    parser = make_parser()
    parts = [
        _header("unbounded-agent", 8, "GPUs of a host for systemd-nspawn machines with Kubernetes nodes"),
        "# SYNOPSIS\n\n**unbounded-agent** [**--config** *FILE*] *COMMAND* [*ARGUMENT* ...]\n",
        f"# DESCRIPTION\n\n{_paragraph(parser.description)}\n",
        f"# OPTIONS\n\n{''.join(_arguments(parser))}",
        "# COMMANDS\n",
        *(_command(each) for each in _subcommands(parser)),
        f"# EXIT STATUS\n\n{_block(_sections(parser)['exit codes'])}",
        "# FILES\n",
        f"*{CONFIG_FILE}*, *{CONFIG_DIRECTORY}/\\*.toml*\n:   The configuration, unbounded-agent.toml(5)\n",
        f"*{STATE}*\n:   Driver roots, and records of what the agent did\n",
        "# SEE ALSO\n\n**unbounded-agent.toml**(5), **systemd-nspawn**(1), **machinectl**(1)\n",
    ]
    return "\n".join(parts)


def configuration() -> str:
    """Return unbounded-agent.toml(5)."""
    text = CONTENTS.sub("", LINK.sub(r"\1", CONFIGURATION.read_text()))
    _, _, body = text.partition("\n")
    body = re.sub(r"<!--.*?-->\n", "", body, flags=re.DOTALL)
    body = re.sub(r"^## (.+)$", lambda match: f"# {match[1].replace('`', '').upper()}", body, flags=re.MULTILINE)
    body = re.sub(r"^### `(.+)`$", r"## \1", body, flags=re.MULTILINE)
    head = _header("unbounded-agent.toml", 5, "configuration of unbounded-agent")
    return f"{head}\n# DESCRIPTION\n{body}\n# SEE ALSO\n\n**unbounded-agent**(8)\n"


def _header(name: str, section: int, purpose: str) -> str:
    return f'% "{name}" "{section}" "" "unbounded-agent {__version__}" "System Administration"\n\n# NAME\n\n' + (
        f"{name} - {purpose}\n"
    )


def _command(parser: argparse.ArgumentParser) -> str:
    """Return a command's part of the page, with those of its own commands."""
    usage = " ".join(parser.format_usage().removeprefix("usage: unbounded-agent").split())
    usage = usage.replace("[-h] ", "").removesuffix(" [-h]").removesuffix(" ...")
    inner = list(_subcommands(parser))
    if inner:
        return "\n".join(_command(each) for each in inner)
    sections = _sections(parser)
    parts = [f"## {usage.replace('_', ' ')}\n\n{_paragraph(parser.description)}\n", "".join(_arguments(parser))]
    parts += [f"Exit status:\n\n{_block(sections['exit codes'])}", f"Example:\n\n{_block(sections['example'])}"]
    return "\n".join(part for part in parts if part)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of the commands that the list of commands shows."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for shown in action._choices_actions:
                yield action.choices[shown.dest]


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(f"**{each}**" for each in action.option_strings)
        value = "" if action.nargs == 0 else f"*{action.metavar or '|'.join(action.choices or [action.dest.upper()])}*"
        yield f"{' '.join(each for each in (name, value) if each)}\n:   {action.help}\n\n"


def _sections(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the parts of a parser's epilog, each a line with a colon and indented lines, by their titles."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in (parser.epilog or "").splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
        elif line.strip():
            found.setdefault({"examples": "example"}.get(title, title), []).append(line.strip())
    return {title: "\n".join(lines) for title, lines in found.items()}


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def _block(text: str) -> str:
    return "```\n" + text + "\n```\n"


if __name__ == "__main__":
    sys.stdout.write({"unbounded-agent.8": commands, "unbounded-agent.toml.5": configuration}[sys.argv[1]]())
