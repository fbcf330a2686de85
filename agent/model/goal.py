"""The goal, as frozen data. It depends on nothing but the configuration and the facts."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, TypeAlias

from msgspec import Struct, field

from agent.model.facts import (
    DeviceAllow,
    DeviceNode,
    Granted,
    LiveSettings,
    Remembered,
    Seen,
    ServiceDirectory,
    StagedRoot,
    Unseen,
)
from agent.model.handoff import OTHER_DEVICES, Handoff, Variable
from agent.model.text import one_line

# Steps from the current state to the goal. Data only: agent.host.apply.steps performs them, `plan` prints them.

ActionKind: TypeAlias = Literal["write", "remove", "stage", "mount", "reload", "change"]
"""The label of an action in metrics. It is never reworded, unlike the sentence of `describe()`, which is for people."""


class Step(Struct, frozen=True):
    """What `apply`, `up` and `reset` do to a host, one action at a time."""

    kind: ClassVar[ActionKind]
    words: ClassVar[str]
    """The action for people. It may contain the action's fields, as in `{0.path}`."""
    decisive: ClassVar[bool] = False
    """Whether no later step is performed if this one fails. Otherwise, only steps that depend on it are left out."""
    together: ClassVar[bool] = False
    """Whether the step may run at the same time as the steps directly before and after it with this mark."""

    def describe(self) -> str:
        """Return what the action does, to be put after `would` or `cannot`."""
        return self.words.format(self)


class WriteFile(Step, frozen=True):
    """Replace a file atomically; parents are created with mode 0755."""

    kind = "write"
    path: str
    content: bytes
    mode: int = 0o644

    def describe(self) -> str:
        return f"write {self.path} ({len(self.content)} bytes)"


class RemoveFile(Step, frozen=True):
    """Remove a file or symbolic link that the agent wrote."""

    kind = "remove"
    words = "remove {0.path}"
    path: str


class StageDriverRoot(Step, frozen=True):
    """Copy a driver's user-space files into a new driver root, and publish it once it is complete."""

    kind = "stage"
    root: StagedRoot
    machines: frozenset[str]
    """The machines whose handoffs name the root, or will name it."""

    def describe(self) -> str:
        size = sum(file.size for file in self.root.files)
        return (
            f"stage {self.root.vendor} driver {self.root.version} as driver root {self.root.index} "
            f"({len(self.root.files)} files, {size / 1e6:.0f} MB)"
        )


class PublishDriverRoot(Step, frozen=True):
    """Mount a staged driver root where machines see it; if mounts do not work, move it there as a plain directory."""

    kind = "mount"
    words = "mount driver root {0.root.index} ({0.root.vendor} driver {0.root.version})"
    root: StagedRoot
    machines: frozenset[str]
    """As for StageDriverRoot."""


class ProtectDriverRoots(Step, frozen=True):
    """Mount driver roots in place of the plain directories that were published while mounts did not work."""

    kind = "mount"
    indices: tuple[int, ...]

    def describe(self) -> str:
        return f"mount driver roots in place of plain directories: {', '.join(map(str, self.indices))}"


class RemoveDriverRoot(Step, frozen=True):
    """Remove a driver root of the agent, with its manifest."""

    kind = "remove"
    words = "remove driver root {0.index} ({0.what}), which nothing uses"
    index: int
    what: str
    """For people: the vendor and version of the driver in the root, or that the root is incomplete."""


class RemoveStaleStaging(Step, frozen=True):
    """Remove the directories that an interrupted staging or removal of a driver root left."""

    kind = "remove"
    paths: tuple[str, ...]

    def describe(self) -> str:
        return f"remove leftovers of driver roots: {', '.join(self.paths)}"


class ReloadUnits(Step, frozen=True):
    """Make systemd read its unit files again, as `systemctl daemon-reload` does."""

    kind = "reload"
    words = "reload systemd's units"
    outdated: bool = False
    """Whether systemd says that a unit's files have changed. Otherwise, it reloads only if the agent changed one."""


