"""`unbounded-agent gpus`: lists GPUs, or runs its subcommands detach, attach, forget and holders."""

import argparse

from agent.cli.attach import attach
from agent.cli.detach import detach
from agent.cli.forget import forget
from agent.cli.gpu_list import list_gpus
from agent.cli.holders import holders
from agent.cli.printing import say
from agent.host.reconcile import Reconciler

PRINTED = {"forget": forget, "holders": holders}
"""Subcommands of `gpus` that return lines to print. Without an address they apply to all GPUs."""


def gpus(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Run a subcommand and print its result.

    Return 1 if `detach` or `attach` did not complete, or if anything in the list of GPUs is unknown; otherwise 0.
    """
    command = options.gpus_command
    if command in (None, "list"):
        return list_gpus(reconciler, for_programs=options.json)
    address = options.address
    if command in PRINTED:
        say(PRINTED[command](address, reconciler))
        return 0
    ending = (detach if command == "detach" else attach)(address, reconciler)
    say(ending.sentences)
    return 0 if ending.done else 1
