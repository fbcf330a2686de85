"""Identifies device nodes with statx(2), which answers without a request to a file server or FUSE daemon.

os.stat of a file on a dead NFS server or FUSE file system never returns, and any process may have such a file open.
"""

import ctypes
import os
import stat

AT_FDCWD = -100
AT_NO_AUTOMOUNT = 0x800
AT_STATX_DONT_SYNC = 0x4000
"""Allows cached values: a file's type and device number never change (include/uapi/linux/fcntl.h)."""
STATX_TYPE = 1


class _Statx(ctypes.Structure):
    """struct statx of include/uapi/linux/stat.h, 256 bytes, which is the same on all architectures."""

    _fields_ = (
        ("before_mode", ctypes.c_ubyte * 28),
        ("mode", ctypes.c_uint16),
        ("between", ctypes.c_ubyte * 98),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("after", ctypes.c_ubyte * 120),
    )


_call = ctypes.CDLL(None, use_errno=True).statx
_call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Statx))


def character_device(place: str) -> tuple[int, int] | None:
    """Return a character device's major and minor; None for any other file. Links are followed. Raises OSError."""
    status = _Statx()
    if _call(AT_FDCWD, os.fsencode(place), AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE, ctypes.byref(status)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)
    return (status.rdev_major, status.rdev_minor) if stat.S_ISCHR(status.mode) else None
