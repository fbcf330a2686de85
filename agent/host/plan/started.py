"""Derives a running machine's live settings from copies of the files that it started with. Pure.

This is done if the record of the live settings is missing (prepare@ did not write it, or it was damaged since), or does
not say which settings the machine started with.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from agent.host.plan.goal import Plan
from agent.host.plan.nspawn import escape
from agent.model.device_allow import DeviceAllow
from agent.model.facts import Facts, MachineFacts
from agent.model.faults import Fault, fault
from agent.model.goal import MachineGoal
from agent.model.live import READ_ONLY, LiveSettings

NOT_COMPARED = re.compile(rb"^(?:#.*|DeviceAllow=.*|ExecStartPre=(?:.*\\\n)*.*)\n?", re.MULTILINE)
"""Lines of a drop-in that are not compared: devices, because they can change while a machine runs, and comments and
commands before the start, because they differ between releases. A backslash at the end continues a line
(systemd.syntax(7))."""
NODE = re.compile(rb"Bind=/dev/(?!kmsg$)")
"""A line of a .nspawn file that binds a device other than /dev/kmsg."""


def with_started(planned: Plan, facts: Facts) -> tuple[Facts, Mapping[str, Fault]]:
    """Return the facts with derived live settings, and the unexpected errors by machine.

    Live settings are derived where the record is missing or does not say how the machine started.
    """
    goals = {goal.name: goal for goal in planned.goal.machines}
    machines, faults = [], {}
    for machine in facts.machines:
        if machine.started and machine.name in goals:
            try:
                machine = replace(machine, live=_known(goals[machine.name], machine))
            except Exception as error:
                faults[machine.name] = fault("determine which settings it started with", error)
        machines.append(machine)
    return replace(facts, machines=tuple(machines)), faults


def _known(goal: MachineGoal, machine: MachineFacts) -> LiveSettings | None:
    """Return the machine's live settings: its devices from the record, if there is one, everything else derived."""
    derived = _derived(goal, machine)
    if machine.live is None or derived is None:
        return derived
    return replace(machine.live, fixed=derived.fixed, mounts=derived.mounts)


def _derived(goal: MachineGoal, machine: MachineFacts) -> LiveSettings | None:
    """Return the live settings that follow from the files of the start; None if these files are unknown.

    `fixed` is empty if the files differ from the goal in settings that only a restart can change.
    """
    if machine.started is None:
        return None
    nspawn, drop_in = machine.started[0].splitlines(), machine.started[1].decode(errors="replace")
    lines = {path: _line(path, number) for path, number in goal.live.nodes.items()}
    same = _settings(nspawn, lines) == _settings(goal.nspawn.content.splitlines(), lines)
    same = same and _without_devices(machine.started[1]) == _without_devices(goal.drop_in.content)
    allowing = (line for line in drop_in.splitlines() if line.startswith("DeviceAllow=/dev/char/"))
    allowed = [DeviceAllow.parse(line.partition("=")[2]) for line in allowing]
    numbers = {entry.node for entry in allowed}
    # Directories of daemons are left out, so they are bound again: it is unknown which of them existed at the start.
    nodes = {
        path: number
        for path, number in goal.live.nodes.items()
        if lines[path] in nspawn and f"/dev/char/{number}" in numbers
    }
    # All permissions by number are the agent's. Their owners are not recorded, so permissions that are not granted are
    # withdrawn at once.
    permitted = (*machine.device_allow, *allowed)
    ours = [entry for entry in permitted if entry.node.startswith("/dev/char/") or entry in goal.live.allow]
    allow = tuple(dict.fromkeys(ours))
    fixed, mounts = (goal.live.fixed, goal.live.mounts) if same else ("", ())
    return LiveSettings(fixed, allow, nodes, unsure=True, mounts=mounts)


def _line(path: str, number: str) -> bytes:
    return f"{'BindReadOnly' if number.startswith(READ_ONLY) else 'Bind'}={escape(path)}".encode()


def _settings(content: list[bytes], lines: dict[str, bytes]) -> list[bytes]:
    devices = {*lines.values()}
    return [line for line in content if line not in devices and not NODE.match(line) and not line.startswith(b"#")]


def _without_devices(drop_in: bytes) -> bytes:
    return NOT_COMPARED.sub(b"", drop_in)
