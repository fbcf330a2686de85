"""Checks that the granted device nodes exist in this machine, have the right numbers and can be opened.

Also removes nodes that are no longer granted.
"""

import errno
import fnmatch
import posixpath
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from agent.machine.notes import Context, attempt, publications
from agent.machine.vendors import GPU_NODES, VENDORS
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
UNKNOWN = "unknown-nodes"
"""Name of the note about nodes that the handoff does not name: when a run first saw them, by CLOCK_MONOTONIC."""
BINDING = 120.0
"""Seconds that a new GPU's nodes may be unknown. The host binds them before it publishes the handoff, and may stage a
driver root in between."""
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
        "the driver could not initialise the GPU: reset it, then run `unbounded-agent gpus attach {gpu}` on the host, "
        "or reboot the host; `unbounded-agent doctor` there has the commands",
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


def live_numbers(system: System, devices: Iterable[GrantedDevice]) -> dict[str, DeviceNumber]:
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


def check_devices(context: Context, request: Request, kernel_paths: Collection[str]) -> Condition:
    """Return DevicesAllowed. A node is opened only if no earlier result for it still holds.

    The kernel has `kernel_paths` while the driver is loaded. If some of them are hidden, the reason is DriverHidden,
    and the status is True nevertheless: NVML may work without them, and CDISpecCurrent shows whether it does. If all
    are missing, the driver was unloaded meanwhile.
    """
    system, notes, name = context.system, context.notes, f"opened-{request.vendor}"
    live = live_numbers(system, request.devices)
    wrong = wrong_numbers(system, request.devices, live)
    noted, published = notes.load(name), publications(context)
    codes: dict[str, int] = {}
    for path in live.keys() - wrong.keys():
        match noted.get("nodes", {}).get(path):
            # An error in NOT_AGAIN holds only until `publications` change. Other errors never hold.
            case [major, minor, int(code)] if (major, minor) == (live[path].major, live[path].minor) and (
                not code or (code in NOT_AGAIN and noted.get("published") == published)
            ):
                codes[path] = code
    due = [device.path for device in request.devices if device.path not in codes and device.path not in wrong]
    codes |= _open(system, due) if due else {}
    # The results are saved even if nothing was opened now, because this drops the results of nodes that are gone. If a
    # GPU is detached and later attached again, it gets the same nodes, and their old results must not count.
    nodes = {path: [live[path].major, live[path].minor, code] for path, code in codes.items()}
    notes.save(name, {"published": published, "nodes": nodes} if nodes else {})
    if not request.devices:
        return not_applicable(KIND, "no device is granted to this machine")
    failed = [(path, code, *OPEN_ERRORS.get(code, OTHER_ERROR)) for path, code in sorted(codes.items()) if code]
    if not wrong and not failed:
        opened = f"all {len(codes)} granted device nodes open"
        hidden = [path for path in kernel_paths if not system.exists(path)]
        if len(hidden) in (0, len(kernel_paths)):
            return true(KIND, Reason.OPENED, opened)
        why = (
            f"this machine does not show {', '.join(hidden)}, so NVML may call the GPUs blocked by the operating system"
        )
        return true(KIND, Reason.DRIVER_HIDDEN, f"{opened}; {why}; the machine's next start fixes that")
    # Empty for a node that all GPUs share.
    gpus = {device.path: device.pci_address for device in request.devices}
    # WrongNode comes first, because it makes the host bind nodes.
    reason = Reason.WRONG_NODE if wrong else failed[0][2]
    sentences = [*wrong.values()]
    sentences += [
        f"{path} does not open ({errno.errorcode.get(code, code)}): {advice.format(gpu=gpus[path] or 'PCI-ADDRESS')}"
        for path, code, _, advice in failed
    ]
    concerned = dict.fromkeys(gpus[path] for path in (*wrong, *(path for path, *_ in failed)))
    return false(KIND, reason, "; ".join(sentences), concerned if all(concerned) else ())


def _open(system: System, paths: list[str]) -> dict[str, int]:
    # The path is written here, because importing open_nodes to find it would load the module signal.
    program = f"{posixpath.dirname(__file__)}/open_nodes.py"
    limit = min(max(OPEN_LIMIT, NODE_LIMIT * len(paths)), LONGEST)
    output = system.run(
        # With -I -S, Python loads only the standard library, which halves the time that it takes to start.
        sys.executable, "-I", "-S", program, str(limit), *paths, timeout=limit + 10,
    )  # fmt: skip
    codes = {path: int(code) for code, _, path in (line.partition(" ") for line in output.splitlines())}
    if silent := [path for path in paths if path not in codes]:
        raise AgentError(f"{program} has no result for {', '.join(silent)}", "restart unbounded-agent-gpu.service")
    return codes


