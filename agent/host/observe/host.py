"""Observes the host. Each pass reads everything again, except the unchanged lists of loader caches (Memory)."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import asdict

from agent.config.checks import is_below, plain
from agent.config.settings import CONTROL_PATHS, Config, mountable
from agent.host.observe.checks import observe_checks
from agent.host.observe.driver_roots import observe_staged
from agent.host.observe.machine import (
    ignored_settings,
    observe_machine,
    observe_start,
    observe_template,
    observe_units,
    observe_version,
    unseen_machine,
    with_properties,
)
from agent.host.state.gpus import observe_gpus, observe_remembered
from agent.host.state.records import MARK, OWNED_FILES, is_ours, machines_with_state
from agent.host.vendors import HOST_VENDORS
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, CommandError
from agent.model.facts import (
    Absent,
    Broken,
    CacheEntry,
    Facts,
    FileState,
    GpuFacts,
    MountSource,
    Placement,
    Seen,
    Unseen,
    VendorFacts,
)
from agent.model.goal import fault
from agent.model.handoff import DRA
from agent.model.paths import (
    HOST_NVIDIA,
    LOADER_CACHE,
    MACHINES_STATE,
    OWNED,
    PCI_DEVICES,
    RELOAD_PENDING,
    REMEMBERED_GPUS,
    STATE,
    WENT_BACK,
    device_allow_drop_in,
    machine_files,
    machine_of,
    machine_unit,
    mount_unit,
)
from agent.system.deadlines import call_source
from agent.system.devices import DeviceSource
from agent.system.files import System
from agent.system.journal import Ages
from agent.system.trust import classify_error, discard, path_components, read_seen, untrusted_component
from agent.vendors.host_vendor import Sources

# Where GPUs are in the host: NUMA node and PCI root complex.


ROOT = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/")
"""A root complex in the path of a device in sysfs (pci_create_root_bus in the kernel)."""
NUMA_NODE = re.compile(r"-?[0-9]{1,4}")


def observe_placements(config: Config, vendors: Iterable[VendorFacts], system: System) -> Mapping[str, Placement]:
    """Return the placement of every GPU, by PCI address; none if no machine uses DRA, because only DRA needs them."""
    placements = {}
    uses_dra = any(each.allocation == DRA for each in config.machines.values())
    for address in (gpu.pci_address for vendor in vendors if uses_dra for gpu in vendor.gpus):
        path = f"{PCI_DEVICES}/{address}"
        target, node = read_seen(system.read_link, path), read_seen(system.read_text, f"{path}/numa_node")
        # Take the first root complex in the path. Devices behind an Intel VMD controller have a second one below it.
        root = ROOT.search(target) if isinstance(target, str) else None
        number = NUMA_NODE.fullmatch(node.strip()) if isinstance(node, str) else None
        placements[address] = Placement(int(number[0]) if number else -1, root[1] if root else "")
    return placements


# Which DNS servers programs on this host use.


RESOLV_CONF = "/etc/resolv.conf"
STUB = "/run/systemd/resolve/stub-resolv.conf"
"""Names systemd-resolved, at 127.0.0.53, as the DNS server. On most hosts that use systemd-resolved, RESOLV_CONF is a
link to this file, even while systemd-resolved is not running."""
UPLINK = "/run/systemd/resolve/resolv.conf"
"""Names the DNS servers that systemd-resolved itself queries (systemd-resolved.service(8))."""
SERVERS = 3
"""How many servers the C library and the kubelet use of a file (MAXNS in resolv.h)."""
BROADCAST = ipaddress.IPv4Address("255.255.255.255")
LIMIT = 1 << 16
"""Bytes of the largest file that is read."""


def uses_stub_resolver(system: System) -> bool:
    """Return whether programs send DNS queries to systemd-resolved on the host's loopback interface."""
    target = read_seen(system.read_link, RESOLV_CONF)
    # Most distributions make the link relative to /etc.
    return isinstance(target, str) and target.removeprefix("..") == STUB


