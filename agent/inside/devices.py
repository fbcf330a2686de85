"""Are the granted device nodes in this machine, with the right numbers, and do they open?"""

import errno
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import agent.inside.open_nodes
from agent.conditions import Condition, ConditionType, false, not_applicable, true
from agent.errors import AgentError, ApplyError
from agent.handoff import GrantedDevice, Handoff, Request
from agent.identity import DeviceNumber
from agent.inside.journal import WARNING, say
from agent.inside.notes import Notes
from agent.system.files import System

OPEN_LIMIT = 30
"""Seconds for all nodes together: without a persistence daemon the first open initialises the GPU."""

STACKED = 16
"""Mounts at one node: systemd before 255 puts a new one upon the old one when a node is bound again."""

GRANTED = "granted-"
"""With a vendor's name the note of its nodes that the machine has: numbers by path."""
WITHDRAWN = "withdrawn"
"""The note of what was withdrawn since the machine's boot and may still be open: numbers by path."""

OPENED = "Opened"
NOT_WITHDRAWN = "NotWithdrawn"
WRONG_NODE = "WrongNode"
"""The reason for which the host binds nodes anew."""

NOT_AGAIN = (errno.EIO, errno.ETIMEDOUT)
"""The driver tried and failed: trying again each minute would only do harm."""

REASONS = {
    errno.EPERM: (
        "NotPermitted",
        "the machine's cgroup does not allow it: on the host, `unbounded-agent apply` sets its DeviceAllow=",
    ),
    errno.EACCES: ("NotPermitted", "its mode or owner forbids it: compare `ls -l` on the host"),
    errno.ENXIO: ("NoDriver", "no driver stands behind its number: load the kernel module on the host"),
    errno.ENODEV: ("NoDriver", "the driver knows no such device: see `dmesg` on the host"),
    errno.EIO: (
        "GPUFailed",
        "the driver could not initialise the GPU: see `dmesg` on the host for NVRM and Xid lines, then reset or reboot",
    ),
    errno.ETIMEDOUT: ("OpenTimedOut", f"it did not open within {OPEN_LIMIT} s: see `dmesg` on the host"),
}
"""By errno: the condition's reason, and what to do next."""


def live_numbers(system: System, devices: tuple[GrantedDevice, ...]) -> dict[str, DeviceNumber]:
    """Numbers of those nodes that are character devices in this machine."""
    numbers = {}
    for device in devices:
        try:
            number = system.device(device.path)
        except OSError:
            continue
        if number is not None:
            numbers[device.path] = number
    return numbers


def check_devices(system: System, notes: Notes, request: Request, generation: str) -> Condition:
    """The DevicesAllowed condition; opens what has not been opened since boot with these numbers and this grant."""
    if not request.devices:
        return not_applicable(ConditionType.DEVICES_ALLOWED, "no device is granted to this machine")
    live = live_numbers(system, request.devices)
    wrong = wrong_numbers(system, request.devices, live)
    if wrong:
        return false(ConditionType.DEVICES_ALLOWED, WRONG_NODE, "; ".join(wrong))
    name = f"opened-{request.vendor}"
    known = _still_valid(notes.load(name), live, generation)
    due = tuple(device.path for device in request.devices if device.path not in known)
    if due:
        known |= _open(system, due)
        nodes = {path: [live[path].major, live[path].minor, code] for path, code in known.items()}
        notes.save(name, {"generation": generation, "nodes": nodes})
    return _condition(known)


def with_hidden_driver(system: System, condition: Condition, paths: Collection[str]) -> Condition:
    """DevicesAllowed by another reason where nodes open and some of `paths`, which the kernel has then, are not here.

    Where all are missing, the driver was unloaded since. Not False: whether NVML of this driver minds is proven by the
    CDI spec, which is made with it.
    """
    hidden = [path for path in paths if not system.exists(path)]
    if condition.reason != OPENED or len(hidden) in (0, len(paths)):
        return condition
    return true(
        condition.type,
        "DriverHidden",
        f"{condition.message}; {', '.join(hidden)} cannot be seen in this machine, for which NVML may call the GPUs "
        "blocked by the operating system; the machine's next start shows it",
    )


def withdraw_nodes(
    system: System, notes: Notes, request: Request, newest: Handoff | None
) -> tuple[tuple[str, ...], Condition | None]:
    """Remove nodes that were granted since the machine's start and are no more; a condition only where that failed.

    `newest`: the handoff as it is by now; the host has bound the nodes of a newer one already. None: it cannot be read,
    and nothing is removed. From the host nothing can be: machinectl(1) binds into a machine, and has no opposite.
    """
    try:
        return _withdraw_nodes(system, notes, request, newest)
    # Whatever it is, as a full /run: it must not cost the report.
    except Exception as error:
        return (), false(ConditionType.DEVICES_ALLOWED, NOT_WITHDRAWN, f"what is not granted any more: {error}")


