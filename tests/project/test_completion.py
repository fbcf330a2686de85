"""The completions of the package, each asked in its shell. A stand-in gives the answers of the real program."""

import json
import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.parser import subcommands
from deploy.generate.completion import PROGRAM, completion
from tests.fakes.programs import program
from tests.fakes.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = ("0000:01:00.0", "0000:02:00.0", "0000:02:00.1")
LISTED = {name for name, command in subcommands("").items() if not command.hidden}
CASES: dict[str, set[str]] = {
    "": LISTED,
    "sta": {"status", "start"},
    "pl": {"plan"},
    "gpus ": {*subcommands("gpus")},
    "gpus --json ": {*subcommands("gpus")},
    "kube ": {*subcommands("kube")},
    "plan --": {"--help", "--diff", "--json"},
    "status ": {"gpu-node", "second"},
    "status --wait=600 ": {"gpu-node", "second"},
    "status --check se": {"second"},
    "reset ": {"gpu-node", "second"},
    "gpus detach ": {*GPUS},
    "gpus forget 0000:02": {*GPUS[1:]},
    "kube allocation ": {"dra", "device-plugin"},
    "kube allocation dra g": {"gpu-node"},
    "kube manifests runtime": {"runtime-class"},
    "--config co": {"config.toml"},
    "up --re": {"--rebuild"},
    "stop gpu-node --kubeconfig adm": {"admin.conf"},
    "run ": set(),
}
"""What is offered for words that were typed."""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the program, the completions, and a few files."""
    directory = tmp_path_factory.mktemp("home")
    for name in ("answers", "functions"):
        (directory / name).mkdir()
    (directory / "admin.conf").touch()
    (directory / "config.toml").write_text("[machines.gpu-node]\n[machines.second]\n")

    def answer(*words: str) -> str:
        argv = (sys.executable, "-m", "agent.cli.main", *words)
        return subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout

    answers = {
        "status --json": answer("--config", str(directory / "config.toml"), "status", "--json"),
        "kube manifests": answer("kube", "manifests"),
        # GPUs of a real host are not here; everything else is the program.
        "gpus --json": json.dumps({"gpus": [{"address": each, "driver": "nvidia"} for each in GPUS]}, indent=2),
    }
    for asked, text in answers.items():
        (directory / "answers" / asked).write_text(text)
    # Nothing else is asked. Each answer was made once: 30 starts of Python would take seconds.
    program(directory / "bin" / PROGRAM, 'cat "$HOME/answers/$*"')
    for shell, name in (("bash", "bash"), ("zsh", f"functions/_{PROGRAM}"), ("fish", f"{PROGRAM}.fish")):
        (directory / name).write_text(completion(shell))
    return directory


def environment(home: Path) -> dict[str, str]:
    path = f"{home}/bin:{os.environ['PATH']}"
    return {**os.environ, "HOME": str(home), "PATH": path, "TERM": "dumb"}


def offered(home: Path, *command: str) -> dict[str, set[str]]:
    """Return the offers that a shell prints for all cases, each after a line with %."""
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    parts = [part.splitlines() for part in done.stdout.split("%\n")[1:]]
    found = [{line.split("\t")[0].rstrip() for line in lines if line} - {"-h"} for lines in parts]
    return dict(zip(CASES, found, strict=True))


def test_bash(home: Path) -> None:
    """It calls the function that `complete` names, with the words as Bash splits them."""
    script = f"""
    source ./bash
    read -ra options < <(complete -p {PROGRAM})
    for ((i = 0; i < ${{#options[@]}}; i++)); do [[ ${{options[i]}} != -F ]] || function=${{options[i + 1]}}; done
    compopt() {{ :; }}
    """
    for typed in CASES:
        line = f"{PROGRAM} {typed}"
        words = " ".join(map(shlex.quote, line.replace(":", " : ").replace("=", " = ").split()))
        # What is before a colon stays in the line.
        kept = shlex.quote("".join(typed.rpartition(" ")[2].rpartition(":")[:2]))
        script += f"""
        COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({words})
        [[ $COMP_LINE != *' ' ]] || COMP_WORDS+=('')
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
        "$function"
        echo %; for each in "${{COMPREPLY[@]}}"; do echo {kept}"$each"; done
        """
    assert offered(home, "bash", "-c", script) == CASES


def test_fish(home: Path) -> None:
    asked = (f"echo %; complete --do-complete {shlex.quote(f'{PROGRAM} {typed}')}" for typed in CASES)
    command = "; ".join((f"source ./{PROGRAM}.fish", *asked))
    assert offered(home, "fish", "--no-config", "-c", command) == CASES


SETUP_OF_ZSH = """
PROMPT=; RPROMPT=; unsetopt zle_bracketed_paste prompt_cr; fpath=($HOME/functions $fpath)
autoload -Uz compinit; compinit -u -d $HOME/zcompdump
compadd() {
    local -a matching
    [[ ${@[(I)-(O|A|D)]} -gt 0 ]] && { builtin compadd "$@"; return }
    builtin compadd -O matching "$@"
    print -rl -- $matching >>$HOME/offered
    builtin compadd "$@"
}
finish() { BUFFER=; print -r -- . >>$HOME/finished }
zle -N finish; bindkey '^X' finish; bindkey '^I' complete-word
"""
"""Here, `compadd` also writes what matches into a file."""


def test_zsh(home: Path) -> None:
    """It completes only in a terminal."""
    (home / ".zshrc").write_text(SETUP_OF_ZSH)
    found, finished = {}, home / "finished"
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-i"], environment(home))
    try:
        for typed in CASES:
            (home / "offered").write_text("")
            os.write(terminal, f"{PROGRAM} {typed}\t\x18".encode())
            wait_for(finished.exists, what=typed)
            finished.unlink()
            found[typed] = {*(home / "offered").read_text().split()}
            while select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 4096)
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)
    # It offers options where there is nothing else.
    assert {typed: each - {"-h", "--help"} for typed, each in found.items()} == {
        typed: each - {"--help"} for typed, each in CASES.items()
    }
