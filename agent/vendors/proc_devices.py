"""/proc/devices: which majors the kernel's drivers have registered now, proc(5)."""

PROC_DEVICES = "/proc/devices"


def parse_majors(text: str) -> dict[str, int]:
    """Majors by name, of the character devices in /proc/devices. A name is a whole word, one major may have several."""
    _, _, section = text.partition("Character devices:\n")
    section, _, _ = section.partition("\nBlock devices:")
    majors: dict[str, int] = {}
    for line in section.splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdecimal() and name:
            majors.setdefault(name, int(number))
    return majors
