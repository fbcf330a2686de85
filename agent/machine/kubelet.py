"""Checks in the kubelet's files whether the granted GPUs are advertised, without asking the plugin or the API server.

The kubelet (pkg/kubelet/cm/devicemanager of k8s.io/kubernetes) writes its checkpoint when a plugin sends a list of
devices, and when a pod gets devices, but not when the kubelet starts. When a plugin exits, its devices become unhealthy
at once, but the kubelet writes the checkpoint only five minutes later. So the plugin's sockets are tried as well, and a
checkpoint that is older than the sockets proves nothing.
"""

import contextlib
import fnmatch
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.machine.cdi import spec_changed_at
from agent.machine.containerd import socket_path
from agent.machine.containerd_tables import MAIN
from agent.machine.devices import live_numbers
from agent.machine.notes import Context, Notes, attempt, noted_ages
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true, unknown
from agent.model.contract import (
    DRA_STATUS_SILENT_AFTER,
    AllocatableDevice,
    AllocatableVendor,
    DraStatus,
    parse_dra_status,
    parse_node_files,
    render_allocatable,
)
from agent.model.device import gives_gpus
from agent.model.errors import CommandError, DocumentError
from agent.model.handoff import SIZE_LIMIT, Request
from agent.model.json_document import accept_version, get, objects, parse_json, parse_object, require_object, strings
from agent.model.paths import ALLOCATABLE, DRA_CLAIMS, DRA_STATUS, MACHINE_REPORT_DIRECTORY, NODE_FILES, REPORT_NAME
from agent.model.text import counted, first_of, first_quoted, quoted, rfc3339
from agent.system.files import UNUSABLE, System
from agent.system.journal import Ages
from agent.vendors.machine_vendor import MachineVendor

PLUGINS = "/var/lib/kubelet/device-plugins"
"""The kubelet's directory for device plugins, which is not configurable (DevicePluginPath of k8s.io/kubelet)."""
KUBELET_SOCKET = f"{PLUGINS}/kubelet.sock"
CHECKPOINT = f"{PLUGINS}/kubelet_internal_checkpoint"
CHECKPOINT_LIMIT = 4 << 20
"""Bytes of the largest checkpoint that is read. It lists the devices of each container."""
NAMES_READ = 16_384
"""How many names in the kubelet's directory are read. Pods of device plugins may write in it."""
SOCKETS = 64
"""How many sockets of one vendor's plugin are tried. It has one for each resource."""
NAME_SHOWN = 120
"""How many characters of a name, which a pod may have chosen, a message shows."""
NAMES_SHOWN = 16
"""How many names a message shows."""
PROBLEMS_SHOWN = 3
"""How many problems of the plugin's specification a message names. After a driver upgrade, there is one problem for
each of the driver's files."""
KIND = ConditionType.GPUS_ADVERTISED


class Plugin(NamedTuple):
    """A vendor's device plugin, as the kubelet's directory shows it."""

    serving: Sequence[str]
    """Sockets that accept connections."""
    dead: Sequence[str] = ()
    """Sockets that nobody listens on."""
    registered: Mapping[str, tuple[str, ...]] = {}
    """Ids of the vendor's registered devices by resource, according to the checkpoint; none without a checkpoint."""
    begun: int = 0
    """When the plugin began to serve: the time of its newest socket, in nanoseconds since the epoch."""
    begun_at: float = -math.inf
    """The same time by CLOCK_MONOTONIC."""
    up_to_date: bool = False
    """Whether the checkpoint was written after the plugin began to serve."""


def check_advertised(
    context: Context, vendor: MachineVendor, request: Request, published: tuple[str, ...]
) -> Condition:
    """Return GPUsAdvertised, after a restart of the device plugin if that is configured and needed. Raises OSError.

    `published` has the names of the devices in the CDI specification.
    """
    condition = _by_kubelet(context, vendor, request, published)
    if condition.status is Status.TRUE and vendor.plugin_spec and request.gpus:
        condition = _with_plugin_spec(context.system, vendor, request, condition)
    fixed_by_restart = condition.reason in (Reason.DEVICE_PLUGIN_RESTART_NEEDED, Reason.PLUGIN_SPEC_OUTDATED)
    if context.handoff.restart_device_plugin and fixed_by_restart:
        return condition._replace(message=f"{condition.message}; {_restart(context, vendor)}")
    return condition


