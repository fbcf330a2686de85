"""Reads the kubeconfig with which the kubelet uses the API server (clientcmd/api/v1 of k8s.io/client-go).

A kubeconfig is YAML, which the standard library cannot read, so kubectl prints it as JSON unless it is JSON already.
agent.dra.credentials calls this only when the file has changed.
"""

import base64
import binascii
import posixpath
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import in_json, parse_object
from agent.system.files import System

SIZE_LIMIT = 1 << 18
"""Bytes of the largest kubeconfig, certificate or token that is read."""
KUBECTL_LIMIT = 15.0
"""Seconds for kubectl, which only reads the file."""
HTTPS_PORT = 443
UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that a text in JSON can have, but the name of a file or server cannot: a null character, or half a
surrogate pair."""
NOT_SUPPORTED = {
    "exec": "a program that provides credentials",
    "auth-provider": "an authentication provider",
    "username": "a password",
    "as": "impersonation",
}
"""Keys of a kubeconfig's `user` that the agent does not support, with their meanings."""


@dataclass(frozen=True, slots=True)
class Material:
    """A certificate, key or token: in a file, or inline."""

    path: str = ""
    data: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.path or self.data)

    def read(self, system: System) -> bytes:
        """Return the content. Raises OSError."""
        return system.read(self.path, SIZE_LIMIT) if self.path else self.data


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """The kubeconfig's current context: the address of the API server, and the credentials."""

    host: str
    port: int
    prefix: str
    """Path in the server's address, which precedes the path of every request; usually empty."""
    server_name: str
    """The name that the server's certificate must have."""
    ca: Material
    certificate: Material
    key: Material
    token: Material

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files that the kubeconfig names. They are replaced when credentials are renewed."""
        return tuple(each.path for each in (self.ca, self.certificate, self.key, self.token) if each.path)


def read_kubeconfig(system: System, path: str) -> Kubeconfig:
    """Return the current context of a kubeconfig. Raises AgentError or OSError."""
    content = system.read(path, SIZE_LIMIT)
    if not content.lstrip().startswith(b"{"):
        command = ("kubectl", "config", "view", "--raw", "--minify", "--output=json", f"--kubeconfig={path}")
        content = system.run(*command, timeout=KUBECTL_LIMIT).encode(errors="surrogateescape")
    return parse_kubeconfig(path, content)


def parse_kubeconfig(where: str, data: bytes) -> Kubeconfig:
    """Return the current context of a kubeconfig in JSON. Raises AgentError.

    `where` is the file's path. Relative paths in the file start at its directory.
    """
    document = parse_object(where, data)
    context = _named(where, document, "context", _text(where, document, "current-context"), "current-context")
    cluster = _named(where, document, "cluster", _text(where, context, "cluster"), "the current context's cluster")
    user = _named(where, document, "user", _text(where, context, "user"), "the current context's user")
    _refuse(where, cluster, user)
    server = _text(where, cluster, "server")
    try:
        parts = urllib.parse.urlsplit(server)
        host, port = parts.hostname or "", HTTPS_PORT if parts.port is None else parts.port
        # Later, a connection encodes the host in this way, and a request encodes the path. Find out here whether both
        # can be encoded.
        host.encode("idna")
        parts.path.encode("ascii")
    except ValueError:
        parts, host, port = urllib.parse.urlsplit(""), "", 0
    if parts.scheme != "https" or not host or not port:
        raise DocumentError(f"{where}: the server must be an https:// address, not {server[:100]!a}")
    server_name = _text(where, cluster, "tls-server-name") or host
    try:
        server_name.encode("idna")
    except UnicodeError as error:
        raise DocumentError(f"{where}: key tls-server-name must be a host's name, not {server_name[:100]!a}") from error
    directory = posixpath.dirname(where)
    kubeconfig = Kubeconfig(
        host,
        port,
        parts.path.rstrip("/"),
        server_name,
        ca=_material(where, cluster, "certificate-authority", directory),
        certificate=_material(where, user, "client-certificate", directory),
        key=_material(where, user, "client-key", directory),
        token=_token(where, user, directory),
    )
    if not (kubeconfig.certificate and kubeconfig.key) and not kubeconfig.token:
        raise DocumentError(f"{where}: the user has neither a client certificate with its key nor a token")
    return kubeconfig


def _refuse(where: str, cluster: dict[str, Any], user: dict[str, Any]) -> None:
    if cluster.get("insecure-skip-tls-verify"):
        hint = "set certificate-authority"
        raise AgentError(
            f"{where}: it skips the verification of the server's certificate, which is not supported", hint
        )
    if cluster.get("proxy-url"):
        raise AgentError(f"{where}: it names a proxy, which is not supported", "let the node reach the server directly")
    for key, meaning in NOT_SUPPORTED.items():
        if user.get(key):
            hint = "join the node with a client certificate (TLS bootstrap) or a token file"
            raise AgentError(f"{where}: it uses {meaning} ({key}), which is not supported here", hint)


def _named(where: str, document: dict[str, Any], kind: str, name: str, key: str) -> dict[str, Any]:
    """Return the entry with this name in a list such as `clusters`. Raises DocumentError.

    `key` says where the name comes from.
    """
    if not name:
        raise DocumentError(f"{where}: {key} is not set")
    listed = document.get(f"{kind}s")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") == name and isinstance(found := each.get(kind), dict):
            return found
    raise DocumentError(f"{where}: {key} is {name[:100]!a}, which is not in `{kind}s`")


def _text(where: str, document: dict[str, Any], key: str) -> str:
    value = document.get(key) or ""
    if not isinstance(value, str):
        raise DocumentError(f"{where}: key {key} must be a string, not {in_json(value)}")
    if UNUSABLE.search(value):
        raise DocumentError(f"{where}: key {key} has characters that are not allowed")
    return value


def _material(where: str, entry: dict[str, Any], key: str, directory: str) -> Material:
    """Return the certificate or key at `key`. Inline data, at `KEY-data`, takes precedence over the file."""
    try:
        data = base64.b64decode(_text(where, entry, f"{key}-data"), validate=True)
    except (binascii.Error, ValueError) as error:
        # The message leaves out the cause, which could quote a part of a key.
        raise DocumentError(f"{where}: key {key}-data is not base64") from error
    path = _text(where, entry, key)
    return Material(data=data) if data else Material(posixpath.join(directory, path) if path else "")


def _token(where: str, user: dict[str, Any], directory: str) -> Material:
    """Return the token. Here the file takes precedence over inline data, because the token in the file is renewed."""
    path = _text(where, user, "tokenFile")
    return Material(posixpath.join(directory, path)) if path else Material(data=_text(where, user, "token").encode())
