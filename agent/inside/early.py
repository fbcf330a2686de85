"""Starts the generators of CDI specs before the rest of the machine half is loaded.

A generator takes longer than all else together, and depends on the driver root alone. This is only a head start: the
run takes what was started if it comes to the very same command, and does everything by itself if not.
"""

import contextlib
import json
import os

from agent.paths import HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.system.machine_runner import MachineRunner
from agent.vendors.generators import GENERATORS
from agent.versions import ACCEPTED_HANDOFFS

MARK = f"{MACHINE_STATE}/early"
"""The last generation with a head start. One each: the run may have reasons not to generate, now and each minute."""


def start_generators(runner: MachineRunner, root: str = "") -> None:
    """For each request of a new generation of the handoff. Raises nothing: the run tells what is wrong."""
    # KeyError: a handoff without requests.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with open(f"{root}{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}", encoding="utf-8") as file:
            handoff = json.load(file)
        match handoff:
            case {"version": int(version), "generation": str(generation)} if version in ACCEPTED_HANDOFFS:
                if not _is_new(generation, root):
                    return
            case _:
                return
        for request in handoff["requests"]:
            match request:
                case {"vendor": str(vendor), "gpus": [_, *_], "driver_root": str(driver_root)} if driver_root:
                    if vendor in GENERATORS:
                        os.makedirs(f"{root}{spec_directory(vendor)}", exist_ok=True)
                        runner.start(GENERATORS[vendor](driver_root, spec_directory(vendor)))


def _is_new(generation: str, root: str) -> bool:
    """Whether it had no head start yet, which is noted first: what cannot be noted is not started."""
    with contextlib.suppress(FileNotFoundError), open(f"{root}{MARK}", encoding="utf-8") as file:
        if file.read() == generation:
            return False
    os.makedirs(f"{root}{MACHINE_STATE}", exist_ok=True)
    with open(f"{root}{MARK}", "w", encoding="utf-8") as file:
        file.write(generation)
    return True