def dns_servers(path: str, system: System) -> tuple[list[str], list[str]]:
    """Return the DNS servers in a file like resolv.conf(5) that are used, and those of them that pods can ask."""
    found = read_seen(lambda each: system.read(each, LIMIT), path)
    lines = found.decode(errors="replace").splitlines() if isinstance(found, bytes) else []
    words = [line.split() for line in lines]
    servers = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver"][:SERVERS]
    return servers, [each for each in servers if _is_same_in_pods(each)]


def _is_same_in_pods(server: str) -> bool:
    """Return whether an address leads to the same server in a pod, which has a network of its own.

    A link-local address of IPv6 does not: it is that of a host on the pod's own link. One of IPv4 does: pods send their
    packets to the node, which forwards them. So the resolvers of clouds can be asked, such as 169.254.169.254.
    """
    try:
        address = ipaddress.ip_address(server.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local:
            return False
        address = address.ipv4_mapped or address
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or address == BROADCAST)


# The sources of extra mounts: whether they exist, and who controls the paths to them.


def observe_sources(config: Config, system: System) -> dict[str, Seen[MountSource]]:
    """Return each source, by its path in the settings. Each look has a time limit: a network mount may hang."""
    mounts = [mount for settings in config.machines.values() for mount in settings.extra_mounts]
    # /var/lib/machines, for example, may be a link.
    real_paths = [read_seen(system.real_path, path) for path in CONTROL_PATHS if mounts]
    control_paths = {*CONTROL_PATHS, *(path for path in real_paths if isinstance(path, str))}
    writable = {mount.source for mount in mounts if not mount.read_only}

    def resolve(path: str) -> MountSource:
        real = system.real_path(path)
        # statfs(2) triggers an automount, which lstat(2) and the like do not.
        system.free_bytes(real)
        return MountSource(real, path_components(system, path))

    def observe_source(path: str) -> MountSource | Broken:
        source = call_source(path, lambda: resolve(path))
        try:
            mountable(plain(source.path), read_only=path not in writable, control_paths=control_paths)
        except ValueError as error:
            return Broken(str(error))
        if step := next((each for each in source.components if is_below(each, control_paths)), ""):
            return Broken(f"the path to it leads through {step}, which controls the host or other machines")
        # A user who can replace the source with a link could give root in the machine access to any part of the host.
        if why := call_source(f"the path to {path}", lambda: untrusted_component(system, path, any_last_owner=True)):
            return Broken(f"{why}: the path could be redirected")
        return source

    return {path: read_seen(observe_source, path) for path in sorted({mount.source for mount in mounts})}


def observe_nspawn_sources(config: Config, system: System) -> dict[str, str]:
    """Return the real paths of what `nspawn.extra` mounts, by the path in that setting.

    A path that cannot be resolved is left out. The result is empty if no machine has `extra_mounts`, because these
    paths are only compared with the paths to the sources of `extra_mounts`.
    """
    if not any(settings.extra_mounts for settings in config.machines.values()):
        return {}
    paths = {path for settings in config.machines.values() for path in settings.nspawn.mounted_paths()}
    seen = {path: read_seen(lambda path: call_source(path, lambda: system.real_path(path)), path) for path in paths}
    return {path: real for path, real in seen.items() if isinstance(real, str)}


# The files that a goal may contain, and the ownership record.


def read_owned(system: System) -> tuple[dict[str, str] | Unseen, str]:
    """Return the ownership record (digests by path), and a problem with it. A damaged one is discarded: it is empty."""
    match OWNED_FILES.read_seen(OWNED, system):
        case Unseen(why) as unseen:
            return unseen, why
        case Absent():
            return {}, ""
        case Broken(why):
            # `discard` also logs the damage. That is needed because this pass replaces the damaged file, and then
            # observes again: the facts at the end of the pass no longer show the damage.
            discard(OWNED, why, system)
            return {}, why
        case found:
            return found.files, ""


