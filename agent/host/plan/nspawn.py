"""Renders a machine's settings file, systemd.nspawn(5). Pure."""

import math
import posixpath
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from agent.config.settings import ExtraMount, MachineSettings, NspawnSettings, shutdown_grace
from agent.host.state.records import MARK
from agent.host.vendors import HOST_VENDORS
from agent.model.device import DeviceNumber
from agent.model.facts import Absent, Broken, DeviceAllow, DeviceNode, Facts, MountSource, ServiceDirectory, Unseen
from agent.model.paths import (
    CONFIG_FILE,
    DRIVER_ROOTS_TARGET,
    HOST_NVIDIA,
    KUBELET_CERTIFICATES,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_HOST_NVIDIA,
    MACHINE_REPORT_DIRECTORY,
    PASS_LOCK,
    STOPPING_NAME,
    carried_directory,
    handoff_directory,
    identity_directory,
    machine_root,
    nspawn_file,
    report_directory,
    rewritten_nspawn,
    started_drop_in,
    started_nspawn,
    stop_mark,
    unit_drop_in,
)

# The commands that run in a machine's unit before each start.
#
# The commands do not need the agent, so a machine starts even if the agent is broken. If the source of a bind in the
# machine's .nspawn file is missing, they comment out that bind: systemd-nspawn would not start the machine, and has no
# optional binds.


CONFIGURED_IN = "# As configured (nspawn.extra"
"""The beginning of the comment before the lines from nspawn.extra in each section."""
CONFIGURED = f"{CONFIGURED_IN}):"
"""That comment in [Files], where these lines are never commented out: nspawn fails if the source of one is missing. The
comments in earlier sections differ from it, because the commands at the start comment out nothing that follows it."""
MISSING = "\\#missing:"
"""The prefix that comments out a line whose source is missing, quoted for the shell."""
LOCK_WAIT = 20
"""Seconds that the commands wait for the end of a running pass. After that, the start continues without the lock. On an
idle host, only a pass that stages a driver takes longer."""
REPORT_MOUNT = "-t tmpfs -o size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec unbounded-agent-report"
"""Arguments of mount(8). The file system is small, so that a machine that fills it does no harm."""


def before_start(machine: str) -> list[str]:
    """Return ExecStartPre= lines that need only a shell and the base system's tools, and no file of the agent.

    Each line may fail ("-"), and runs outside the unit's sandbox ("+"): systemd-nspawn would not see the directory for
    reports if it was mounted in a sandbox.
    """
    file, new, report = nspawn_file(machine), rewritten_nspawn(machine), report_directory(machine)
    make_directories = (
        "umask 022",
        f"mkdir -p {HOST_NVIDIA} {handoff_directory(machine)} {report}",
        f"rmdir {stop_mark(machine)} 2>/dev/null",
        # Remove the reports of the machine's previous run.
        f"umount -l {report} 2>/dev/null",
        f"mount {REPORT_MOUNT} {report}",
    )
    # Comment out binds whose source is missing, and restore those whose source is back.
    comment_out_binds = (
        # The lock is needed because a pass of the agent writes the same file. If the lock cannot be opened, the shell
        # must go on: without `command` it would exit, because `exec` is a special built-in utility (POSIX). With umask
        # 077 only root can open the lock, so no other user can hold it.
        f"umask 077; command exec 9>>{PASS_LOCK} && flock -w {LOCK_WAIT} 9",
        "umask 022",
        f"test -s {file} || exit 0",
        f"text=$(while IFS= read -r line; do line=${{line#{MISSING}}}",
        # Once `theirs` is set, no line matches the second pattern, so the lines from nspawn.extra stay as they are.
        f'case "$theirs$line" in "{CONFIGURED}") theirs=1 ;; '
        # Without -r, `read` handles backslashes and splits at colons as nspawn does (systemd.nspawn(5), Bind=).
        'Bind=*|BindReadOnly=*) printf %s "${line#*=}" | { IFS=: read source rest; test -e "$source"; } '
        f"|| line={MISSING}$line ;; esac",
        f'printf "%s\\n" "$line"; done <{file})',
        f'test -z "$text" || test "$text" = "$(cat {file})" && exit 0',
        f'printf "%s\\n" "$text" >{new} && sync {new} && mv -f {new} {file}',
    )
    copies = ((file, started_nspawn(machine)), (unit_drop_in(machine), started_drop_in(machine)))
    copy_settings = ("umask 022", *(f"cp -f {source} {copy} || rm -f {copy}" for source, copy in copies))
    return [
        "# The next lines work without the agent, so that the machine starts whatever is wrong with the agent.",
        "# Make an empty directory for reports, and the directories that the machine mounts:",
        _shell(make_directories),
        "# systemd-nspawn starts no machine with a Bind= whose source is missing: such lines wait for a later start.",
        _shell(comment_out_binds),
        "# Keep a copy of the settings that the machine starts with, in case the agent could not note them.",
        _shell(copy_settings),
    ]


