"""Print the completion of a shell: `python -m deploy.generate.completion SHELL`, with bash, zsh or fish for SHELL."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping

import shtab

from agent.cli.parser import make_parser

PROGRAM = "unbounded-agent"
COMMANDS = {
    # Lines of the indented JSON: the keys of `machines`, and the addresses of the GPUs, also of lost ones.
    "machines": r"""unbounded-agent status --json 2>/dev/null | sed -n 's/^    "\(.*\)": {$/\1/p'""",
    "gpus": r"""unbounded-agent gpus --json 2>/dev/null | sed -n 's/^ *"address": "\(.*\)",$/\1/p'""",
    "manifests": r"""unbounded-agent kube manifests 2>/dev/null | sed 's/ .*//'""",
}
"""Commands that print the names to choose from, by the end of the name of the shell's function."""
METAVARS = {"MACHINE": "machines", "PCI-ADDRESS": "gpus", "NAME": "manifests"}
"""What an argument stands for, by how the help names it; FILE and DIR are shtab's own."""
BASH = r"""
# Bash also splits at `:`, which PCI addresses have, and at `=`. Split only at blanks, and --option=value in two.
_unbounded_agent() {
  local typed=${COMP_LINE:0:COMP_POINT} word words COMP_WORDS=() COMP_CWORD
  read -ra words <<<"$typed"
  [[ $typed == *[[:space:]] ]] && words+=("")
  for word in "${words[@]}"; do
    case $word in
      --*=*) COMP_WORDS+=("${word%%=*}" "${word#*=}") ;;
      *) COMP_WORDS+=("$word") ;;
    esac
  done
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_unbounded_agent
  # Bash replaces only what follows the last `:`.
  word=${COMP_WORDS[COMP_CWORD]}
  [[ $word != *:* || $COMP_WORDBREAKS != *:* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*:}"}"}")
}
complete -F _unbounded_agent unbounded-agent
"""


def completion(shell: str) -> str:
    """Return the text of the completion for `bash`, `zsh` or `fish`."""
    parser = make_parser()
    for action in _actions(parser):
        # The value of --wait and its like cannot be left out before a machine's name.
        if action.option_strings and action.nargs == argparse.OPTIONAL:
            action.nargs = None
        if candidates := _candidates(str(action.metavar)):
            action.complete = candidates  # type: ignore[attr-defined]
    text = str(shtab.complete(parser, shell))
    if shell == "zsh":
        # Also the value in --option=value.
        text = re.sub(r'^  "(--[a-z-]+)(?=\[.*\]:[A-Z]+:)', r'  "\1=', text, flags=re.MULTILINE)
    return text + (BASH if shell == "bash" else "\n")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _candidates(metavar: str) -> Mapping[str, object] | None:
    if metavar in ("FILE", "DIR"):
        return dict(shtab.FILE if metavar == "FILE" else shtab.DIRECTORY)
    if metavar not in METAVARS:
        return None
    kind = METAVARS[metavar]
    function = f"_unbounded_agent_{kind}"
    command = COMMANDS[kind]
    preamble = {
        "bash": f'{function}() {{ compgen -W "$({command})" -- "$1"; }}',
        "zsh": f'{function}() {{ compadd -- ${{(f)"$({command})"}}; }}',
        "fish": f"function {function}; {command}; end",
    }
    return {"bash": function, "zsh": function, "fish": f"({function})", "preamble": preamble}


if __name__ == "__main__":
    sys.stdout.write(completion(sys.argv[1]))