def _no_kubelet(system: System) -> Condition | None:
    if not system.is_directory(PLUGINS):
        return unknown(KIND, Reason.NO_KUBELET, f"{PLUGINS} does not exist: no kubelet has run in this machine")
    if system.listening_process(KUBELET_SOCKET) is None:
        why = f"{KUBELET_SOCKET} accepts no connection: see `systemctl status kubelet` in the machine"
        return unknown(KIND, Reason.KUBELET_DOWN, why)
    return None


def _by_kubelet(context: Context, vendor: MachineVendor, request: Request, published: tuple[str, ...]) -> Condition:
    system, notes = context.system, context.notes
    missing = _no_kubelet(system)
    if missing and missing.reason == Reason.NO_KUBELET:
        return missing if request.gpus else not_applicable(KIND, "no GPU is granted to this machine")
    try:
        with noted_ages(notes) as ages:
            plugin = _read_plugin(system, vendor, ages)
            published_at = ages.changed_at(vendor.spec_path, spec_changed_at(context, vendor) / 1e9)
    except DocumentError as error:
        return unknown(KIND, Reason.BAD_CHECKPOINT, str(error))
    if missing:
        return missing
    if not request.gpus and not any(plugin.registered.values()):
        return not_applicable(KIND, "no GPU is granted to this machine, and none is advertised")
    if not_running := _not_running(vendor, plugin):
        return not_running
    gpus = {gpu for ids in plugin.registered.values() for each in ids if (gpu := vendor.gpu_of(each, request))}
    # The GPUs that this run or an earlier one found advertised since the plugin began to serve.
    name = f"device-plugin-{vendor.name}"
    noted = notes.load(name)
    once_advertised = gpus.union(noted["known"] if noted.get("begun") == plugin.begun else ())
    notes.save(name, {"begun": plugin.begun, "known": sorted(once_advertised)})
    outdated = not vendor.plugin_rescans and published_at > plugin.begun_at
    in_spec = {gpu for name in published if (gpu := vendor.gpu_of(name, request))}
    condition = _compare(vendor, request, in_spec, gpus, plugin.registered, once_advertised if outdated else None)
    return condition._replace(advertised=len(in_spec & gpus))


def _plugin_sockets(system: System, vendor: MachineVendor) -> dict[str, int | None]:
    """Return the processes that listen on the sockets of the vendor's plugin, by path; None if nobody listens."""
    names = fnmatch.filter(system.some_entries(PLUGINS, NAMES_READ), vendor.plugin_sockets)[:SOCKETS]
    return {path: system.listening_process(path) for path in (f"{PLUGINS}/{name}" for name in names)}


def _read_plugin(system: System, vendor: MachineVendor, ages: Ages) -> Plugin:
    sockets = _plugin_sockets(system, vendor)
    serving = [path for path, process in sockets.items() if process is not None]
    dead = [path for path in sockets if path not in serving]
    try:
        # Links are not followed: pods of device plugins may write in this directory, and may put a link there.
        written = system.identity(CHECKPOINT, follow=False).mtime_ns
        registered = parse_checkpoint(system.read_untrusted(CHECKPOINT, CHECKPOINT_LIMIT)[0])
        times = {path: system.identity(path, follow=False).mtime_ns for path in serving}
    except FileNotFoundError:
        return Plugin(serving, dead)
    except OSError as error:
        raise DocumentError(f"{CHECKPOINT}: cannot be read: {error.strerror}") from error
    by_resource = {
        name: ids
        for name, ids in registered.items()
        if gives_gpus(name, vendor.resource_prefix, vendor.harmless_resources)
    }
    # The times are converted by `ages` before they are compared: the wall clock may have been set between two of them.
    begun = [(ages.changed_at(path, mtime_ns / 1e9), mtime_ns) for path, mtime_ns in times.items()]
    begun_at, newest = max(begun, default=(-math.inf, 0))
    up_to_date = ages.changed_at(CHECKPOINT, written / 1e9) >= begun_at
    return Plugin(serving, dead, by_resource, newest, begun_at, up_to_date)


