"""Serves /statusz on a Unix socket for root on this host."""

import contextlib
import errno
import os
import socket

from agent.host.daemon.http.server import NO_THREAD_ADVICE, Limits, Server
from agent.model.errors import AgentError
from agent.system import opening


class LocalServer(Server):
    """A server on a Unix socket to which only root may connect. It replaces a socket that an earlier process left."""

    def __init__(self, directory: str, name: str) -> None:
        """Listen on the socket `name` in `directory`. Raises AgentError if the socket cannot be created."""
        try:
            descriptor = opening.open_probe(directory)
            try:
                # Use the directory's descriptor: the path may be too long for sun_path, which has room for 107 bytes.
                path = f"/proc/self/fd/{descriptor}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self.serve(socket.AF_UNIX, path, Limits())
            finally:
                os.close(descriptor)
        except OSError as error:
            writable = f"check that {directory} is a directory that the agent can write to"
            raise AgentError(
                f"{directory}/{name}: cannot listen: {error.strerror}",
                NO_THREAD_ADVICE if error.errno == errno.EAGAIN else writable,
            ) from error

    def server_bind(self) -> None:
        """Bind the socket so that other users can never connect: the file gets the socket's mode (unix_bind)."""
        os.fchmod(self.socket.fileno(), 0o600)
        super().server_bind()
