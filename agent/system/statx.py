"""Asks statx(2) for the time when a file was made, which os.stat does not tell, and for a device's numbers.

os.stat is not used for a device's numbers, because it asks the NFS server or FUSE daemon that provides a file. If that
server or daemon is dead, os.stat never returns, and any process may have such a file open. statx(2) can return the
numbers without asking.
"""

import ctypes
import os
import stat

AT_FDCWD = -100
AT_NO_AUTOMOUNT = 0x800
AT_STATX_DONT_SYNC = 0x4000
"""Allows cached values: a file's type and device number never change (include/uapi/linux/fcntl.h)."""
AT_SYMLINK_NOFOLLOW = 0x100
STATX_TYPE = 1
STATX_BIRTH = 0x800


class _Statx(ctypes.Structure):
    """struct statx of include/uapi/linux/stat.h, 256 bytes, which is the same on all architectures."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before_mode", ctypes.c_ubyte * 24),
        ("mode", ctypes.c_uint16),
        ("between", ctypes.c_ubyte * 50),
        ("birth_seconds", ctypes.c_int64),
        ("birth_nanoseconds", ctypes.c_uint32),
        ("times", ctypes.c_ubyte * 36),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("after", ctypes.c_ubyte * 120),
    )


_call = ctypes.CDLL(None, use_errno=True).statx
_call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Statx))


def character_device(place: str) -> tuple[int, int] | None:
    """Return a character device's major and minor; None for any other file. Links are followed. Raises OSError."""
    status = _status(place, AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE)
    return (status.rdev_major, status.rdev_minor) if stat.S_ISCHR(status.mode) else None


def birth(place: str) -> int:
    """Return when a file was made, in nanoseconds since the epoch; 0 if its file system does not record that.

    Links are not followed. Raises OSError.
    """
    status = _status(place, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BIRTH)
    known = bool(status.mask & STATX_BIRTH)
    return status.birth_seconds * 10**9 + status.birth_nanoseconds if known else 0


def _status(place: str, flags: int, wanted: int) -> _Statx:
    status = _Statx()
    if _call(AT_FDCWD, os.fsencode(place), flags, wanted, ctypes.byref(status)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)
    return status
