"""Starts the generators of CDI specs before the rest of the machine half is loaded.

A generator takes longer than all else together, and depends on the driver root alone. This is only a head start: the
run takes what was started if it comes to the very same command, and does everything by itself if not.
"""

import contextlib
import json
import os
from typing import Any

from agent.paths import HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.system.machine_runner import MachineRunner
from agent.vendors.generators import GENERATORS


def start_generators(runner: MachineRunner, root: str = "") -> None:
    """For each request of a handoff whose spec was not published yet. Raises nothing: the run tells what is wrong."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        handoff = _load(f"{root}{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}")
        for request in handoff.get("requests", ()):
            match request:
                case {"vendor": str(vendor), "gpus": [_, *_], "driver_root": str(driver_root)} if driver_root:
                    if vendor in GENERATORS and _published(vendor, root) != handoff.get("generation"):
                        os.makedirs(f"{root}{spec_directory(vendor)}", exist_ok=True)
                        runner.start(GENERATORS[vendor](driver_root, spec_directory(vendor)))


def _published(vendor: str, root: str) -> object:
    """The generation of the handoff from which the present spec was made."""
    try:
        return _load(f"{root}{MACHINE_STATE}/spec-{vendor}.json").get("generation")
    except (OSError, ValueError, RecursionError):
        return None


def _load(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    return value if isinstance(value, dict) else {}
