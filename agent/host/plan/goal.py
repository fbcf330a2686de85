"""Plans the goal from configuration, facts and the time. Pure: the same facts in any order give the same bytes."""

from collections.abc import Collection, Container, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.driver_roots import named_roots
from agent.host.plan.live_devices import owners, permissions_to_keep, withdrawn_nodes
from agent.host.plan.nspawn import (
    ADDRESS_FAMILIES,
    BIND,
    KNOWS_ADDRESS_FAMILIES,
    bindable,
    device_allow,
    escape,
    fixed_lines,
    not_carried,
    render_drop_in,
    render_nspawn,
    split_mounts,
)
from agent.host.state.gpus import REMEMBERED
from agent.host.vendors import host_vendor, rank
from agent.model.conditions import Reason
from agent.model.device import PCI_ADDRESS
from agent.model.facts import (
    FIXED_FORM,
    READ_ONLY,
    READ_WRITE,
    UNSTAGED,
    Absent,
    Broken,
    DeviceAllow,
    Facts,
    Gpu,
    Granted,
    LiveSettings,
    MachineFacts,
    Remembered,
    RememberedGpu,
    Seen,
    StagedRoot,
    Unseen,
    VendorFacts,
)
from agent.model.goal import DriverRoots, Fault, Goal, Grant, MachineGoal, Share, WriteFile, fault, gpu_nodes
from agent.model.handoff import DRA, OTHER_DEVICES, GrantedDevice, GrantedFile, Handoff, Request, render_handoff
from agent.model.paths import (
    MACHINE_HOST_NVIDIA,
    REMEMBERED_GPUS,
    handoff_file,
    machine_files,
    nspawn_file,
    unit_drop_in,
)
from agent.model.text import counted, sha256


class Plan(Struct, frozen=True):
    """The goal, and the machines that have no goal, each with the reason."""

    goal: Goal
    held: dict[str, str]
    """Machines that must not change, each with the reason. The machine is missing; it has an error; a fact that its
    goal needs could not be observed (fail static); or it is no longer configured, but must keep its settings."""
    skipped: dict[str, str]
    """Machines that get nothing, each with the reason. They have no files of the agent, and get none."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Unexpected errors by machine; the plan leaves such a machine as it is."""


def plan(config: Config, facts: Facts, now: float = 0.0) -> Plan:
    """Return what each machine should have, and the driver roots for it. `now` is in seconds since the epoch."""
    faults = {machine.name: machine.root for machine in facts.machines if isinstance(machine.root, Fault)}
    return _plan_around(faults, config, facts, now)


def _plan_around(faults: Mapping[str, Fault], config: Config, facts: Facts, now: float) -> Plan:
    """Return the plan, in which machines with a fault stay as they are."""
    former = _no_longer_configured(config, facts)
    held, skipped, goals = {**former}, dict[str, str](), list[MachineGoal]()
    roots = _Roots(facts.next_driver_root_index)
    unseen = [vendor.devices.why for vendor in facts.vendors if not isinstance(vendor.devices, tuple | Absent)]
    unseen += [facts.staged_unseen] if facts.staged_unseen else []
    unknown = _unknown_grants(config, facts)
    template = facts.template_device_allow
    without_gpus = not any(vendor.gpus for vendor in facts.vendors)
    # First the machines whose settings name GPUs, then the others, both in the order of their names.
    configured = [each for each in facts.machines if each.name in config.machines]
    configured.sort(key=lambda each: (not isinstance(config.machines[each.name].gpus, list), each.name))
    for machine in configured:
        name, settings = machine.name, config.machines[machine.name]
        if isinstance(machine.root, Absent | Broken):
            # The machine's file system may not be mounted yet: keep its settings.
            held[name] = machine.root.why
        elif name in faults:
            held[name] = faults[name].why
        elif unseen or name in unknown:
            held[name] = "; ".join([*unseen, *unknown.get(name, ())])
        elif machine.may_run and machine.live_unseen:
            # Without the running machine's record, its goal would lack the withdrawn nodes and the permissions to keep.
            held[name] = machine.live_unseen
        elif not isinstance(template, tuple):
            held[name] = template.why
        elif (
            without_gpus
            and name not in facts.candidates
            and not settings.has_extras
            and not any(path in facts.files and facts.files[path].owned for path in machine_files(name))
        ):
            skipped[name] = "no GPU on this host"
        else:
            try:
                selection = _selection(name, config, facts, faults, former, goals)
                goals.append(_machine_goal(machine, config, facts, template, roots, selection))
            except Exception as error:
                # The machine keeps its GPUs, but a machine that was planned before it may have got one of them: plan
                # all machines again.
                return _plan_around({**faults, name: fault("plan its settings", error)}, config, facts, now)
    waiting = tuple(root for root in roots.waiting if root not in roots.wanted)
    goals.sort(key=lambda each: each.name)
    remembered = _remember(config, facts, goals, held, now)
    return Plan(Goal(tuple(roots.wanted), tuple(goals), waiting, remembered), held, skipped, faults)


