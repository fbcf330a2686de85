"""Checks that the granted device nodes exist in this machine, have the right numbers and can be opened.

Also removes nodes that are no longer granted.
"""

import errno
import fnmatch
import posixpath
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from agent.machine.notes import Context, Notes, Owned, publications
from agent.machine.vendors import GPU_NODES, VENDOR_NAMES
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true
from agent.model.device import DeviceNumber, dri_link
from agent.model.errors import AgentError
from agent.model.handoff import OTHER_DEVICES, GrantedDevice, Handoff, Request
from agent.model.paths import spec_file
from agent.model.text import counted, first_of
from agent.system.deadlines import bounded
from agent.system.files import System
from agent.system.journal import WARNING, say
from agent.system.processes import Held, find_holders

KIND = ConditionType.DEVICES_ALLOWED
OPEN_LIMIT, NODE_LIMIT, LONGEST = 30, 10, 80
"""The time limit, in seconds, for opening all nodes together is NODE_LIMIT for each node, but at least OPEN_LIMIT and
at most LONGEST. LONGEST leaves time to report before the unit's own limit. Without a persistence daemon, the first open
of a GPU initialises it, which takes seconds; the driver may initialise one GPU after another."""

STACKED = 16
"""The largest number of mounts that are removed from one node. systemd before 255 stacks each new mount on the old
one."""

GRANTED = "granted-"
"""Prefix of the names of notes, one per vendor, with the numbers of the machine's nodes by path."""
WITHDRAWN = "withdrawn"
"""Name of the note about nodes that were withdrawn since the machine's boot and may still be open: numbers by path."""

NOT_AGAIN = (errno.EIO, errno.ETIMEDOUT)
"""Errors after which the node is not opened again each minute: the driver has failed, and another try may do harm."""

OPEN_ERRORS = {
    errno.EPERM: (
        Reason.NOT_PERMITTED,
        "the machine's cgroup does not allow it: run `unbounded-agent apply` on the host",
    ),
    errno.EACCES: (Reason.NOT_PERMITTED, "its mode or owner forbids it: compare `ls -l` on the host"),
    errno.ENXIO: (Reason.NO_DRIVER, "no driver answers at its number: load the kernel module on the host"),
    errno.ENODEV: (Reason.NO_DRIVER, "the driver knows no such device: see `dmesg` on the host"),
    errno.EIO: (
        Reason.GPU_FAILED,
        "the driver could not initialise the GPU: see `dmesg` on the host (NVRM, Xid), then reset the GPU and run "
        "`unbounded-agent gpus attach {gpu}` there or, if the reset fails, reboot the host: `unbounded-agent "
        "doctor` has the commands",
    ),
    errno.ETIMEDOUT: (Reason.OPEN_TIMED_OUT, "it did not open in time: see `dmesg` on the host"),
    errno.EAGAIN: (
        Reason.OPEN_FAILED,
        "the machine has reached its limit of memory or processes, or the driver is resetting a GPU: see `dmesg` on "
        "the host",
    ),
}
"""The condition's reason, and the end of its message, by the errno of open(2)."""
OTHER_ERROR = (Reason.OPEN_FAILED, "see `dmesg` on the host")


def live_numbers(system: System, devices: tuple[GrantedDevice, ...]) -> dict[str, DeviceNumber]:
    """Return the numbers of the nodes that are character devices in this machine, by path."""
    numbers = {}
    for device in devices:
        try:
            number = system.device(device.path)
        except OSError:
            continue
        if number is not None:
            numbers[device.path] = number
    return numbers


def check_devices(context: Context, request: Request) -> Condition:
    """Return DevicesAllowed. A node is opened only if no earlier result for it still holds (see `_still_valid`)."""
    system, notes, name = context.system, context.notes, f"opened-{request.vendor}"
    live = live_numbers(system, request.devices)
    wrong = wrong_numbers(system, request.devices, live)
    published = publications(context)
    codes = _still_valid(notes.load(name), {path: live[path] for path in live if path not in wrong}, published)
    due = tuple(device.path for device in request.devices if device.path not in codes and device.path not in wrong)
    if due:
        codes |= _open(system, due)
    # The results are saved even if nothing was opened now, because this drops the results of nodes that are gone. If a
    # GPU is detached and later attached again, it gets the same nodes, and their old results must not count.
    nodes = {path: [live[path].major, live[path].minor, code] for path, code in codes.items()}
    notes.save(name, {"published": published, "nodes": nodes} if nodes else {})
    if not request.devices:
        return not_applicable(KIND, "no device is granted to this machine")
    return _condition(wrong, codes, {device.path: device.pci_address for device in request.devices})


