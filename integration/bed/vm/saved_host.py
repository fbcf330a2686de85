"""Keeps a simulated host that takes minutes to prepare, with its snapshots, for each state of the checkout."""

from collections.abc import Callable
from pathlib import Path

from integration.bed import wheels
from integration.bed.cache import REPOSITORY, cached
from integration.bed.machine.machine_image import machines_disk
from integration.bed.vm import guest, installation, qemu, simulated_host
from integration.bed.vm.emulator import emulator
from integration.bed.vm.host_image import host_image
from integration.bed.vm.simulated_host import SimulatedHost


def saved_host(prepare: Callable[[SimulatedHost], None], prepared_by: Path) -> SimulatedHost:
    """Return a host in the state of the last snapshot that `prepare` makes.

    The saved host is used again until something that it was made from changes, such as `prepared_by`, the file that
    defines `prepare`.
    """
    image, machines = host_image(wheels.dependencies()), machines_disk()

    def build(target: Path) -> None:
        with SimulatedHost(image, machines) as host:
            prepare(host)
            host.save(target)

    sources = [Path(str(module.__file__)) for module in (guest, installation, qemu, simulated_host)]
    inputs: list[Path | str] = [*sources, prepared_by, wheels.agent(), REPOSITORY / "systemd", *emulator()]
    inputs += [str(image), str(machines), str(qemu.processors())]
    return SimulatedHost(saved=cached(f"saved-host-{qemu.processors()}", inputs, build))
