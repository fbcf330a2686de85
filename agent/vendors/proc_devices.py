"""What the kernel's drivers have registered now: /proc/devices (proc(5)) and /proc/misc."""

from collections.abc import Iterator

PROC_DEVICES = "/proc/devices"


def parse_majors(text: str) -> dict[str, int]:
    """Majors by name, of the character devices in /proc/devices. A name is a whole word, one major may have several."""
    majors: dict[str, int] = {}
    for major, name in _registered(text):
        majors.setdefault(name, major)
    return majors


def names_by_major(text: str) -> dict[int, frozenset[str]]:
    """The same the other way round: some names have several majors, and some majors several names."""
    names: dict[int, set[str]] = {}
    for major, name in _registered(text):
        names.setdefault(major, set()).add(name)
    return {major: frozenset(found) for major, found in names.items()}


def _registered(text: str) -> Iterator[tuple[int, str]]:
    _, _, section = text.partition("Character devices:\n")
    section, _, _ = section.partition("\nBlock devices:")
    for line in section.splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdecimal() and name:
            yield int(number), name


def parse_misc(text: str) -> dict[str, int]:
    """Minors by name, of the miscellaneous devices in /proc/misc (drivers/char/misc.c)."""
    fields = (line.split(maxsplit=1) for line in text.splitlines())
    return {each[1].strip(): int(each[0]) for each in fields if len(each) == 2 and each[0].isdecimal()}
