"""The completions of the package, each asked in its own shell. A stand-in gives the answers of the real program."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.cli.parser import subcommands
from deploy.generate.completion import PROGRAM, completion

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = '{"gpus": [{"address": "0000:01:00.0"}, {"address": "0000:02:00.0"}, {"address": "0000:02:00.1"}]}'
ANSWERED = ("status --json", "gpus --json", "kube manifests")
"""What the completions ask the program."""
STAND_IN = """#!/bin/sh
# Nothing else is asked. Each answer was made once: 60 starts of Python would take seconds.
cat "$HOME/answers/$*"
"""
LISTED = {name for name, command in subcommands("").items() if not command.hidden}
CASES = [
    ("", LISTED),
    ("sta", {"status", "start"}),
    ("pl", {"plan"}),
    ("gpus ", {*subcommands("gpus")}),
    ("gpus --json ", {*subcommands("gpus")}),
    ("kube ", {*subcommands("kube")}),
    ("plan --", {"--help", "--diff", "--json"}),
    ("status ", {"gpu-node", "second"}),
    ("status --wait=600 ", {"gpu-node", "second"}),
    ("status --check se", {"second"}),
    ("reset ", {"gpu-node", "second"}),
    ("gpus detach ", {"0000:01:00.0", "0000:02:00.0", "0000:02:00.1"}),
    ("gpus forget 0000:02", {"0000:02:00.0", "0000:02:00.1"}),
    ("kube allocation ", {"dra", "device-plugin"}),
    ("kube allocation dra g", {"gpu-node"}),
    ("kube manifests runtime", {"runtime-class"}),
    ("--config co", {"config.toml"}),
    ("up --re", {"--rebuild"}),
    ("stop gpu-node --kubeconfig adm", {"admin.conf"}),
    ("run ", set()),
]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the program, the completions, and a few files."""
    directory = tmp_path_factory.mktemp("home")
    for name in ("config.toml", "admin.conf"):
        (directory / name).touch()
    (directory / "config.toml").write_text("[machines.gpu-node]\n[machines.second]\n")
    (directory / "answers").mkdir()
    for asked in ANSWERED:
        (directory / "answers" / asked).write_text(answer(asked, directory))
    (directory / "bin").mkdir()
    (directory / "bin" / PROGRAM).write_text(STAND_IN)
    (directory / "bin" / PROGRAM).chmod(0o755)
    (directory / "functions").mkdir()
    for shell, name in (("bash", "bash"), ("zsh", f"functions/_{PROGRAM}"), ("fish", f"{PROGRAM}.fish")):
        (directory / name).write_text(completion(shell))
    return directory


def answer(asked: str, home: Path) -> str:
    """Return the program's answer. GPUs of a real host are not here; everything else is the program."""
    if asked == "gpus --json":
        return re.sub('"$', '",', json.dumps(json.loads(GPUS), indent=2), flags=re.MULTILINE)
    options = ("--config", str(home / "config.toml")) if asked == "status --json" else ()
    argv = [sys.executable, "-m", "agent.cli.main", *options, *asked.split()]
    return subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout


def environment(home: Path) -> dict[str, str]:
    path = f"{home}/bin:{os.environ['PATH']}"
    return {**os.environ, "HOME": str(home), "PATH": path, "TERM": "dumb"}


def asked(home: Path, *command: str) -> set[str]:
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.split("\t")[0].rstrip() for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_bash(home: Path, typed: str, expected: set[str]) -> None:
    """It calls the function that `complete` names, with the words as Bash splits them."""
    line = f"{PROGRAM} {typed}"
    script = f"""
    source ./bash
    COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}
    COMP_WORDS=({" ".join(map(shlex.quote, line.replace(":", " : ").replace("=", " = ").split()))})
    [[ $COMP_LINE != *' ' ]] || COMP_WORDS+=('')
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    read -ra options < <(complete -p {PROGRAM})
    for ((i = 0; i < ${{#options[@]}}; i++)); do [[ ${{options[i]}} != -F ]] || function=${{options[i + 1]}}; done
    compopt() {{ :; }}
    "$function"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    kept = typed.rpartition(" ")[2].rpartition(":")
    found = {f"{kept[0]}{kept[1]}{each}" for each in asked(home, "bash", "-c", script) if each}
    assert found - {"-h"} == expected


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_fish(home: Path, typed: str, expected: set[str]) -> None:
    command = f"source ./{PROGRAM}.fish; complete --do-complete {shlex.quote(f'{PROGRAM} {typed}')}"
    assert asked(home, "fish", "--no-config", "-c", command) - {"-h"} == expected


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_zsh(home: Path, typed: str, expected: set[str]) -> None:
    """zsh completes only in a terminal."""
    found = in_terminal(home, f"{PROGRAM} {typed}")
    # It offers options where there is nothing else.
    assert found - {"-h", "--help"} == expected - {"--help"}


def in_terminal(home: Path, line: str) -> set[str]:
    """Return what zsh offers for a line. Its `compadd` prints what matches instead of adding it."""
    setup = """
    PROMPT=; RPROMPT=; unsetopt zle_bracketed_paste prompt_cr; fpath=($HOME/functions $fpath)
    autoload -Uz compinit; compinit -u -d $HOME/zcompdump
    compadd() {
        local -a matching
        [[ ${@[(I)-(O|A|D)]} -gt 0 ]] && { builtin compadd "$@"; return }
        builtin compadd -O matching "$@"
        print -rl -- $matching >>$HOME/offered
        builtin compadd "$@"
    }
    finish() { print -r -- . >>$HOME/finished }
    zle -N finish; bindkey '^X' finish; bindkey '^I' complete-word
    """
    (home / ".zshrc").write_text(setup)
    offered, finished = home / "offered", home / "finished"
    for path in (offered, finished):
        path.unlink(missing_ok=True)
    offered.touch()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-i"], environment(home))
    try:
        os.write(terminal, f"{line}\t\x18".encode())
        limit = time.monotonic() + 30
        while not finished.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        assert finished.exists()
        return set(offered.read_text().split())
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)