def with_hidden_driver(system: System, condition: Condition, paths: Collection[str]) -> Condition:
    """Return DevicesAllowed, with reason DriverHidden if the nodes open, but some of `paths` do not exist.

    The kernel has these paths while the driver is loaded. If all of them are missing, the driver was unloaded
    meanwhile, and `condition` is returned unchanged. Even with DriverHidden, the status is True: NVML may work without
    the paths. CDISpecCurrent shows whether it does, because the specification is generated with NVML.
    """
    hidden = [path for path in paths if not system.exists(path)]
    if condition.reason != Reason.OPENED or len(hidden) in (0, len(paths)):
        return condition
    why = f"this machine does not show {', '.join(hidden)}, so NVML may call the GPUs blocked by the operating system"
    message = f"{condition.message}; {why}; the machine's next start fixes that"
    return true(KIND, Reason.DRIVER_HIDDEN, message)


def withdraw_nodes(
    context: Context, request: Request, newest: Handoff | None
) -> tuple[tuple[str, ...], Condition | None]:
    """Remove nodes that are no longer granted. Return the removed paths, and a condition if that failed.

    The host cannot remove nodes: machinectl(1) can bind into a machine, but not unbind. `newest` is the current
    handoff, which may be newer than this run's. The nodes that `newest` grants are kept, because the host may have
    bound them already. If `newest` is None, because the handoff cannot be read, nothing is removed. If a removal cannot
    be noted, no path is returned, although nodes may be gone.
    """
    try:
        return _withdraw_nodes(context, request, newest)
    # Any exception: the report must be written even if, for example, /run is full.
    except Exception as error:
        return (), false(KIND, Reason.NOT_WITHDRAWN, f"cannot withdraw nodes that are no longer granted: {error}")


def _withdraw_nodes(
    context: Context, request: Request, newest: Handoff | None
) -> tuple[tuple[str, ...], Condition | None]:
    notes, name = context.notes, f"{GRANTED}{request.vendor}"
    noted = notes.load(name)
    newest_requests = newest.requests if newest else ()
    vendor_devices = (device for each in newest_requests if each.vendor == request.vendor for device in each.devices)
    granted = {device.path: [device.major, device.minor] for device in (*request.devices, *vendor_devices)}
    if newest is None:
        notes.save(name, {**noted, **granted})
        return (), None
    # A path may now be granted for another vendor. Then the node is kept, but this vendor's note no longer has it: the
    # other vendor's note does.
    kept = {*granted, *(device.path for each in newest_requests for device in each.devices)}
    stale = {path: number for path, number in noted.items() if path not in kept}
    failures = []
    for path, number in stale.items():
        try:
            _withdraw(context.system, path)
        except (AgentError, OSError) as error:
            # The path stays in the note, so that the next run tries again.
            granted[path] = number
            failures.append(str(error))
    removed = tuple(path for path in stale if path not in granted)
    # WITHDRAWN is saved before the vendor's own note: if the run is killed between the two, the next run withdraws the
    # nodes again. In the opposite order, nodes that may still be open would be in neither note, and so be forgotten.
    notes.save(WITHDRAWN, {**notes.load(WITHDRAWN), **{path: stale[path] for path in removed}})
    notes.save(name, granted)
    if not failures:
        return removed, None
    return removed, false(KIND, Reason.NOT_WITHDRAWN, f"no longer granted, but not removed: {'; '.join(failures)}")


def unmount_removed(system: System, paths: Iterable[str]) -> None:
    """Unmount nodes and directories whose source was removed on the host, so that the host can bind new ones.

    systemd before 255 mounts on top of the old mount, but the kernel refuses that if the old mount's source was removed
    (ENOENT, cant_mount() in fs/namespace.c). The host cannot unmount anything in a machine.
    """
    for path in paths:
        try:
            for _ in range(STACKED):
                # Only a removed source has a link count of 0.
                if not system.is_mount(path) or system.link_count(path):
                    break
                system.run("umount", "--lazy", path)
        except (AgentError, OSError) as error:
            # Only a warning: DevicesAllowed will report WrongNode, and a host with systemd 255 or later can then bind
            # the node despite the old mount.
            say(WARNING, f"cannot unmount {path}, which was removed on the host: {error}")


