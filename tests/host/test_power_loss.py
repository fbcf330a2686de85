"""A power loss: a file system may keep any part of what was not synced, in any order."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.host.reconcile import Reconciler
from agent.model.paths import MACHINES_STATE, MANIFESTS, NSPAWN, OWNED, STAGING, TREES, UNITS, nspawn_file
from agent.system.files import temporary_path
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

DURABLE = (NSPAWN, UNITS, MACHINES_STATE, OWNED, temporary_path(OWNED))


@dataclass
class Disk:
    """Records system calls on their way to the kernel."""

    root: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Each call, and the path that it changes or syncs."""

    def note(self, call: str, path: str) -> None:
        if not path.startswith((f"{self.root}/proc", f"{self.root}/run/")):
            self.calls.append((call, path.removeprefix(self.root)))

    def unsynced(self) -> list[tuple[str, str]]:
        """Return names whose change was not synced afterwards, and files renamed before their content was synced."""
        found = []
        for place, (call, path) in enumerate(self.calls):
            if call == "rename from" and ("fsync", path) not in self.calls[:place]:
                found.append((call, path))
            if call in ("rename", "unlink", "mkdir") and ("fsync", os.path.dirname(path)) not in self.calls[place:]:
                found.append((call, path))
        return [(call, path) for call, path in found if path.startswith(DURABLE)]


@pytest.fixture
def disk(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(os.path.realpath(gpu_host.root))
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        disk.note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(old: str, new: str, **options: int | None) -> None:
        if not os.path.islink(old):
            disk.note("rename from", os.path.realpath(old))
        real_rename(old, new, **options)
        disk.note("rename", os.path.join(os.path.realpath(os.path.dirname(new)), os.path.basename(new)))

    def noting(call: str, real: Callable[..., None]) -> Callable[..., None]:
        def noted(path: str, *arguments: int, **options: int | None) -> None:
            place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            real(path, *arguments, **options)
            disk.note(call, place)

        return noted

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "unlink", noting("unlink", os.unlink))
    monkeypatch.setattr(os, "mkdir", noting("mkdir", os.mkdir))
    return disk


def test_what_a_pass_sets_up_survives_a_power_loss(gpu_host: Host, disk: Disk) -> None:
    """A file is recorded on disk before it exists, and a driver root is on disk before it is recorded."""
    assert reconciler(gpu_host).run_pass().failures == ()
    recorded, written = disk.calls.index(("rename", OWNED)), disk.calls.index(("rename", nspawn_file(MACHINE)))
    assert ("fsync", os.path.dirname(OWNED)) in disk.calls[recorded:written]
    assert disk.unsynced() == []
    synced = disk.calls[: disk.calls.index(("rename", f"{MANIFESTS}/0.json"))]
    tree = Path(gpu_host.full_path(f"{TREES}/0"))
    copies = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(copies) > 10
    for copy in copies:
        staged = f"{STAGING}/0/{copy.relative_to(tree)}"
        # The second case: a file that the agent writes itself is synced under its temporary name.
        assert ("fsync", staged) in synced or ("rename", staged) in synced, staged
        assert ("fsync", os.path.dirname(staged)) in synced


def test_removed_settings_do_not_return(gpu_host: Host, disk: Disk) -> None:
    reconciler(gpu_host).run_pass()
    for name in tuple(gpu_host.bus.units):
        gpu_host.bus.units[name.replace(MACHINE, "other")] = gpu_host.bus.units[name]
    disk.calls.clear()
    Reconciler(reconciler(gpu_host).config.validated({"machines": {"other": {}}}), gpu_host, gpu_host).reconcile()
    assert ("unlink", nspawn_file(MACHINE)) in disk.calls
    assert disk.unsynced() == []