def _withdraw_nodes(
    system: System, notes: Notes, request: Request, newest: Handoff | None
) -> tuple[tuple[str, ...], Condition | None]:
    """Raises OSError where it cannot be noted."""
    name = f"{GRANTED}{request.vendor}"
    noted = notes.load(name)
    by_now = newest.requests if newest else ()
    of_vendor = (device for each in by_now if each.vendor == request.vendor for device in each.devices)
    granted = {device.path: [device.major, device.minor] for device in (*request.devices, *of_vendor)}
    if newest is None:
        notes.save(name, {**noted, **granted})
        return (), None
    # A path may be another vendor's node by now, which then is in the note of that one.
    kept = {*granted, *(device.path for each in by_now for device in each.devices)}
    stale = {path: number for path, number in noted.items() if path not in kept}
    failures = []
    for path, number in stale.items():
        try:
            _withdraw(system, path)
        except (AgentError, OSError) as error:
            granted[path] = number
            failures.append(str(error))
    removed = tuple(path for path in stale if path not in granted)
    # Noted first: who is killed in between withdraws again, and nothing that may be open is forgotten.
    notes.save(WITHDRAWN, {**notes.load(WITHDRAWN), **{path: stale[path] for path in removed}})
    notes.save(name, granted)
    if not failures:
        return removed, None
    why = f"not granted any more: {'; '.join(failures)}"
    return removed, false(ConditionType.DEVICES_ALLOWED, NOT_WITHDRAWN, why)


def unmount_removed(system: System, paths: Iterable[str]) -> None:
    """Take away mounts of what the host has removed since, so that it can bind what it made instead.

    systemd before 255 mounts upon the old mount, and the kernel refuses that where its source has no name any more
    (ENOENT, cant_mount() in fs/namespace.c). From the host nothing can be unmounted.
    """
    for path in paths:
        try:
            for _ in range(STACKED):
                if not system.is_mount(path) or system.link_count(path):
                    break
                system.run("umount", "--lazy", path)
        except (AgentError, OSError) as error:
            # A newer systemd on the host binds it anew all the same, once DevicesAllowed says WrongNode.
            say(WARNING, f"{path} was removed on the host and stays mounted: {error}")


def _withdraw(system: System, path: str) -> None:
    for _ in range(STACKED):
        if not system.is_mount(path):
            break
        # --lazy: a program of the machine's own may still have it open, which lasts until that closes it.
        system.run("umount", "--lazy", path)
    else:
        raise ApplyError(f"{path}: {STACKED} mounts upon each other were removed, and there are more")
    # The mount point, an empty file. What is no such file was put there by somebody else.
    if system.is_file(path) and not system.identity(path).size:
        system.remove(path)


def wrong_numbers(
    system: System, devices: tuple[GrantedDevice, ...], live: Mapping[str, DeviceNumber]
) -> tuple[str, ...]:
    """A sentence for each node that is not here, or is another one."""
    wrong = []
    for device in devices:
        number, wanted = live.get(device.path), f"character device {device.major}:{device.minor}"
        if number is None:
            exists = system.exists(device.path)
            found = "another kind of file, or a node that the host has removed since" if exists else "nothing"
        elif (number.major, number.minor) != (device.major, device.minor):
            found = f"{number.major}:{number.minor}"
        else:
            continue
        wrong.append(
            f"{device.path} must be {wanted}, found {found}: the host binds it, see its `unbounded-agent status`"
        )
    return tuple(wrong)


def _still_valid(noted: dict[str, Any], live: Mapping[str, DeviceNumber], generation: str) -> dict[str, int]:
    """What need not be opened again: nodes that opened with the numbers they have, and failures of this grant."""
    nodes = noted.get("nodes")
    if not isinstance(nodes, dict):
        return {}
    valid: dict[str, int] = {}
    for path, number in live.items():
        match nodes.get(path):
            case [number.major, number.minor, int(code)] if code == 0:
                valid[path] = code
            case [number.major, number.minor, int(code)] if code in NOT_AGAIN and noted.get("generation") == generation:
                valid[path] = code
    return valid


def _open(system: System, paths: tuple[str, ...]) -> dict[str, int]:
    """The error number by path (0: it opens)."""
    program = agent.inside.open_nodes.__file__
    output = system.run(
        # -I -S: nothing but the standard library, which halves the start.
        sys.executable, "-I", "-S", program, str(OPEN_LIMIT), *paths, timeout=OPEN_LIMIT + 10,
    )  # fmt: skip
    codes = {path: int(code) for code, _, path in (line.partition(" ") for line in output.splitlines())}
    silent = [path for path in paths if path not in codes]
    if silent:
        raise AgentError(f"{program} said nothing of {', '.join(silent)}", "start unbounded-agent-gpu.service again")
    return codes


def _condition(codes: Mapping[str, int]) -> Condition:
    failed = {path: code for path, code in sorted(codes.items()) if code}
    if not failed:
        return true(ConditionType.DEVICES_ALLOWED, OPENED, f"all {len(codes)} granted device nodes open")
    sentences, reason = [], ""
    for path, code in failed.items():
        why, advice = REASONS.get(code, ("OpenFailed", "see `dmesg` on the host"))
        reason = reason or why
        sentences.append(f"{path} does not open ({errno.errorcode.get(code, code)}): {advice}")
    return false(ConditionType.DEVICES_ALLOWED, reason, "; ".join(sentences))