def _withdraw(system: System, path: str) -> None:
    for _ in range(STACKED):
        if not system.is_mount(path):
            break
        # With --lazy, umount succeeds even while programs in the machine have the node open.
        system.run("umount", "--lazy", path)
    else:
        raise AgentError(f"{path}: unmounted {STACKED} stacked mounts, but there may be more")
    # The mount point is an empty file. Any other file is not the agent's.
    if system.is_file(path) and not system.identity(path).size:
        system.remove(path)


def wrong_numbers(
    system: System, devices: tuple[GrantedDevice, ...], live: Mapping[str, DeviceNumber]
) -> dict[str, str]:
    """Return a sentence for each node that is missing in this machine or has the wrong numbers, by path."""
    wrong = {}
    for device in devices:
        number, wanted = live.get(device.path), f"character device {device.major}:{device.minor}"
        if number is None:
            exists = system.exists(device.path)
            found = "another kind of file, or a node that the host has removed since" if exists else "nothing"
        elif (number.major, number.minor) != (device.major, device.minor):
            found = f"{number.major}:{number.minor}"
        else:
            continue
        wrong[device.path] = (
            f"{device.path} must be {wanted}, found {found}: the host binds it; see `unbounded-agent status` there"
        )
    return wrong


def _still_valid(noted: dict[str, Any], live: Mapping[str, DeviceNumber], published: object) -> dict[str, int]:
    """Return the noted results that still hold: those of nodes with the same numbers.

    An error in NOT_AGAIN holds only until `publications` change too. Other errors never hold.
    """
    valid: dict[str, int] = {}
    for path, number in live.items():
        match noted.get("nodes", {}).get(path):
            case [number.major, number.minor, int(code)] if code == 0 or (
                code in NOT_AGAIN and noted.get("published") == published
            ):
                valid[path] = code
    return valid


def _open(system: System, paths: tuple[str, ...]) -> dict[str, int]:
    """Open the nodes. Return the error numbers by path; 0 means that the node opens."""
    # The path is written here, because importing open_nodes to find it would load the module signal.
    program = f"{posixpath.dirname(__file__)}/open_nodes.py"
    limit = min(max(OPEN_LIMIT, NODE_LIMIT * len(paths)), LONGEST)
    output = system.run(
        # With -I -S, Python loads only the standard library, which halves the time that it takes to start.
        sys.executable, "-I", "-S", program, str(limit), *paths, timeout=limit + 10,
    )  # fmt: skip
    codes = {path: int(code) for code, _, path in (line.partition(" ") for line in output.splitlines())}
    silent = [path for path in paths if path not in codes]
    if silent:
        raise AgentError(f"{program} has no result for {', '.join(silent)}", "restart unbounded-agent-gpu.service")
    return codes


def _condition(wrong: Mapping[str, str], codes: Mapping[str, int], gpus: Mapping[str, str]) -> Condition:
    """Return DevicesAllowed. `gpus` maps each node to its GPU, or to an empty text if all GPUs share the node."""
    failed = [(path, code, *OPEN_ERRORS.get(code, OTHER_ERROR)) for path, code in sorted(codes.items()) if code]
    if not wrong and not failed:
        return true(KIND, Reason.OPENED, f"all {len(codes)} granted device nodes open")
    # WrongNode comes first, because it makes the host bind nodes.
    reason = Reason.WRONG_NODE if wrong else failed[0][2]
    sentences = list(wrong.values())
    sentences += [
        f"{path} does not open ({errno.errorcode.get(code, code)}): {advice.format(gpu=gpus[path] or 'PCI-ADDRESS')}"
        for path, code, _, advice in failed
    ]
    concerned = dict.fromkeys(gpus[path] for path in (*wrong, *(path for path, *_ in failed)))
    limited = concerned if all(concerned) else ()
    return false(KIND, reason, "; ".join(sentences), limited)


# The links that udev makes on a host. In a machine no udevd runs. nspawn makes only the links to its own nodes, and
# binding a node does not make its links.

# Older releases of runc use /dev/char/MAJOR:MINOR to find a device's path, and so does systemd for the scopes of
# containers. The command `nvidia-ctk system create-dev-char-symlinks` and the GPU Operator's validator make these too.
DIRECTORY = "/dev/char"


def link_nodes(context: Context, request: Request) -> None:
    """Make links in /dev/char. Raises OSError if the note about them cannot be read; other errors are only logged."""
    name = f"char-links-{request.vendor}"
    if not (request.devices or context.notes.load(name)):
        return
    wanted = {
        f"{DIRECTORY}/{number.major}:{number.minor}": posixpath.relpath(path, DIRECTORY)
        for path, number in live_numbers(context.system, request.devices).items()
    }
    try:
        # A link that another program made is neither noted nor changed.
        _settle_links(context, name, wanted, lambda link, _: not context.system.exists(link))
    except OSError as error:
        say(WARNING, f"cannot create links in {DIRECTORY}: {error}")


