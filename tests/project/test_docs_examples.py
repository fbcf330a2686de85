"""What readers copy from the documentation is valid: configurations, YAML, and commands."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from agent.config.settings import Config

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    *("ansible-playbook", "apt", "buildah", "cat", "cp", "curl", "dpkg-reconfigure", "echo", "eglinfo", "glxinfo"),
    *("grep", "helm", "install", "journalctl", "jq", "kubectl", "ls", "machinectl", "make", "modprobe", "nvidia-smi"),
    *("promtool", "python3", "rm", "rmmod", "sed", "skopeo", "systemctl", "systemd-run", "unbounded-agent"),
    "vulkaninfo",
}
"""What the pages' commands begin with. A misspelt program, or one that no reader has heard of, is not among them."""
OPERATORS = {"|", "||", "&&", ";"}
ASSIGNMENT = re.compile(r"\w+=\S*")
OTHER_TEXT = {
    *("HOST", "vm.overcommit_memory", "overlay", "[Service]", "[Socket]", "apiVersion:", "GPU", "lrwxrwxrwx"),
    *("Unattended-Upgrade::Package-Blacklist", "LibrariesPresent", "gpu-node:", "#cloud-config"),
}
"""The first words of blocks that have no commands."""


PARSERS = "".join(path.read_text() for path in (REPOSITORY / "integration").rglob("*.py"))
"""What the short programs in integration/ start."""


class Block(NamedTuple):
    """A block of code in a page."""

    page: str
    language: str
    text: str

    @property
    def first_word(self) -> str:
        return self.text.split(maxsplit=1)[0]


@cache
def blocks() -> list[Block]:
    found = []
    pages = [*REPOSITORY.glob("*.md"), REPOSITORY / "integration/README.md", *(REPOSITORY / "docs").rglob("*.md")]
    for page in sorted(pages):
        for each in BLOCK.finditer(page.read_text()):
            text = re.sub(f"^{each['indent']}", "", each["text"], flags=re.MULTILINE)
            found.append(Block(page.relative_to(REPOSITORY).as_posix(), each["language"], text))
    return found


def in_language(name: str) -> list[Block]:
    return [block for block in blocks() if block.language == name]


def named(block: Block) -> str:
    return f"{block.page}: {block.text.splitlines()[0]}"


def faults(configuration: str) -> list[str]:
    try:
        Config.validated(tomllib.loads(configuration.replace("...", 64 * "0")))
    except tomllib.TOMLDecodeError as error:
        return [str(error)]
    except ValidationError as error:
        # A page shows only the tables that it explains.
        return [str(each) for each in error.errors() if each["type"] != "missing"]
    return []


def test_configurations_are_valid() -> None:
    assert {named(block): found for block in in_language("toml") if (found := faults(block.text))} == {}
    assert faults("machines.a.speed = 9")
    assert faults("machines.a = ")


def test_yaml_is_valid() -> None:
    for block in in_language("yaml"):
        assert list(yaml.safe_load_all(block.text)), named(block)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of a block's commands; with prompts, other lines are output. Raises ValueError for bad quotes."""
    text = block.text.replace("\\\n", " ")
    # Not a shell: what is in parentheses stays.
    text = re.sub(r'"?\$\([^()]*\)"?', "...", text)
    for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE) or text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
        lexer.whitespace_split = True
        for operator, words in groupby(lexer, key=lambda word: word in OPERATORS):
            found = list(dropwhile(ASSIGNMENT.fullmatch, words))
            if not operator and found:
                yield found


def shell_blocks() -> list[Block]:
    """Return the blocks of commands, except the reference's, which has usages and a test of its own."""
    found = (block for block in blocks() if block.language in ("", "bash", "sh") and block.page != "docs/commands.md")
    return [block for block in found if block.first_word not in OTHER_TEXT]


def unknown(program: str, arguments: list[str]) -> list[str]:
    """Return what of a command does not exist: the program, a target of make, or an option of our program."""
    if program == "make":
        targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        return sorted(set(arguments) - set(targets))
    if "/" not in program:
        return [] if program in PROGRAMS else [program]
    path = REPOSITORY / program
    if program.startswith(("~", "/")):
        return []
    if not (path.is_file() and path.stat().st_mode & 0o100):
        return [program]
    options = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    return [each for each in options if not re.search(rf"{each}\b(?!-)", path.read_text() + PARSERS)]


def test_commands_are_known() -> None:
    """Programs of the repository exist, and have the options that the page gives them."""
    found = [(named(block), command) for block in shell_blocks() for command in commands(block)]
    assert [(where, wrong) for where, command in found if (wrong := unknown(command[0], command[1:]))] == []
    for command in (["gerp"], ["make", "dbe"], ["integration/tset"], ["integration/faults", "--quik"]):
        assert unknown(command[0], command[1:]) == command[-1:]


def test_the_checks_see_the_blocks() -> None:
    assert len(in_language("toml")) > 10
    assert len(shell_blocks()) > 20
    assert list(commands(Block("", "", "A=1 make deb | jq x # y\n"))) == [["make", "deb"], ["jq", "x"]]