def _no_longer_configured(config: Config, facts: Facts) -> dict[str, str]:
    """Return machines that keep their settings although they are no longer configured, each with the reason.

    Without the agent's settings, the option -U in systemd-nspawn@.service would apply at the next start, and change the
    owners of the machine's files.
    """
    held = {}
    for machine in (each for each in facts.machines if each.name not in config.machines):
        if not machine.stays_ended:
            held[machine.name] = "it is no longer in the configuration; its settings stay while it runs"
        elif machine.kept_from_boot_by and not isinstance(machine.root, Absent):
            held[machine.name] = (
                "it is no longer in the configuration; its settings stay, because it starts when the host boots; "
                f"`{machine.kept_from_boot_by}` ends that"
            )
    return held


class _Roots:
    """Assigns indices to driver roots that are not on disk yet. Machines with the same root get the same index."""

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        self.wanted: list[StagedRoot] = []
        self.waiting: list[StagedRoot] = []

    def assign(self, root: StagedRoot | None, roots: list[StagedRoot]) -> StagedRoot | None:
        """Return the root with an index, and add it to `roots`: `wanted` or `waiting`."""
        if root is None:
            return None
        if root.index == UNSTAGED:
            same = [each for each in (*self.wanted, *self.waiting) if replace(each, index=UNSTAGED) == root]
            root = same[0] if same else replace(root, index=self.next_index)
            self.next_index = max(self.next_index, root.index + 1)
        if root not in roots:
            roots.append(root)
        return root


# The record of granted GPUs: which to remember, and since when some are lost.


def _remember(
    config: Config, facts: Facts, goals: Iterable[MachineGoal], held: Container[str], now: float
) -> Seen[Remembered]:
    """Return the record as it should be. `held` contains the machines that keep what they have.

    If the address of a recorded GPU is gone from the PCI bus, the GPU is lost. There are two exceptions, in which the
    GPU leaves the record: its UUID is now at another address, or the settings of its machines no longer request it. A
    GPU that is still on the bus leaves the record once no machine has it.
    """
    before = facts.remembered
    if isinstance(before, Unseen | Absent):
        return before
    if isinstance(before, Broken):
        before = Remembered(damage=before.why)
    if not all(isinstance(vendor.devices, tuple | Absent) for vendor in facts.vendors):
        # If the PCI bus could not be listed, every GPU would seem to be lost.
        return before
    granted: dict[str, set[str]] = {}
    for goal in goals:
        for address in (address for grant in goal.grants for address in grant.gpus):
            granted.setdefault(address, set()).add(goal.name)
    recorded = {each.pci_address: each for each in before.gpus}
    present = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    uuids = {gpu.uuid for gpu in present.values() if gpu.uuid}
    gpus = []
    for address in sorted({*recorded, *granted}):
        gpu, old = present.get(address), recorded.get(address)
        had = [(each, config.machines[each].gpus) for each in (old.machines if old else ()) if each in config.machines]
        if gpu is not None:
            model, uuid = (old.model, old.uuid) if old else ("", "")
            machines = {*granted.get(address, ()), *(name for name, _ in had if name in held)}
            entry = RememberedGpu(address, gpu.vendor, gpu.model or model, gpu.uuid or uuid, tuple(sorted(machines)))
        elif old is not None and old.uuid not in uuids:
            # The texts `all` and `count=N` name no GPU: they request any that the machine had.
            named = {address, old.uuid}
            machines = {name for name, wanted in had if isinstance(wanted, str) or named.intersection(wanted)}
            entry = RememberedGpu(address, old.vendor, old.model, old.uuid, tuple(sorted(machines)), old.lost or now)
        else:
            continue
        if entry.machines:
            gpus.append(entry)
    return Remembered(tuple(gpus), before.damage)