def wrong_numbers(system: System, devices: Iterable[GrantedDevice], live: Mapping[str, DeviceNumber]) -> dict[str, str]:
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


def settle_others(context: Context, request: Request, newest: Handoff | None) -> tuple[Condition, ...]:
    """Settle non-GPU devices. Return DevicesAllowed, and a second one if nodes could not be withdrawn.

    `newest` is as in `withdraw_nodes`. Nodes are checked, but never opened: opening a watchdog would start it, and the
    host would soon reboot. Opening other devices may have side effects too.
    """
    unmount_removed(context.system, (device.path for device in request.devices))

    def present() -> Condition:
        link_nodes(context, request)
        if not request.devices:
            return not_applicable(KIND, "no device is granted to this machine")
        wrong = wrong_numbers(context.system, request.devices, live_numbers(context.system, request.devices))
        if wrong:
            return false(KIND, Reason.WRONG_NODE, "; ".join(wrong.values()))
        return true(KIND, Reason.NODES_PRESENT, f"other devices: {counted(len(request.devices), 'node')}")

    _, failure = withdraw_nodes(context, request, newest)
    return (attempt(KIND, present), *((failure,) if failure else ()))


# Nodes that are no longer granted.


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
        removed, failures = _withdraw_nodes(context, request, newest)
    # Any exception: the report must be written even if, for example, /run is full.
    except Exception as error:
        return (), false(KIND, Reason.NOT_WITHDRAWN, f"cannot withdraw nodes that are no longer granted: {error}")
    if not failures:
        return removed, None
    return removed, false(KIND, Reason.NOT_WITHDRAWN, f"no longer granted, but not removed: {'; '.join(failures)}")


def _withdraw_nodes(context: Context, request: Request, newest: Handoff | None) -> tuple[tuple[str, ...], list[str]]:
    notes, name = context.notes, f"{GRANTED}{request.vendor}"
    noted, failures = notes.load(name), list[str]()
    newest_requests = newest.requests if newest else ()
    vendor_devices = (device for each in newest_requests if each.vendor == request.vendor for device in each.devices)
    granted = {device.path: [device.major, device.minor] for device in (*request.devices, *vendor_devices)}
    if newest is None:
        notes.save(name, {**noted, **granted})
        return (), failures
    # A path may now be granted for another vendor. Then the node is kept, but this vendor's note no longer has it: the
    # other vendor's note does.
    kept = {*granted, *(device.path for each in newest_requests for device in each.devices)}
    removed = {}
    for path, number in noted.items():
        if path in kept:
            continue
        try:
            _withdraw(context.system, path)
            removed[path] = number
        except (AgentError, OSError) as error:
            # The path stays in the note, so that the next run tries again.
            granted[path] = number
            failures.append(str(error))
    # WITHDRAWN is saved before the vendor's own note: if the run is killed between the two, the next run withdraws the
    # nodes again. In the opposite order, nodes that may still be open would be in neither note, and so be forgotten.
    notes.save(WITHDRAWN, notes.load(WITHDRAWN) | removed)
    notes.save(name, granted)
    return tuple(removed), failures


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


