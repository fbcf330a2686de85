"""Downloads from real servers on this host, with redirects that are followed and redirects that are refused."""

import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Literal

import pytest

from agent.system.http import open_url
from tests.fakes.web_server import certificate, serving

pytestmark = pytest.mark.processes


class Handler(BaseHTTPRequestHandler):
    """Redirects /to/URL to the URL, and /again/N to /again/N-1 until N is 0."""

    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path))
        kind, rest = self.path[1:].split("/", 1)
        target = rest if kind == "to" else f"/again/{int(rest) - 1}" if kind == "again" and rest != "0" else ""
        self.send_response(302 if target else 200)
        self.send_header("Location", target)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"content")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """A mirror, another host to which it redirects, and the mirror without TLS."""
    made = certificate(tmp_path_factory.mktemp("tls"))
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
