"""Settings for systemd-nspawn, with the defaults that a Kubernetes node needs (systemd.nspawn(5)). Pure."""

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import field

from agent.config.pod_environment import VariableName
from agent.config.table import Table, text

OneLine = Annotated[
    str,
    text(r"([^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\\])?", "one line of text that does not end in a backslash", secret=True),
]
"""Text for one line of a unit file. A line break would start another setting; a backslash at the end would join the
next line."""
SectionName = Annotated[str, text(r"[A-Z][A-Za-z]*", "the name of a section, such as Files")]
KeyName = Annotated[str, text(r"[A-Z][A-Za-z0-9]*", "the name of a setting, such as Bind")]

MOUNT_PART = re.compile(r"(?:^|:)((?:\\.|[^:\\])*)")
"""Matches one part of a mount setting's value. Parts end at a colon, but not at `\\:`, an escaped colon
(systemd.nspawn(5), --bind= of systemd-nspawn(1))."""

NO_USER_NAMESPACE = (
    "a machine cannot have a user namespace: systemd could bind no device into it while it runs; the "
    "kubelet could not open /dev/kmsg; CNI could not create interfaces in the host's network; remove private_users and "
    "PrivateUsers (docs/security.md)"
)


class NspawnSettings(Table, frozen=True, kw_only=True):
    """Settings of systemd-nspawn, systemd.nspawn(5). Where a default weakens the machine's isolation, its description
    says why."""

    capability: OneLine = "CAP_BPF CAP_IPC_LOCK CAP_NET_ADMIN CAP_PERFMON CAP_SYSLOG"
    """Capabilities in addition to systemd-nspawn's own set (`--capability=` in systemd-nspawn(1)), which contains
    CAP_SYS_ADMIN and CAP_MKNOD. `"all"` gives every capability.

    CAP_NET_ADMIN is for CNI and kube-proxy, CAP_SYSLOG for the kubelet, which reads `/dev/kmsg`, and CAP_IPC_LOCK for
    pods that pin memory; pods may ask for the others. The default does not contain CAP_SYS_MODULE, CAP_SYS_RAWIO and
    CAP_SYS_TIME, which change the host's kernel, I/O ports and clock (docs/security.md).
    """
    private_users: bool = False
    """Always `false`: a machine cannot have a user namespace (docs/security.md)."""
    system_call_filter: OneLine = "@keyring bpf"
    """System calls to allow in addition to nspawn's own. runc joins a session keyring and loads BPF device programs;
    nspawn's own filter forbids both."""
    virtual_ethernet: bool = False
    """Give the machine a network of its own. By default the machine uses the host's network."""
    kmsg: bool = True
    """Bind `/dev/kmsg`. The kubelet watches it for out-of-memory kills and does not start without it."""
    modules: bool = True
    """Bind `/lib/modules` read-only. kube-proxy and CNI plugins read it."""
    environment: dict[VariableName, OneLine] = field(
        default_factory=lambda: {
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
        }
    )
    """Environment variables of systemd-nspawn itself. The defaults give the machine cgroup v2, and make `/proc/sys/net`
    writable for CNI."""
    extra: dict[SectionName, dict[KeyName, OneLine | list[OneLine]]] = {}
    """Any other settings of systemd.nspawn(5), by section, such as `extra.Files.Bind = ["/srv/data"]`. They are
    appended unchanged."""

    def __post_init__(self) -> None:
        if self.private_users or "PrivateUsers" in self.extra.get("Exec", {}):
            raise ValueError(NO_USER_NAMESPACE)

    def mounted_paths(self) -> Iterator[str]:
        """Yield the host paths in `extra` in which root in the machine can write. The paths have no escapes.

        Paths of BindReadOnly= are among them, because root in the machine can remount them writable. Of an overlay's
        paths, only the one that takes the overlay's changes is among them: the last path before the target. If Overlay=
        has only two paths, the second one takes the changes, and is the target too. OverlayReadOnly= has no path that
        takes changes.
        """
        files = self.extra.get("Files", {})
        for key in ("Bind", "BindReadOnly", "Overlay"):
            lines = files.get(key, [])
            for line in [lines] if isinstance(lines, str) else lines:
                # systemd removes blanks at the start.
                parts = [re.sub(r"\\(.)", r"\1", part) for part in MOUNT_PART.findall(line.strip())]
                path = parts[-2 if len(parts) > 2 else -1] if key == "Overlay" else parts[0].removeprefix("-")
                # Leave out empty paths, and paths that start with "+", which lie below the machine's own root.
                if path.startswith("/"):
                    yield path