class ChangeDevices(Step, frozen=True):
    """Change which devices a running machine may open, and bind the nodes that it does not have."""

    kind = "change"
    machine: str
    before: LiveSettings
    after: LiveSettings
    foreign: tuple[DeviceAllow, ...]
    """Entries of the unit's DeviceAllow= list that the agent did not add. They stay."""
    read_only: frozenset[str] = frozenset()

    @property
    def rebinds(self) -> bool:
        """Whether all nodes are bound again, because the machine reported some missing."""
        return self.after.rebound not in ("", self.before.rebound)

    def describe(self) -> str:
        before, after = self.before, self.after
        parts = [
            ("permit", [str(entry) for entry in after.allow if entry not in before.allow]),
            ("forbid", [str(entry) for entry in before.allow if entry not in after.allow]),
            ("bind", [path for path, number in after.nodes.items() if before.nodes.get(path) != number]),
            ("no longer bind", [path for path in before.nodes if path not in after.nodes]),
        ]
        changes = "; ".join(f"{verb} {', '.join(things)}" for verb, things in parts if things)
        return f"change the devices of machine {self.machine}: {changes or 'update the record of its devices'}"


Cleanup: TypeAlias = RemoveDriverRoot | RemoveStaleStaging
"""Steps that remove driver roots or leftovers of them. No machine waits for these steps."""
Publishing: TypeAlias = StageDriverRoot | PublishDriverRoot | ProtectDriverRoots
"""Steps that must be done before a handoff may name a driver root."""
Action: TypeAlias = WriteFile | RemoveFile | Publishing | Cleanup | ReloadUnits | ChangeDevices


class Done(Struct, frozen=True):
    """An action that was carried out."""

    kind: ActionKind
    sentence: str


# The goal.


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
    """Index of the one that the machine's current handoff names."""


class Grant(Struct, frozen=True):
    """What one machine gets of one vendor."""

    vendor: str
    gpus: tuple[str, ...] = ()
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
    cdi_hooks: tuple[str, ...] = ()
    environment: tuple[Variable, ...] = ()
    fabric_cause: str | None = ""
    """What the GPUs' fabric and persistence mode depend on, in words: services and kernel modules. None if it could not
    be observed."""
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Requested devices of other kinds that are missing, in words. Everything else is granted without them."""


def gpu_nodes(grants: Iterable[Grant]) -> frozenset[str]:
    """Return the paths of the GPUs' nodes, which machines get read-only.

    A read-only node can still be opened for writing. But a pod, which is given a bind of the machine's node, cannot
    change the mode and owner of the host's node. The nodes of other devices are bound writable, because some programs
    change their owner: KubeVirt, for example, changes the owner of /dev/net/tun.
    """
    return frozenset(node.path for grant in grants if grant.vendor != OTHER_DEVICES for node in grant.nodes)


class MachineGoal(Struct, frozen=True):
    """One machine's files on the host, and the handoff for its machine half."""

    name: str
    grants: tuple[Grant, ...]
    nspawn: WriteFile
    drop_in: WriteFile
    handoff: Handoff
    handoff_file: WriteFile
    granted: Granted
    live: LiveSettings
    """The settings that the machine will have when it runs with this goal."""
    missing: tuple[str, ...] = ()
    """Mounts whose source is missing or must not be mounted, in words."""

    @property
    def generation(self) -> str:
        """The handoff's. Computing it again would take longer than the rest of the plan."""
        return self.granted.generation


class Goal(Struct, frozen=True):
    """Everything that this host should have."""

    driver_roots: tuple[StagedRoot, ...]
    machines: tuple[MachineGoal, ...]
    waiting_roots: tuple[StagedRoot, ...]
    """Roots that no handoff names yet, because no kernel module of the root's version is loaded."""
    remembered: Seen[Remembered]

    def files(self) -> tuple[WriteFile, ...]:
        """Return every owned file in the order of writing: the handoffs last."""
        settings = [file for machine in self.machines for file in (machine.nspawn, machine.drop_in)]
        return (*settings, *(machine.handoff_file for machine in self.machines))


SHOWN = 200
"""Characters of an error that messages show; the log has the traceback."""


class Fault(Unseen, frozen=True):
    """An unexpected error in the work for one machine as a fact, so that other machines are not affected.

    Users neither cause nor fix it: it is a bug, possibly triggered by a hostile machine.
    """

    error: Exception


def fault(work: str, error: Exception) -> Fault:
    """Return an unexpected error as a fact. `work` completes the sentence "cannot ..."."""
    return Fault(f"cannot {work}: {in_words(error)}", error)


def in_words(error: BaseException) -> str:
    """Return the error with its type, without which many Python errors say little."""
    return f"{type(error).__name__}: {one_line(str(error))[:SHOWN]}"
