"""Plans the goal from configuration, facts and the time. Pure: the same facts in any order give the same bytes."""

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.before_start import CONFIGURED
from agent.host.plan.driver_roots import named_roots
from agent.host.plan.live_devices import owners, permissions_to_keep, withdrawn_nodes
from agent.host.plan.mounts import split_mounts
from agent.host.plan.nspawn import ADDRESS_FAMILIES, KNOWS_ADDRESS_FAMILIES, SYS_MODULE, bindable, render_nspawn
from agent.host.plan.remembered import remember
from agent.host.plan.selection import Selection, describe_wrong_driver, select
from agent.host.plan.shares import Shares, in_turn, unknown_grants
from agent.host.plan.unit_drop_in import device_allow, from_template, render_drop_in
from agent.host.vendors import host_vendor
from agent.model.device_allow import DeviceAllow
from agent.model.digest import sha256
from agent.model.driver_root import UNSTAGED, StagedRoot
from agent.model.facts import Absent, Broken, DeviceNode, Facts, VendorFacts
from agent.model.faults import Fault, fault
from agent.model.goal import DriverRoots, Goal, Grant, MachineGoal, OwnedFile, Share, gpu_nodes
from agent.model.granted import Granted
from agent.model.handoff import (
    DRA,
    OTHER_DEVICES,
    GrantedDevice,
    GrantedFile,
    Handoff,
    Request,
    render_handoff,
)
from agent.model.live import READ_ONLY, READ_WRITE, LiveSettings
from agent.model.paths import MACHINE_HOST_NVIDIA, handoff_file, machine_files, nspawn_file, unit_drop_in


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
    return _plan_around(_faults(facts), config, facts, now)


def _plan_around(faults: Mapping[str, Fault], config: Config, facts: Facts, now: float) -> Plan:
    """Return the plan, in which machines with a fault stay as they are."""
    held = _no_longer_configured(config, facts)
    skipped: dict[str, str] = {}
    machines: list[MachineGoal] = []
    roots = _Roots(facts.next_driver_root_index)
    no_root = {each.name: each.root.why for each in facts.machines if isinstance(each.root, Absent | Broken)}
    shares = Shares(config, facts, faults, held.keys())
    unseen = [vendor.devices.why for vendor in facts.vendors if not isinstance(vendor.devices, tuple | Absent)]
    unseen += [facts.staged_unseen] if facts.staged_unseen else []
    unknown = unknown_grants(config, facts, faults)
    # Without a running machine's record, its goal would lack the withdrawn nodes and the permissions to keep.
    unseen_live = {each.name: each.live_unseen for each in facts.machines if each.may_run and each.live_unseen}
    template = facts.template_device_allow
    for name, settings in in_turn(config):
        if name in no_root:
            # The machine's file system may not be mounted yet: keep its settings.
            held[name] = no_root[name]
        elif name in faults:
            held[name] = faults[name].why
        elif unseen or name in unknown:
            held[name] = "; ".join([*unseen, *unknown.get(name, ())])
        elif name in unseen_live:
            held[name] = unseen_live[name]
        elif not isinstance(template, tuple):
            held[name] = template.why
        elif (
            not any(vendor.gpus for vendor in facts.vendors)
            and not settings.has_extras
            and not _has_owned_files(facts, name)
        ):
            skipped[name] = "no GPU on this host"
        else:
            try:
                machine = _machine_goal(name, config, facts, template, roots, shares.share(name))
            except Exception as error:
                # The machine keeps its GPUs, but a machine that was planned before it may have got one of them: plan
                # all machines again.
                return _plan_around({**faults, name: fault("plan its settings", error)}, config, facts, now)
            shares.record_grants(name, settings, machine.grants)
            machines.append(machine)
    waiting = tuple(root for root in roots.waiting if root not in roots.wanted)
    machines.sort(key=lambda each: each.name)
    remembered = remember(config, facts, machines, held, now)
    return Plan(Goal(tuple(roots.wanted), tuple(machines), waiting, remembered), held, skipped, faults)


