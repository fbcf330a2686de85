"""The host half's backend of `agent.system.process`, which uses the sh package."""

import errno
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import BinaryIO

import sh

from agent.system.deadlines import bounded
from agent.system.process import ENVIRONMENT, FILE_LIMIT, OUTPUT_LIMIT, Completed, TimeLimitError

KILL_MARGIN = 3.0
"""Seconds in which a killed program has to exit."""
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Environment variables that a tool inherits."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def host_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """Run a program, as a Runner does. A program that SIGKILL does not end is not run again until it has ended."""
    # All threads involved are daemon threads, so none of them keeps this process from exiting.
    return bounded(" ".join(argv), lambda: _run(argv, timeout, ENVIRONMENT, _limit_files), timeout + KILL_MARGIN)


def tool_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """Run a program that downloads or unpacks files of any size. This is a Runner.

    Unlike other programs, it inherits the settings of proxies, and is killed if this process dies, because it would go
    on writing.
    """
    environment = {**ENVIRONMENT, **{name: os.environ[name] for name in PROXIES if name in os.environ}}
    return bounded(
        " ".join(argv), lambda: _run(argv, timeout, environment, _die_with(os.getpid())), timeout + KILL_MARGIN
    )


def _limit_files() -> None:
    # The program's output is a file in memory, which counts towards this unit's memory limit. If the program could
    # print without end, the kernel might kill the service.
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))


def _die_with(parent: int) -> Callable[[], None]:
    """Return a function for a new process to call: the kernel kills that process when the thread that made it ends.

    `parent` is the id of this process.
    """
    # Not imported at the top of the module, because few commands run a tool. Not imported in `begin`, because an import
    # in the new process could hang: if another thread of this process held a lock of the importer, nothing would
    # release the lock there.
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def begin() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the call above; then no signal comes.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return begin


def _run(
    argv: tuple[str, ...], timeout: float, environment: Mapping[str, str], prepare: Callable[[], None]
) -> Completed:
    """Run a program in a new session, without our terminal.

    At the time limit, kill it and what it started, except processes with a session or process group of their own.
    The new process calls `prepare` before it becomes the program.
    """
    with ExitStack() as files:
        # Output goes to memory: pipes would need threads, and stay open while a program's children run.
        stdout, stderr, pid_file = (files.enter_context(_memory(each)) for each in ("stdout", "stderr", "pid"))
        null = files.enter_context(open(os.devnull, "rb"))

        def begin() -> None:
            prepare()
            # Python ignores this signal, and programs would inherit that.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.write(pid_file.fileno(), b"%d" % os.getpid())

        running = _start(argv, (null, stdout, stderr, pid_file), environment, begin)
        in_time = False
        try:
            in_time = _ends_within(running.process.pid, timeout)
        finally:
            if not in_time:
                _kill(running.process.pid)
            status = _status(running)
        if not in_time:
            raise TimeLimitError
        return Completed(status, _content(stdout), _content(stderr))


def _start(
    argv: tuple[str, ...],
    files: tuple[BinaryIO, BinaryIO, BinaryIO, BinaryIO],
    environment: Mapping[str, str],
    begin: Callable[[], None],
) -> sh.RunningCommand:
    """Start the program, or raise OSError. The new process calls `begin` before it becomes the program.

    `files` are its input, output and standard error, and the file to which `begin` writes its process id.
    """
    null, stdout, stderr, pid_file = files
    try:
        return sh.Command(argv[0], search_paths=ENVIRONMENT["PATH"].split(":"))(
            *argv[1:],
            _in=null,
            _out=stdout,
            _err=stderr,
            _env=dict(environment),
            _cwd="/",
            _new_session=True,
            _preexec_fn=begin,
            _ok_code=list(range(256)),
            _return_cmd=True,
            _bg=True,
            _bg_exc=False,
        )
    except sh.CommandNotFound as error:
        raise FileNotFoundError(argv[0]) from error
    except sh.ForkException as error:
        raise OSError(errno.ENOEXEC, "not a program that this host can run", argv[0]) from error
    except RuntimeError as error:
        # sh could not start a thread (the unit's TasksMax=, or the host's limit), but the program is already running.
        pid = int(_content(pid_file))
        _kill(pid)
        os.waitpid(pid, 0)
        raise OSError(errno.EAGAIN, str(error), argv[0]) from error


def _memory(name: str) -> BinaryIO:
    return open(os.memfd_create(name), "w+b", buffering=0)


def _content(file: BinaryIO) -> bytes:
    return os.pread(file.fileno(), min(os.fstat(file.fileno()).st_size, OUTPUT_LIMIT + 1), 0)


def _ends_within(pid: int, timeout: float) -> bool:
    """Return whether the process exits within `timeout` seconds. sh's own wait polls, and takes a tenth of a second."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        # The process has exited, and one of sh's threads has collected its status.
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)


def _kill(pid: int) -> None:
    """Kill the process and what it started, except processes with their own session or group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _status(running: sh.RunningCommand) -> int:
    """Wait until the program exits. Return its exit code, or minus the number of the signal that killed it."""
    try:
        running.wait()
        return int(running.exit_code)
    except sh.SignalException as error:
        return -abs(int(error.exit_code))
