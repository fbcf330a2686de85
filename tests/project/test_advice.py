"""Commands that messages and `doctor` advise: our own parse, and those of other programs have options that exist.

advice.toml says of each command in which test it is run against its fault, or why it is not. Which fault has which
command is tested where the fault is: tests/cli/doctor.
"""

import ast
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from agent.cli.parser import COMMANDS, make_parser

REPOSITORY = Path(__file__).resolve().parents[2]
FILLED = "gpu-node"
"""Stands for what a message fills in."""
HELP = (
    *("systemctl", "journalctl", "modprobe", "udevadm", "df", "du", "chmod", "chown", "dmesg", "ldconfig", "ls"),
    *("machinectl", "mokutil", "rm", "systemd-run", "umount", "dpkg", "tail", "grep", "sort"),
)
"""Programs that print all their options with --help."""
OPTIONS = {
    # nvidia-smi(1), also of its subcommands conf-compute, drain, mig and nvlink.
    "nvidia-smi": "-L -e -i -pm -p -m -q -d -srs -cci -cgi -C --gpu-reset --query-gpu --format",
    "nvidia-modprobe": "-c -u -f",
    "kubectl": "-A -o -n -f --field-selector --previous --subresource --as --as-group --overwrite --show-labels",
    **dict.fromkeys(("kubeadm", "containerd", "ctr", "hostnamectl", "rmmod", "nft", "echo"), ""),
    "nvidia-cuda-mps-control": "",
    "apt": "--reinstall",
    "dkms": "-k",
    "pgrep": "-af",
    "update-alternatives": "--config",
    "update-initramfs": "-u",
    "lspci": "-D -Dk -k",
    "fuser": "-vm -v -m",
    "ip": "-brief",
    "skopeo": "--authfile",
    "ss": "-lntp",
    "sysctl": "--system",
    "sed": "-n",
    "unbounded-agent": "",
}
"""Further programs, which are not on each computer that tests, with their options as their manuals have them."""
PROSE = {"containerd in the machine does not know the handler of a runtime class"}
"""Sentences that begin like a command."""
ADVICE = tomllib.loads((Path(__file__).parent / "advice.toml").read_text())


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
def texts_of_the_agent() -> dict[str, list[str]]:
    """Return the strings of each module, by its path below agent/."""
    top = REPOSITORY / "agent"
    paths = [path.relative_to(top).as_posix() for path in top.rglob("*.py")]
    return {path: [*texts(ast.parse((top / path).read_text()))] for path in paths}


def test_messages_of_the_machine_say_where_to_run_their_commands() -> None:
    """The host shows them in conditions. There, systemd knows none of the machine's units."""
    asked = re.compile(r"`(systemctl|journalctl|dpkg|containerd|ctr|ldconfig -p`\)) (?!config dump)")
    unsaid = [
        text
        for path, found in texts_of_the_agent().items()
        for text in found
        if path.startswith("machine/") and asked.search(text)
        if not re.search(r"\b(in the|in this|on the) (machine|host)\b", text)
    ]
    # A part of a message that names the machine after it; and one whose output is the evidence, not an advice.
    assert [
        text for text in unsaid if text != f"`systemctl {FILLED} {FILLED}`" and "printed no plugin" not in text
    ] == []


@cache
def commands() -> frozenset[str]:
    """Return the commands, one program each. They may have values, for which FILLED stands.

    Messages have them in backquotes. What `doctor` prints has them in lines of their own, with a remark behind two
    spaces.
    """
    lines = list[str]()
    for path, found in texts_of_the_agent().items():
        for text in found:
            lines += (re.sub(r"\{\w*\}", FILLED, each) for each in re.findall(r"`([^`\n]+)`", text))
            if path.startswith(("cli/doctor/", "vendors/")):
                lines += (each for each in text.partition("  #")[0].splitlines() if len(each.split()) > 1)
    lines = [re.sub(r"\$\(.*?\)", FILLED, each) for each in lines]
    parts = [part.strip() for line in lines for part in re.split(r" && | \| | ; |; |, then: ", line)]
    parts = [re.sub(r"\{\w+\}", FILLED, re.sub(r"^sudo ", "", part)) for part in parts]
    return frozenset(part for part in parts if part.split()[:1] and part.split()[0] in {*HELP, *OPTIONS}) - PROSE


OURS = sorted(each for each in commands() if each.startswith("unbounded-agent "))
OTHERS = sorted(each for each in commands() if not each.startswith("unbounded-agent"))


def test_commands_are_found() -> None:
    """In messages with values, in constants, and in the tables of `doctor`."""
    assert f"unbounded-agent gpus attach {FILLED}" in OURS
    assert "unbounded-agent kube allocation dra gpu-node --kubeconfig FILE" in OURS
    assert "systemctl enable --now nvidia-persistenced" in OTHERS
    assert len(OURS) > 25
    assert len(OTHERS) > 60


def test_each_command_was_run_against_its_fault_or_the_table_says_why_not() -> None:
    listed = [command for each in (*ADVICE["run"], *ADVICE["not_run"]) for command in each["commands"]]
    assert sorted(commands() - {*listed}) == [], "add it to advice.toml, with a test that runs it, or the reason"
    assert sorted({*listed} - commands()) == [], "nothing prints it any more: remove it from advice.toml"
    assert len(listed) == len({*listed}), "it is listed twice"
    for each in ADVICE["run"]:
        path, _, name = each["test"].partition("::")
        assert f"def {name}(" in (REPOSITORY / path).read_text(), f"{each['test']} does not exist"


def parses(command: str) -> bool:
    words = shlex.split(command)[1:]
    # Prose names commands without their arguments.
    if words == [FILLED] or " ".join(words) in COMMANDS:
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
    argv = [program, *["settle"] * (program == "udevadm"), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def unknown_options(command: str) -> list[str]:
    program, *words = shlex.split(command)
    options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    if program in OPTIONS:
        return [option for option in options if option not in OPTIONS[program].split()]
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
    # The first word that is no option, nor the value of one.
    found = (re.match(r"systemctl(?: -[Mp] \S+| -\S+)* ([^-]\S*)", command) for command in OTHERS)
    verbs = {match[1] for match in found if match} - {FILLED}
    assert "restart" in verbs
    text = help_of("systemctl")
    assert [verb for verb in sorted(verbs) if not re.search(rf"^  {verb}\b", text, re.MULTILINE)] == []
