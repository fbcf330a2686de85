"""Opens device nodes, each in a process of its own; run as a program, so that a hanging driver never hangs its caller.

Arguments: a time limit in seconds, then the nodes. Prints one line `<errno> <path>` for each: 0 opened, 110 (ETIMEDOUT)
not within the limit. Ends in time even when a process cannot be killed because the kernel keeps it in open(2).
"""

import errno
import os
import signal
import sys
import time


def main(arguments: list[str]) -> None:
    """Fork one child for each node, gather those that end in time, kill the others."""
    deadline = time.monotonic() + float(arguments[0])
    waiting = {_open_in_child(path): path for path in arguments[1:]}
    while waiting and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
        else:
            _print(os.waitstatus_to_exitcode(status), waiting.pop(pid))
    for pid, path in waiting.items():
        os.kill(pid, signal.SIGKILL)
        _print(errno.ETIMEDOUT, path)
    # Standard output would stay open in a child that cannot be killed; leaving it to init, not waiting for it.
    sys.stdout.flush()
    os._exit(0)


def _open_in_child(path: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Otherwise the caller, which reads until end of file, would wait for a child that hangs.
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 0
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError as error:
        code = error.errno or errno.EIO
    os._exit(min(code, 255))


def _print(code: int, path: str) -> None:
    sys.stdout.write(f"{code} {path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