def note_unknown_nodes(context: Context) -> tuple[Condition, ...]:
    """Find mounted nodes that the handoff does not name, and note them like granted ones, so that they are withdrawn.

    Such nodes exist if the host half or nspawn bound the nodes of a device, and the host half withdrew the device
    before a run could note them. The handoff lists these; for others, if the host has lost its record, this waits for
    BINDING. Returns a condition if the search fails, or if nodes cannot be noted; otherwise an empty tuple.
    """
    system, requests = context.system, context.handoff.requests
    known = {device.path for request in requests for device in request.devices}
    # A DRM node may belong to any vendor, so unknown ones are noted for a vendor that this run settles anyway, if there
    # is one. The nodes of GPUs are recognised by their names. Those of other devices have no such names. Only the host
    # knows which of these it has bound and withdrawn, so the handoff lists the withdrawn ones.
    named = [each.vendor for each in requests if each.vendor in GPU_NODES]
    try:
        seen, unknown, now = context.notes.load(UNKNOWN), dict[str, float](), time.monotonic()
        for vendor in dict.fromkeys((*named, *GPU_NODES, OTHER_DEVICES)):
            paths = context.handoff.withdrawn if vendor == OTHER_DEVICES else _nodes(system, vendor)
            bound = {path for path in paths if system.is_mount(path) and not system.is_directory(path)} - known
            unknown |= {path: seen.get(path, now) for path in bound.difference(context.handoff.withdrawn)}
            due = {path for path in bound if path not in unknown or now - unknown[path] >= BINDING}
            if due:
                name = f"{GRANTED}{vendor}"
                noted = context.notes.load(name)
                numbers = {path: system.device(path) for path in sorted(due - noted.keys())}
                added = {path: [each.major, each.minor] if each else None for path, each in numbers.items()}
                context.notes.save(name, {**added, **noted})
            known |= bound
        context.notes.save(UNKNOWN, unknown)
    except OSError as error:
        return (false(KIND, Reason.NOT_WITHDRAWN, f"cannot tell what is mounted in /dev: {error}"),)
    return ()


def _nodes(system: System, vendor: str) -> Iterable[str]:
    for pattern in GPU_NODES[vendor]:
        directory, _, name = f"/dev/{pattern}".rpartition("/")
        if system.is_directory(directory):
            yield from (f"{directory}/{each}" for each in fnmatch.filter(system.entries(directory), name))


def withdrawn_requests(context: Context) -> list[Request]:
    """Return empty requests for vendors that the handoff no longer names, so that their devices are withdrawn."""
    named = {request.vendor for request in context.handoff.requests}

    def may_own(path: str) -> bool:
        try:
            return context.owned.has(path)
        except AgentError:
            return True

    return [
        Request(name, (), ())
        for name in (*VENDORS, OTHER_DEVICES)
        if name not in named and (context.notes.may_have(f"{GRANTED}{name}") or may_own(spec_file(name)))
    ]


# The links that udev makes on a host. In a machine no udevd runs. nspawn makes only the links to its own nodes, and
# binding a node does not make its links.

# Older releases of runc use /dev/char/MAJOR:MINOR to find a device's path, and so does systemd for the scopes of
# containers. The command `nvidia-ctk system create-dev-char-symlinks` and the GPU Operator's validator make these too.
DIRECTORY = "/dev/char"


def link_nodes(context: Context, request: Request) -> None:
    """Make links in /dev/char. Raises OSError if the note about them cannot be read; other errors are only logged."""
    system, name = context.system, f"char-links-{request.vendor}"
    if not (request.devices or context.notes.load(name)):
        return
    wanted = {
        f"{DIRECTORY}/{number.major}:{number.minor}": posixpath.relpath(path, DIRECTORY)
        for path, number in live_numbers(system, request.devices).items()
    }
    try:
        # A link that another program made is neither noted nor changed.
        _settle_links(context, name, wanted, lambda link, _: not system.exists(link))
    except OSError as error:
        say(WARNING, f"cannot create links in {DIRECTORY}: {error}")


def link_dri_nodes(context: Context, request: Request) -> None:
    """Make the links in /dev/dri/by-path, by which programs find a GPU's DRM nodes. Raises OSError."""
    system = context.system
    wanted = {
        link: posixpath.relpath(device.path, posixpath.dirname(link))
        for device in request.devices
        if (link := dri_link(device.kind, device.pci_address))
    }
    # A correct link that is not noted was made by the host's udev: all of /dev/dri may be bound into the machine. Such
    # a link is not noted now either, so the agent never removes it.
    _settle_links(context, f"dri-links-{request.vendor}", wanted, lambda link, target: system.read_link(link) != target)


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
    containers, remark = notes.load("containers"), ""
    if held.holders:
        described = [each.describe(pod=str(containers.get(each.container, {}).get("pod", ""))) for each in held.holders]
        what = "LeftOpen (no longer granted, but still open; PIDs are the machine's)"
        remark = f"; {what}: {first_of(described, SHOWN, '; ')}"
    if held.unseen:
        remark += f"; {counted(len(held.unseen), 'process', 'processes')} could not be inspected"
        remark += "" if held.holders else ", and may still have nodes open that are no longer granted"
    return remark