def remembered_files(remembered: Seen[Remembered]) -> tuple[WriteFile, ...]:
    """Return both copies of the record, in the order of writing; none if the record could not be read."""
    if not isinstance(remembered, Remembered):
        return ()
    content = REMEMBERED.render(remembered)
    return tuple(WriteFile(path, content) for path in REMEMBERED_GPUS)


# Divides the host's GPUs among the machines.
#
# GPUs that settings name are not available to `count=N`, nor are those of a machine that keeps its settings although it
# is no longer configured. A machine keeps the GPUs that it has. `all` means all GPUs, even those that other machines
# have. If the agent meets an unexpected error (a fault) in its work on a machine, that machine keeps its GPUs, and no
# other machine gets one of them, except GPUs that may be shared.


def _selection(
    name: str,
    config: Config,
    facts: Facts,
    faults: Collection[str],
    former: Collection[str],
    planned: Iterable[MachineGoal],
) -> "Selection":
    """Return the machine's GPUs. A candidate has those of its machine, which was planned before it."""
    machine = facts.candidates.get(name)
    if machine is None:
        return select(facts.vendors, config.machines[name].gpus, _share(name, config, facts, faults, former, planned))
    grants = (grant for goal in planned if goal.name == machine for grant in goal.grants)
    return select(facts.vendors, [gpu for grant in grants for gpu in grant.gpus], Share())


def _share(
    name: str,
    config: Config,
    facts: Facts,
    faults: Collection[str],
    former: Collection[str],
    planned: Iterable[MachineGoal],
) -> Share:
    """Return what limits the machine's choice. `planned` are the goals of the machines before it.

    `former` are the machines that keep their settings although they are not configured.
    """
    settings = {each: found for each, found in config.machines.items() if each not in facts.candidates}
    granted = {each.name: _had(each) or frozenset() for each in facts.machines if each.name in settings}
    # The GPUs that settings name, even for machines that do not exist yet.
    named = {gpu for each in settings.values() if isinstance(each.gpus, list) for gpu in each.gpus}
    taken = _with_addresses(named, facts)
    # Until a machine gets a new grant, it has its old one. Machines whose settings name GPUs count too, although
    # `taken` should have their GPUs already: if the settings name a GPU by its UUID, its address is unknown until the
    # driver has initialised the GPU.
    has = {**granted, name: frozenset[str]()}
    for goal in (each for each in planned if each.name in settings):
        has[goal.name] = frozenset(gpu for each in goal.grants for gpu in (*each.gpus, *each.detached))
    taken |= {gpu for other, gpus in has.items() if settings[other].gpus != "all" for gpu in gpus}
    current, own = granted.get(name, frozenset()), set[str]()
    reserved: dict[str, str] = {}
    for machine in sorted(facts.machines, key=lambda each: each.name):
        # What the machine was granted or may still open, as far as that is known. The paths of nodes that GPUs share
        # may be among it. That does no harm, because no GPU's address equals a path.
        live_owners = machine.live.owners.values() if isinstance(machine.live, LiveSettings) else ()
        may_open, shared = {*machine.kept_gpus, *live_owners}, set[str]()
        if machine.name == name:
            own = may_open
            continue
        if machine.name in former and _counts(settings[name]):
            boots = f" but starts when the host boots; `{machine.kept_from_boot_by}` releases the GPU"
            until = boots if machine.stays_ended and machine.kept_from_boot_by else ""
            why = f"still held by machine {machine.name}, which is no longer in the configuration{until}"
        elif machine.name in faults and machine.name in settings and (wanted := settings[machine.name].gpus) != "all":
            why = f"still held by machine {machine.name}, for which the agent had an unexpected error"
            why = f"{why} ({Reason.INTERNAL_ERROR})"
            # Other machines may name the GPUs that its settings name, too.
            shared = _with_addresses(wanted, facts) if isinstance(wanted, list) else shared
        else:
            continue
        if _had(machine) is None:
            # The machine may have any GPU.
            why = f"perhaps {why}"
            may_open |= {gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus}
        reserved |= dict.fromkeys(may_open - shared, why)
    # A fault or a former machine must not cost this one a GPU that it already has.
    reserved = {gpu: why for gpu, why in reserved.items() if gpu not in own}
    return Share(frozenset(taken), current, current & facts.draining, reserved)


