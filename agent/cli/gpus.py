"""`unbounded-agent gpus`: its subcommands detach, attach, forget and holders."""

from agent.cli.detach import attach, detach
from agent.cli.forget import forget
from agent.cli.holders import holders
from agent.cli.printing import say
from agent.host.reconcile import Reconciler

LISTING = {"forget": forget, "holders": holders}
"""Subcommands of `gpus` that only print lines; without an address they concern all GPUs."""


def gpus(command: str, address: str, reconciler: Reconciler) -> int:
    """Run a subcommand and print its sentences. Return 1 if a detachment, or its undoing, is not complete."""
    if command in LISTING:
        # A host without GPUs has no holders: the empty line is the whole answer.
        say(LISTING[command](address, reconciler) or [""])
        return 0
    ending = (detach if command == "detach" else attach)(address, reconciler)
    say(ending.sentences)
    return 0 if ending.done else 1
