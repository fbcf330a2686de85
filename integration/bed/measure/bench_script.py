"""The scripts of bench_scripts/, which measure on the simulated host."""

from pathlib import Path

from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Completed, Guest

SCRIPTS = Path(__file__).with_name("bench_scripts")
Measures = dict[str, float | int | str]


def script(guest: Guest, name: str, *arguments: str, timeout: float = 120, check: bool = True) -> Completed:
    """Run a script on the host; its first argument is the machine's name."""
    path = f"/root/bench/{name}"
    guest.write(path, (SCRIPTS / name).read_bytes(), 0o755)
    return guest.run([path, MACHINE, *arguments], timeout=timeout, check=check)


def numbers(ended: Completed) -> dict[str, float]:
    """Return the numbers in lines of the form `NAME NUMBER`, by name."""
    return {name: float(value) for name, value in (line.split() for line in ended.stdout.splitlines())}


def seconds(ended: Completed) -> float:
    """Return the number of the line `seconds NUMBER`."""
    return numbers(ended)["seconds"]