def parse_checkpoint(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the ids of the registered devices, by resource. Raises DocumentError.

    All versions of Kubernetes since 1.10 write this part of the file in the same way. The checksum is not verified,
    because it depends on how Go prints the structure.
    """
    hint = "see the kubelet's log; the kubelet writes the file again when a device plugin registers"
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DocumentError(f"{CHECKPOINT}: not JSON: {error}", hint) from error
    content, where = document, ""
    for key in ("Data", "RegisteredDevices"):
        if not isinstance(content, dict):
            break
        content, where = content.get(key), f"{where}.{key}".lstrip(".")
    if not isinstance(content, dict):
        raise DocumentError(f"{CHECKPOINT}: {f'key {where}' if where else 'it'} is not an object", hint)
    registered = {}
    for resource, listed in content.items():
        # Go writes a slice without elements as null or as [].
        ids = [] if listed is None else listed
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise DocumentError(f"{CHECKPOINT}: key {where}[{resource[:100]!a}] is not a list of strings", hint)
        registered[resource] = tuple(ids)
    return registered


def published_devices(system: System, vendor: MachineVendor, granted: Request) -> tuple[AllocatableDevice, ...]:
    """Return the devices in the published specification, of which the machine's last report has the names.

    Raises OSError, ValueError or DocumentError.
    """
    report = parse_object(REPORT_NAME, system.read(f"{MACHINE_REPORT_DIRECTORY}/{REPORT_NAME}", SIZE_LIMIT))
    # With several vendors, the names are qualified.
    names = frozenset(each.rpartition("=")[2] for each in strings(REPORT_NAME, report, "cdi_devices"))
    return vendor.allocatable(parse_json(system.read_untrusted(vendor.spec_path)[0]), granted, names)


def device_name(device: AllocatableDevice) -> str:
    """Return the device's name, such as a UUID."""
    return device.cdi_names[0].rpartition("=")[2]


def offered_gpus(system: System, vendor: MachineVendor, granted: Request, ages: Ages) -> set[str] | None:
    """Return the granted GPUs that pods may still get from the vendor's device plugin, by their PCI addresses.

    None if the kubelet has never had a plugin. A GPU is left out only if the plugin's list cannot mean it: an id of an
    unknown form may be any GPU's. The kubelet keeps the list of a plugin that has just ended for five minutes, and a
    plugin that starts again may offer a GPU that it had withdrawn. Raises OSError.
    """
    if not system.is_directory(PLUGINS):
        return None
    try:
        plugin = _read_plugin(system, vendor, ages)
    except DocumentError:
        return set(granted.gpus)
    if not (plugin.serving or plugin.dead or plugin.registered):
        return None
    if plugin.serving and not plugin.up_to_date:
        return set(granted.gpus)
    listed = {vendor.gpu_of(each, granted) for ids in plugin.registered.values() for each in ids}
    names = dict[str, str]()
    with contextlib.suppress(OSError, ValueError, DocumentError):
        devices = published_devices(system, vendor, granted)
        names = {vendor.gpu_of(device_name(each), granted): each.pci_address for each in devices}
    return {gpu for gpu in granted.gpus if any(names.get(each, gpu) == gpu for each in listed)}


class Allocation(NamedTuple):
    """Devices that the kubelet gave to a pod."""

    pod: str
    """The pod's uid."""
    resource: str
    ids: tuple[str, ...]


def allocations(data: bytes) -> tuple[Allocation, ...]:
    """Return what pods were given, from the kubelet's checkpoint. Raises DocumentError.

    Ids are listed by NUMA node since Kubernetes 1.21, and as one list before (PodDevicesEntry in checkpoint.go). A pod
    that has ended stays listed until the kubelet admits another one.
    """

    def allocation(where: str, item: dict[str, Any]) -> Allocation:
        ids = item.get("DeviceIDs") or []
        lists = ids.values() if isinstance(ids, dict) else [ids]
        listed = [each for found in lists if isinstance(found, list) for each in found]
        pod, resource = (get(where, item, key, str) for key in ("PodUID", "ResourceName"))
        return Allocation(pod, resource, strings(where, {"DeviceIDs": listed}, "DeviceIDs"))

    content = get(CHECKPOINT, parse_object(CHECKPOINT, data), "Data", dict)
    # Go writes a slice without elements as null or as [].
    return objects(CHECKPOINT, {"Data": content.get("PodDeviceEntries") or []}, "Data", allocation)


CLAIMS_LIMIT = 4 << 20
"""Bytes of the largest record of claims that is read."""


class Claim(NamedTuple):
    """A claim that agent.dra has prepared for the kubelet. Devices that it only monitors are left out."""

    namespace: str
    name: str
    uid: str
    devices: frozenset[str]
    """Their names in ResourceSlices."""
    cdi_names: frozenset[str]


def prepared_claims(system: System) -> tuple[Claim, ...]:
    """Return the claims of this node's pods. Raises OSError or DocumentError.

    agent.dra.claims writes the record. This module cannot import that one, which needs libraries.
    """

    def claim(where: str, item: dict[str, Any]) -> Claim:
        devices = [require_object(where, each) for each in get(where, item, "devices", list)]
        had = [each for each in devices if not each.get("admin")]
        namespace, name, uid = (get(where, item, key, str) for key in ("namespace", "name", "uid"))
        cdi_names = frozenset(each for device in had for each in strings(where, device, "cdi_names"))
        return Claim(namespace, name, uid, frozenset(get(where, each, "device", str) for each in had), cdi_names)

    try:
        document = parse_object(DRA_CLAIMS, system.read(DRA_CLAIMS, CLAIMS_LIMIT))
    except FileNotFoundError:
        return ()
    accept_version(DRA_CLAIMS, document, 1)
    return objects(DRA_CLAIMS, document, "claims", claim)


def _not_running(vendor: MachineVendor, plugin: Plugin) -> Condition | None:
    """Return the condition if a part of the plugin is not running, or the kubelet has no list from it; else None."""
    advice = f"see the log of the device plugin's pod for {vendor.resource_prefix}*"
    refused = f"no connection is accepted at {_in_words(plugin.dead)}"
    if not plugin.serving:
        if not plugin.dead and not plugin.registered:
            message = f"no device plugin for {vendor.resource_prefix}* has registered with the kubelet"
            return unknown(KIND, Reason.NO_DEVICE_PLUGIN, f"{message}; pods can still ask for CDI devices by name")
        why = refused if plugin.dead else f"its socket in {PLUGINS} is gone"
        return false(KIND, Reason.DEVICE_PLUGIN_DOWN, f"the device plugin is not running: {why}; {advice}")
    if plugin.dead:
        # Each resource has its own socket: one that is served says nothing about the others.
        why = f"{refused}, only at {_in_words(plugin.serving)}"
        advice += "; remove a socket that no plugin uses any longer"
        return false(KIND, Reason.DEVICE_PLUGIN_DOWN, f"{why}; {advice}")
    if not plugin.up_to_date:
        serves = f"the device plugin serves {_in_words(plugin.serving)}"
        message = f"{serves}, but the kubelet has no list of devices from it yet; if that lasts, {advice}"
        return false(KIND, Reason.NOT_REGISTERED, message)
    return None


def _compare(
    vendor: MachineVendor,
    request: Request,
    in_spec: set[str],
    gpus: set[str],
    registered: Mapping[str, tuple[str, ...]],
    once_advertised: set[str] | None,
) -> Condition:
    """Compare the GPUs in the CDI specification with the advertised ones, and return the condition.

    The GPUs' identities are compared, because time-slicing and MIG change the counts. `once_advertised` has the GPUs
    that the plugin has advertised since it started. It is None if the plugin notices the CDI specification's last
    change without a restart.
    """
    resources = [f"{quoted(resource, NAME_SHOWN)}: {len(ids)}" for resource, ids in sorted(registered.items())]
    counts = first_of(resources, NAMES_SHOWN)
    if request.gpus and not in_spec:
        return unknown(
            KIND, Reason.NOT_PUBLISHED, f"no CDI specification names the granted GPUs yet, see CDISpecCurrent; {counts}"
        )
    missing, stale = in_spec - gpus, gpus - in_spec
    pairs = ((resource, each) for resource, ids in registered.items() for each in ids)
    foreign = {f"{resource}={each}" for resource, each in pairs if not vendor.gpu_of(each, request)}
    if missing and foreign:
        message = f"the device plugin advertises ids of an unknown form ({_in_words(foreign)})"
        why = f"it is unknown whether they stand for {_in_words(missing)}: check Allocatable in `kubectl describe node`"
        return unknown(KIND, Reason.UNKNOWN_IDS, f"{message}; {why}")
    parts = [f"not advertised, although granted: {_in_words(missing)}"] if missing else []
    parts += [f"advertised, but not (or no longer) in the CDI specification: {_in_words(stale)}"] if stale else []
    message = f"{'; '.join(parts)}; see the log of the device plugin, and restart its pod"
    # If a plugin no longer advertises a GPU that it once advertised, it considers that GPU unhealthy. Such a GPU must
    # not cause a restart: a restarted plugin would offer the unhealthy GPU to pods again.
    if once_advertised is not None and (missing - once_advertised or stale):
        why = "the plugin started before the CDI specification last changed, and looks for GPUs only when it starts"
        return false(KIND, Reason.DEVICE_PLUGIN_RESTART_NEEDED, f"{message}: {why}")
    if missing:
        return false(KIND, Reason.GPUS_MISSING, f"{message} once the GPUs are healthy")
    if stale:
        return false(KIND, Reason.STALE_GPUS, message)
    return true(KIND, Reason.ADVERTISED, f"every GPU in the CDI specification is advertised ({counts})")


def used_plugins(conditions: list[Condition]) -> list[Condition]:
    """Of several vendors' conditions of one type, return those that count for the machine.

    For GPUsAdvertised: if any vendor's device plugin is used, the conditions of vendors without a used plugin are left
    out. For any other type, all conditions count.
    """
    used = [each for each in conditions if each.reason not in (Reason.NO_DEVICE_PLUGIN, Reason.NOT_APPLICABLE)]
    return used if conditions[0].type is KIND and used else conditions


def _in_words(names: Iterable[str]) -> str:
    return first_quoted(sorted(names), NAMES_SHOWN, NAME_SHOWN)


def _with_plugin_spec(system: System, vendor: MachineVendor, request: Request, advertised: Condition) -> Condition:
    """Return GPUsAdvertised, which was True, with the remark or the fault of the plugin's own specification.

    The plugin has one if it is configured with a CDI strategy: pods then get the devices of that one, not of the
    agent's. The agent never edits that file.
    """
    try:
        # Links are not followed: pods of device plugins may write in this directory, and may put a link there.
        spec, own = parse_json(system.read_untrusted(vendor.plugin_spec)[0]), None
        with contextlib.suppress(OSError, ValueError):
            own = parse_json(system.read_untrusted(vendor.spec_path)[0])
        live = live_numbers(system, request.devices)
        problems = vendor.plugin_spec_problems(spec, own, request, live, system.leads_to_something)
    except FileNotFoundError:
        return advertised
    except ValueError as error:
        problems = (f"it is not JSON: {error}",)
    if not problems:
        return advertised._replace(message=f"{advertised.message}; the plugin's own {vendor.plugin_spec} is in order")
    what = f"the device plugin's own CDI specification {vendor.plugin_spec} is out of date"
    why = f"{what}: {first_of(problems, PROBLEMS_SHOWN, '; ')}"
    advice = "restart its pod, which writes the file again, or remove it if the plugin uses another strategy now"
    return false(KIND, Reason.PLUGIN_SPEC_OUTDATED, f"{why}; {advice}")


# If `restart_device_plugin` is set, the plugin's container is stopped through the CRI, and the kubelet starts it again,
# as it does with every container of a DaemonSet. Other containers are not affected. The next run sees the result.

SOCKET = "/run/containerd/containerd.sock"
"""containerd's socket, if nothing else is known."""
GRACE = 10
"""Seconds for the plugin to exit after SIGTERM."""
CONNECT_LIMIT = 10
"""Seconds for the CRI to answer."""
CRICTL_LIMIT = 60
"""Seconds that crictl may run."""
RESTART_INTERVAL = 300.0
"""Minimum seconds between two restarts. The kubelet's own delay before it starts a container again grows up to this."""
UNIT = "unbounded-agent-restart-device-plugin"
SHOWN_ID = 13
"""Characters of a container's id that a message shows, as in crictl's tables."""
CONTAINER = re.compile(r"(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?")
"""The part of a cgroup's path that names a container: `cri-containerd-ID.scope` (systemd) or `ID` (cgroupfs)."""


def _restart(context: Context, vendor: MachineVendor) -> str:
    """Restart the plugin if it may be restarted now, and return a sentence about the result.

    The plugin is restarted at most once for each change of the CDI specification: a second restart would not help. But
    if a container could not be stopped, that is tried again. Between two attempts are at least RESTART_INTERVAL.
    """
    system, notes = context.system, context.notes
    name = f"device-plugin-restart-{vendor.name}"
    noted = notes.load(name)
    spec, now, number = spec_changed_at(context, vendor), time.monotonic(), int(noted.get("number", 0)) + 1
    # A socket with several names may be another plugin's: any pod that may write in the directory can make a hard link.
    processes = {
        process
        for path, process in _plugin_sockets(system, vendor).items()
        if process is not None and system.link_count(path) == 1
    }
    containers = sorted({found for process in processes if (found := _container(system, process))})
    same, is_early = noted.get("spec") == spec, number > 1 and now - float(noted.get("at", 0)) < RESTART_INTERVAL
    if same and (is_early or not {*containers} & {*noted.get("containers", ())}):
        return str(noted.get("told"))
    if is_early:
        since = f"it was restarted less than {RESTART_INTERVAL:.0f} s ago"
        return f"{since}; a later run restarts it if that is still needed"
    if not containers:
        return "it is not restarted, because it is not running in a pod's container"
    if (crictl := system.find_program("crictl")) is None:
        return "it is not restarted: install crictl in the machine's image, or let `up` do it (binaries.crictl_version)"
    stopped = ", ".join(each[:SHOWN_ID] for each in containers)
    what = f"restart {number} since the machine's boot stops container {stopped}"
    failed = ", which the one before could not" if same else ""
    sentence = f"{what} through the CRI{failed}: if this lasts, see `journalctl -u {UNIT}` in the machine"
    # Noted before the restart: if it could not be noted afterwards, each run would restart the plugin again.
    notes.save(name, {"spec": spec, "at": now, "number": number, "told": sentence, "containers": containers})
    try:
        # A transient unit stops the containers. It is not waited for: a plugin may take some time to exit.
        properties = f"--property=RuntimeMaxSec={CRICTL_LIMIT}"
        unit = ("systemd-run", "--quiet", "--no-block", "--collect", f"--unit={UNIT}", properties)
        endpoint = f"unix://{socket_path(context) or SOCKET}"
        stop = (crictl, f"--runtime-endpoint={endpoint}", f"--timeout={CONNECT_LIMIT}s", "stop", f"--timeout={GRACE}")
        system.run(*unit, *stop, *containers, timeout=20)
    except CommandError as error:
        notes.save(name, noted)
        return f"it cannot be restarted: {error}"
    return sentence


def _container(system: System, process: int) -> str:
    """Return the id of a process's container, by its cgroup; empty outside pods, or if the process has exited."""
    try:
        cgroups = system.read(f"/proc/{process}/cgroup", 1 << 16).decode(errors="replace").splitlines()
    except OSError:
        return ""
    for path in (line.split(":", 2)[-1] for line in cgroups):
        # The cgroups of all pods' containers are below kubepods or kubepods.slice.
        parts = path.partition("kubepods")[2].split("/")
        ids = [match[1] for each in parts if (match := CONTAINER.fullmatch(each))]
        if ids:
            return ids[0]
    return ""


# Dynamic Resource Allocation: agent.dra offers the GPUs. It is a separate service, because it talks to the kubelet and
# the API server, and the GPU setup never waits for these. Here, its status is only read.

DRA_UNIT = "unbounded-agent-dra"


def settle_offer(context: Context, vendors: Sequence[AllocatableVendor]) -> Condition:
    """Publish the allocatable devices, and return GPUsAdvertised. Raises OSError."""
    system, content, published = context.system, render_allocatable(vendors), b""
    # If it is missing or damaged, it is written again.
    with contextlib.suppress(OSError):
        published = system.read(ALLOCATABLE)
    if published != content:
        system.write(ALLOCATABLE, content, 0o600)
    granted = {gpu for request in context.handoff.requests for gpu in request.gpus}
    allocatable = {device.pci_address for vendor in vendors for device in vendor.devices}
    if not granted:
        return not_applicable(KIND, "no GPU is granted to this machine")
    status = _dra_status(system, context.notes)
    if isinstance(status, Condition):
        return status
    offered = {gpu for offer in status.offers for gpu in offer.gpus}
    return _compare_offers(status, granted, allocatable, offered)._replace(advertised=len(granted & offered))


def _dra_status(system: System, notes: Notes) -> DraStatus | Condition:
    if missing := _no_kubelet(system):
        return missing
    status, silent = DraStatus(0.0), ""
    try:
        status = parse_dra_status(system.read(DRA_STATUS))
        with noted_ages(notes) as ages:
            if ages.of(DRA_STATUS, status.at) > DRA_STATUS_SILENT_AFTER:
                silent = f"has reported nothing since {rfc3339(status.at)}"
    except FileNotFoundError:
        silent = "has reported nothing since the machine's start"
    except DocumentError as error:
        silent = f"wrote a status that cannot be read: {error}"
    if silent:
        effect = "no pod with a GPU can start or end, but running pods keep their GPUs"
        advice = f"see `systemctl status {DRA_UNIT}` in the machine"
        return false(KIND, Reason.DRA_DRIVER_DOWN, f"{DRA_UNIT}.service {silent}; {effect}; {advice}")
    if status.reason:
        return Condition(KIND, Status.FALSE, status.reason, status.message)
    if not status.registered:
        message = f"the kubelet has not accepted {DRA_UNIT}.service as a driver yet, so no pod can start with a GPU"
        why = status.message or "if that lasts, see the logs of both"
        return false(KIND, Reason.NOT_REGISTERED, f"{message}; {why}")
    return status


def _compare_offers(status: DraStatus, granted: set[str], allocatable: set[str], offered: set[str]) -> Condition:
    """Return GPUsAdvertised. All sets have PCI addresses. `allocatable` has the GPUs that CDI specifications name."""
    for offer in status.offers:
        if offer.reason:
            return Condition(KIND, Status.FALSE, offer.reason, offer.message)
    if not allocatable:
        message = "no CDI specification names the granted GPUs yet, see CDISpecCurrent"
        return unknown(KIND, Reason.NOT_PUBLISHED, message)
    where = f"the ResourceSlices of node {status.node}"
    advice = f"if that lasts, see `journalctl -u {DRA_UNIT}` in the machine"
    if missing := allocatable - offered:
        message = f"not in {where} yet, although ready for pods: {_in_words(missing)}; {advice}"
        return false(KIND, Reason.GPUS_MISSING, message)
    if stale := offered - granted:
        message = f"in {where}, but not (or no longer) granted: {_in_words(stale)}; {advice}"
        return false(KIND, Reason.STALE_GPUS, message)
    parts = [f"{where} have {counted(sum(len(offer.devices) for offer in status.offers), 'device')}"]
    if tainted := [name for offer in status.offers for name in offer.tainted]:
        parts.append(f"{len(tainted)} of them tainted, so new pods do not get them: {_in_words(tainted)}")
    if without := granted - allocatable:
        parts.append(f"without {_in_words(without)}, which no CDI specification names: see CDISpecCurrent")
    return true(KIND, Reason.ADVERTISED, "; ".join(filter(None, (*parts, status.message))))


# Validation markers: files that tell the vendor's pods what works in this machine.

MARKERS = ConditionType.VALIDATION_MARKERS_SET
MARKERS_NOTE = "validation-markers"
"""Name of the note that has content if there may be markers of the agent."""
FIRST_LINE = "# Written by unbounded-agent, which removes this file if it is no longer true.\n"
"""By this line the agent recognises its own markers. A shell that reads a marker takes the line for a comment."""
MARKER_LIMIT = 4096
"""Bytes of the largest marker that is read. A larger one is not the agent's."""


def settle_markers(
    context: Context, vendor: MachineVendor, request: Request, conditions: tuple[Condition, ...]
) -> tuple[Condition, ...]:
    """Make the vendor's markers that the conditions prove, remove refuted ones, and return ValidationMarkersSet.

    A marker is refuted if a condition that it needs is False; a fault of only some GPUs refutes nothing, because the
    markers are about all. If none of these conditions is False, but one is Unknown, the marker stays as it is. If
    markers are not configured, those that the agent made before are removed, and an empty tuple is returned. If the
    vendor has no markers, an empty tuple is returned too.
    """
    configured = context.handoff.validation_markers
    if not (configured or context.notes.may_have(MARKERS_NOTE)) or not vendor.markers:
        return ()
    condition = attempt(MARKERS, lambda: _settle_markers(context, vendor, request, conditions))
    return (condition,) if configured else ()


def _settle_markers(
    context: Context, vendor: MachineVendor, request: Request, conditions: tuple[Condition, ...]
) -> Condition:
    system, wanted = context.system, context.handoff.validation_markers and bool(request.gpus)
    if wanted:
        # Noted before the first write, so that a marker of a killed run is removed later.
        context.notes.save(MARKERS_NOTE, {"made": True})
    foreign, doubts = list[str](), dict[ConditionType, Condition]()
    faults = [
        each
        for each in conditions
        if each.status is not Status.TRUE and not (each.gpus and set(each.gpus) < set(request.gpus))
    ]
    for marker in vendor.markers:
        doubtful = {each.type: each for each in faults if each.type in marker.proof}
        doubts |= doubtful
        present, content = _marker_content(system, marker.path), (FIRST_LINE + marker.content).encode()
        if present is not None and not present.startswith(FIRST_LINE.encode()):
            foreign.append(marker.path)
        elif not wanted or any(each.status is Status.FALSE for each in doubtful.values()):
            system.remove(marker.path)
        elif not doubtful and present != content:
            system.write(marker.path, content)
    if not wanted:
        context.notes.save(MARKERS_NOTE, {})
        return not_applicable(MARKERS, "no GPU is granted to this machine")
    if foreign:
        advice = (
            "if that is the GPU Operator's validator, unset validation_markers on the host; otherwise remove the file"
        )
        return false(MARKERS, Reason.FOREIGN_FILE, f"{' and '.join(foreign)}: made by another program; {advice}")
    if refuted := [each.type for each in doubts.values() if each.status is Status.FALSE]:
        message = f"a file is missing while a condition that it stands for is False: {', '.join(refuted)}"
        return false(MARKERS, Reason.NOT_PROVEN, message)
    if doubts:
        return unknown(MARKERS, Reason.NOT_PROVEN, f"waiting for {', '.join(doubts)}")
    return true(MARKERS, Reason.SET, f"{' and '.join(each.path for each in vendor.markers)} exist")


def _marker_content(system: System, path: str) -> bytes | None:
    """Return the content; None if there is no file. Raises OSError.

    The content is empty for what cannot be the agent's: a directory, a link, a file larger than MARKER_LIMIT.
    """
    try:
        return system.read_untrusted(path, MARKER_LIMIT)[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in UNUSABLE:
            return b""
        raise


# The files that `up` put into this machine.

CHANGED_FILES_NOTE = "node-files"
DELAY = 45.0
"""Seconds between the first run after a boot and the first comparison. The kubelet's start waits for the first runs,
and computing the digests of Kubernetes' programs takes a third of a second. DELAY is less than the minute between two
runs of the timer, so the timer's next run compares."""


def changed_files(context: Context) -> tuple[str, ...]:
    """Return the paths of the files that `up` put into this machine and that have changed since. Raises OSError.

    They are sorted. The list itself counts as changed if it cannot be used. Nothing is compared in the first DELAY
    seconds after a boot. A file is read again only if its identity has changed.
    """
    system, notes = context.system, context.notes
    if not system.exists(NODE_FILES):
        return ()
    noted, now = notes.load(CHANGED_FILES_NOTE), time.monotonic()
    first_run, before = noted.get("first_run", now), noted.get("compared", {})
    if not noted:
        notes.save(CHANGED_FILES_NOTE, {"first_run": first_run, "compared": before})
    if now - first_run < DELAY:
        return ()
    try:
        listed = parse_node_files(NODE_FILES, system.read(NODE_FILES))
    except (DocumentError, OSError):
        return (NODE_FILES,)
    # The agent itself may have added its import to this file, or may add it later.
    listed.pop(MAIN, None)
    compared = {path: _compared(path, *original, before.get(path, []), system) for path, original in listed.items()}
    notes.save(CHANGED_FILES_NOTE, {"first_run": first_run, "compared": compared})
    return tuple(sorted(path for path, result in compared.items() if not result or not result[-1]))


def _compared(path: str, digest: str, size: int, before: list[Any], system: System) -> list[Any]:
    """Return the file's identity, and as last element whether its content is the original; [] if it cannot be read."""
    try:
        identity = system.identity(path)
        if before[:-1] == list(identity):
            return before
        # A file of another size is not read: it may be very large.
        return [*identity, identity.size == size and system.digest(path) == digest]
    except OSError:
        return []
