"""Opens device nodes, all at once and in a process of its own, so that a hanging driver never hangs its caller.

Run as a program. Arguments: a time limit in seconds, then the nodes. Prints one line `<errno> <path>` for each:
0 opened, 110 (ETIMEDOUT) not within the limit. Ends in time even if the kernel keeps the opening process in open(2).
"""

import errno
import os
import signal
import sys
import time

# Not threading: importing it takes longer than the threads.
from _thread import start_new_thread

PAUSE = 0.002
"""Seconds between two checks of what has opened."""


def main(arguments: list[str]) -> None:
    """Fork one child that opens every node in a thread of its own, collect its results, and abandon it."""
    deadline, paths = time.monotonic() + float(arguments[0]), arguments[1:]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _open_all(paths, writer)
    os.close(writer)
    codes = _gather(reader, len(paths), deadline)
    for index, path in enumerate(paths):
        sys.stdout.write(f"{codes.get(index, errno.ETIMEDOUT)} {path}\n")
    # It may be impossible to kill the child: leave it to init instead of waiting.
    sys.stdout.flush()
    os.kill(child, signal.SIGKILL)
    os._exit(0)


def _gather(reader: int, number: int, deadline: float) -> dict[int, int]:
    """Return the error number by the node's index, of those known in time."""
    os.set_blocking(reader, False)
    text = b""
    while text.count(b"\n") < number and time.monotonic() < deadline:
        try:
            said = os.read(reader, 4096)
        except BlockingIOError:
            time.sleep(PAUSE)
            continue
        if not said:
            break
        text += said
    pairs = (line.split() for line in text.splitlines())
    return {int(index): int(code) for index, code in pairs}


def _open_all(paths: list[str], writer: int) -> None:
    """Open all nodes, in the child. Never returns."""
    # Otherwise the caller, which reads until end of file, would wait for a process that hangs.
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for index, path in enumerate(paths):
        start_new_thread(_open, (path, index, writer))
    while True:
        # The parent ends it, once it has all results or the time is over.
        time.sleep(60)


def _open(path: str, index: int, writer: int) -> None:
    code = 0
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError as error:
        code = error.errno or errno.EIO
    # One write of less than PIPE_BUF bytes: lines of several threads never mix.
    os.write(writer, f"{index} {code}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
