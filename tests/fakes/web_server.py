"""Web servers of a test on this host, with TLS if they have a certificate."""

import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def certificate(directory: Path, *name: str) -> Path:
    """Make a certificate for 127.0.0.1 and localhost, with its key next to it. Starts a process.

    `name` are options of openssl that name the server otherwise.
    """
    made, key = directory / "crt", directory / "key"
    name = name or ("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    out = ("-keyout", str(key), "-out", str(made))
    subprocess.run(["openssl", "req", "-x509", *new, *name, *out], check=True, capture_output=True)
    return made


def certificate_of_an_intermediate_ca(directory: Path) -> tuple[Path, bytes]:
    """Make a certificate for 127.0.0.1, with its key next to it, and return it with its CA. Starts processes.

    The CA is not a root, and no certificate has key identifiers. Clients in Go, such as kubectl, accept that.
    """
    config = directory / "openssl.cnf"
    config.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    new = ("-config", config, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    bare = ("-addext", "subjectKeyIdentifier=none", "-addext", "authorityKeyIdentifier=none")
    for name, key, issuer, extension in (
        ("root", "root.key", (), "basicConstraints=critical,CA:TRUE"),
        ("ca", "ca.key", ("root", "root.key"), "basicConstraints=critical,CA:TRUE"),
        ("crt", "key", ("ca", "ca.key"), "subjectAltName=IP:127.0.0.1"),
    ):
        by = ("-CA", directory / issuer[0], "-CAkey", directory / issuer[1]) if issuer else ()
        what = ("-subj", f"/CN={name}", "-addext", extension, "-keyout", directory / key, "-out", directory / name)
        subprocess.run(["openssl", "req", "-x509", *new, *bare, *what, *by], check=True, capture_output=True)
    return directory / "crt", (directory / "ca").read_bytes()


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], certificate: Path | None = None) -> Iterator[int]:
    """Serve on 127.0.0.1, and yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_name("key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
