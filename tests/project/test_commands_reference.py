"""Commands in the documentation are valid, and docs/json.md describes every document."""

import re
import shlex
from pathlib import Path

from agent.cli.parser import COMMANDS, make_parser
from tests.project.reference_pages import DOCS


def is_valid(words: list[str]) -> bool:
    try:
        # A parser for one command is made in a fraction of the time, and is the same (tests/cli/test_main.py).
        return bool(make_parser(words[0]).parse_args(words).command)
    except SystemExit:
        return False


def test_examples_are_valid() -> None:
    examples = [each for command in COMMANDS.values() for each in command.examples]
    words = [shlex.split(example.partition("|")[0].removeprefix("sudo ")) for example in examples]
    assert [each for each in words if each[0] == "unbounded-agent" and not is_valid(each[1:])] == []
    assert len(words) > 20
    assert not is_valid(["status", "--no-such-option"])


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


def test_commands_in_the_documentation_are_valid() -> None:
    # Prose names commands without their arguments.
    names = {*COMMANDS, "COMMAND --help"}
    words = [shlex.split(command)[1:] for command in written()]
    assert [each for each in words if " ".join(each) not in names and not is_valid(each)] == []
    assert len(words) > 50


def test_every_document_is_described() -> None:
    text = (DOCS / "json.md").read_text()
    commands = {name for name, each in COMMANDS.items() if "--json" in page_section(name) and not each.hidden}
    assert {each for each in commands if f"## `{each}" not in text} == set()
    assert commands >= {"status", "plan", "doctor", "gpus", "up", "preflight"}


def page_section(name: str) -> str:
    return (DOCS / "commands.md").read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