def observe_files(
    configured: Collection[str], others: Iterable[str], owned: Mapping[str, str] | Unseen, system: System
) -> dict[str, FileState]:
    """Return the states of these files: the machines' files, both copies of the GPU record, and all recorded files."""
    of_machines = (
        path for name in {*configured, *others} for path in (*machine_files(name), device_allow_drop_in(name))
    )
    digests = {} if isinstance(owned, Unseen) else owned
    states = {}
    for path in sorted({*REMEMBERED_GPUS, *of_machines, *digests}):
        # Directories are not trusted: root in a machine can remount the machine's handoff directory writable, and put
        # anything in a file's place.
        found = read_seen(system.read_untrusted, path)
        content = found[0] if isinstance(found, tuple) else found
        if path in digests:
            is_owned = not isinstance(content, bytes) or is_ours(content, digests[path])
        else:
            # Without a record of it, only the first line of a file shows whether the agent wrote it. A configured
            # machine's file is written again, and so recorded, if the record can be read.
            is_owned = isinstance(content, bytes) and content.startswith(MARK)
            is_owned = is_owned and (isinstance(owned, Unseen) or machine_of(path) not in configured)
        states[path] = FileState(content, is_owned)
    return states


# The dynamic loader's cache, as `ldconfig -p` lists it (glibc, elf/cache.c).


LDCONFIG = "/sbin/ldconfig"
HEADER = re.compile(r"([0-9]{1,9}) libs found in cache `.*'")
FOOTER = "Cache generated by: "
"""The beginning of the last line, if glibc 2.33 or newer wrote the cache."""
LINE = re.compile(r"\t(?P<soname>.+?) \((?P<tags>[^()]*)\) => (?P<path>/.*)")

ARCHITECTURES = {"x86-64": "x86_64", "AArch64": "aarch64"}
"""Architectures by the tag that follows `libc6` in a line. Lines for i386 have no such tag. Other tags, such as x32,
are unsupported."""


Listing = tuple[CacheEntry, ...]
"""The output of `ldconfig -p`. The order matters: the loader takes the first entry of a soname."""


def parse_listing(output: str) -> Listing | Broken:
    """Parse the output of `ldconfig -p`. If it is cut short, it is Broken: libraries would count as absent."""
    header, _, body = output.partition("\n")
    match = HEADER.fullmatch(header)
    if match is None:
        return Broken(f"ldconfig -p: the output does not start with the number of libraries, but with {header[:80]!r}")
    lines = [line for line in body.split("\n") if line and not line.startswith(FOOTER)]
    if len(lines) < int(match[1]):
        return Broken(f"ldconfig -p: the output lists only {len(lines)} of {match[1]} libraries")
    # Some lines of an unknown form are left out. If no line has the known one, glibc has a new one.
    parsed = [each for each in map(LINE.fullmatch, lines) if each]
    if lines and not parsed:
        return Broken(f"ldconfig -p: no line has the known form; the first is {lines[0][:80]!r}")
    return tuple(CacheEntry(each["soname"], _architecture(each["tags"]), each["path"]) for each in parsed)


def _architecture(tags: str) -> str:
    """Return the architecture in tags such as `libc6,x86-64, hwcap: "x86-64-v3"`; empty if it is not supported."""
    # Tags are compared as a whole, because a hwcap may look like the tag of an architecture.
    kind, second, *_ = (*re.split(r", *", tags), "")
    if kind != "libc6":
        return ""
    return "i686" if not second or second.startswith(("hwcap: ", "OS ABI: ")) else ARCHITECTURES.get(second, "")


Listings = dict[str, tuple[FileIdentity, Listing]]
"""The last listings, by root, each with the identity that the cache file had then."""


def list_loader_cache(system: System, root: str = "/", known: Listings | None = None) -> Seen[Listing]:
    """List the loader cache of the host, or of the system in the directory `root`, with paths relative to that root.

    `known` gets the listing. ldconfig runs only if the cache file has changed since: an idle pass starts no process.
    """
    where, known = "" if root == "/" else f"{root}: ", {} if known is None else known
    last = known.pop(root, None)
    try:
        inner = system if root == "/" else system.below(root)
    except OSError as error:
        return classify_error(root, error)
    identity = read_seen(inner.identity, LOADER_CACHE)
    if isinstance(identity, Absent):
        return Absent(f"{where}{LOADER_CACHE}: no such file; run ldconfig")
    if not isinstance(identity, FileIdentity):
        return identity
    if last is None or last[0] != identity:
        # /sbin may be missing from a service's PATH, and some systems have ldconfig elsewhere.
        program = "ldconfig" if read_seen(system.exists, LDCONFIG) is False else LDCONFIG
        # With `-C`, the host's ldconfig can read the cache of any glibc. `-r` does not work here, because ldconfig then
        # calls chroot(2), which the service may not call.
        try:
            listing = parse_listing(
                system.run(program, "-p", *(("-C", inner.full_path(LOADER_CACHE)) if where else ()))
            )
        except CommandError as error:
            return Unseen(str(error))
        if isinstance(listing, Broken):
            return listing
        last = identity, listing
    known[root] = last
    return last[1]


