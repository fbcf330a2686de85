"""Serves the pages on the configured address, or on sockets that systemd passed."""

import errno
import logging
import socket
from collections.abc import Sequence

from agent.host.daemon.http.server import LIMITS, Limits, Server, Site
from agent.model.errors import AgentError
from agent.model.text import one_line

log = logging.getLogger(__name__)


class InheritedServer(Server):
    """A server on a socket on which systemd listens, even while the service does not run (systemd.socket(5))."""

    def __init__(self, listening: socket.socket, site: Site, limits: Limits = LIMITS) -> None:
        """Serve the pages of `site`. Pages are needed at once, because peers may be waiting already."""
        self.serve(listening.family, None, limits, listening, site)

    def stop(self) -> None:
        """Do nothing: a shutdown of the socket would also end systemd's listening. The threads end with the process."""


class Endpoint:
    """Servers on the sockets that systemd passed; if it passed none, a server on the configured address.

    If another process uses the address, `listen` can be called again later.
    """

    def __init__(self, address: str, inherited: Sequence[socket.socket] = ()) -> None:
        self.error = ""
        """Why the pages are not served; empty if they are."""
        self._address, self._site = address, Site()
        self._server: Server | None = None
        self._inherited, self._served = tuple(inherited), list[InheritedServer]()
        for each in inherited:
            log.info("serving on %s, on which systemd listens; metrics.address is not used", each.getsockname())
        self.listen()

    def publish(self, site: Site) -> None:
        """Serve these pages from now on."""
        self._site = site
        if self._server:
            self._server.site = site
        # Accept connections on systemd's sockets only now: without pages, peers that have waited would get "Not Found".
        if len(self._served) < len(self._inherited):
            self._accept()
        for each in self._served:
            each.site = site

    def listen(self) -> None:
        """Start the server on the configured address, unless it runs or systemd passed sockets.

        The same failure is logged only once.
        """
        if self._server or self._inherited:
            return
        try:
            self._use(Server(self._address))
        except AgentError as error:
            self._failed(error.message, one_line(str(error)))

    def move(self, address: str) -> None:
        """Serve on another address. If it cannot be bound, raise AgentError and keep the old one.

        Do nothing if systemd passed sockets.
        """
        if address == self._address or self._inherited:
            return
        try:
            server = Server(address)
        except AgentError as error:
            in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not self._server or not in_use or _port(address) != _port(self._address):
                raise
            # The old server may be in the way: no two sockets can listen on 127.0.0.1:PORT and 0.0.0.0:PORT.
            server = self._replace(self._server, address)
        else:
            if self._server:
                self._server.stop()
        self._address = address
        self._use(server)

    def _accept(self) -> None:
        """Serve those of systemd's sockets that are not served yet."""
        try:
            for each in self._inherited[len(self._served) :]:
                self._served.append(InheritedServer(each, self._site))
            self.error = ""
        except OSError as error:
            why = f"the socket that systemd passed: {error.strerror}"
            self._failed(why, why)

    def _failed(self, error: str, detail: str) -> None:
        if error != self.error:
            log.error("cannot serve metrics and health pages; each pass tries again: %s", detail)
        self.error = error

    def _replace(self, old: Server, address: str) -> Server:
        """Stop the old server, and return a new one; if that fails, raise AgentError and serve on the old address."""
        old.stop()
        self._server = None
        try:
            return Server(address)
        except AgentError:
            self.listen()
            raise

    def _use(self, server: Server) -> None:
        server.site = self._site
        self._server, self.error = server, ""
        log.info("serving http://%s/metrics", self._address)


def _port(address: str) -> str:
    return address.rpartition(":")[2]