def _faults(facts: Facts) -> dict[str, Fault]:
    """Return the unexpected errors that occurred while observing machines."""
    return {machine.name: machine.root for machine in facts.machines if isinstance(machine.root, Fault)}


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

    def assign(self, grant: Grant) -> Grant:
        """Return the grant with indices for its roots."""
        serving = self._assign(grant.driver_root, self.wanted)
        waiting = self._assign(grant.waiting_root, self.waiting)
        return replace(grant, driver_root=serving, waiting_root=waiting)

    def _assign(self, root: StagedRoot | None, roots: list[StagedRoot]) -> StagedRoot | None:
        """Return the root with an index, and add it to `roots`."""
        if root is None:
            return None
        if root.index == UNSTAGED:
            assigned = [*self.wanted, *self.waiting]
            same = [each for each in assigned if replace(each, index=UNSTAGED) == root]
            root = same[0] if same else replace(root, index=self.next_index)
            self.next_index = max(self.next_index, root.index + 1)
        if root not in roots:
            roots.append(root)
        return root


def _has_owned_files(facts: Facts, machine: str) -> bool:
    return any(path in facts.files and facts.files[path].owned for path in machine_files(machine))


def _machine_goal(
    name: str, config: Config, facts: Facts, template: tuple[DeviceAllow, ...], roots: _Roots, share: Share
) -> MachineGoal:
    settings = config.machines[name]
    grants = _grants(name, settings, facts, roots, select(facts.vendors, settings.gpus, share))
    nodes = tuple(sorted(node for grant in grants for node in grant.nodes))
    directories = tuple(sorted(directory for grant in grants for directory in grant.directories))
    mounts = split_mounts(settings.extra_mounts, facts, config.machines)
    dns = _resolv_conf(settings, facts)
    nspawn = render_nspawn(
        name,
        settings.nspawn,
        nodes,
        directories,
        mounts.possible,
        read_only=gpu_nodes(grants),
        dns=dns,
        restrict_families=_knows_families(name, facts),
    )
    allow = device_allow(settings, template, nodes)
    allow += permissions_to_keep(name, facts, allow)
    drop_in = render_drop_in(name, settings, allow)
    handoff = _handoff(name, settings, facts, grants)
    return MachineGoal(
        name=name,
        grants=grants,
        nspawn=OwnedFile(nspawn_file(name), nspawn),
        drop_in=OwnedFile(unit_drop_in(name), drop_in),
        handoff=handoff,
        handoff_file=OwnedFile(handoff_file(name), render_handoff(handoff)),
        granted=_granted(handoff.generation, grants, facts),
        live=LiveSettings(
            fixed=_fixed_digest(name, settings, template),
            allow=allow,
            nodes={
                **{node.path: f"{node.number.major}:{node.number.minor}" for node in nodes},
                **{each.path: f"{READ_WRITE if each.writable else READ_ONLY}{each.inode}" for each in directories},
            },
            owners=owners(allow, facts),
            mounts=tuple(mount.target for mount in mounts.possible),
            withdrawn=handoff.withdrawn,
        ),
        missing=mounts.missing,
    )


def _handoff(name: str, settings: MachineSettings, facts: Facts, grants: tuple[Grant, ...]) -> Handoff:
    return Handoff(
        name,
        facts.architecture,
        tuple(_request(grant) for grant in grants if grant.vendor != OTHER_DEVICES or grant.nodes),
        default_runtime=settings.default_runtime,
        restart_device_plugin=settings.restart_device_plugin,
        containerd_drop_in=settings.containerd_drop_in,
        validation_markers=settings.validation_markers,
        withdrawn=withdrawn_nodes(name, facts, {node.path for grant in grants for node in grant.nodes}),
        allocation=DRA if settings.allocation == DRA else "",
    )


def _granted(generation: str, grants: tuple[Grant, ...], facts: Facts) -> Granted:
    """Return the record of what the machine has. It still has a GPU that is being drained."""
    gpus = (gpu for grant in grants for gpu in grant.gpus)
    draining = (gpu for grant in grants for gpu in grant.detached if gpu in facts.draining)
    roots = {grant.vendor: grant.driver_root.index for grant in grants if grant.driver_root}
    return Granted(generation, (*gpus, *draining), roots)


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


