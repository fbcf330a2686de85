"""Opens public files in places where users other than root can write. A link there might lead to a secret of root."""

import errno
import os
import stat
from typing import BinaryIO

from agent.system import opening


def open_public(place: str) -> BinaryIO:
    """Open a world-readable regular file whose path contains no link. Raises OSError (EINVAL, ELOOP) for other files.

    Checking the path before or after the open is not enough, because the check may see a different file. So this checks
    the file behind the descriptor.
    """
    probe = opening.open_probe(place, follow=False)
    try:
        mode = os.fstat(probe).st_mode
        # proc(5): the link in /proc has the real path of the file. That path differs from `place` if `place` has links,
        # or if the file was moved or removed.
        if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{probe}") != place:
            raise OSError(errno.ELOOP, "a link is in its path, or it was moved or removed", place)
        if stat.S_ISREG(mode) and not mode & stat.S_IROTH:
            raise OSError(errno.EINVAL, f"not every user can read it (mode {stat.S_IMODE(mode):04o})", place)
        return opening.regular(probe, place)
    finally:
        os.close(probe)
