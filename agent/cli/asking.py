"""Asks the running service to answer a command. It has loaded what takes the command most of its time to load.

The service answers by running the same code on the same files (agent.cli.answering), so the answer is the same.
Imports little, because this comes before everything else.
"""

import os
import sys
from collections.abc import Sequence

import agent
from agent.cli.printing import LISTING, ignore_broken_pipe
from agent.model.paths import COMMAND_PAGE, RUNTIME, STATUSZ_SOCKET

WORDS = {"status": {"--check", "--json", "--wide"}, "plan": {"--diff", "--json"}, "gpus": {"list", "--json"}}
"""Commands that the service answers, with their arguments. They end soon, change nothing, and need nothing that the
service's sandbox hides. `doctor` needs kernel modules' files, and reads libcuda's version as another user."""
TAKES_NAME = ("status",)
"""Commands that also take a machine's name."""
LIMIT = 4.0
"""Seconds to wait for the service. It does not answer if it was stopped by a signal or is starved of processors."""


def ask_service(arguments: Sequence[str], directory: str = RUNTIME) -> int | None:
    """Print the service's answer and return its exit code. None if the command must run in this process instead.

    Only root can ask: other users see less of the host than the service, and get an answer that says so.
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
        # There is no service, or it is one that declines or knows no such page. Every reason leads to the same.
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
    return name in WORDS and all(each in WORDS[name] or (named and not each.startswith("-")) for each in rest)


def installation() -> list[str | int]:
    """Return what tells installed versions apart: a service that was not restarted after an upgrade has older code."""
    place = os.path.realpath(agent.__file__)
    # Not the mtime: files in a package keep theirs, whatever is installed.
    return [agent.__version__, place, os.stat(place).st_ctime_ns]


def _completed(stream: str, text: str) -> tuple[str, str]:
    """Return a stream and the text to print there. Raises OSError if what the service cannot see cannot be seen."""
    if stream != LISTING:
        return stream, text
    from agent.cli.gpu_table import lines_of

    return "stdout", "".join(f"{line}\n" for line in lines_of(text))


def _exchange(path: str, request: str) -> bytes:
    """Return the body of the service's answer. Raises OSError, or ValueError if it declines."""
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