def _had(machine: MachineFacts) -> frozenset[str] | None:
    """Return the GPUs that the machine was granted last or, without a usable record of that, those that it may open.

    None if neither is known.
    """
    if isinstance(machine.granted, Granted | Absent):
        return frozenset(machine.kept_gpus)
    return frozenset(machine.live.owners.values()) if machine.live else None


def _counts(settings: MachineSettings) -> bool:
    """Return whether the settings request a number of GPUs."""
    return isinstance(settings.gpus, str) and settings.gpus != "all"


def _with_addresses(names: Collection[str], facts: Facts) -> set[str]:
    """Return the names of GPUs (addresses or UUIDs), and for each known UUID also the GPU's address."""
    present = (gpu for vendor in facts.vendors for gpu in vendor.gpus)
    return {*names, *(gpu.pci_address for gpu in present if gpu.uuid in names)}


def _unknown_grants(config: Config, facts: Facts) -> dict[str, list[str]]:
    """Return the machines whose share or driver root cannot be determined, each with the reasons.

    Both depend on the machine's own grant. A machine with `count=N` could get another machine's GPU, so its share
    depends on the grants of all machines, except those with `all`. A damaged grant is discarded, unless it alone could
    say which GPUs a running machine with `count=N` has.
    """
    unseen = []
    for machine in (each for each in facts.machines if each.name in config.machines):
        granted = machine.granted
        alone = _counts(config.machines[machine.name]) and not machine.ended and _had(machine) is None
        if isinstance(granted, Unseen) or (alone and isinstance(granted, Broken)):
            unseen.append((machine.name, granted.why))
    unknown = {}
    for name, settings in config.machines.items():
        counts = _counts(settings)
        why = [why for other, why in unseen if other == name or (counts and config.machines[other].gpus != "all")]
        if why:
            unknown[name] = why
    return unknown


# Selects the GPUs, of any vendor, that a machine's settings request.


class Selection(Struct, frozen=True):
    """The selected GPUs of all vendors."""

    gpus: tuple[Gpu, ...]
    """The GPUs, including detached ones. With `count=N`, a detached GPU is included only while it is being drained, or
    if no other GPU can replace it."""
    problems: tuple[str, ...] = ()
    """Requests of the settings that the host cannot fulfil, one sentence each."""
    wrong_driver: tuple[Gpu, ...] = ()
    """GPUs that the settings request, but that are bound to a wrong driver."""


def select(vendors: tuple[VendorFacts, ...], wanted: str | list[str], share: Share) -> Selection:
    """Return the GPUs for one machine. `wanted` is its setting `gpus`."""
    present = sorted(gpu for vendor in vendors for gpu in vendor.gpus)
    # GPUs without a driver are included, because their driver may be loaded later. GPUs that driver_override reserves
    # for another driver are left out.
    fitting = [
        gpu
        for gpu in present
        if (gpu.driver or gpu.override) in ("", *host_vendor(gpu.vendor).drivers) and not gpu.excluded
    ]
    wrong = tuple(gpu for vendor in vendors for gpu in host_vendor(vendor.vendor).misbound_gpus(vendor.gpus))
    excluded = tuple(_excluded(gpu.pci_address) for gpu in present if gpu.excluded)
    if isinstance(wanted, list):
        chosen: list[Gpu] = []
        problems: list[str] = []
        missed = tuple(gpu for gpu in wrong if gpu.pci_address in wanted or gpu.uuid in wanted)
        for name in wanted:
            named = [gpu for gpu in fitting if name in (gpu.pci_address, gpu.uuid)]
            chosen += [gpu for gpu in named if gpu not in chosen and gpu.pci_address not in share.reserved]
            problems += _why_reserved(named, share)
            if not named and all(name not in (gpu.pci_address, gpu.uuid) for gpu in missed):
                problems.append(_why_not_found(name, present))
        return Selection(tuple(chosen), tuple(problems), missed)
    # A GPU without a driver is selected only if a driver is expected, or if the machine already has the GPU: an
    # integrated GPU, for example, may have no driver on purpose. A virtual function is a part of another GPU on this
    # host, and meant for a virtual machine: it is selected only if it has a driver and the machine already has this
    # function, which it may have got by its address, and which pods may use.
    expected = {vendor.vendor for vendor in vendors if vendor.driver_expected}
    usable = [
        gpu
        for gpu in fitting
        if (gpu.pci_address in share.current and (gpu.driver or not gpu.virtual))
        or (not gpu.virtual and (gpu.driver or gpu.vendor in expected))
    ]
    reserved = _why_reserved(usable, share)
    available = [gpu for gpu in usable if gpu.pci_address not in share.reserved]
    if wanted == "all":
        # If a GPU of another vendor is usable, a GPU with a wrong driver is not reported: it may be meant for the
        # host's display.
        missed = tuple(gpu for gpu in wrong if all(each.vendor == gpu.vendor for each in usable))
        return Selection(tuple(available), reserved if usable else excluded, missed)
    count, free = int(wanted.removeprefix("count=")), [gpu for gpu in available if gpu.pci_address not in share.taken]
    # Detached GPUs come last, except the machine's draining GPUs: processes may still use these, and meanwhile an
    # administrator may attach them again. Of all GPUs that do not come last, the machine's current ones come first: a
    # new GPU with a lower address must not replace a GPU that pods use.
    last = {gpu.pci_address for gpu in free if gpu.detached} - share.draining

    def order(gpu: Gpu) -> tuple[bool, bool, bool, int, bool, str]:
        # An integrated GPU is rarely wanted, and has a low address. It comes after all others, and the driver comes
        # after that and after the vendor: the driver of a preferred GPU may load late, and a machine keeps the GPU that
        # it gets first.
        current = gpu.pci_address in share.current
        kind = gpu.integrated, rank(gpu.vendor), not gpu.driver
        return gpu.pci_address in last, not current, *kind, gpu.pci_address

    best = tuple(sorted(free, key=order)[:count])
    if len(best) == count:
        return Selection(best)
    found = f"the host has {counted(len(free), 'usable GPU')}"
    if len(free) < len(usable):
        others = len(usable) - len(free)
        found = f"other machines have {others} of the host's {len(usable)} usable GPUs"
    problem = f"the configuration asks for {counted(count, 'GPU')}, but {found}"
    return Selection(best, (problem, *reserved, *excluded), wrong)


