"""Requests by HTTPS to a real server on this host, with a CA of its own."""

import http.server
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.system.http import ask
from tests.fakes.web_server import certificate, certificate_of_an_intermediate_ca, serving

pytestmark = pytest.mark.processes


class Handler(http.server.BaseHTTPRequestHandler):
    """Accepts one token."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer good" else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, bytes]]:
    made = certificate(tmp_path_factory.mktemp("tls"))
    with serving(Handler, made) as port:
        yield f"https://127.0.0.1:{port}", made.read_bytes()


def test_the_token_decides_and_the_clock_is_read(server: tuple[str, bytes]) -> None:
    url, ca = server
    good = ask(f"{url}/api", ca=ca, token="good")
    assert good.status == 200
    assert good.date is not None
    assert abs(good.date - time.time()) < 10
    assert ask(f"{url}/api", ca=ca, token="bad").status == 401


def test_what_kubernetes_clients_accept_is_accepted(tmp_path: Path) -> None:
    """A CA that is not a root, certificates without key identifiers, and comments in any language between them.

    By default, Python 3.11 refuses the first, and Python 3.13 the second.
    """
    made, ca = certificate_of_an_intermediate_ca(tmp_path)
    with serving(Handler, made) as port:
        assert ask(f"https://127.0.0.1:{port}/api", ca="# F\u0151tan\xfas\xedtv\xe1ny\n".encode() + ca).status == 401


def test_a_certificate_that_names_the_server_in_the_subject_only_is_refused(tmp_path: Path) -> None:
    """As by Go ("relies on legacy Common Name field"): the kubelet could not join through this server."""
    made = certificate(tmp_path, "-subj", "/CN=localhost")
    with serving(Handler, made) as port, pytest.raises(ssl.SSLCertVerificationError):
        ask(f"https://localhost:{port}/api", ca=made.read_bytes())


def test_attack_no_ca_at_all_does_not_mean_the_hosts(
    server: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL reads this variable, so the host trusts the server."""
    place = tmp_path / "host.crt"
    place.write_bytes(server[1])
    monkeypatch.setenv("SSL_CERT_FILE", str(place))
    for content in (b"", b"no certificate", b"\xff", b"\n"):
        with pytest.raises(ValueError, match="PEM"):
            ask(server[0], ca=content, token="good")


@pytest.mark.parametrize(
    ("url", "kind"),
    [("https://127.0.0.1:1", ConnectionRefusedError), ("https://nowhere.invalid", socket.gaierror), ("", ssl.SSLError)],
)
def test_what_cannot_be_asked(server: tuple[str, bytes], tmp_path: Path, url: str, kind: type[OSError]) -> None:
    """The last one has a certificate of another CA."""
    with pytest.raises(kind):
        ask(f"{url or server[0]}/api", ca=certificate(tmp_path).read_bytes())
