"""Starts the generators of CDI specifications before the rest of the machine half is loaded.

A generator takes longer than everything else, and depends only on what the host provides: the driver root and the
device nodes. When the rest of the machine half runs the same command, it gets the result of the generator that was
started here. If the host has published the handoff again since, or if the commands differ, the rest of the machine half
starts a generator of its own.
"""

import os

# The module that collections.abc gets its names from. It is loaded already, and the package collections is not.
from _collections_abc import Callable, Iterable, Mapping

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
"""Bytes of the largest handoff. The value is SIZE_LIMIT of agent.model.handoff; importing it would take too long."""


class _JsonSettings:
    """The settings of json.loads, for the scanner that json.loads calls."""

    strict = True
    object_hook = object_pairs_hook = parse_constant = None
    parse_float, parse_int = float, int


def start_generators(runner: MachineRunner, root: str = "") -> None:
    """Start the generators, unless that was done before for this generation of the handoff.

    Raises nothing: agent.machine.run reports errors.
    """
    try:
        _start_generators(runner, root)
    # Any exception: the rest of the machine half starts the generators that were not started here.
    except Exception:
        return


def _start_generators(runner: MachineRunner, root: str) -> None:
    # Not the module json, because it loads re and enum, which takes as long as Python's own start. If this Python has
    # another scanner, an exception is raised here, and the rest of the machine half starts the generators later.
    from _json import make_scanner

    path = f"{root}{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
    published = _identity(path)
    handoff, _ = make_scanner(_JsonSettings)(_content(path).decode(), 0)  # type: ignore[arg-type]
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
                    directory = f"{root}{spec_directory(vendor)}"
                    os.makedirs(directory, exist_ok=True)
                    # The generator would follow a link, and hang on a FIFO. A directory raises an exception here.
                    for name in os.listdir(directory):
                        os.unlink(f"{directory}/{name}")
                    command = GENERATORS[vendor](driver_root, spec_directory(vendor), request.get("cdi_hooks", ()))
                    # While the rest of the machine half is loaded, the host may grant further GPUs, or bind nodes that
                    # were missing. In both cases it publishes the handoff again. The generator may have searched for
                    # GPUs before, so its result is used only if the handoff is still the same file.
                    runner.start(command, lambda: _identity(path) == published)


def _claim(generation: str, root: str) -> bool:
    """Record that generators are started for this generation. Return False if that was recorded before.

    Raises OSError.
    """
    mark = f"{root}{MARK}"
    try:
        if _content(mark) == generation.encode():
            return False
        os.unlink(mark)
    except FileNotFoundError:
        pass
    os.makedirs(f"{root}{MACHINE_STATE}", exist_ok=True)
    with opening.new_file(mark) as file:
        file.write(generation.encode())
    return True


def _identity(path: str) -> tuple[int, int] | None:
    """Return a value that changes when the host publishes the file again; None if the file cannot be observed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _content(path: str) -> bytes:
    return opening.content(opening.open_probe(path), path, LIMIT)[0]
