"""Checks in the kubelet's files whether the granted GPUs are advertised, without asking the plugin or the API server.

The kubelet (pkg/kubelet/cm/devicemanager of k8s.io/kubernetes) writes its checkpoint when a plugin sends a list of
devices, and when a pod gets devices, but not when the kubelet starts. When a plugin exits, its devices become unhealthy
at once, but the kubelet writes the checkpoint only five minutes later. So the plugin's sockets are tried as well, and a
checkpoint that is older than the sockets proves nothing.
"""

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from agent.machine.cdi.spec import spec_changed_at
from agent.machine.context import Context
from agent.machine.notes import Notes, noted_ages
from agent.model.conditions import Condition, ConditionType, false, not_applicable, true, unknown
from agent.model.errors import DocumentError
from agent.model.extended_resources import gives_gpus
from agent.model.handoff import Request
from agent.model.reasons import Reason
from agent.model.text import first_of, first_quoted, quoted
from agent.system.ages import Ages
from agent.system.files import System
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
FIXED_BY_RESTART = (Reason.DEVICE_PLUGIN_RESTART_NEEDED, Reason.PLUGIN_SPEC_OUTDATED)
"""Reasons that a restart of the plugin fixes. The second one is from agent.machine.kubelet.plugin_spec."""

KIND = ConditionType.GPUS_ADVERTISED


class Plugin(NamedTuple):
    """A vendor's device plugin, as the kubelet's directory shows it."""

    serving: Mapping[str, int]
    """Sockets that accept connections, each with the id of the process that listens. The id is 0 for a process outside
    this PID namespace."""
    dead: tuple[str, ...] = ()
    """Sockets that nobody listens on."""
    registered: Mapping[str, tuple[str, ...]] | None = None
    """Ids of the vendor's registered devices by resource, according to the checkpoint; None without a checkpoint."""
    begun: int = 0
    """When the plugin began to serve: the time of its newest socket, in nanoseconds since the epoch."""
    begun_at: float = -math.inf
    """The same time by CLOCK_MONOTONIC."""
    up_to_date: bool = False
    """Whether the checkpoint was written after the plugin began to serve."""


def check_advertised(
    context: Context, vendor: MachineVendor, request: Request, published: tuple[str, ...]
) -> Condition:
    """Return GPUsAdvertised. `published` has the names of the devices in the CDI specification. Raises OSError."""
    condition = _by_kubelet(context, vendor, request, published)
    if not vendor.plugin_spec or not context.system.exists(vendor.plugin_spec):
        return condition
    # Imported here: few plugins make a specification of their own.
    from agent.machine.kubelet.plugin_spec import with_plugin_spec

    return with_plugin_spec(context.system, vendor, request, condition)


def _by_kubelet(context: Context, vendor: MachineVendor, request: Request, published: tuple[str, ...]) -> Condition:
    """Return GPUsAdvertised according to the kubelet's directory alone. Raises OSError."""
    system = context.system
    if not system.is_directory(PLUGINS):
        if not request.gpus:
            return not_applicable(KIND, "no GPU is granted to this machine")
        return unknown(KIND, Reason.NO_KUBELET, f"{PLUGINS} does not exist: no kubelet has run in this machine")
    try:
        with noted_ages(context.notes) as ages:
            plugin = _read_plugin(system, vendor, ages)
            published_at = ages.changed_at(vendor.spec_path, spec_changed_at(context, vendor) / 1e9)
    except DocumentError as error:
        return unknown(KIND, Reason.BAD_CHECKPOINT, str(error))
    in_spec = {gpu for name in published if (gpu := vendor.gpu_of(name, request))}
    if system.listening_process(KUBELET_SOCKET) is None:
        return unknown(
            KIND,
            Reason.KUBELET_DOWN,
            f"{KUBELET_SOCKET} accepts no connection: see `systemctl status kubelet` in the machine",
        )
    if not request.gpus and not any((plugin.registered or {}).values()):
        return not_applicable(KIND, "no GPU is granted to this machine, and none is advertised")
    not_running = _not_running(vendor, plugin)
    if not_running is not None:
        return not_running
    once_advertised = _once_advertised(context.notes, vendor, request, plugin)
    outdated = not vendor.plugin_rescans and published_at > plugin.begun_at
    registered = plugin.registered or {}
    condition = _compare(vendor, request, in_spec, registered, once_advertised if outdated else None)
    return condition._replace(advertised=len(in_spec & _gpus(vendor, request, registered)))


