"""Parses /proc/devices (proc(5)) and /proc/misc: the device numbers that the kernel's drivers have registered."""

from collections.abc import Iterator

from agent.model.digits import whole_number

PROC_DEVICES = "/proc/devices"


def parse_majors(text: str) -> dict[str, int]:
    """Return the majors of the character devices in /proc/devices, by name. If a name has several, the first counts."""
    majors: dict[str, int] = {}
    for major, name in _registered(text):
        majors.setdefault(name, major)
    return majors


def names_by_major(text: str) -> dict[int, frozenset[str]]:
    """Return the names of the character devices by major. A major can have several names, and a name several majors."""
    names: dict[int, set[str]] = {}
    for major, name in _registered(text):
        names.setdefault(major, set()).add(name)
    return {major: frozenset(group) for major, group in names.items()}


def _registered(text: str) -> Iterator[tuple[int, str]]:
    _, _, section = text.partition("Character devices:\n")
    section, _, _ = section.partition("\nBlock devices:")
    for line in section.splitlines():
        digits, _, name = line.strip().partition(" ")
        number = whole_number(digits)
        if number is not None and name:
            yield number, name


def parse_misc(text: str) -> dict[str, int]:
    """Return the minors of the miscellaneous devices in /proc/misc (drivers/char/misc.c), by name."""
    fields = (line.split(maxsplit=1) for line in text.splitlines())
    minors = {each[1].strip(): whole_number(each[0]) for each in fields if len(each) == 2}
    return {name: minor for name, minor in minors.items() if minor is not None}