def _why_reserved(gpus: Iterable[Gpu], share: Share) -> tuple[str, ...]:
    addresses = [gpu.pci_address for gpu in gpus if gpu.pci_address in share.reserved]
    return tuple(f"GPU {address} is {share.reserved[address]}" for address in addresses)


def _excluded(name: str) -> str:
    return (
        f"GPU {name} is excluded by a parameter of its kernel module: see `modprobe -c | grep -iE 'exclu|gpublacklist'`"
    )


def _why_not_found(name: str, present: list[Gpu]) -> str:
    """Return the sentence about a requested GPU that no machine can get, or that was not found on the host."""
    for gpu in present:
        if name in (gpu.pci_address, gpu.uuid):
            return _excluded(name) if gpu.excluded else _wrong_driver(gpu, name)
    unknown = [gpu.pci_address for gpu in present if not gpu.uuid and gpu.driver in host_vendor(gpu.vendor).drivers]
    if unknown and not PCI_ADDRESS.fullmatch(name):
        return (
            f"GPU {name} is not on this host, or is one of {', '.join(unknown)}, whose UUIDs are unknown; name the GPU "
            "by its PCI address, or run the command that initialises it, if `unbounded-agent doctor` shows one"
        )
    return f"GPU {name} is not on this host"


def _wrong_driver(gpu: Gpu, name: str) -> str:
    found = f"kernel driver {gpu.driver}" if gpu.driver else f"driver_override {gpu.override}"
    return f"GPU {name} has {found}, not {' or '.join(host_vendor(gpu.vendor).drivers)}"


# One machine's files, handoff and live settings.


