"""`unbounded-agent gpus`: its subcommands detach, attach, forget and holders."""

from agent.cli.detach import attach, detach
from agent.cli.forget import forget
from agent.cli.holders import holders
from agent.cli.printing import say
from agent.host.reconcile import Reconciler

LISTING = {"forget": forget, "holders": holders}
"""Subcommands of `gpus` that return lines to print. Without an address they apply to all GPUs."""


def gpus(command: str, address: str, reconciler: Reconciler) -> int:
    """Run a subcommand and print its sentences. Return 1 if `detach` or `attach` did not complete."""
    if command in LISTING:
        # On a host without GPUs, `holders` returns no lines: print an empty one as the answer.
        say(LISTING[command](address, reconciler) or [""])
        return 0
    ending = (detach if command == "detach" else attach)(address, reconciler)
    say(ending.sentences)
    return 0 if ending.done else 1
