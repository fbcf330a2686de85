"""Files of places in which others than root may write, opened so that none of them leads to a secret of root's."""

import errno
import os
import stat
from typing import BinaryIO


def open_public(place: str) -> BinaryIO:
    """A regular file that everybody may read, at this very path. Raises OSError: EINVAL or ELOOP for anything else.

    What is asked of the path, before or after, may be answered by another file than the one that is opened.
    """
    # O_PATH first: to open a device is to act on it, and a FIFO waits for its writer.
    probe = os.open(place, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mode = os.fstat(probe).st_mode
        # proc(5): where it was opened, with all links followed; one that was renamed or removed has another path.
        if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{probe}") != place:
            raise OSError(errno.ELOOP, "a link leads elsewhere", place)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", place)
        if not mode & stat.S_IROTH:
            raise OSError(errno.EINVAL, f"not everybody may read it (mode {stat.S_IMODE(mode):04o})", place)
        return open(f"/proc/self/fd/{probe}", "rb")
    finally:
        os.close(probe)
