"""Lists mounts, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from agent.system.files import System

MOUNTS = "/proc/self/mountinfo"


def mounted(system: System, file_system: str) -> frozenset[str]:
    """Return the mount points of file systems of the type `file_system`, with the kernel's escapes. Raises OSError."""
    found = set()
    for line in system.lines(MOUNTS):
        # The mount point is followed by optional fields, a hyphen, and the type.
        before, _, after = line.decode(errors="surrogateescape").partition(" - ")
        fields = before.split(" ")
        if after.split(" ")[0] == file_system and len(fields) > 4:
            found.add(fields[4])
    return frozenset(found)