def link_dri_nodes(context: Context, request: Request) -> None:
    """Make the links in /dev/dri/by-path, by which programs find a GPU's DRM nodes. Raises OSError."""
    wanted = {
        link: posixpath.relpath(device.path, posixpath.dirname(link))
        for device in request.devices
        if (link := dri_link(device.kind, device.pci_address))
    }
    # A correct link that is not noted was made by the host's udev: all of /dev/dri may be bound into the machine. Such
    # a link is not noted now either, so the agent never removes it.
    name, system = f"dri-links-{request.vendor}", context.system
    _settle_links(context, name, wanted, lambda link, target: system.read_link(link) != target)


def _settle_links(
    context: Context, name: str, wanted: Mapping[str, str], is_missing: Callable[[str, str], bool]
) -> None:
    """Make the wanted links that are missing, and remove the agent's other ones. `name` is that of their note."""
    system, notes = context.system, context.notes
    noted = notes.load(name)
    for link, target in noted.items():
        if wanted.get(link) != target and system.read_link(link) == target:
            system.remove(link)
    own = {link: target for link, target in wanted.items() if noted.get(link) == target or is_missing(link, target)}
    # Noted before they are made, so that links of a killed run are removed later.
    notes.save(name, own)
    for link, target in own.items():
        if is_missing(link, target):
            system.link(link, target)


# What the machine still has although the handoff no longer names it: nodes, and vendors' files and notes.


def note_unknown_nodes(context: Context) -> tuple[Condition, ...]:
    """Find mounted nodes that the handoff does not name, and note them like granted ones, so that they are withdrawn.

    Such nodes exist if the host half or nspawn bound the nodes of a device, and the host half withdrew the device
    before a run could note them. Returns a condition if the search fails, or if nodes cannot be noted; otherwise an
    empty tuple.
    """
    requests = context.handoff.requests
    known = {device.path for request in requests for device in request.devices}
    # A DRM node may belong to any vendor, so unknown ones are noted for a vendor that this run settles anyway, if there
    # is one: the vendors of the handoff's requests come first below.
    vendors = [each.vendor for each in requests if each.vendor in GPU_NODES]
    try:
        for vendor in dict.fromkeys((*vendors, *GPU_NODES)):
            unknown = {path for pattern in GPU_NODES[vendor] for path in _bound_nodes(context.system, pattern)} - known
            if unknown:
                _note(context, vendor, unknown)
                known |= unknown
        # The nodes above are recognised as GPUs' nodes by their names. The nodes of other devices have no such names.
        # Only the host knows which of these it has bound and withdrawn, so the handoff lists the withdrawn ones.
        withdrawn = {path for path in context.handoff.withdrawn if _is_bound_node(context.system, path)}
        if withdrawn - known:
            _note(context, OTHER_DEVICES, withdrawn - known)
    except OSError as error:
        return (false(KIND, Reason.NOT_WITHDRAWN, f"cannot tell what is mounted in /dev: {error}"),)
    return ()


def _note(context: Context, vendor: str, paths: set[str]) -> None:
    noted = context.notes.load(f"{GRANTED}{vendor}")
    numbers = {path: context.system.device(path) for path in sorted(paths - noted.keys())}
    unknown = {path: [each.major, each.minor] if each else None for path, each in numbers.items()}
    context.notes.save(f"{GRANTED}{vendor}", {**unknown, **noted})


def _bound_nodes(system: System, pattern: str) -> list[str]:
    """Return the mounted nodes below /dev that match a pattern."""
    directory, _, name = f"/dev/{pattern}".rpartition("/")
    entries = system.entries(directory) if system.is_directory(directory) else ()
    paths = [f"{directory}/{each}" for each in fnmatch.filter(entries, name)]
    return [path for path in paths if _is_bound_node(system, path)]


def _is_bound_node(system: System, path: str) -> bool:
    return system.is_mount(path) and not system.is_directory(path)


def withdrawn_requests(context: Context) -> list[Request]:
    """Return empty requests for vendors that the handoff no longer names, so that their devices are withdrawn."""
    named = {request.vendor for request in context.handoff.requests}
    return [
        Request(name, (), ())
        for name in (*VENDOR_NAMES, OTHER_DEVICES)
        if name not in named
        and (may_have_content(context.notes, f"{GRANTED}{name}") or _may_own(context.owned, spec_file(name)))
    ]