class Memory(Struct, frozen=True):
    """What a pass remembers of the passes before it."""

    listings: Listings = field(default_factory=dict)
    ages: Ages = field(default_factory=Ages)
    """The ages of files."""


def observe(config: Config, system: System, devices: DeviceSource, memory: Memory) -> Facts:
    """Return the facts of one pass; what could not be observed is Unseen. Raises AgentError for the GPU notes."""
    owned, discarded = read_owned(system)
    with_state, not_listed = machines_with_state(system)
    if not_listed and (discarded or not owned):
        raise AgentError(f"cannot list {MACHINES_STATE}: which machines have settings of the agent is unknown")
    recorded = [] if isinstance(owned, Unseen) else [name for path in owned if (name := machine_of(path)) is not None]
    files = observe_files(config.machines, {*with_state, *recorded}, owned, system)
    # Include machines that are no longer configured, but still have the agent's settings, or may have.
    kept = (path for path, state in files.items() if state.owned or isinstance(state.content, Unseen))
    names = sorted({*config.machines, *recorded, *filter(None, map(machine_of, kept))})
    notes = observe_gpus(system)
    services = [service for vendor in HOST_VENDORS for service in vendor.services]
    parent_mount = mount_unit(HOST_NVIDIA)
    units = observe_units([*map(machine_unit, names), *services, parent_mount], system)

    sources = Sources(
        system=system,
        architecture=system.architecture(),
        pci=devices.pci_devices(),
        drm=devices.drm_devices(),
        loader_cache=lambda root: list_loader_cache(system, root, memory.listings),
        driver=config.driver,
        machines=config.machines,
        units={service: units[service].unit_state for service in services},
        started=lambda service: observe_start(units[service], system),
        lost=notes.lost,
        faults=notes.faults,
        detached=notes.detached,
    )
    machines = []
    for name in names:
        unit, node = with_properties(name, units[machine_unit(name)], system), config.machines.get(name)
        try:
            is_node = node is not None and node.node is not None
            machines.append(observe_machine(name, unit, system, memory.ages, is_node=is_node))
        except Exception as error:
            machines.append(unseen_machine(name, unit, fault("observe it", error)))
    template = observe_template(system)
    remembered, damage = observe_remembered(system)
    checks, not_checks = observe_checks(system, memory.ages)
    vendors = tuple(vendor.observe(sources) for vendor in HOST_VENDORS)
    told = read_seen(system.read_text, WENT_BACK)
    went_back = told.strip() if isinstance(told, str) else ""
    problems = (
        went_back,
        "" if isinstance(template, tuple) else template.why,
        discarded,
        notes.problem,
        damage,
        not_checks,
        *(each for name in names for each in ignored_settings(name, system)),
    )
    return Facts(
        architecture=sources.architecture,
        systemd_version=observe_version(system),
        template_device_allow=template,
        vendors=vendors,
        machines=tuple(machines),
        mounting_failed=units[parent_mount].unit_state == "failed",
        **asdict(observe_staged(system)),
        remembered=remembered,
        draining=notes.draining,
        gpus=GpuFacts(
            notes.faults,
            notes.tainted,
            notes.attached,
            notes.tests,
            notes.begun,
            frozenset(notes.resetting),
            notes.outdated,
            observe_placements(config, vendors, system),
        ),
        mount_sources=observe_sources(config, system),
        nspawn_sources=observe_nspawn_sources(config, system),
        problems=tuple(filter(None, problems)),
        went_back=went_back,
        state_free=read_seen(system.free_bytes, STATE),
        stub_resolver=uses_stub_resolver(system),
        # If this cannot be observed, assume a pending reload: at worst, systemd reloads its units once too often.
        reload_pending=read_seen(system.exists, RELOAD_PENDING) is not False,
        checks=checks,
        files=files,
    )
