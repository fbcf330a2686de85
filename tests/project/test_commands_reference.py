"""Commands in the documentation are valid, and docs/json.md describes every document."""

import re
import shlex
from pathlib import Path

import pytest

from agent.cli.commands import COMMANDS, GPU_COMMANDS, KUBE_COMMANDS, Command
from agent.cli.parser import make_parser
from tests.project.reference_pages import DOCS

ALL: list[Command] = [*COMMANDS.values(), *GPU_COMMANDS.values(), *KUBE_COMMANDS.values()]


@pytest.mark.parametrize("example", [each for command in ALL for each in command.examples])
def test_examples_are_valid(example: str) -> None:
    command = example.partition("|")[0].removeprefix("sudo ")
    words = shlex.split(command)
    if words[0] == "unbounded-agent":
        assert make_parser().parse_args(words[1:]).command


def commands_in(page: Path) -> set[str]:
    """Return the agent's commands in a page's code, without what follows that only a shell understands."""
    code = re.findall(r"`([^`\n]+)`", page.read_text()) + re.findall(
        r"^(?:\$ )?(unbounded-agent .*)$", page.read_text(), re.M
    )
    begun = (each.removeprefix("sudo ").removeprefix("$ ") for each in code)
    found = {re.split(r" *(?:[|#;>]|&&|  )", each)[0] for each in begun if each.startswith("unbounded-agent ")}
    # These are the usages of the reference.
    return {each for each in found if "[" not in each and "COMMAND ..." not in each}


def written() -> list[str]:
    return sorted({each for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md") for each in commands_in(path)})


@pytest.mark.parametrize("command", written())
def test_commands_in_the_documentation_are_valid(command: str) -> None:
    words = shlex.split(command)[1:]
    name = " ".join(words)
    # Prose names commands without their arguments.
    if name not in {**COMMANDS, **{f"gpus {each}": command for each in GPU_COMMANDS}, "COMMAND --help": ""}:
        make_parser().parse_args(words)


def test_every_document_is_described() -> None:
    text = (DOCS / "json.md").read_text()
    commands = {name for name, each in COMMANDS.items() if "--json" in page_section(name) and not each.hidden}
    assert {each for each in commands if f"## `{each}" not in text} == set()
    assert commands >= {"status", "plan", "doctor", "gpus", "up", "preflight"}


def page_section(name: str) -> str:
    return (DOCS / "commands.md").read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