def _grants(
    name: str, settings: MachineSettings, facts: Facts, roots: _Roots, selection: Selection
) -> tuple[Grant, ...]:
    """Return a grant for each vendor that handoffs name, even if the machine gets nothing of that vendor.

    For other devices, there is a grant only if some are configured. The problems of the selection are reported once:
    with the first vendor that has a GPU on this host or, if none has, with the first vendor.
    """
    vendors = sorted((each for each in facts.vendors if _is_handed(each)), key=lambda each: each.vendor)
    current_roots = named_roots(facts, name) or {}
    reporting = next((each.vendor for each in (*(each for each in vendors if each.gpus), *vendors)), "")
    grants = []
    for vendor in vendors:
        choice = DriverRoots(facts.staged, current_roots.get(vendor.vendor))
        gpus = tuple(gpu for gpu in selection.gpus if gpu.vendor == vendor.vendor)
        grant = roots.assign(_only_bindable(host_vendor(vendor.vendor).grant(vendor, settings, choice, gpus)))
        problems = selection.problems if vendor.vendor == reporting else ()
        # Each vendor reports its own GPUs with a wrong driver, because its conditions say what to do next.
        problems += tuple(
            describe_wrong_driver(gpu, gpu.pci_address) for gpu in selection.wrong_driver if gpu.vendor == vendor.vendor
        )
        grants.append(replace(grant, problems=problems + grant.problems))
    # Omit the other devices if none are configured.
    return tuple(each for each in grants if each.vendor != OTHER_DEVICES or each.nodes or each.missing)


def _is_handed(vendor: VendorFacts) -> bool:
    """Return whether handoffs name the vendor.

    They do if the host has one of the vendor's GPUs, or if every handoff has to name the vendor. When handoffs stop
    naming a vendor, a machine half that knows this vendor withdraws what the machine had of it.
    """
    return bool(vendor.gpus) or host_vendor(vendor.vendor).in_every_handoff


def _fixed_digest(name: str, settings: MachineSettings, template: tuple[DeviceAllow, ...]) -> str:
    """Return a digest of the settings whose change needs a restart: all but the devices and ResolvConf=."""
    # All configured mounts are included, even those without a source: a source that appears or disappears must not
    # change the digest.
    nspawn = render_nspawn(name, settings.nspawn, (), mounts=tuple(settings.extra_mounts))
    # These lines are left out: a machine that runs without them needs no restart.
    nspawn = nspawn.replace(f"{SYS_MODULE}\n".encode(), b"").replace(f"{CONFIGURED}\n".encode(), b"")
    # The comments in the drop-in count: rewording one would make every running machine need a restart.
    drop_in = render_drop_in(name, settings, from_template(template), whole=False)
    return sha256(nspawn + drop_in)


def _only_bindable(grant: Grant) -> Grant:
    """Return the grant without nodes whose path cannot be written into a .nspawn file, and with a problem for each."""
    refused = [node for node in grant.nodes if not bindable(node.path)]
    problems = tuple(f"{node.path!r} cannot be written into a .nspawn file" for node in refused)
    nodes = tuple(node for node in grant.nodes if node not in refused)
    return replace(grant, nodes=nodes, problems=grant.problems + problems)


def _request(grant: Grant) -> Request:
    """Return what the machine half sets up for a grant.

    A GPU that has no node yet, for example because its driver is not loaded, counts as granted: no other machine gets
    it. But no pod can use it yet, so the handoff does not name it.
    """
    root = grant.driver_root
    with_node = {node.pci_address for node in grant.nodes}
    return Request(
        vendor=grant.vendor,
        gpus=tuple(address for address in grant.gpus if address in with_node),
        devices=tuple(_device(node) for node in grant.nodes),
        driver_version=root.version if root else "",
        driver_root=f"{MACHINE_HOST_NVIDIA}/{root.index}" if root else "",
        files=tuple(sorted(GrantedFile(file.target, file.link) for file in root.files)) if root else (),
        sockets=grant.services,
        environment=grant.environment,
        cdi_modes=grant.cdi_modes,
        cdi_hooks=grant.cdi_hooks,
    )


def _device(node: DeviceNode) -> GrantedDevice:
    number = node.number
    # Only the nodes of MIG instances need the capability. They belong to a GPU, so they have a PCI address.
    capability = node.capability if node.pci_address else ""
    return GrantedDevice(node.path, node.kind, number.major, number.minor, node.pci_address, capability)
