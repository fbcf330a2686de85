"""Publishes the additional CDI specifications that a vendor's generator makes: one for each requested mode.

Each mode has a file of its own. These specifications are treated like that of the GPUs: generated in another
directory, verified, published by a rename, and generated again when an input changes.
"""

import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from agent import __version__
from agent.machine.cdi import foreign_specs
from agent.machine.cdi.candidate import in_words, make_output_directory
from agent.machine.cdi.foreign_specs import Foreign, ForeignSpec
from agent.machine.containerd.active import containerd_state
from agent.machine.context import Context
from agent.machine.devices.nodes import live_numbers
from agent.machine.failures import Failure
from agent.machine.steps import ERROR_SHOWN
from agent.model.conditions import ConditionType, Status, true
from agent.model.digest import json_digest, sha256
from agent.model.errors import AgentError
from agent.model.handoff import Request
from agent.model.json_document import json_for_yaml
from agent.model.paths import mode_spec_file, spec_directory
from agent.model.reasons import Reason
from agent.model.text import one_line
from agent.vendors.machine_vendor import CdiModes, Generated, MachineVendor, looked_up

MODE_LIMIT = 8.0
"""Seconds to generate the specification of one mode. No mode does anything slow."""
LIMIT = 10.0
"""Seconds to generate the specifications of all modes. Even a run that also generates the specification of the GPUs
twice stays below TimeoutStartSec= of unbounded-agent-gpu.service. systemd kills a run at that limit, and a killed
run withdraws and reports nothing."""
SHORTEST = 1.0
"""Seconds of LIMIT that must be left to start the generator."""


class _Mode(NamedTuple):
    """One mode's specification: its inputs, and where it is published. It implements OwnSpec."""

    name: str
    generator: CdiModes
    request: Request
    """What the specification is made from."""
    spec_path: str
    spec_kind: str
    rival_spec: str = ""
    rival_units: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return f"spec-{self.request.vendor}-{self.name}"


def publish_modes(context: Context, vendor: MachineVendor, request: Request) -> tuple[str, bool]:
    """Publish the specifications of all requested modes. Raises nothing.

    Returns a remark for CDISpecCurrent, and whether something is left out of a specification.

    A failure is only a remark, because Ready is about GPUs, and pods get the GPUs from another specification.
    """
    modes, granted = vendor.cdi_modes, [device for each in context.handoff.requests for device in each.devices]
    owned, publisher = context.owned, _Publisher(context, vendor)
    served, without_devices, failed = [], [], []
    for name in request.cdi_modes:
        path = mode_spec_file(vendor.name, name)
        if modes is None or not (kind := modes.kind(name)):
            failed.append(
                f"{name}: the image's agent does not support this mode: update it to the host agent's release"
            )
            with contextlib.suppress(OSError, AgentError):
                # If the image was replaced by an older one, there may be a file for this mode. It is removed, because
                # this release cannot tell which of the devices in it are still granted.
                owned.remove(path)
            continue
        mode = _Mode(name, modes, modes.mode_request(name, request, granted), path, kind)
        try:
            if not mode.request.devices:
                # Pods must not get devices that are no longer granted.
                owned.remove(path)
                without_devices.append(name)
            else:
                served.append(publisher.settle(mode))
        # Any exception, because the content of files or a tool's output must not keep the report from being written.
        except Exception as error:
            failed.append(f"{name}: {one_line(str(error))[:ERROR_SHOWN]}{publisher.keep(mode)}")
    parts = [
        *([f"ModeNotServed: {'; '.join(failed)}"] if failed else []),
        *served,
        *publisher.remarks,
        *publisher.left_out,
        *([f"no devices for mode {', '.join(without_devices)}"] if without_devices else []),
    ]
    return "".join(f"; {part}" for part in parts), bool(publisher.left_out)


