"""Commands and files in the virtual machine, through QEMU's guest agent (qemu-ga protocol reference)."""

import base64
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from integration.bed.process import BedError
from integration.bed.vm.json_socket import ClosedError, JSONObject, JSONSocket
from integration.bed.vm.qemu import Qemu

SHARED = 3.0
"""Multiplies the limit of each command: two guests, unit tests and builds may share two processors."""
CHUNK = 256 * 1024


class GuestError(BedError):
    """A command in the guest failed, or the guest does not answer."""


@dataclass(frozen=True)
class Completed:
    """The result of a command. `status` is the exit status; if a signal killed the command, minus its number."""

    status: int
    stdout: str
    stderr: str


class Computer(Protocol):
    """A host on which commands run as root: the simulated host, or this computer."""

    def run(self, argv: Sequence[str], timeout: float = 60, check: bool = True, stdin: str = "") -> Completed:
        """Run `argv`, for `timeout` seconds at most."""
        ...

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        ...


class Guest:
    """The guest of a running QEMU. Connects on first use, and again after a reboot or a restored snapshot."""

    def __init__(self, qemu: Qemu) -> None:
        self._qemu = qemu
        self._socket: JSONSocket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wait(self, timeout: float) -> None:
        """Wait until the guest agent answers on a new, synchronized connection. Raises GuestError."""
        deadline = time.monotonic() + timeout
        while True:
            self.close()
            try:
                self._synchronize(min(5.0, max(0.1, deadline - time.monotonic())))
                return
            except (TimeoutError, ClosedError, OSError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise GuestError(
                        f"the guest agent did not answer within {timeout:.0f} s ({error}); {self._qemu.evidence()}"
                    ) from error
                time.sleep(0.2)

    def run(self, argv: Sequence[str], timeout: float = 60, check: bool = True, stdin: str = "") -> Completed:
        """Run `argv` as root. Raises GuestError if it takes too long or, with `check`, if its status is not 0.

        `timeout` is in seconds, and meant for a guest that has a processor to itself: it is multiplied by SHARED.
        """
        pid = self.start(argv, stdin)
        timeout *= SHARED
        deadline = time.monotonic() + timeout
        pause = 0.02
        while not (answer := self._call("guest-exec-status", {"pid": pid}))["exited"]:
            if time.monotonic() > deadline:
                self._call("guest-exec", {"path": "kill", "arg": ["-KILL", str(pid)]})
                raise GuestError(f"in the guest, {shlex.join(argv)}: not done in {timeout} s; {self._qemu.evidence()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)
        completed = Completed(
            answer["exitcode"] if "exitcode" in answer else -answer.get("signal", 0),
            _decode(answer.get("out-data")),
            _decode(answer.get("err-data")),
        )
        if check and completed.status:
            raise GuestError(
                f"in the guest, {shlex.join(argv)}: status {completed.status}\n{completed.stdout[-2000:]}"
                f"{completed.stderr[-4000:]}\n{self._qemu.evidence()}"
            )
        return completed

    def start(self, argv: Sequence[str], stdin: str = "") -> int:
        """Start `argv` as root, and return its process ID without waiting for its end."""
        arguments: JSONObject = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        # The guest agent's own environment has no login PATH, and its locale is C, without UTF-8.
        arguments["env"] = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG=C.UTF-8", "HOME=/root"]
        if stdin:
            arguments["input-data"] = base64.b64encode(stdin.encode()).decode()
        pid: int = self._call("guest-exec", arguments)["pid"]
        return pid

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file (not atomically), and create its directory if it is missing."""
        self.run(["mkdir", "-p", path.rpartition("/")[0] or "/"])
        handle = self._call("guest-file-open", {"path": path, "mode": "w"})
        for start in range(0, len(content), CHUNK):
            chunk = base64.b64encode(content[start : start + CHUNK]).decode()
            self._call("guest-file-write", {"handle": handle, "buf-b64": chunk})
        self._call("guest-file-close", {"handle": handle})
        self.run(["chmod", f"{mode:o}", path])

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises GuestError if the file cannot be opened."""
        handle = self._call("guest-file-open", {"path": path, "mode": "r"})
        content = b""
        while True:
            answer = self._call("guest-file-read", {"handle": handle, "count": CHUNK})
            content += base64.b64decode(answer.get("buf-b64", ""))
            # Files of procfs report end of file only by an empty read.
            if not answer["count"]:
                break
        self._call("guest-file-close", {"handle": handle})
        return content

    def set_clock(self) -> None:
        """Set the guest's clock to this computer's time: a restored guest has the time of its snapshot."""
        self.run(["date", "--utc", "--set", f"@{time.time():.3f}"])

    def _synchronize(self, timeout: float) -> JSONSocket:
        sock = JSONSocket(self._qemu.guest_socket)
        self._socket = sock
        number = secrets.randbits(31)
        # 0xFF makes the guest agent drop what is left of an interrupted command.
        sock.send({"execute": "guest-sync-delimited", "arguments": {"id": number}}, prefix=b"\xff", timeout=timeout)
        deadline = time.monotonic() + timeout
        while sock.receive(max(0.0, deadline - time.monotonic())).get("return") != number:
            pass
        return sock

    def _call(self, command: str, arguments: JSONObject) -> Any:  # noqa: ANN401 - each command has its own result
        if self._socket is None:
            self.wait(90)
        assert self._socket is not None
        try:
            self._socket.send({"execute": command, "arguments": arguments})
            answer = self._socket.receive(timeout=180)
        except (TimeoutError, ClosedError) as error:
            self.close()
            raise GuestError(f"guest agent, {command}: {error}; {self._qemu.evidence()}") from error
        if "error" in answer:
            described = answer["error"].get("desc")
            raise GuestError(f"guest agent, {command} {_short(arguments)}: {described}; {self._qemu.evidence()}")
        return answer.get("return")


def _decode(data: str | None) -> str:
    return base64.b64decode(data or "").decode(errors="replace")


def _short(arguments: JSONObject) -> str:
    return str({key: value for key, value in arguments.items() if key not in ("buf-b64", "input-data", "env")})
