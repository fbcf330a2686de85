"""Derives a running machine's live settings from copies of the files that it started with. Pure.

That is necessary if the record of the live settings is missing (prepare@ did not write it, or it was damaged since), or
does not say with which settings the machine started.
"""

import re
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from agent.host.plan.goal import Plan
from agent.host.plan.nspawn import ADDRESS_FAMILIES, escape
from agent.model.device_allow import DeviceAllow
from agent.model.facts import Facts, MachineFacts
from agent.model.faults import Fault, fault
from agent.model.goal import MachineGoal
from agent.model.live import LiveSettings

NOT_COMPARED = re.compile(
    rb"^(?:#.*|After=.*|DeviceAllow=.*|ExecStartPre=(?:.*\\\n)*.*|TimeoutStopSec=.*)\n?", re.MULTILINE
)
"""Lines of a drop-in that are not compared. Devices can change while a machine runs. Comments, the order of units, the
commands before the start and the limit for the stop differ between releases of the agent. A backslash at the end of a
line continues it (systemd.syntax(7))."""
BIND = re.compile(rb"Bind(?:ReadOnly)?=(.*)")
"""A line of a .nspawn file that binds a path."""
DEVICE = re.compile(rb"/dev/(?!kmsg$)")
"""The beginning of a device's path, other than /dev/kmsg."""


def with_live(planned: Plan, facts: Facts) -> tuple[Facts, Mapping[str, Fault]]:
    """Return the facts with derived live settings for machines that need them, and the unexpected errors by machine."""
    goals = {goal.name: goal for goal in planned.goal.machines}
    machines, faults = [], {}
    for machine in facts.machines:
        if machine.started and machine.name in goals:
            try:
                machine = replace(machine, live=_completed(goals[machine.name], machine, machine.started))
            except Exception as error:
                faults[machine.name] = fault("determine which settings it started with", error)
        machines.append(machine)
    return replace(facts, machines=tuple(machines)), faults


def _completed(goal: MachineGoal, machine: MachineFacts, started: tuple[bytes, bytes]) -> LiveSettings:
    """Return the machine's recorded live settings, with derived `fixed` and `mounts`; without a record, derive all."""
    derived = _derived(goal, machine, started)
    if machine.live is None:
        return derived
    return replace(machine.live, fixed=derived.fixed, mounts=derived.mounts)


def _derived(goal: MachineGoal, machine: MachineFacts, started: tuple[bytes, bytes]) -> LiveSettings:
    """Return the live settings that follow from the files that the machine started with.

    `fixed` is empty if these files differ from the goal in more than devices, daemons' directories, and the lines of
    NOT_COMPARED.
    """
    nspawn, drop_in = started[0].splitlines(), started[1].decode(errors="replace")
    paths = {path: escape(path).encode() for path in goal.live.nodes}
    same = _fixed_lines(nspawn, paths.values()) == _fixed_lines(goal.nspawn.content.splitlines(), paths.values())
    same = same and NOT_COMPARED.sub(b"", started[1]) == NOT_COMPARED.sub(b"", goal.drop_in.content)
    lines = (line for line in drop_in.splitlines() if line.startswith("DeviceAllow=/dev/char/"))
    at_start = [DeviceAllow.parse(line.partition("=")[2]) for line in lines]
    numbers = {entry.node for entry in at_start}
    # Daemons' directories are left out, because it is unknown which of them existed at the start. So they are bound
    # again.
    bound = {bind[1] for bind in map(BIND.fullmatch, nspawn) if bind}
    nodes = {
        path: number
        for path, number in goal.live.nodes.items()
        if paths[path] in bound and f"/dev/char/{number}" in numbers
    }
    # The unit's list may also have entries that are not the agent's, from the template or from an administrator's
    # drop-in. An entry counts as the agent's if it names a device by its number, or if it is in the goal. The owners of
    # these devices are not recorded, so entries that are no longer granted are withdrawn at once.
    found = (*machine.device_allow, *at_start)
    by_agent = [entry for entry in found if entry.node.startswith("/dev/char/") or entry in goal.live.allow]
    allow = tuple(dict.fromkeys(by_agent))
    fixed, mounts = (goal.live.fixed, goal.live.mounts) if same else ("", ())
    # `unsure` because no record says which of these permissions are in force: this pass sets the entire list again.
    return LiveSettings(fixed, allow, nodes, unsure=True, mounts=mounts)


def _fixed_lines(nspawn: list[bytes], bound: Collection[bytes]) -> list[bytes]:
    """Return the lines of a .nspawn file that need a restart if they change.

    Comments, ResolvConf=, ADDRESS_FAMILIES, and binds of devices and of the paths in `bound` do not.
    """
    counted = (line for line in nspawn if not line.startswith((b"#", b"ResolvConf=")))
    lines = ((line, BIND.fullmatch(line)) for line in counted if line != ADDRESS_FAMILIES.encode())
    return [line for line, bind in lines if not bind or (bind[1] not in bound and not DEVICE.match(bind[1]))]