STOP_ANSWER = 10
"""Seconds that a stop waits for the machine half's answer. If there is none, systemd goes on with its own stop."""


def before_stop(machine: str) -> list[str]:
    """Return an ExecStop= line that asks the machine half to shut the machine down, and waits for that.

    systemd's own stop is a signal to the machine's systemd, which logind in the machine does not announce: the kubelet
    would not end its pods. Like the lines of `before_start`, this one may fail, and needs no file of the agent. If the
    machine half answers, TimeoutStopSec= limits the time; systemd's own stop follows.
    """
    script = (
        # A machine that has ended by itself has no process.
        'test -n "$MAINPID" || exit 0',
        # A directory, because root in a machine could put a link in the place of a file that is written here.
        f"mkdir {stop_mark(machine)} || exit 0",
        "waited=0",
        "while kill -0 $MAINPID 2>/dev/null",
        # The answer is a link, which `test -h` does not follow.
        f"do test $waited -lt {STOP_ANSWER} || test -h {report_directory(machine)}/{STOPPING_NAME} || exit 0",
        "sleep 1",
        "waited=$((waited + 1))",
        "done",
    )
    return ["# Shut the machine down by its logind, which announces that to the kubelet.", _shell(script, "ExecStop")]


def _shell(script: tuple[str, ...], key: str = "ExecStartPre") -> str:
    """Return a line with the script as one quoted word, escaped for systemd (systemd.service(5))."""
    escaped = [line.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$") for line in script]
    # systemd joins the lines with blanks. No line may begin with # or ;, because it would be a comment even in quotes.
    return f"{key}=-+/bin/sh -c '" + "; \\\n    ".join(escaped) + "'"


SYS_MODULE = "BindReadOnly=/sys/module"
"""Binds the whole directory, because a module's own directory does not exist until the module is loaded."""
TRUE = ("yes", "y", "true", "t", "on", "1")
"""Values that systemd's parse_boolean accepts as true."""
OWN_NETWORK = ("VirtualEthernetExtra", "Interface", "MACVLAN", "IPVLAN", "Bridge", "Zone")
"""Settings of [Network] that imply Private=yes."""

ADDRESS_FAMILIES = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_PACKET"
"""What a node needs: CNI plugins, kube-proxy and the kubelet configure the network by netlink; DHCP clients, ARP and
tcpdump use packet sockets. systemd 261 announces that nspawn will allow only the first three by default (its NEWS)."""
KNOWS_ADDRESS_FAMILIES = 261
"""The first systemd whose .nspawn files have RestrictAddressFamilies=. Earlier ones warn about an unknown key."""

HEADER = f"{MARK.decode()}; changes are overwritten. Its settings are in {CONFIG_FILE}.\n"


def bindable(path: str) -> bool:
    """Return whether a Bind= line can have the path. systemd strips blanks at both ends, and splits at line breaks."""
    return path == path.strip() and path.isprintable() and path.startswith("/")


def escape(path: str) -> str:
    """Return the path for a Bind= line, with colons and backslashes escaped (systemd.nspawn(5))."""
    return path.replace("\\", "\\\\").replace(":", "\\:")


def render_nspawn(
    machine: str,
    settings: NspawnSettings,
    nodes: tuple[DeviceNode, ...],
    directories: tuple[ServiceDirectory, ...] = (),
    mounts: tuple[ExtraMount, ...] = (),
    carried: tuple[str, ...] = (),
    *,
    read_only: Collection[str] = (),
    dns: str = "",
    restrict_families: bool = False,
    identity: bool = False,
) -> bytes:
    """Return the machine's .nspawn file.

    `carried` are directories in the machine that are outside of its root file system. `read_only` has the paths of
    nodes to bind read-only. `dns` is the value of ResolvConf=; empty means nspawn's own choice. `restrict_families`
    says whether the host's nspawn knows RestrictAddressFamilies=. `identity` says whether the host keeps the
    certificates of the machine's kubelet.
    """
    sections: dict[str, list[str]] = {
        "Exec": [
            "Boot=yes",
            "PrivateUsers=no",
            f"Capability={settings.capability}",
            f"SystemCallFilter={settings.system_call_filter}",
            *([f"ResolvConf={dns}"] if dns else []),
            *([ADDRESS_FAMILIES] if restrict_families else []),
        ],
        "Network": [f"VirtualEthernet={_yes(settings.virtual_ethernet)}"],
        "Files": [
            f"BindReadOnly={escape(HOST_NVIDIA)}:{MACHINE_HOST_NVIDIA}",
            f"BindReadOnly={escape(handoff_directory(machine))}:{MACHINE_HANDOFF_DIRECTORY}",
            f"Bind={escape(report_directory(machine))}:{MACHINE_REPORT_DIRECTORY}",
            *([f"Bind={escape(identity_directory(machine))}:{KUBELET_CERTIFICATES}"] if identity else []),
        ],
    }
    if settings.modules:
        sections["Files"].append("BindReadOnly=/lib/modules")
    # nspawn gives a machine a /sys with only some directories if the machine has its own network namespace, or with
    # this variable (mount_sysfs in nspawn-mount.c).
    if own_network(settings) or settings.environment.get("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "") == "network":
        sections["Files"].append(SYS_MODULE)
    if settings.kmsg:
        sections["Files"].append("Bind=/dev/kmsg")
    binds = [(node.path in read_only, escape(node.path)) for node in nodes]
    binds += [(not directory.writable, escape(directory.path)) for directory in directories]
    binds += [(False, f"{escape(carried_directory(machine, path))}:{escape(path)}") for path in carried]
    binds += [(mount.read_only, f"{escape(mount.source)}:{escape(mount.target)}") for mount in mounts]
    sections["Files"] += [f"{'BindReadOnly' if protected else 'Bind'}={bind}" for protected, bind in binds]
    for section, extra in sorted(settings.extra.items()):
        lines = sections.setdefault(section, [])
        # Sections that only nspawn.extra has need no comment.
        if lines:
            lines.append(CONFIGURED if section == "Files" else f"{CONFIGURED_IN}.{section}):")
        for key, values in sorted(extra.items()):
            lines += [f"{key}={value}" for value in ([values] if isinstance(values, str) else values)]
    body = "\n".join(f"[{section}]\n" + "".join(f"{line}\n" for line in lines) for section, lines in sections.items())
    return (HEADER + "\n" + body).encode()


def own_network(settings: NspawnSettings) -> bool:
    """Return whether the machine has its own network namespace (settings_private_network in nspawn-settings.c)."""
    network = settings.extra.get("Network", {})
    virtual_ethernet = _last(network.get("VirtualEthernet", []), _yes(settings.virtual_ethernet)).lower() in TRUE
    private = _last(network.get("Private", []), "no").lower() in TRUE
    return virtual_ethernet or private or any(network.get(key) for key in OWN_NETWORK)


def _last(values: str | list[str], default: str) -> str:
    """Return the last of several assignments, which is the one in force; `default` if there is none."""
    return values if isinstance(values, str) else [default, *values][-1]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# The drop-in for systemd-nspawn@NAME.service, systemd.unit(5).


NOT_FOR_MACHINES = ("block-", "/dev/loop-control", "/dev/mapper/control")
"""Prefixes of DeviceAllow= entries in systemd's template unit that no machine gets.

The template has these entries for `systemd-nspawn --image=`. With them, root in a machine could open the host's disks:
it can mount a devtmpfs, which has a node for each disk of the host. If a loop device is mounted read-only, root could
also replace the file behind the device (LOOP_CHANGE_FD, drivers/block/loop.c).
"""


STOP_AFTER = ("remote-fs.target", DRIVER_ROOTS_TARGET, *(name for each in HOST_VENDORS for name in each.services))
"""What the machine stops before, because its pods use it. At the start, prepare@ waits for the same units. If the agent
was removed, the machine waits."""


def device_allow(
    settings: MachineSettings, template: tuple[DeviceAllow, ...], nodes: tuple[DeviceNode, ...]
) -> tuple[DeviceAllow, ...]:
    """Return the machine's DeviceAllow= list. `template` is the list of the installed template unit."""
    # DevicePolicy=closed does not allow /dev/kmsg: without this entry, open() fails with EPERM (systemd 257).
    kmsg = (DeviceAllow("/dev/kmsg", "rw"),) if settings.nspawn.kmsg else ()
    modes = {device.path: device.mode for device in settings.extra_devices}
    granted = (DeviceAllow(node_by_number(node.number), modes.get(node.path, settings.device_mode)) for node in nodes)
    from_template = (entry for entry in template if not entry.node.startswith(NOT_FOR_MACHINES))
    return (*from_template, *kmsg, *granted)


def node_by_number(number: DeviceNumber) -> str:
    """Return the name of a device in a DeviceAllow= entry: by number, because systemd skips paths that are missing."""
    return f"/dev/char/{number.major}:{number.minor}"


def render_drop_in(machine: str, settings: MachineSettings, allow: tuple[DeviceAllow, ...]) -> bytes:
    """Return the drop-in with the DeviceAllow= list `allow`."""
    lines = [
        "[Unit]",
        f"Wants=unbounded-agent-prepare@{machine}.service",
        f"After=unbounded-agent-prepare@{machine}.service",
        "# At the host's shutdown, the machine stops before these. The order through prepare@ does not count then,",
        "# because systemd orders only what it starts or stops, and prepare@ is not active.",
        f"After={' '.join(STOP_AFTER)}",
        "# A machine whose start fails, for want of a node that is bound, is tried again until it works.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *before_start(machine),
        *(f"Environment={quote(f'{name}={value}')}" for name, value in sorted(settings.nspawn.environment.items())),
        "# The template's 16384 would cap the processes of the whole node.",
        "TasksMax=infinity",
        "# NCCL and RDMA pin memory.",
        "LimitMEMLOCK=infinity",
        "Restart=on-failure",
        "RestartSec=2",
        *before_stop(machine),
        "# In the machine, systemd kills after 90 s what ignores SIGTERM, such as a pod's `sleep infinity`. With the",
        "# same limit here, the default, the whole machine would be killed in the middle of its shutdown. Before that,",
        "# the kubelet ends pods (shutdownGracePeriod).",
        f"TimeoutStopSec={stop_limit(settings)}",
        "# An empty assignment first, then the template's list without loop devices and device mapper: otherwise what",
        "# systemctl set-property once wrote into 50-DeviceAllow.conf would stay allowed. Further devices: a drop-in",
        "# that sorts behind this one.",
        "DeviceAllow=",
        *(f"DeviceAllow={entry}" for entry in allow),
    ]
    return (HEADER + "\n" + "".join(f"{line}\n" for line in lines)).encode()


def stop_limit(settings: MachineSettings) -> int:
    """Return TimeoutStopSec= in seconds. systemd applies it first to `before_stop`, and then to its own stop."""
    return 120 + math.ceil(shutdown_grace(settings.node.kubelet.configuration if settings.node else {}))


def quote(value: str) -> str:
    """Return the value in quotes, for a setting that systemd splits into words (systemd.syntax(7)).

    systemd also expands specifiers in such a setting, so `%` is escaped.
    """
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


# Which changes of both files need a restart.


NOT_COMPARED = re.compile(
    rf"ResolvConf=replace-(?:host|uplink)|{ADDRESS_FAMILIES}|{SYS_MODULE}|Bind(?:ReadOnly)?=/dev/(?!kmsg$).*".encode()
)
"""Lines of the agent in a .nspawn file without which a machine may run on. The last pattern is for binds of devices."""
NOT_COMPARED_IN_DROP_IN = re.compile(
    rb"^(?:#.*|After=.*|DeviceAllow=.*|Exec(?:StartPre|Stop)=(?:.*\\\n)*.*|TimeoutStopSec=.*)\n?", re.MULTILINE
)
"""Devices can change while a machine runs. Comments, the order of units, the commands before a start and a stop, and
the limit for a stop differ between releases. A backslash at the end of a line continues it (systemd.syntax(7))."""
BIND = re.compile(rb"Bind(?:ReadOnly)?=(.*)")
"""A line of a .nspawn file that binds a path."""


def fixed_lines(nspawn: bytes, drop_in: bytes, bound: Collection[bytes] = ()) -> list[bytes]:
    """Return the lines that need a restart if they change.

    All lines from nspawn.extra do. Of the agent's own, the lines of NOT_COMPARED and binds of the paths in `bound` do
    not. If this function changes, so must FIXED_FORM.
    """
    fixed, theirs = list[bytes](), False
    for line in nspawn.splitlines():
        theirs = line.startswith(CONFIGURED_IN.encode()) or (theirs and not line.startswith(b"["))
        bind = BIND.fullmatch(line)
        own = bool(NOT_COMPARED.fullmatch(line) or (bind and bind[1] in bound))
        if not line.startswith(b"#") and (theirs or not own):
            fixed.append(line)
    return [*fixed, *NOT_COMPARED_IN_DROP_IN.sub(b"", drop_in).splitlines()]


def not_carried(machine: str, path: str) -> str:
    """Return that a machine's carried directory has no effect yet, and how to move the files that the root has there.

    The container sees the machine's root as its own, so no link that was left there leads to the host's files.
    """
    directory, root = carried_directory(machine, path), machine_root(machine)
    bind, source = shlex.quote(f"--bind={escape(directory)}:/mnt"), shlex.quote(f"{path}/.")
    copy, directory = f"systemd-nspawn --settings=no -D {root} {bind} cp -a {source} /mnt/", shlex.quote(directory)
    return (
        f"{path} of node.carry (its files are still in the machine's root: run `unbounded-agent stop {machine}`, "
        f"`mkdir -p {directory}`, if there are files `{copy}`, and `unbounded-agent start {machine}`)"
    )


# Plans the extra mounts of a machine.


def split_mounts(
    mounts: Sequence[ExtraMount], facts: Facts, machines: Mapping[str, MachineSettings]
) -> tuple[tuple[ExtraMount, ...], tuple[str, ...]]:
    """Return the mounts that a machine has from its next start on, and those that are not possible now, in words.

    The latter have a source that is missing or must not be mounted. They are left out of the settings, because a
    missing source would prevent the machine's start. The `source` of the others is the real path: nspawn would follow a
    link, which may change before the start. `machines` has the settings of all machines.
    """
    mounted_by = _mounted_paths(facts, machines) if mounts else {}
    possible, missing = [], []
    for mount in mounts:
        what = f"{mount.source} for {mount.target}"
        match facts.mount_sources.get(mount.source):
            case MountSource() as source if outer := _outer_path(source, mounted_by):
                # A read-only mount of `outer` counts too, because root in the machine can remount it writable.
                missing.append(
                    f"{what} (the path to it leads through {outer}, where machine {mounted_by[outer]} could put a link)"
                )
            case MountSource(path=real):
                possible.append(replace(mount, source=real))
            case Broken(why) | Unseen(why):
                missing.append(f"{what} ({why})")
            case Absent() | None:
                missing.append(what)
    return tuple(possible), tuple(missing)


def _mounted_paths(facts: Facts, machines: Mapping[str, MachineSettings]) -> dict[str, str]:
    """Return the host paths that machines mount or will mount, each with a machine that could put links there."""
    mounted_by = dict[str, str]()
    for name, settings in machines.items():
        mounted_by |= {mount.source: name for mount in settings.extra_mounts}
        for path in settings.nspawn.mounted_paths():
            # The path may contain `//`, `.` and `..`. nspawn does not check the path, and follows every link in it.
            mounted_by[f"/{posixpath.normpath(path).lstrip('/')}"] = name
            if path in facts.nspawn_sources:
                mounted_by[facts.nspawn_sources[path]] = name
    real_paths = {source.path: mounted_by[path] for path, source in facts.mount_sources.items()
                  if path in mounted_by and isinstance(source, MountSource)
                  and not _outer_path(source, mounted_by)}  # fmt: skip
    return mounted_by | real_paths


def _outer_path(source: MountSource, paths: Iterable[str]) -> str:
    """Return the first of `paths` that the path to the source leads through; empty if there is none."""
    return next((path for path in paths for step in source.components if step.startswith(f"{path.rstrip('/')}/")), "")
