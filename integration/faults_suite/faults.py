"""Make each call fail, with every error of its manual page that a bad or full disk or a kernel under load returns."""

from errno import EACCES, EDQUOT, EIO, EMFILE, ENOMEM, ENOSPC, EROFS

from integration.faults_suite.interception import TORN, Call, Strike
from integration.faults_suite.points import Baseline

CHANGES = (ENOSPC, EIO, EROFS, EDQUOT)
WRITING = {
    "open": (*CHANGES, EMFILE, ENOMEM),
    "mkdir": (*CHANGES, ENOMEM),
    "symlink": CHANGES,
    "rename": CHANGES,
    "write": (ENOSPC, EIO, EDQUOT),
    "copy_file_range": (ENOSPC, EIO, ENOMEM),
    "fsync": (EIO, ENOSPC, EDQUOT),
    "fdatasync": (EIO, ENOSPC, EDQUOT),
    "unlink": (EIO, EROFS),
    "rmdir": (EIO, EROFS),
    "chmod": (EIO, EROFS),
    "fchmod": (EIO, EROFS),
    "run": (EIO, ENOMEM),
    "call": (EIO,),
}
"""The errors of each writing call. `run` stands for a program that cannot start, `call` for a service that refuses."""
READING = (EIO, EACCES)


def faults(baseline: Baseline, every: int = 1) -> list[Strike]:
    """Return a strike for each error of WRITING at each writing call, and for each error of READING at reading calls.

    Of equal reading calls, only the first is struck. With `every`, return one in so many of all these strikes.
    """
    strikes = [
        Strike(number, code, torn=call.name in TORN and code != EIO)
        for number, call in enumerate(baseline.writing)
        for code in WRITING[call.name]
    ]
    first: dict[Call, int] = {}
    for number, call in enumerate(baseline.reading):
        first.setdefault(call, number)
    strikes += [Strike(number, code, writing=False) for number in first.values() for code in READING]
    return strikes[::every]
