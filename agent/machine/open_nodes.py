"""A program that opens device nodes, all at the same time, for a caller that must not hang if a driver hangs.

The arguments are a time limit in seconds and the nodes. It prints a line `<errno> <path>` for each node: 0 if it
opened, 110 (ETIMEDOUT) if it did not open within the limit, 11 (EAGAIN) if it could not be tried: no thread could be
started, or the child process was killed. The program exits in time even if open(2) hangs in the kernel.
"""

import errno
import os
import signal
import sys
import time
from threading import Thread

PAUSE = 0.002
"""Seconds between two checks for results."""


def main(arguments: list[str]) -> None:
    """Open the nodes in threads of a child process, print the results, and kill the child without waiting for it."""
    deadline, paths = time.monotonic() + float(arguments[0]), arguments[1:]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _open_all(paths, writer)
    os.close(writer)
    codes = _gather(reader, len(paths), deadline)
    for index, path in enumerate(paths):
        sys.stdout.write(f"{codes[index]} {path}\n")
    sys.stdout.flush()
    # A child that hangs in the kernel does not die yet. It is left to init, which reaps it later.
    os.kill(child, signal.SIGKILL)
    os._exit(0)


def _gather(reader: int, count: int, deadline: float) -> dict[int, int]:
    """Return the nodes' error numbers by index. Nodes without a report get ETIMEDOUT, or EAGAIN if the child ended."""
    os.set_blocking(reader, False)
    text, without = b"", errno.ETIMEDOUT
    while text.count(b"\n") < count and time.monotonic() < deadline:
        try:
            data = os.read(reader, 4096)
        except BlockingIOError:
            time.sleep(PAUSE)
            continue
        if not data:
            # The child has ended too soon.
            without = errno.EAGAIN
            break
        text += data
    pairs = (line.split() for line in text.splitlines())
    return dict.fromkeys(range(count), without) | {int(index): int(code) for index, code in pairs}


def _open_all(paths: list[str], writer: int) -> None:
    # The child must not keep our output open: the caller reads it to its end, and would wait for a hanging child.
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for index, path in enumerate(paths):
        try:
            Thread(target=_open, args=(path, index, writer), daemon=True).start()
        except RuntimeError:
            _report(index, errno.EAGAIN, writer)
    while True:
        # The parent kills this process once it has all results, or time is up.
        time.sleep(60)


def _open(path: str, index: int, writer: int) -> None:
    # Not O_NONBLOCK: since release 550, NVIDIA's driver answers such an open before it initialises the GPU, so the open
    # always succeeds. A FIFO in the node's place does not block this open, which is for reading and writing (fifo(7)).
    code = 0
    try:
        # The node is not closed here, but when this process is killed: without persistence mode, the driver would shut
        # the GPU down at the close, and initialise it again for the CDI generator.
        os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        code = error.errno or errno.EIO
    _report(index, code, writer)


def _report(index: int, code: int, writer: int) -> None:
    # A write of less than PIPE_BUF bytes is atomic: lines of several threads never mix.
    os.write(writer, f"{index} {code}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