def _once_advertised(notes: Notes, vendor: MachineVendor, request: Request, plugin: Plugin) -> Set[str]:
    """Return the GPUs that this run or an earlier one found advertised since the plugin began to serve."""
    name = f"device-plugin-{vendor.name}"
    noted = notes.load(name)
    before = noted.get("known", []) if noted.get("begun") == plugin.begun else []
    gpus = {*before, *_gpus(vendor, request, plugin.registered or {})}
    notes.save(name, {"begun": plugin.begun, "known": sorted(gpus)})
    return gpus


def _gpus(vendor: MachineVendor, request: Request, registered: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {gpu for ids in registered.values() for each in ids if (gpu := vendor.gpu_of(each, request))}


def _gives_gpus(vendor: MachineVendor, resource: str) -> bool:
    return gives_gpus(resource, vendor.resource_prefix, vendor.harmless_resources)


def plugin_sockets(system: System, vendor: MachineVendor) -> dict[str, int | None]:
    """Return the processes that listen on the sockets of the vendor's plugin, by path; None if nobody listens."""
    names = fnmatch.filter(system.some_entries(PLUGINS, NAMES_READ), vendor.plugin_sockets)[:SOCKETS]
    return {path: system.listening_process(path) for path in (f"{PLUGINS}/{name}" for name in names)}


def _read_plugin(system: System, vendor: MachineVendor, ages: Ages) -> Plugin:
    """Return the vendor's device plugin. Raises DocumentError if the checkpoint is unusable, or OSError."""
    sockets = plugin_sockets(system, vendor)
    serving = {path: process for path, process in sockets.items() if process is not None}
    dead = tuple(path for path, process in sockets.items() if process is None)
    try:
        # Links are not followed: pods of device plugins may write in this directory, and may put a link there.
        written = system.identity(CHECKPOINT, follow=False).mtime_ns
        registered = parse_checkpoint(system.read_untrusted(CHECKPOINT, CHECKPOINT_LIMIT)[0])
        times = {path: system.identity(path, follow=False).mtime_ns for path in serving}
    except FileNotFoundError:
        return Plugin(serving, dead)
    except OSError as error:
        raise DocumentError(f"{CHECKPOINT}: cannot be read: {error.strerror}") from error
    by_resource = {name: ids for name, ids in registered.items() if _gives_gpus(vendor, name)}
    # The times are converted by `ages` before they are compared: the wall clock may have been set between two of them.
    begun = [(ages.changed_at(path, mtime_ns / 1e9), mtime_ns) for path, mtime_ns in times.items()]
    begun_at, newest = max(begun, default=(-math.inf, 0))
    up_to_date = ages.changed_at(CHECKPOINT, written / 1e9) >= begun_at
    return Plugin(serving, dead, by_resource, newest, begun_at, up_to_date)


def parse_checkpoint(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the ids of the registered devices, by resource. Raises DocumentError.

    All versions of Kubernetes write this part of the file in the same way, except that `Data` is missing before 1.10.
    The checksum is not verified, because it depends on how Go prints the structure.
    """
    hint = "see the kubelet's log; the kubelet writes the file again when a device plugin registers"
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{CHECKPOINT}: not JSON: {error}", hint) from error
    if not isinstance(document, dict):
        raise DocumentError(f"{CHECKPOINT}: not a JSON object", hint)
    content, where = document.get("Data", document), "Data"
    if isinstance(content, dict):
        content, where = content.get("RegisteredDevices"), "Data.RegisteredDevices"
    if not isinstance(content, dict):
        raise DocumentError(f"{CHECKPOINT}: key {where} is not an object", hint)
    registered = {}
    for resource, listed in content.items():
        # Go writes a slice without elements as null or as [].
        ids = [] if listed is None else listed
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise DocumentError(f"{CHECKPOINT}: key {where}[{resource[:100]!a}] is not a list of strings", hint)
        registered[resource] = tuple(ids)
    return registered


def _not_running(vendor: MachineVendor, plugin: Plugin) -> Condition | None:
    """Return the condition if a part of the plugin is not running, or the kubelet has no list from it; else None."""
    advice = f"see the log of the device plugin's pod for {vendor.resource_prefix}*"
    if not plugin.serving:
        if not plugin.dead and not plugin.registered:
            message = f"no device plugin for {vendor.resource_prefix}* has registered with the kubelet"
            return unknown(KIND, Reason.NO_DEVICE_PLUGIN, f"{message}; pods can still ask for CDI devices by name")
        why = f"its socket in {PLUGINS} is gone"
        if plugin.dead:
            why = f"no connection is accepted at {in_words(plugin.dead)}"
        return false(KIND, Reason.DEVICE_PLUGIN_DOWN, f"the device plugin is not running: {why}; {advice}")
    if plugin.dead:
        # Each resource has its own socket: one that is served says nothing about the others.
        why = f"no connection is accepted at {in_words(plugin.dead)}, only at {in_words(plugin.serving)}"
        return false(
            KIND, Reason.DEVICE_PLUGIN_DOWN, f"{why}; {advice}; remove a socket that no plugin uses any longer"
        )
    if not plugin.up_to_date:
        message = (
            f"the device plugin serves {in_words(plugin.serving)}, but the kubelet has no list of devices from it yet"
        )
        return false(KIND, Reason.NOT_REGISTERED, f"{message}; if that lasts, {advice}")
    return None


def _compare(
    vendor: MachineVendor,
    request: Request,
    in_spec: set[str],
    registered: Mapping[str, tuple[str, ...]],
    once_advertised: Set[str] | None,
) -> Condition:
    """Compare the GPUs in the CDI specification with the advertised ones, and return the condition.

    The GPUs' identities are compared, because time-slicing and MIG change the counts. `once_advertised` has the GPUs
    that the plugin has advertised since it started. It is None if the plugin notices the CDI specification's last
    change without a restart.
    """
    gpus = _gpus(vendor, request, registered)
    pairs = [(resource, each) for resource, listed in registered.items() for each in listed]
    foreign = {f"{resource}={each}" for resource, each in pairs if not vendor.gpu_of(each, request)}
    resources = [f"{quoted(resource, NAME_SHOWN)}: {len(ids)}" for resource, ids in sorted(registered.items())]
    counts = first_of(resources, NAMES_SHOWN)
    if request.gpus and not in_spec:
        return unknown(
            KIND, Reason.NOT_PUBLISHED, f"no CDI specification names the granted GPUs yet, see CDISpecCurrent; {counts}"
        )
    missing, stale = in_spec - gpus, gpus - in_spec
    if missing and foreign:
        message = f"the device plugin advertises ids of an unknown form ({in_words(foreign)})"
        why = f"it is unknown whether they stand for {in_words(missing)}: check Allocatable in `kubectl describe node`"
        return unknown(KIND, Reason.UNKNOWN_IDS, f"{message}; {why}")
    parts = [f"not advertised, although granted: {in_words(missing)}"] if missing else []
    parts += [f"advertised, but not (or no longer) in the CDI specification: {in_words(stale)}"] if stale else []
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


def in_words(names: Iterable[str]) -> str:
    """Return names of GPUs, devices or sockets, sorted, as a message shows them."""
    return first_quoted(sorted(names), NAMES_SHOWN, NAME_SHOWN)