def may_have_content(notes: Notes, name: str) -> bool:
    """Return whether a note has content; True if the note cannot be read, so that a later step reports the error."""
    try:
        return bool(notes.load(name))
    except OSError:
        return True


def _may_own(owned: Owned, path: str) -> bool:
    try:
        return owned.has(path)
    except AgentError:
        return True


# Processes that still have a withdrawn node open: an open descriptor stays usable after the node is removed and the
# permission is withdrawn. The host half cannot search, because its service may not inspect processes. A command on the
# host could, but when a GPU is lost, nobody runs one.

SHOWN = 10
"""How many processes the message names, because its length is limited; the others are counted."""
SEARCH_LIMIT = 10.0
"""Seconds to search all processes. The report, which is the machine's heartbeat, waits for this."""
SEARCHES = "left-open"
"""Name of the note with the number of consecutive failed searches."""
FAILED_SEARCHES = 5
"""Consecutive failed searches after which the agent gives up: each one delays a run's report, and a run is made every
minute."""


def left_open_remark(context: Context, limit: float = SEARCH_LIMIT) -> str:
    """Return the remark on DevicesAllowed that names the processes with withdrawn nodes open; empty if there are none.

    Forgets nodes that none has. Raises any error of the search, and TimeoutError after `limit` seconds. After
    FAILED_SEARCHES consecutive errors, no search is made, and all withdrawn nodes are forgotten.
    """
    notes = context.notes
    noted = notes.load(WITHDRAWN)
    granted = {(device.major, device.minor) for request in context.handoff.requests for device in request.devices}
    # Numbers that are granted again are left out: they may now belong to another GPU, which processes may have open.
    wanted = {number: path for path, each in noted.items() if each and (number := (each[0], each[1])) not in granted}
    failed = notes.load(SEARCHES).get("failed", 0)
    # Counted as failed before the search, because this run may be killed during the search.
    notes.save(SEARCHES, {"failed": failed + 1})
    search = bool(wanted) and failed < FAILED_SEARCHES
    held = bounded("/proc", partial(find_holders, context.system, wanted), limit) if search else Held()
    open_paths = {path for holder in held.holders for path in holder.paths}
    # Nodes are forgotten even if some processes cannot be inspected, because that may never change.
    notes.save(WITHDRAWN, {path: number for path, number in noted.items() if path in open_paths})
    notes.save(SEARCHES, {"failed": 0})
    return _remark(held, notes.load("containers"))


def _remark(held: Held, containers: Mapping[str, Any]) -> str:
    """Return the remark on the processes; empty if there are none."""
    unseen = f"{counted(len(held.unseen), 'process', 'processes')} could not be inspected" if held.unseen else ""
    if not held.holders:
        return f"; {unseen}, and may still have nodes open that are no longer granted" if unseen else ""
    pods = (str(containers.get(each.container, {}).get("pod", "")) for each in held.holders)
    described = [each.describe(pod=pod) for each, pod in zip(held.holders, pods, strict=True)]
    shown = first_of(described, SHOWN, "; ")
    what = f"; LeftOpen (no longer granted, but still open; PIDs are the machine's): {shown}"
    return f"{what}; {unseen}" if unseen else what


# Non-GPU devices. Nodes are checked, but never opened: opening a watchdog would start it, and the host would soon
# reboot. Opening other devices may have side effects too.


def settle_others(context: Context, request: Request, newest: Handoff | None) -> tuple[Condition, ...]:
    """Settle the devices. Return DevicesAllowed, and a second DevicesAllowed if nodes could not be withdrawn.

    `newest` is as in `withdraw_nodes`.
    """
    try:
        unmount_removed(context.system, (device.path for device in request.devices))
        link_nodes(context, request)
        _, failure = withdraw_nodes(context, request, newest)
        return (_present(context.system, request), *((failure,) if failure else ()))
    except (AgentError, OSError) as error:
        return (false(KIND, Reason.FAILED, str(error)),)


def _present(system: System, request: Request) -> Condition:
    if not request.devices:
        return not_applicable(KIND, "no device is granted to this machine")
    wrong = wrong_numbers(system, request.devices, live_numbers(system, request.devices))
    if wrong:
        return false(KIND, Reason.WRONG_NODE, "; ".join(wrong.values()))
    return true(KIND, Reason.NODES_PRESENT, f"other devices: {counted(len(request.devices), 'node')}")
