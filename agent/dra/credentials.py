"""Keeps the credentials for connections to the API server, and loads them again when one of their files has changed.

When the kubelet's certificate or a token is renewed, a new file replaces the old one.
"""

import os
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.dra.kubeconfig import Kubeconfig, Material, read_kubeconfig
from agent.model.device import FileIdentity
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.tls import client_context


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """The credentials of connections. When a file changes, new connections use a new session."""

    kubeconfig: Kubeconfig
    context: ssl.SSLContext
    headers: Mapping[str, str] = field(repr=False)


class Credentials:
    """The kubelet's identity towards the API server. Threads may share it."""

    def __init__(self, system: System, path: str) -> None:
        """`path` is that of the kubeconfig, which is read at the first call of `session`."""
        self._system, self._path = system, path
        self._lock = threading.Lock()
        self._kubeconfig: Kubeconfig | None = None
        self._session: Session | None = None
        self._seen: dict[str, FileIdentity | None] = {}
        """The identities, by path, of the kubeconfig and of the files that it names, when they were last read."""

    def session(self) -> Session:
        """Return the session for a new connection or request. Raises AgentError, which names the unusable file."""
        with self._lock:
            seen = self._identities(self._seen or (self._path,))
            if self._session is None or seen != self._seen:
                self._session = None
                if self._kubeconfig is None or seen[self._path] != self._seen.get(self._path):
                    self._kubeconfig = self._read(self._path)
                # The files' identities are taken before the files are read: if a file changes in between, the next call
                # reads it again.
                self._seen = {**self._identities(self._kubeconfig.files), self._path: seen[self._path]}
                self._session = self._make(self._kubeconfig)
            return self._session

    def _read(self, path: str) -> Kubeconfig:
        try:
            return read_kubeconfig(self._system, path)
        except OSError as error:
            raise AgentError(f"{path}: cannot read the kubelet's kubeconfig: {error.strerror}") from error

    def _identities(self, paths: Iterable[str]) -> dict[str, FileIdentity | None]:
        return {path: self._identity(path) for path in paths}

    def _identity(self, path: str) -> FileIdentity | None:
        try:
            return self._system.identity(path)
        except OSError:
            return None

    def _make(self, kubeconfig: Kubeconfig) -> Session:
        try:
            context = client_context(self._content(kubeconfig.ca) if kubeconfig.ca else None)
            context.set_alpn_protocols(["http/1.1"])
            if kubeconfig.certificate and kubeconfig.key:
                self._load_certificate(context, kubeconfig)
            token = self._token(kubeconfig.token)
        except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
            files = ", ".join(kubeconfig.files) or "inline data"
            reason = getattr(error, "reason", None) or "not PEM"
            raise AgentError(f"{self._path}: a certificate, key or token is unusable ({reason}): {files}") from None
        except OSError as error:
            # For example, there may be no memory or file descriptor left.
            raise AgentError(f"{self._path}: cannot load its credentials: {error.strerror}") from error
        return Session(kubeconfig, context, {"Authorization": f"Bearer {token}"} if token else {})

    def _load_certificate(self, context: ssl.SSLContext, kubeconfig: Kubeconfig) -> None:
        """Load certificate and key by way of files in memory.

        OpenSSL takes them only from files, and could block while it reads the original files.
        """
        descriptors = [os.memfd_create("tls", os.MFD_CLOEXEC) for _ in range(2)]
        try:
            for descriptor, material in zip(descriptors, (kubeconfig.certificate, kubeconfig.key), strict=True):
                os.write(descriptor, self._content(material))
            certificate, key = (f"/proc/self/fd/{each}" for each in descriptors)
            context.load_cert_chain(certificate, key, password=_no_password)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _token(self, material: Material) -> str:
        """Return the token; empty if there is none.

        Raises UnicodeDecodeError, or an AgentError that does not quote the token.
        """
        token = self._content(material).decode("ascii").strip() if material else ""
        # http.client refuses headers with line breaks, and its error would quote the token.
        if " " in token or not token.isprintable():
            where = material.path or f"{self._path}: key token"
            raise AgentError(
                f"{where}: the token has a space, a line break or a control character", "write it there on one line"
            )
        return token

    def _content(self, material: Material) -> bytes:
        try:
            return material.read(self._system)
        except OSError as error:
            raise AgentError(
                f"{material.path}: cannot read this file of the kubelet's kubeconfig: {error.strerror}"
            ) from error


def _no_password() -> str:
    """Refuse keys with a password. Without this function, OpenSSL would ask for the password on the terminal."""
    raise ValueError
