"""A host for tests of whole passes: a driver's recorded files on a simulated host.

Recorded: names, links and sizes of Debian's driver files, and ldconfig's output. Synthetic: the files' contents (at
most 4 KiB), the GPUs with their nodes and procfs, the loaded module, systemd's answers, and the machine, which is an
empty directory.
"""

import os
from pathlib import Path

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from tests.fakes.host import Host

MACHINE = "gpu-node"
RECORDED = "debian-13-driver-550"
VERSION = "550.163.01"
UNITS = ("systemd-nspawn@gpu-node.service", "nvidia-persistenced.service", "nvidia-fabricmanager.service")


def reconciler(host: Host, **settings: object) -> Reconciler:
    return Reconciler(Config.validated({"machines": {MACHINE: settings}}), host, host)


def units(host: Host, machine: str, stopped_at: int = 0, device_allow: list[tuple[str, str]] | None = None) -> None:
    for name, state in zip(UNITS, (machine, "active", "inactive"), strict=True):
        host.bus.unit(name, state, stopped_at=stopped_at, device_allow=device_allow if name == UNITS[0] else None)


def set_up(host: Host) -> Host:
    """Set up two GPUs, one stopped machine and Debian's driver, with files cut to 4 KiB because staging copies them."""
    host.load(RECORDED)
    for path in Path(host.root).rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 4096:
            os.truncate(path, 4096)
            os.utime(path, (1_700_000_000, 1_700_000_000))
    host.driver(VERSION, gpus=2)
    host.file("/usr/lib/systemd/system/systemd-nspawn@.service", "[Service]\nDeviceAllow=char-pts rw\n")
    host.make_directory(f"/var/lib/machines/{MACHINE}")
    host.bus.version("257.13-1~deb13u1")
    host.command("systemctl", "daemon-reload")
    host.command("systemctl", "start", "--no-block", UNITS[0])
    units(host, "inactive")
    host.bus.unit("unbounded-agent.service")
    return host


def without_gpus(host: Host, *, driver: bool = True) -> Host:
    """Take both GPUs from the host, and the driver's libraries as well if it has no driver."""
    for bus in ("01", "02"):
        host.unplug(f"0000:{bus}:00.0")
    if not driver:
        host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")
    return host
