"""Starts the generators of CDI specifications before the rest of the machine half is loaded.

A generator takes longer than everything else, and depends only on what the host provides: the driver root and the
device nodes. When the rest of the machine half runs the same command, it gets the result of the generator that was
started here, unless the host has published the handoff again since. It starts any other command itself.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping

from agent.model.paths import HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.model.versions import ACCEPTED_HANDOFFS
from agent.system import opening
from agent.system.spawn_runner import MachineRunner
from agent.vendors.nvidia.cdi.command import generate_command

GENERATORS: Mapping[str, Callable[[str, str, Iterable[str]], tuple[str, ...]]] = {"nvidia": generate_command}
"""By vendor, a function that returns the generator's command for a driver root, an output directory and hooks."""

MARK = f"{MACHINE_STATE}/early"
"""A file with the last generation of the handoff for which generators were started. Generators are started early only
once per generation, because later runs may not need the result."""

LIMIT = 1 << 20
"""Bytes of the largest handoff: SIZE_LIMIT of agent.model.handoff, a module that would take too long to import."""


def start_generators(runner: MachineRunner, root: str = "") -> None:
    """Start the generators for a new generation of the handoff. Raises nothing: agent.machine.run reports errors."""
    # KeyError means that the handoff has no requests.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        path = f"{root}{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
        published = _identity(path)
        handoff = json.loads(_content(path))
        match handoff:
            case {"version": int(version), "generation": str(generation)} if version in ACCEPTED_HANDOFFS:
                if not _claim(generation, root):
                    return
            case _:
                return
        for request in handoff["requests"]:
            match request:
                case {"vendor": str(vendor), "gpus": [_, *_], "driver_root": str(driver_root)} if driver_root:
                    if vendor in GENERATORS:
                        os.makedirs(f"{root}{spec_directory(vendor)}", exist_ok=True)
                        hooks = request.get("cdi_hooks", ())
                        command = GENERATORS[vendor](driver_root, spec_directory(vendor), hooks)
                        # While the rest is loaded, the host may grant further GPUs, or bind nodes that were missing.
                        # The generator may have searched for GPUs before that.
                        runner.start(command, lambda: _identity(path) == published)


def _claim(generation: str, root: str) -> bool:
    """Record that generators are started for this generation. Return False if that was recorded before.

    Raises OSError.
    """
    mark = f"{root}{MARK}"
    with contextlib.suppress(FileNotFoundError):
        if _content(mark) == generation.encode():
            return False
        os.unlink(mark)
    os.makedirs(f"{root}{MACHINE_STATE}", exist_ok=True)
    with opening.new_file(mark) as file:
        file.write(generation.encode())
    return True


def _identity(path: str) -> tuple[int, int] | None:
    """Return a value that differs once the host has published the file again; None if the file is not readable."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_ctime_ns
    return None


def _content(path: str) -> bytes:
    return opening.content(opening.open_probe(path), path, LIMIT)[0]
