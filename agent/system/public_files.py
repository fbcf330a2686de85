"""Opens files in places where users other than root can write, so that none leads to a secret of root's."""

import errno
import os
import stat
from typing import BinaryIO

from agent.system import opening


def open_public(place: str) -> BinaryIO:
    """Open a world-readable regular file at this very path. Raises OSError: EINVAL or ELOOP for anything else.

    Checks of the path, before or after, may see another file than the one that is opened.
    """
    probe = opening.look_at(place, follow=False)
    try:
        mode = os.fstat(probe).st_mode
        # proc(5): the path where it was opened, with all links followed; a renamed or removed file has another one.
        if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{probe}") != place:
            raise OSError(errno.ELOOP, "a link leads elsewhere", place)
        if stat.S_ISREG(mode) and not mode & stat.S_IROTH:
            raise OSError(errno.EINVAL, f"not everybody may read it (mode {stat.S_IMODE(mode):04o})", place)
        return opening.regular(probe, place)
    finally:
        os.close(probe)
