"""Runs tools that download and unpack, with the sh package: a backend of `agent.system.process`.

Other programs of the host half run without sh: its import takes 40 ms, and it takes 6 ms to run a program.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import sh

from agent.system.deadlines import bounded
from agent.system.process import ENVIRONMENT, KILL_MARGIN, Completed, completed, memory_file

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Environment variables that a tool inherits."""
UMASK = 0o022
"""The umask of the tools. The user root may have umask 077. With it, only this user could enter the top directory of a
file system that umoci unpacks, and no other user's program in the machine would start."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def tool_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """Run a program that downloads or unpacks files of any size. This is a Runner.

    Unlike other programs, it inherits the settings of proxies. It is killed if this process dies: otherwise, it would
    go on writing.
    """
    environment = {**ENVIRONMENT, **{name: os.environ[name] for name in PROXIES if name in os.environ}}
    # All threads involved are daemon threads, so none of them keeps this process from exiting.
    return bounded(" ".join(argv), lambda: _run(argv, timeout, environment), timeout + KILL_MARGIN)


def _run(argv: tuple[str, ...], timeout: float, environment: Mapping[str, str]) -> Completed:
    """Run a program in a new session, without a controlling terminal. Raises OSError if it cannot start."""
    with ExitStack() as files:
        stdout, stderr = (files.enter_context(memory_file(each)) for each in ("stdout", "stderr"))
        null = files.enter_context(open(os.devnull, "rb"))
        try:
            running = sh.Command(argv[0], search_paths=ENVIRONMENT["PATH"].split(":"))(
                *argv[1:],
                _in=null,
                _out=stdout,
                _err=stderr,
                _env=dict(environment),
                _cwd="/",
                _new_session=True,
                _preexec_fn=_beginning(),
                _ok_code=list(range(256)),
                _return_cmd=True,
                _bg=True,
                _bg_exc=False,
            )
        except sh.CommandNotFound as error:
            raise FileNotFoundError(argv[0]) from error
        except sh.ForkException as error:
            raise OSError(errno.ENOEXEC, "not a program that this host can run", argv[0]) from error

        def wait() -> int:
            try:
                running.wait()
                return int(running.exit_code)
            except sh.SignalException as error:
                return -abs(int(error.exit_code))

        return completed(running.process.pid, wait, stdout, stderr, timeout)


def _beginning() -> Callable[[], None]:
    """Return a function that the new process calls before it becomes the program.

    After that call, the kernel kills the new process when the thread that made it ends.
    """
    parent, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def begin() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the call above; then no signal comes.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        # Python ignores this signal, and programs would inherit that.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.umask(UMASK)

    return begin
