"""Groups errno values (errno(3)) by what they mean when a file is observed."""

import errno

NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
"""ENODEV: a sysfs or procfs file whose device disappeared between open(2) and read(2)."""
UNUSABLE = frozenset({errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG})
"""The file exists, but has the wrong type or size; or its path is too long, or has too many links."""
