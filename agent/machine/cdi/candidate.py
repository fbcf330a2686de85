"""A CDI specification with its verdict, and the GPUs that do not count as missing in it."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agent.model.device import DeviceNumber
from agent.model.handoff import Request
from agent.model.text import first_of
from agent.system.errnos import UNUSABLE
from agent.system.files import System
from agent.vendors.machine_vendor import MachineVendor, Verdict, looked_up

SHOWN = 10
"""How many parts the message names, because its length is limited; the others are counted."""


class Candidate(NamedTuple):
    """A specification's text with its verdict."""

    text: bytes
    verdict: Verdict
    unpartitioned: tuple[str, ...] = ()
    """Granted GPUs that no specification can list, because they have no partition yet (see UNPARTITIONED_FOR).

    The verdict does not count them as missing.
    """

    @property
    def good(self) -> bool:
        return not self.verdict.problems and not self.verdict.missing


def published_candidate(
    system: System, vendor: MachineVendor, request: Request, live: dict[str, DeviceNumber]
) -> Candidate | None:
    """Return the published specification; None if it is missing or malformed, not a regular file, or too large.

    Raises OSError if the specification exists but cannot be read now. Then it must not be replaced, because it may
    serve more GPUs than a new one.
    """
    try:
        text = system.read_untrusted(vendor.spec_path)[0]
        spec = json.loads(text)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        return None
    return Candidate(text, verdict_of(system, vendor, spec, request, live))


def make_output_directory(system: System, directory: str) -> None:
    """Make a generator's directory, and remove from it what a generator would follow, or hang on.

    Regular files stay: a generator that was started early may be writing one.
    """
    system.make_directory(directory)
    for name in system.entries(directory):
        path = f"{directory}/{name}"
        if system.read_link(path) is not None or not system.is_file(path):
            system.remove_tree(path)


def verdict_of(
    system: System, vendor: MachineVendor, spec: object, request: Request, live: dict[str, DeviceNumber]
) -> Verdict:
    return vendor.verify(spec, request, *looked_up(system, spec, live))


def in_words(spec_path: str, generator: str, left_out: Sequence[str]) -> str:
    """Return a sentence on what is left out of a specification."""
    return (
        f"EditsLeftOut: this agent does not know all that {generator} writes, and has left out of {spec_path}: "
        f"{first_of(left_out, SHOWN)}"
    )


def excuse_noted_unpartitioned(current: Candidate | None, noted: Mapping[str, Any], inputs: str) -> Candidate | None:
    """Return `current`. Until the noted time, GPUs that are noted as unpartitioned do not count as missing in it.

    A note for other inputs is ignored.
    """
    until, gpus = noted.get("until"), noted.get("unpartitioned")
    if current is None or noted.get("inputs") != inputs or not isinstance(gpus, list):
        return current
    return excuse_unpartitioned(current, gpus) if isinstance(until, float) and time.monotonic() < until else current


def excuse_unpartitioned(candidate: Candidate, gpus: Collection[str]) -> Candidate:
    missing = tuple(gpu for gpu in candidate.verdict.missing_gpus if gpu not in gpus)
    return Candidate(candidate.text, candidate.verdict._replace(missing_gpus=missing), tuple(gpus))
