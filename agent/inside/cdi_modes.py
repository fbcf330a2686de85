"""Publishes the further CDI specs that a vendor's generator makes in other modes, each in a file of its own.

As with that of GPUs: made aside, verified, put in place by one rename, made anew when what it depends on has changed.
"""

import hashlib
import json
import time
from dataclasses import asdict, astuple, dataclass

from agent.errors import AgentError
from agent.handoff import Handoff, Request, one_line
from agent.inside.devices import live_numbers
from agent.inside.notes import Notes, Owned
from agent.inside.runtime_active import containerd_state
from agent.paths import mode_spec_file, spec_directory
from agent.system.files import System
from agent.vendors.machine import cdi_modes
from agent.vendors.machine_protocol import CdiModes, MachineVendor

MODE_LIMIT = 8.0
"""Seconds for one mode: none of them starts what has to be waited for."""
LIMIT = 10.0
"""Seconds for all together: with those of GPUs, which a run may try twice, far from the TimeoutStartSec= of
unbounded-agent-gpu.service, at which neither nodes would be withdrawn nor anything reported."""
SHORTEST = 1.0
"""Seconds in which it is worth to start one."""
ERROR_SHOWN = 300
"""Characters of a mode's failure in the remark: six of them leave room in a condition's message."""


@dataclass(frozen=True, slots=True)
class _Mode:
    """One spec: what it is made of, and where it goes."""

    name: str
    vendor: CdiModes
    request: Request
    """What it is made from."""
    path: str
    directory: str


def publish_modes(
    system: System, notes: Notes, owned: Owned, vendor: MachineVendor, request: Request, handoff: Handoff
) -> str:
    """A remark to CDISpecCurrent on all modes that the request asks for; raises nothing.

    No more than a remark: Ready is about GPUs, and pods get those by another file.
    """
    modes, granted = cdi_modes(vendor.name), [device for each in handoff.requests for device in each.devices]
    served, lacking, failed, deadline = [], [], [], time.monotonic() + LIMIT
    remarks: dict[str, None] = {}
    for name in request.cdi_modes:
        if modes is None or not (kind := modes.kind(name)):
            failed.append(f"{name}: this image's agent does not know it, bring it to the host's release")
            continue
        path, of_mode = mode_spec_file(vendor.name, name), modes.basis(name, request, granted)
        try:
            if not of_mode.devices:
                # No pod may be given what is not this machine's any more.
                owned.remove(path)
                lacking.append(name)
            else:
                directory = spec_directory(f"{vendor.name}-{name}")
                mode = _Mode(name, modes, of_mode, path, directory)
                remarks |= dict.fromkeys(_publish(system, notes, owned, mode, deadline))
                served.append(f"{path} has {kind}")
        # Whatever it is: what the tool wrote, or somebody else, must cost neither the other modes nor the report.
        except Exception as error:
            failed.append(f"{name}: {one_line(str(error))[:ERROR_SHOWN]}")
    parts = [
        *served,
        *remarks,
        *([f"no device for mode {', '.join(lacking)}"] if lacking else []),
        *([f"ModeNotServed: {'; '.join(failed)}"] if failed else []),
    ]
    return "".join(f"; {part}" for part in parts)


def _publish(system: System, notes: Notes, owned: Owned, mode: _Mode, deadline: float) -> tuple[str, ...]:
    """Remarks on what is published. Raises AgentError or OSError; what is published then stays."""
    if not owned.may_write(mode.path):
        raise AgentError(f"{mode.path} is not ours and is not overwritten", "move it away if nothing needs it")
    note, inputs = f"spec-{mode.request.vendor}-{mode.name}", _inputs(system, notes, mode)
    noted = notes.load(note)
    if system.exists(mode.path) and (noted.get("inputs"), noted.get("digest")) == (
        inputs,
        _digest(system.read(mode.path)),
    ):
        return tuple(noted["remarks"])
    limit = min(MODE_LIMIT, deadline - time.monotonic())
    if limit < SHORTEST:
        raise AgentError(f"not made yet, the modes before it took all of {LIMIT:.0f} s", "the next run tries it")
    text, remarks = _generate(system, notes, mode, limit)
    owned.claim(mode.path)
    system.write(mode.path, text)
    notes.save(note, {"inputs": inputs, "digest": _digest(text), "remarks": list(remarks)})
    return remarks


def _generate(system: System, notes: Notes, mode: _Mode, limit: float) -> tuple[bytes, tuple[str, ...]]:
    """The text, and remarks on it; raises AgentError for what must not be published."""
    # Only here: most runs generate nothing.
    from agent.inside.cdi_form import settled
    from agent.inside.containerd_version import as_containerd_takes

    system.make_directory(mode.directory)
    try:
        made = mode.vendor.generate(system, mode.name, mode.request, mode.directory, limit)
    finally:
        for name in system.entries(mode.directory):
            system.remove(f"{mode.directory}/{name}")
    spec, remarks = as_containerd_takes(system, notes, settled(made))
    present = {path for path in _host_paths(spec) if path.startswith("/") and system.exists(path)}
    live = live_numbers(system, mode.request.devices)
    problems = mode.vendor.verify(mode.name, spec, mode.request, live, present)
    if problems:
        raise AgentError(f"the new spec is refused: {'; '.join(problems)}")
    return json.dumps(spec, indent=1, sort_keys=True).encode() + b"\n", remarks


def _host_paths(spec: object) -> set[str]:
    """Of mounts, wherever they are: what has not its form is found by `verify`."""
    if isinstance(spec, dict):
        own = {spec["hostPath"]} if isinstance(spec.get("hostPath"), str) else set()
        return own.union(*map(_host_paths, spec.values()))
    return set[str]().union(*map(_host_paths, spec)) if isinstance(spec, list) else set()


def _inputs(system: System, notes: Notes, mode: _Mode) -> str:
    """A digest of all that the spec is made from."""
    tools = {path: astuple(system.identity(path)) for path in mode.vendor.tools if system.is_file(path)}
    live = {path: astuple(number) for path, number in live_numbers(system, mode.request.devices).items()}
    there = [path for path in mode.vendor.optional_paths(mode.name) if system.exists(path)]
    # What the spec may hold depends on containerd's version.
    depends = [asdict(mode.request), tools, live, there, containerd_state(system, notes)]
    return _digest(json.dumps(depends, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