def _machine_goal(
    machine: MachineFacts,
    config: Config,
    facts: Facts,
    template: tuple[DeviceAllow, ...],
    roots: _Roots,
    selection: "Selection",
) -> MachineGoal:
    name, settings = machine.name, config.machines[machine.name]
    grants = _grants(machine, settings, facts, roots, selection)
    nodes = tuple(sorted(node for grant in grants for node in grant.nodes))
    directories = tuple(sorted(directory for grant in grants for directory in grant.directories))
    mounts, missing_mounts = split_mounts(settings.extra_mounts, facts, config.machines)
    carry = tuple(settings.node.carry) if settings.node else ()
    nspawn = render_nspawn(
        name,
        settings.nspawn,
        nodes,
        directories,
        mounts,
        machine.carried,
        read_only=gpu_nodes(grants),
        dns=_resolv_conf(settings, facts),
        restrict_families=_knows_families(name, facts),
        identity=machine.identity,
    )
    allow = device_allow(settings, template, nodes)
    allow += permissions_to_keep(machine, facts, allow)
    drop_in = render_drop_in(name, settings, allow)
    # The digest has all configured mounts, even those without a source: a source that appears or disappears must not
    # change it.
    configured = render_nspawn(
        name,
        settings.nspawn,
        (),
        mounts=tuple(settings.extra_mounts),
        carried=machine.carried,
        identity=machine.identity,
    )
    fixed = FIXED_FORM + sha256(b"\n".join(fixed_lines(configured, drop_in)))
    handoff = Handoff(
        name,
        facts.architecture,
        tuple(_request(grant) for grant in grants if grant.vendor != OTHER_DEVICES or grant.nodes),
        default_runtime=settings.default_runtime,
        restart_device_plugin=settings.restart_device_plugin,
        containerd_drop_in=settings.containerd_drop_in,
        validation_markers=settings.validation_markers,
        withdrawn=withdrawn_nodes(machine, {node.path for node in nodes}),
        allocation=DRA if settings.allocation == DRA else "",
    )
    # The machine still has a GPU that is being drained.
    draining = [gpu for grant in grants for gpu in grant.detached if gpu in facts.draining]
    granted = Granted(
        handoff.generation,
        (*(gpu for grant in grants for gpu in grant.gpus), *draining),
        {grant.vendor: grant.driver_root.index for grant in grants if grant.driver_root},
    )
    present = owners(facts)
    return MachineGoal(
        name=name,
        grants=grants,
        nspawn=WriteFile(nspawn_file(name), nspawn),
        drop_in=WriteFile(unit_drop_in(name), drop_in),
        handoff=handoff,
        handoff_file=WriteFile(handoff_file(name), render_handoff(handoff)),
        granted=granted,
        live=LiveSettings(
            fixed=fixed,
            allow=allow,
            nodes={
                **{node.path: f"{node.number.major}:{node.number.minor}" for node in nodes},
                **{each.path: f"{READ_WRITE if each.writable else READ_ONLY}{each.inode}" for each in directories},
            },
            owners={entry.node: present[entry.node] for entry in allow if entry.node in present},
            mounts=(*(mount.target for mount in mounts), *machine.carried),
            withdrawn=handoff.withdrawn,
        ),
        missing=(*missing_mounts, *(not_carried(name, each) for each in carry if each not in machine.carried)),
    )


def _grants(
    machine: MachineFacts, settings: MachineSettings, facts: Facts, roots: _Roots, selection: Selection
) -> tuple[Grant, ...]:
    """Return a grant for each vendor that handoffs name, even if the machine gets nothing of that vendor.

    They name a vendor if the host has one of its GPUs, or if every handoff has to name it. When handoffs stop naming a
    vendor, a machine half that knows this vendor withdraws what the machine had of it. For other devices, there is a
    grant only if some are configured. The problems of the selection are reported once: with the first vendor that has a
    GPU on this host or, if none has, with the first vendor.
    """
    vendors = sorted(
        (each for each in facts.vendors if each.gpus or host_vendor(each.vendor).in_every_handoff),
        key=lambda each: each.vendor,
    )
    current_roots = named_roots(machine) or {}
    reporting = next((each.vendor for each in (*(each for each in vendors if each.gpus), *vendors)), "")
    grants = []
    for vendor in vendors:
        choice = DriverRoots(facts.staged, current_roots.get(vendor.vendor))
        gpus = tuple(gpu for gpu in selection.gpus if gpu.vendor == vendor.vendor)
        grant = host_vendor(vendor.vendor).grant(vendor, settings, choice, gpus)
        if vendor.vendor == OTHER_DEVICES and not grant.nodes and not grant.missing:
            continue
        # Each vendor reports its own GPUs with a wrong driver, because its conditions say what to do next.
        wrong = [gpu for gpu in selection.wrong_driver if gpu.vendor == vendor.vendor]
        refused = [node for node in grant.nodes if not bindable(node.path)]
        problems = (
            *(selection.problems if vendor.vendor == reporting else ()),
            *(_wrong_driver(gpu, gpu.pci_address) for gpu in wrong),
            *grant.problems,
            *(f"{node.path!r} cannot be written into a .nspawn file" for node in refused),
        )
        grants.append(
            replace(
                grant,
                nodes=tuple(node for node in grant.nodes if node not in refused),
                driver_root=roots.assign(grant.driver_root, roots.wanted),
                waiting_root=roots.assign(grant.waiting_root, roots.waiting),
                problems=problems,
            )
        )
    return tuple(grants)


