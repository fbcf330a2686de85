"""Requests and downloads from real servers on this host, with a CA of its own, and redirects."""

import socket
import ssl
import time
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Literal

import pytest

from agent.system.http import ask, open_url
from tests.fakes.web_server import certificate, certificate_of_an_intermediate_ca, serving

pytestmark = pytest.mark.processes


class Handler(BaseHTTPRequestHandler):
    """Redirects /to/URL to the URL, and /again/N to /again/N-1 until N is 0. Accepts one token at /api."""

    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path))
        kind, _, rest = self.path[1:].partition("/")
        target = rest if kind == "to" else f"/again/{int(rest) - 1}" if kind == "again" and rest != "0" else ""
        refused = kind == "api" and self.headers["Authorization"] != "Bearer good"
        self.send_response(302 if target else 401 if refused else 200)
        self.send_header("Location", target)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"content")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The servers' certificate."""
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def urls(made: Path) -> Iterator[tuple[str, str, str]]:
    """A mirror, another host to which it redirects, and the mirror without TLS."""
    with (
        serving(Handler, made) as first,
        serving(Handler, made) as second,
        serving(Handler) as plain,
        pytest.MonkeyPatch.context() as patch,
    ):
        # OpenSSL's own variable: the host's CAs.
        patch.setenv("SSL_CERT_FILE", str(made))
        yield f"https://127.0.0.1:{first}", f"https://localhost:{second}", f"http://127.0.0.1:{plain}"


@pytest.fixture(autouse=True)
def asked() -> list[tuple[str, str]]:
    Handler.asked = []
    return Handler.asked


def fetched(url: str, method: Literal["GET", "HEAD"] = "GET") -> bytes:
    with open_url(url, 10, method) as answer:
        return answer.read()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_redirect_to_another_host_is_followed_with_the_same_method(
    urls: tuple[str, str, str], asked: list[tuple[str, str]], method: Literal["GET", "HEAD"]
) -> None:
    mirror, other, _ = urls
    assert fetched(f"{mirror}/to/{other}/file/kubelet", method) == (b"content" if method == "GET" else b"")
    assert asked == [(method, f"/to/{other}/file/kubelet"), (method, "/file/kubelet")]


def test_https_never_becomes_http(urls: tuple[str, str, str], asked: list[tuple[str, str]]) -> None:
    mirror, other, plain = urls
    with pytest.raises(urllib.error.URLError, match="redirects to http://"):
        fetched(f"{mirror}/to/{plain}/file/kubelet")
    assert len(asked) == 1
    for target in (f"{plain}/file/kubelet", f"{other}/file/kubelet"):
        assert fetched(f"{plain}/to/{target}") == b"content"


def test_other_targets_are_refused(urls: tuple[str, str, str]) -> None:
    with pytest.raises(urllib.error.URLError, match="redirects to ftp:"):
        fetched(f"{urls[0]}/to/ftp://127.0.0.1/x")
    assert len(Handler.asked) == 1


def test_redirects_come_to_an_end(urls: tuple[str, str, str]) -> None:
    assert fetched(f"{urls[0]}/again/3") == b"content"
    with pytest.raises(
        urllib.error.HTTPError, match=r"302: it redirects too often; the last answer: [\w ]+$"
    ) as caught:
        fetched(f"{urls[0]}/again/100")
    caught.value.close()


def test_another_ca_is_refused(urls: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        fetched(f"{urls[0]}/file/kubelet")


# Requests with the CAs of the caller, not those of the host.


def test_the_token_decides_and_the_clock_is_read(urls: tuple[str, str, str], made: Path) -> None:
    url, ca = urls[0], made.read_bytes()
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


def test_attack_no_ca_at_all_does_not_mean_the_hosts(urls: tuple[str, str, str]) -> None:
    """Which trusts the server."""
    for content in (b"", b"no certificate", b"\xff", b"\n"):
        with pytest.raises(ValueError, match="PEM"):
            ask(urls[0], ca=content, token="good")


@pytest.mark.parametrize(
    ("url", "kind"),
    [("https://127.0.0.1:1", ConnectionRefusedError), ("https://nowhere.invalid", socket.gaierror), ("", ssl.SSLError)],
)
def test_what_cannot_be_asked(urls: tuple[str, str, str], tmp_path: Path, url: str, kind: type[OSError]) -> None:
    """The last one has a certificate of another CA."""
    with pytest.raises(kind):
        ask(f"{url or urls[0]}/api", ca=certificate(tmp_path).read_bytes())
