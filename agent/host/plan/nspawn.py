"""Renders a machine's settings file, systemd.nspawn(5). Pure."""

from collections.abc import Collection

from agent.config.mounts import ExtraMount
from agent.config.nspawn_settings import NspawnSettings
from agent.host.plan.before_start import CONFIGURED
from agent.host.state.owned_files import MARK
from agent.model.facts import DeviceNode, ServiceDirectory
from agent.model.paths import (
    CONFIG_FILE,
    HOST_NVIDIA,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_HOST_NVIDIA,
    MACHINE_REPORT_DIRECTORY,
    handoff_directory,
    report_directory,
)

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
    *,
    read_only: Collection[str] = (),
    dns: str = "",
    restrict_families: bool = False,
) -> bytes:
    """Return the machine's .nspawn file.

    `read_only` has the paths of nodes to bind read-only. `dns` is the value of ResolvConf=; empty means nspawn's own
    choice. `restrict_families` says whether the host's nspawn knows RestrictAddressFamilies=.
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
        ],
    }
    if settings.modules:
        sections["Files"].append("BindReadOnly=/lib/modules")
    if _reduced_sys(settings):
        sections["Files"].append(SYS_MODULE)
    if settings.kmsg:
        sections["Files"].append("Bind=/dev/kmsg")
    sections["Files"] += [
        f"{'BindReadOnly' if node.path in read_only else 'Bind'}={escape(node.path)}" for node in nodes
    ]
    sections["Files"] += [
        f"{'Bind' if directory.writable else 'BindReadOnly'}={escape(directory.path)}" for directory in directories
    ]
    sections["Files"] += [
        f"{'BindReadOnly' if mount.read_only else 'Bind'}={escape(mount.source)}:{escape(mount.target)}"
        for mount in mounts
    ]
    for section, extra in sorted(settings.extra.items()):
        lines = sections.setdefault(section, [])
        if section == "Files":
            lines.append(CONFIGURED)
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


def _reduced_sys(settings: NspawnSettings) -> bool:
    """Return whether nspawn gives the machine a /sys with only some directories (mount_sysfs in nspawn-mount.c).

    nspawn does so for a machine with its own network namespace, or if SYSTEMD_NSPAWN_API_VFS_WRITABLE is `network`.
    """
    return own_network(settings) or settings.environment.get("SYSTEMD_NSPAWN_API_VFS_WRITABLE", "") == "network"


def _last(values: str | list[str], default: str) -> str:
    """Return the last of several assignments, which is the one in force; `default` if there is none."""
    return values if isinstance(values, str) else [default, *values][-1]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
