"""Asks the running service to run a command. A new process would spend most of its time on imports.

The service runs the same code on the same files (agent.cli.answering), so the answer is the same. This module imports
little, because it runs before everything else.
"""

import os
import sys
from collections.abc import Sequence

import agent
from agent.cli.printing import LISTING, ignore_broken_pipe
from agent.model.paths import COMMAND_PAGE, RUNTIME, STATUSZ_SOCKET

ANSWERABLE = {"status": {"--check", "--json", "--wide"}, "plan": {"--diff", "--json"}, "gpus": {"list", "--json"}}
"""Commands that the service can run, with the arguments that they may have. They end soon and change nothing. `gpus`
needs other processes, which the service's sandbox hides: the process that asks searches them itself (LISTING). The
other commands here need nothing that the sandbox hides or forbids. `doctor` is not one of the commands. It needs the
files of kernel modules, which the sandbox hides, and it reads libcuda's version as another user, which the sandbox
forbids."""
TAKES_NAME = ("status",)
"""The commands in ANSWERABLE that may also have a machine's name as an argument."""
LIMIT = 4.0
"""Seconds to wait for the service. It cannot answer while it is stopped by SIGSTOP, or gets no processor time."""


def ask_service(arguments: Sequence[str], directory: str = RUNTIME) -> int | None:
    """Print the service's answer and return the command's exit code. None if the command must run in this process.

    Only root can ask. For other users, the command runs in their own process: they may read less of the host than the
    service, and the output must say what they may not read.
    """
    if os.geteuid() != 0 or not answerable(arguments):
        return None
    import json

    from agent.cli.terminal import terminal

    width, colour = terminal()
    request = {"arguments": [*arguments], "width": width, "colour": colour, "installation": installation()}
    try:
        document = json.loads(_exchange(f"{directory}/{STATUSZ_SOCKET}", json.dumps(request).encode().hex()))
        output = [_completed(stream, text) for stream, text in document["output"]]
    except (OSError, ValueError):
        # There is no service, the service declines or does not answer in time, or `_completed` cannot list processes:
        # the command must run in this process.
        return None
    try:
        for stream, text in output:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write(text)
            file.flush()
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    return int(document["code"])


def answerable(arguments: Sequence[str]) -> bool:
    """Return whether the service answers this command."""
    name, *rest = arguments or [""]
    named = name in TAKES_NAME
    return name in ANSWERABLE and all(each in ANSWERABLE[name] or (named and not each.startswith("-")) for each in rest)


def installation() -> list[str | int]:
    """Return what identifies the installed version. After an upgrade, the service has older code until it restarts."""
    path = os.path.realpath(agent.__file__)
    # Use the ctime, because package managers set the mtime to the time when the package was built.
    return [agent.__version__, path, os.stat(path).st_ctime_ns]


def _completed(stream: str, text: str) -> tuple[str, str]:
    """Return a stream and the text to print there. For LISTING, find the GPUs' users first, which may raise OSError."""
    if stream != LISTING:
        return stream, text
    from agent.cli.gpu_table import lines_of

    return "stdout", "".join(f"{line}\n" for line in lines_of(text))


def _exchange(path: str, request: str) -> bytes:
    """Return the body of the service's answer. Raises OSError, or ValueError if the service declines."""
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT)
        connection.connect(path)
        connection.sendall(f"GET {COMMAND_PAGE}?{request} HTTP/1.0\r\n\r\n".encode())
        with connection.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError("declined")
    return body
