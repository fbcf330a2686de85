"""Commands that messages and `doctor` advise: our own parse, and those of other programs have options that exist.

Whether a command is right for its fault is tested where the fault is: tests/cli/doctor has each fault with its remedy.
"""

import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from agent.cli.commands import COMMANDS, GPU_COMMANDS, KUBE_COMMANDS
from agent.cli.doctor import remedies
from agent.cli.parser import make_parser
from agent.vendors.nvidia import remedies as nvidia

REPOSITORY = Path(__file__).resolve().parents[2]
FILLED = "gpu-node"
"""Stands for what a message fills in."""
NAMES = {*COMMANDS, *(f"gpus {each}" for each in GPU_COMMANDS), *(f"kube {each}" for each in KUBE_COMMANDS)}
"""Commands that prose may name without their arguments."""
HELP = {
    "systemctl": ("--help",),
    "journalctl": ("--help",),
    "modprobe": ("--help",),
    "udevadm": ("settle", "--help"),
    "df": ("--help",),
    "du": ("--help",),
    "chmod": ("--help",),
    "chown": ("--help",),
    "dmesg": ("--help",),
    "ldconfig": ("--help",),
    "ls": ("--help",),
    "machinectl": ("--help",),
    "mokutil": ("--help",),
    "rm": ("--help",),
    "systemd-run": ("--help",),
    "umount": ("--help",),
    "dpkg": ("--help",),
    "tail": ("--help",),
    "grep": ("--help",),
    "sort": ("--help",),
}
"""Programs, and the arguments with which they print all their options."""
OPTIONS = {
    # nvidia-smi(1), also of its subcommands conf-compute, drain and mig.
    "nvidia-smi": {"-L", "-i", "-pm", "-p", "-m", "-q", "-d", "-srs", "-cci", "-cgi", "-C", "--gpu-reset"},
    "nvidia-modprobe": {"-c", "-u", "-f"},
    "kubectl": {"-A", "-o", "-n", "-f", "--field-selector", "--previous", "--subresource", "--as", "--as-group"},
    "kubeadm": set(),
    "containerd": set(),
    "ctr": set(),
    "apt": {"--reinstall"},
    "dkms": {"-k"},
    "update-alternatives": {"--config"},
    "update-initramfs": {"-u"},
    "hostnamectl": set(),
    "lspci": {"-D", "-Dk", "-k"},
    "fuser": {"-vm", "-v", "-m"},
    "ip": {"-brief"},
    "skopeo": {"--authfile"},
    "ss": {"-lntp"},
    "rmmod": set(),
    "sysctl": {"--system"},
    "nft": set(),
    "echo": set(),
    "sed": {"-n"},
    "nvidia-cuda-mps-control": set(),
    "unbounded-agent": set(),
}
"""Further programs, which are not on each computer that tests, with their options as their manuals have them."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module without its docstrings, in which FILLED stands for each value."""
    left_out = {
        id(each.value)
        for node in ast.walk(tree)
        for each in (getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else None) or ()
        if isinstance(each, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(each) for each in node.values}
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else FILLED for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


@cache
def quoted() -> frozenset[str]:
    """Return what the agent's messages have in backquotes."""
    found: set[str] = set()
    for path in (REPOSITORY / "agent").rglob("*.py"):
        for text in texts(ast.parse(path.read_text())):
            found |= set(re.findall(r"`([^`\n]+)`", text))
    return frozenset(re.sub(r"\{\w*\}", FILLED, each) for each in found)


def test_messages_of_the_machine_say_where_to_run_their_commands() -> None:
    """The host shows them in conditions. There, systemd knows none of the machine's units."""
    asked = re.compile(r"`(systemctl|journalctl|dpkg|containerd|ctr|ldconfig -p`\)) (?!config dump)")
    unsaid = [
        text
        for path in (REPOSITORY / "agent" / "machine").rglob("*.py")
        for text in texts(ast.parse(path.read_text()))
        if asked.search(text) and not re.search(r"\b(in the|in this|on the) (machine|host)\b", text)
    ]
    # A part of a message that names the machine after it; and one whose output is the evidence, not an advice.
    assert [
        text for text in unsaid if text != f"`systemctl {FILLED} {FILLED}`" and "printed no plugin" not in text
    ] == []


def fixes() -> Iterator[str]:
    """Yield the commands of `doctor`, without their remarks."""
    for table in (remedies.REMEDIES, remedies.OFFERED, nvidia.FIXED):
        for lines in table.values():
            yield from lines
    yield from remedies.REMARKS.values()
    yield from nvidia.reload_driver(frozenset())


def commands() -> set[str]:
    """Return the commands, one program each."""
    lines = [re.sub(r"\$\(.*?\)", FILLED, each.partition("  #")[0]) for each in (*quoted(), *fixes())]
    parts = [part.strip() for line in lines for part in re.split(r" && | \| | ; |; ", line)]
    known = {*HELP, *OPTIONS}
    parts = [re.sub(r"^sudo ", "", part) for part in parts]
    return {re.sub(r"\{\w+\}", FILLED, part) for part in parts if part.split()[:1] and part.split()[0] in known}


OURS = sorted(each for each in commands() if each.startswith("unbounded-agent "))
OTHERS = sorted(each for each in commands() if not each.startswith("unbounded-agent"))


def test_commands_are_found() -> None:
    """In messages with values, in constants, and in the tables of `doctor`."""
    assert f"unbounded-agent gpus attach {FILLED}" in OURS
    assert "unbounded-agent kube allocation dra gpu-node --kubeconfig FILE" in OURS
    assert "systemctl enable --now nvidia-persistenced" in OTHERS
    assert len(OURS) > 25
    assert len(OTHERS) > 60


def parses(command: str) -> bool:
    words = shlex.split(command)[1:]
    if words == [FILLED] or " ".join(words) in NAMES:
        return True
    # `kube allocation` takes one of two words, which a message fills in.
    words = [
        "dra" if word == FILLED and before == "allocation" else word
        for before, word in zip(["", *words[:-1]], words, strict=True)
    ]
    try:
        return bool(vars(make_parser().parse_args(words))["command"] == words[0])
    except SystemExit:
        return False


def test_our_own_commands_parse() -> None:
    assert [command for command in OURS if not parses(command)] == []
    assert not parses("unbounded-agent no-such-command")


@cache
def help_of(program: str) -> str:
    done = subprocess.run([program, *HELP[program]], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def unknown_options(command: str) -> list[str]:
    program, *words = shlex.split(command)
    options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    if program in OPTIONS:
        return [option for option in options if option not in OPTIONS[program]]
    if not shutil.which(program):
        return []
    # Letters of one dash may stand together.
    single = [f"-{letter}" for each in options if each[1] != "-" for letter in each[1:] if letter.isalpha()]
    names = [*single, *(each for each in options if each.startswith("--"))]
    return [one for one in names if not re.search(rf"(?<![\w-]){one}(?![\w-])", help_of(program))]


@pytest.mark.processes
def test_options_of_other_programs_exist() -> None:
    assert {command: found for command in OTHERS if (found := unknown_options(command))} == {}
    assert unknown_options("systemctl --no-such-option") == ["--no-such-option"]


@pytest.mark.processes
def test_verbs_of_systemctl_exist() -> None:
    text = help_of("systemctl")
    verbs = set()
    for command in OTHERS:
        program, *words = shlex.split(command)
        if program == "systemctl":
            rest = iter(words)
            for word in rest:
                if word in ("-M", "-p"):
                    next(rest)
                elif not word.startswith("-"):
                    verbs |= {word}
                    break
    assert "restart" in verbs
    assert [verb for verb in sorted(verbs - {FILLED}) if not re.search(rf"^  {verb}\b", text, re.MULTILINE)] == []
