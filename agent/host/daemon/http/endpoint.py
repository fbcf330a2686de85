"""Serves the pages on the configured address or on sockets that systemd passed, and on a local socket for root."""

import contextlib
import logging
import os
import socket
from collections.abc import Sequence

from agent.host.daemon.http.server import LIMITS, Limits, Server, Site
from agent.model.errors import AgentError
from agent.model.text import one_line
from agent.system import opening

log = logging.getLogger(__name__)


class LocalServer(Server):
    """A server on a Unix socket to which only root may connect. It replaces a socket that an earlier process left."""

    def __init__(self, directory: str, name: str, limits: Limits = LIMITS) -> None:
        """Listen on the socket `name` in `directory`. Raises AgentError if the socket cannot be created."""
        try:
            descriptor = opening.open_probe(directory)
            try:
                # Use the directory's descriptor: the socket's path may be longer than the 107 bytes of sun_path.
                place = f"/proc/self/fd/{descriptor}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place)
                self._serve(socket.AF_UNIX, place, limits)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise AgentError(
                f"{directory}/{name}: cannot listen: {error.strerror}",
                f"check that {directory} is a directory that the agent can write to",
            ) from error

    def server_bind(self) -> None:
        """Bind the socket so that other users can never connect: the file gets the socket's mode (unix_bind)."""
        os.fchmod(self.socket.fileno(), 0o600)
        super().server_bind()


class InheritedServer(Server):
    """A server on a socket on which systemd listens, also while the service does not run (systemd.socket(5))."""

    def __init__(self, listening: socket.socket, site: Site, limits: Limits = LIMITS) -> None:
        """Serve the pages of `site`. Peers may have been waiting since before the service started."""
        self._serve(listening.family, None, limits, listening, site)

    def stop(self) -> None:
        """Do nothing: shutting the socket down would do so for systemd too. The threads end with the process."""


class Endpoint:
    """Servers on the sockets that systemd passed, or else one on the configured address.

    If another process uses the address, `listen` can be called again later.
    """

    def __init__(self, address: str, inherited: Sequence[socket.socket] = ()) -> None:
        self.error = ""
        """Why the pages are not served; empty if they are."""
        self._address, self._site = address, Site()
        self._server: Server | None = None
        self._inherited, self._served = tuple(inherited), tuple[InheritedServer, ...]()
        for each in inherited:
            log.info("serving on %s, on which systemd listens; metrics.address is not used", each.getsockname())
        self.listen()

    def publish(self, site: Site) -> None:
        """Serve these pages from now on."""
        self._site = site
        if self._server:
            self._server.site = site
        # Begun only now, so that no peer that has waited gets "Not Found".
        self._served = self._served or tuple(InheritedServer(each, site) for each in self._inherited)
        for each in self._served:
            each.site = site

    def listen(self) -> None:
        """Start the server, unless it runs. The same failure is logged only once."""
        if self._server or self._inherited:
            return
        try:
            self._use(Server(self._address))
        except AgentError as error:
            if error.message != self.error:
                log.error("cannot serve metrics and health pages; each pass tries again: %s", one_line(str(error)))
            self.error = error.message

    def move(self, address: str) -> None:
        """Serve on another address. If the new address cannot be bound, raise AgentError and keep the old one.

        On sockets of systemd nothing changes.
        """
        if address == self._address or self._inherited:
            return
        server = Server(address)
        if self._server:
            self._server.stop()
        self._address = address
        self._use(server)

    def _use(self, server: Server) -> None:
        server.site = self._site
        self._server, self.error = server, ""
        log.info("serving http://%s/metrics", self._address)