def _request(grant: Grant) -> Request:
    """Return what the machine half sets up for a grant.

    A GPU that has no node yet, for example because its driver is not loaded, counts as granted: no other machine gets
    it. But no pod can use it yet, so the handoff does not name it.
    """
    root = grant.driver_root
    with_node = {node.pci_address for node in grant.nodes}
    devices = []
    for node in grant.nodes:
        # Only the nodes of MIG instances need the capability. They belong to a GPU, so they have a PCI address.
        capability = node.capability if node.pci_address else ""
        number = node.number
        devices.append(GrantedDevice(node.path, node.kind, number.major, number.minor, node.pci_address, capability))
    return Request(
        vendor=grant.vendor,
        gpus=tuple(address for address in grant.gpus if address in with_node),
        devices=tuple(devices),
        driver_version=root.version if root else "",
        driver_root=f"{MACHINE_HOST_NVIDIA}/{root.index}" if root else "",
        files=tuple(sorted(GrantedFile(file.target, file.link) for file in root.files)) if root else (),
        sockets=grant.services,
        environment=grant.environment,
        cdi_modes=grant.cdi_modes,
        cdi_hooks=grant.cdi_hooks,
    )


def _knows_families(name: str, facts: Facts) -> bool:
    """Return whether the host's nspawn knows RestrictAddressFamilies=."""
    if isinstance(facts.systemd_version, int):
        return facts.systemd_version >= KNOWS_ADDRESS_FAMILIES
    # The settings must not change only because systemd does not answer.
    present = facts.files.get(nspawn_file(name))
    return bool(present and isinstance(present.content, bytes) and ADDRESS_FAMILIES.encode() in present.content)


def _resolv_conf(settings: MachineSettings, facts: Facts) -> str:
    """Return the machine's ResolvConf= (systemd.nspawn(5)); empty for nspawn's own choice.

    A node passes its DNS servers on to pods, which cannot reach systemd-resolved on the host's loopback interface.
    nspawn would choose systemd-resolved while that listens, whatever /etc/resolv.conf names, and for a machine with its
    own network it would choose no DNS servers at all.
    """
    if settings.node is None:
        return ""
    return "replace-uplink" if facts.stub_resolver else "replace-host"


# Derives a running machine's live settings from copies of the files that it started with.
#
# That is necessary if the record of the live settings is missing (prepare@ did not write it, or it was damaged since),
# or does not say with which settings the machine started.


def with_live(planned: Plan, facts: Facts) -> tuple[Facts, Mapping[str, Fault]]:
    """Return the facts with derived live settings for machines that need them, and the unexpected errors by machine."""
    goals = {goal.name: goal for goal in planned.goal.machines}
    machines, faults = [], {}
    for machine in facts.machines:
        if machine.started and machine.name in goals:
            try:
                live = _derived(goals[machine.name], machine, machine.started)
                if machine.live is not None:
                    live = replace(machine.live, fixed=live.fixed, mounts=live.mounts)
                machine = replace(machine, live=live)
            except Exception as error:
                faults[machine.name] = fault("determine which settings it started with", error)
        machines.append(machine)
    return replace(facts, machines=tuple(machines)), faults


def _derived(goal: MachineGoal, machine: MachineFacts, started: tuple[bytes, bytes]) -> LiveSettings:
    """Return the live settings that follow from the files at the start; no `fixed` if these need a restart."""
    paths = {path: escape(path).encode() for path in goal.live.nodes}
    wanted = fixed_lines(goal.nspawn.content, goal.drop_in.content, paths.values())
    same = fixed_lines(*started, paths.values()) == wanted
    drop_in = started[1].decode(errors="replace").splitlines()
    lines = (line for line in drop_in if line.startswith("DeviceAllow=/dev/char/"))
    at_start = [DeviceAllow.parse(line.partition("=")[2]) for line in lines]
    numbers = {entry.node for entry in at_start}
    # Daemons' directories are left out, because it is unknown which of them existed at the start. So they are bound
    # again.
    bound = {bind[1] for bind in map(BIND.fullmatch, started[0].splitlines()) if bind}
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