class _Publisher:
    """Publishes the specifications of modes one after another."""

    def __init__(self, context: Context, vendor: MachineVendor) -> None:
        self._context, self._vendor = context, vendor
        self._system, self._notes, self._owned = context.system, context.notes, context.owned
        self._deadline = time.monotonic() + LIMIT
        self._foreign_specs: tuple[ForeignSpec, ...] | None = None
        self.remarks: dict[str, None] = {}
        """Remarks on the modes, in order. A remark on several modes is made only once. The values have no meaning."""
        self.left_out: list[str] = []
        """Sentences on what is left out of the specifications."""

    def settle(self, mode: _Mode) -> str:
        """Bring the mode's specification up to date, and return a sentence on what pods can request.

        Raises AgentError or OSError; the caller must then call `keep`.
        """
        if not self._owned.make_way(mode.spec_path):
            raise AgentError(
                f"{mode.spec_path} exists and was not written by the agent, so it was left unchanged",
                "move it away if nothing needs it",
            )
        if self._foreign_specs is None:
            self._foreign_specs = foreign_specs.foreign_specs(self._context, self._vendor)
        foreign = foreign_specs.with_same_kind(self._foreign_specs, mode)
        noted = self._current(mode) or self._publish(mode, foreign)
        self.remarks |= dict.fromkeys(noted["remarks"])
        if left_out := noted.get("left_out"):
            self.left_out.append(in_words(mode.spec_path, mode.generator.tools[0], left_out))
        condition = true(ConditionType.CDI_SPEC_CURRENT, Reason.VERIFIED, f"{mode.spec_path} has {mode.spec_kind}")
        condition = foreign_specs.with_foreign(condition, noted["devices"], foreign, mode)
        if condition.status is not Status.TRUE:
            raise AgentError(condition.message)
        return condition.message

    def keep(self, mode: _Mode) -> str:
        """Remove withdrawn nodes from the published specification, because no new specification could be published.

        If no granted device is left in the file, or if the file cannot be edited, the file is removed. Returns what was
        done, as the end of a message; empty if the file is up to date, missing, or not the agent's. Raises nothing.
        """
        try:
            if not self._owned.has(mode.spec_path) or not self._system.exists(mode.spec_path) or self._current(mode):
                return ""
            if self._remove_withdrawn_nodes(mode):
                return "; the published CDI specification is out of date"
            self._owned.remove(mode.spec_path)
            return f"; removed {mode.spec_path}, which had no granted device left or could not be edited"
        # Any exception, as in publish_modes. The failed publication, for which this was called, is always reported.
        except Exception as error:
            return f"; {mode.spec_path} may be out of date, and was not removed: {one_line(str(error))[:ERROR_SHOWN]}"

    def _remove_withdrawn_nodes(self, mode: _Mode) -> bool:
        """Remove nodes that are no longer granted from the published file. Return whether the file can stay."""
        from agent.vendors.cdi.normalise import normalised

        try:
            text = self._system.read_untrusted(mode.spec_path)[0]
            spec = mode.generator.narrowed(json.loads(text), mode.request)
            if spec is not None and json_for_yaml(normalised(spec), sort_keys=True) != text:
                self._system.write(mode.spec_path, json_for_yaml(normalised(spec), sort_keys=True))
        except (OSError, ValueError, RecursionError):
            # The file is malformed, or the disk is full. The file can still be removed.
            return False
        return spec is not None

    def _current(self, mode: _Mode) -> dict[str, Any]:
        """Return the note about the published specification.

        The result is empty if there is no published specification, or if the specification or an input has changed.
        """
        noted = self._notes.load(mode.note)
        if not self._system.exists(mode.spec_path) or noted.get("inputs") != _inputs_digest(self._context, mode):
            return {}
        return noted if noted.get("digest") == sha256(self._system.read_untrusted(mode.spec_path)[0]) else {}

    def _publish(self, mode: _Mode, foreign: Foreign) -> dict[str, Any]:
        """Generate and publish the specification, and return the note about it. Raises AgentError or OSError."""
        noted, inputs = self._notes.load(mode.note), _inputs_digest(self._context, mode)
        if noted.get("inputs") == inputs:
            # An earlier run generated a specification from the same inputs, and noted its devices. If a specification
            # with these devices would be refused, it need not be generated again.
            self._raise_if_refused(mode, noted["devices"], foreign)
        limit = min(MODE_LIMIT, self._deadline - time.monotonic())
        if limit < SHORTEST:
            raise AgentError(
                f"not generated yet: too little was left of the {LIMIT:.0f} s for all modes",
                "the next run generates it",
            )
        failure = Failure.of(self._context, f"{mode.note}-failed", inputs)
        if failed := failure.noted():
            raise AgentError(str(failed["message"]))
        with failure.saved():
            spec, made = self._generate(mode, limit)
        devices = [each["name"] for each in spec["devices"]]
        noted = {"inputs": inputs, "devices": devices}
        noted |= {"remarks": list(made.remarks), "left_out": list(made.left_out)}
        # Noted before the check, so that a refused specification is not generated again each minute.
        self._notes.save(mode.note, noted)
        self._raise_if_refused(mode, devices, foreign)
        text = json_for_yaml(spec, sort_keys=True)
        with failure.saved():
            self._owned.claim(mode.spec_path)
            self._system.write_quickly(mode.spec_path, text)
        self._context.unsynced.append(mode.spec_path)
        noted["digest"] = sha256(text)
        self._notes.save(mode.note, noted)
        return noted

    def _raise_if_refused(self, mode: _Mode, devices: Iterable[str], foreign: Foreign) -> None:
        if refused := foreign_specs.refusal(self._system, mode, devices, foreign):
            raise AgentError(refused.message)

    def _generate(self, mode: _Mode, limit: float) -> tuple[dict[str, Any], Generated]:
        """Return a verified specification, and the generator's result with all remarks.

        Raises AgentError or OSError.
        """
        # Imported here: most runs generate nothing.
        from agent.machine.containerd.version import adapt_to_containerd
        from agent.vendors.cdi.normalise import normalised

        directory = spec_directory(f"{mode.request.vendor}-{mode.name}")
        make_output_directory(self._system, directory)
        try:
            live = live_numbers(self._system, mode.request.devices)
            made = mode.generator.generate(self._system, mode.name, mode.request, directory, limit, live)
        finally:
            for name in self._system.entries(directory):
                self._system.remove_tree(f"{directory}/{name}")
        spec, remarks = adapt_to_containerd(self._context, normalised(made.spec))
        live = live_numbers(self._system, mode.request.devices)
        problems = mode.generator.verify(mode.name, spec, mode.request, *looked_up(self._system, spec, live))
        if problems or not isinstance(spec, dict):
            raise AgentError(f"the new CDI specification failed the check: {'; '.join(problems)}")
        return spec, made._replace(remarks=(*made.remarks, *remarks))


def _inputs_digest(context: Context, mode: _Mode) -> str:
    """Return a digest of everything that the specification depends on."""
    system = context.system
    tools = {path: system.identity(path) for path in mode.generator.tools if system.is_file(path)}
    live = live_numbers(system, mode.request.devices)
    present = [path for path in mode.generator.optional_paths(mode.name) if system.exists(path)]
    # The versions of the agent and of containerd decide what the specification may contain.
    return json_digest([__version__, mode.request, tools, live, present, containerd_state(context)])
