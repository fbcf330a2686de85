"""The goal, as frozen data. It depends on nothing but the configuration and the facts."""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from agent.model.driver_root import StagedRoot
from agent.model.facts import DeviceNode, Seen, ServiceDirectory
from agent.model.granted import Granted
from agent.model.handoff import OTHER_DEVICES, Handoff, Variable
from agent.model.live import LiveSettings
from agent.model.remembered import Remembered


class Share(Struct, frozen=True):
    """What limits one machine's choice of GPUs, as PCI addresses."""

    taken: frozenset[str] = frozenset()
    """GPUs that the settings of any machine name, and GPUs that other machines have, unless those machines request
    `all`. A machine with `count=N` gets none of these GPUs. Machines with other settings may share them."""
    current: frozenset[str] = frozenset()
    """GPUs that the machine has now. With `count=N`, it keeps up to N of them."""
    draining: frozenset[str] = frozenset()
    """The detached GPUs in `current`. A new grant does not have them, but processes may use them until they exit."""
    reserved: Mapping[str, str] = field(default_factory=dict)
    """GPUs kept for other machines: those with an internal error and, with `count=N`, those that keep their settings
    although they are no longer configured. The values complete "GPU X is ..."."""


class DriverRoots(Struct, frozen=True):
    """The driver roots from which a vendor chooses one for a machine."""

    staged: tuple[StagedRoot, ...]
    current: int | None = None
    """Index of the root that the machine's current handoff names."""


class Grant(Struct, frozen=True):
    """What one machine gets of one vendor."""

    vendor: str
    gpus: tuple[str, ...] = ()
    """PCI addresses."""
    nodes: tuple[DeviceNode, ...] = ()
    driver_files: bool = True
    """Whether the vendor's GPUs are useless without user-space files of the host."""
    driver_root: StagedRoot | None = None
    """The root with those files; None if the machine can use none now."""
    waiting_root: StagedRoot | None = None
    """The root for newly installed files; the machine has `driver_root` until the kernel module is reloaded."""
    detached: tuple[str, ...] = ()
    """PCI addresses of detached GPUs that would be granted otherwise."""
    services: tuple[str, ...] = ()
    """Names of daemons whose sockets the machine may use, whether they run or not."""
    directories: tuple[ServiceDirectory, ...] = ()
    """Socket directories of those daemons in `services` that are running."""
    cdi_modes: tuple[str, ...] = ()
    """Modes in which the vendor's generator makes further CDI specifications."""
    cdi_hooks: tuple[str, ...] = ()
    """Hooks that the vendor's CDI specification has in addition to those that every GPU needs."""
    environment: tuple[Variable, ...] = ()
    """Variables for pods with any of the vendor's devices."""
    fabric_cause: str | None = ""
    """What the GPUs' fabric and persistence mode depend on, in words: services and kernel modules. None if it could not
    be observed."""
    problems: tuple[str, ...] = ()
    """Requests that cannot be granted, one sentence each."""
    missing: tuple[str, ...] = ()
    """Requested non-GPU devices that are missing, in words. Everything else is granted without them."""


def gpu_nodes(grants: Iterable[Grant]) -> frozenset[str]:
    """Return the paths of the GPUs' nodes, which machines get read-only.

    A read-only node can still be opened for writing. But a pod, which is given a bind of the machine's node, cannot
    change the mode and owner of the host's node. The nodes of other devices are bound writable, because some programs
    change their owner: KubeVirt, for example, changes the owner of /dev/net/tun.
    """
    return frozenset(node.path for grant in grants if grant.vendor != OTHER_DEVICES for node in grant.nodes)


class OwnedFile(Struct, frozen=True):
    """A file that only this agent writes."""

    path: str
    content: bytes
    mode: int = 0o644


class MachineGoal(Struct, frozen=True):
    """One machine's files on the host, and the handoff for its machine half."""

    name: str
    grants: tuple[Grant, ...]
    nspawn: OwnedFile
    drop_in: OwnedFile
    handoff: Handoff
    handoff_file: OwnedFile
    granted: Granted
    """The grant in that handoff."""
    live: LiveSettings
    """The settings that the machine will have when it runs with this goal."""
    missing: tuple[str, ...] = ()
    """Mounts whose source is missing or must not be mounted, in words."""

    @property
    def generation(self) -> str:
        """Return the handoff's generation, as recorded in `granted`.

        Computing it from the handoff would take longer than the rest of the plan.
        """
        return self.granted.generation


class Goal(Struct, frozen=True):
    """Everything that this host should have."""

    driver_roots: tuple[StagedRoot, ...]
    """Roots that the handoffs name."""
    machines: tuple[MachineGoal, ...]
    waiting_roots: tuple[StagedRoot, ...]
    """Roots that no handoff names yet, because no kernel module of the root's version is loaded."""
    remembered: Seen[Remembered]
    """The GPUs that machines were last granted, including those lost since."""

    def files(self) -> tuple[OwnedFile, ...]:
        """Return every owned file in the order of writing: the handoffs last."""
        settings = [file for machine in self.machines for file in (machine.nspawn, machine.drop_in)]
        return (*settings, *(machine.handoff_file for machine in self.machines))
