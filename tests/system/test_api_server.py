"""The client of the API server: requests, watches, and the kubeconfig with its credentials."""

import base64
import contextlib
import errno
import gc
import json
import os
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.dra.slices import COLLECTION
from agent.model.conditions import Reason
from agent.model.errors import AgentError, CommandError
from agent.system import api_server as api_module
from agent.system.api_server import (
    ApiClient,
    ApiError,
    ConflictError,
    Credentials,
    Kubeconfig,
    NotFoundError,
    Watcher,
    api_error,
    parse_kubeconfig,
    read_kubeconfig,
)
from agent.system.deadlines import stuck
from agent.system.files import System
from agent.system.process import Completed
from tests.fakes.api_server import NODES, ApiServer, failure, make_certificate
from tests.fakes.dra_machine import KUBECONFIG, NODE, DraMachine
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.processes
HERE = f"{NODES}/{NODE}"


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A request is refused while one of the same name, as of an earlier test, still hangs."""
    yield
    wait_for(lambda: not [what for what in stuck() if NODES in what], 20, "all requests have ended")


def test_the_token_is_sent_and_no_connection_is_left(api: ApiServer, client: ApiClient) -> None:
    for _ in range(3):
        assert client.get(HERE)["metadata"]["uid"] == "uid-1"
    assert [token for *_, token in api.requests] == ["Bearer good"] * 3
    assert not connections(api)


def connections(api: ApiServer) -> list[ssl.SSLSocket]:
    """Return this process's open connections to the server."""
    found = []
    for each in gc.get_objects():
        if isinstance(each, ssl.SSLSocket) and not each.server_side and each.fileno() >= 0:
            # Connections of earlier tests may be ending.
            with contextlib.suppress(OSError):
                found += [each] if each.getpeername()[1] == api.port else []
    return found


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("certificate-authority", "/etc/other.crt", r"the certificate of https://127\.0\.0\.1:\d+ is not accepted"),
        ("tls-server-name", "kubernetes", "is not accepted: Hostname mismatch"),
        ("server", "https://[::1]:1", r"no answer from https://\[::1\]:1: "),
        ("server", "https://127.0.0.1:1/\u00e4", "no answer from https://127.0.0.1:1: "),
    ],
)
def test_another_authority_name_or_address_is_an_error(
    api: ApiServer, joined: DraMachine, tmp_path: Path, key: str, value: str, said: str
) -> None:
    make_certificate(tmp_path / "other.crt", tmp_path / "other.key")
    joined.put("/etc/other.crt", (tmp_path / "other.crt").read_bytes())
    content = json.loads(api.kubeconfig())
    content["clusters"][0]["cluster"][key] = value
    joined.put(KUBECONFIG, json.dumps(content))
    with pytest.raises(ApiError, match=said) as caught:
        ApiClient(Credentials(joined, KUBECONFIG)).get(HERE)
    assert caught.value.reason == Reason.API_UNREACHABLE
    assert api.requests == []


def test_new_credentials_are_used_when_a_file_has_changed(api: ApiServer, joined: DraMachine) -> None:
    joined.put("/etc/token", "first\n")
    joined.put(KUBECONFIG, api.kubeconfig(tokenFile="/etc/token"))
    client = ApiClient(Credentials(joined, KUBECONFIG))
    client.get(HERE)
    joined.put("/etc/token", "second\n")
    client.get(HERE)
    joined.put(KUBECONFIG, api.kubeconfig(token="third"))
    client.get(HERE)
    client.get(HERE)
    assert [token for *_, token in api.requests] == ["Bearer first", "Bearer second", "Bearer third", "Bearer third"]


@pytest.fixture
def with_certificate(api: ApiServer, joined: DraMachine) -> ApiClient:
    """A client with a certificate and a key in files."""
    for name in ("crt", "key"):
        joined.put(f"/pki/{name}", (api.directory / f"api.{name}").read_bytes())
    joined.put(KUBECONFIG, api.kubeconfig(**{"client-certificate": "/pki/crt", "client-key": "/pki/key"}))
    return ApiClient(Credentials(joined, KUBECONFIG))


def test_a_certificate_is_loaded_again_as_soon_as_it_is_whole(joined: DraMachine, with_certificate: ApiClient) -> None:
    with_certificate.get(HERE)
    key = joined.read("/pki/key")
    joined.put("/pki/key", b"half a key")
    for _ in range(2):
        with pytest.raises(AgentError, match="a certificate, key or token is unusable") as caught:
            with_certificate.get(HERE)
        assert "half a key" not in str(caught.value)
    joined.put("/pki/key", key)
    assert with_certificate.get(HERE)["metadata"]["uid"] == "uid-1"
    joined.remove("/pki/crt")
    with pytest.raises(AgentError, match="/pki/crt: cannot read this file of the kubelet's kubeconfig: No such file"):
        with_certificate.get(HERE)


def test_credentials_that_cannot_be_loaded_now_are_an_error_of_the_agent(
    with_certificate: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error would end the thread that watches the API server for good."""

    def memfd_create(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", memfd_create)
        with pytest.raises(AgentError, match=f"{KUBECONFIG}: cannot load its credentials: Too many open files"):
            with_certificate.get(HERE)
    assert with_certificate.get(HERE)["metadata"]["uid"] == "uid-1"


@pytest.mark.parametrize("token", ["s3cret\nmore", "s3cret\r\nX-Other: 1", "s3cret more", "s3cret\0", "s3cret-\u20ac"])
@pytest.mark.parametrize(
    ("user", "place"),
    [({}, f"{KUBECONFIG}: "), ({"tokenFile": "/etc/token"}, "/etc/token")],
    ids=["inline", "in a file"],
)
def test_no_error_has_a_secret(
    api: ApiServer, joined: DraMachine, token: str, user: dict[str, str], place: str
) -> None:
    """A token that is no single word is refused before http.client sees it, whose error would quote the header."""
    joined.put("/etc/token", f"{token}\n")
    joined.put(KUBECONFIG, api.kubeconfig(**(user or {"token": token})))
    with pytest.raises(AgentError, match="token") as caught:
        ApiClient(Credentials(joined, KUBECONFIG)).get(HERE)
    assert place in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert api.requests == []


@pytest.mark.parametrize(
    ("status", "message", "kind", "reason", "said"),
    [
        (401, "Unauthorized", ApiError, Reason.REFUSED, "the kubelet's certificate or token is not accepted"),
        (403, "is forbidden", ApiError, Reason.REFUSED, "authorization mode Node"),
        (404, "the server could not find the requested resource", NotFoundError, Reason.FAILED, "Kubernetes 1.36"),
        (404, 'nodes "x" not found', NotFoundError, Reason.FAILED, "not found$"),
        (409, "modified", ConflictError, Reason.FAILED, "409 Conflict: modified"),
        (422, "Invalid value", ApiError, Reason.FAILED, "report this as a bug"),
        (429, "slow down", ApiError, Reason.API_UNREACHABLE, "429 Too Many Requests"),
        (503, "starting", ApiError, Reason.API_UNREACHABLE, "503 Service Unavailable: starting"),
        (599, "?", ApiError, Reason.API_UNREACHABLE, "599: "),
    ],
)
def test_errors_say_what_to_do(
    api: ApiServer, client: ApiClient, status: int, message: str, kind: type[ApiError], reason: Reason, said: str
) -> None:
    api.answer = lambda *_: failure(status, message)
    with pytest.raises(kind, match=said) as caught:
        client.request("POST", COLLECTION, {"metadata": {"name": "x"}})
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert str(caught.value).startswith(f"POST {COLLECTION}: {status}")


@pytest.mark.parametrize("body", [b"", b"<html>\x1b[2J", b"[1]", b"[" * 100_000, b'{"message": {}}'])
def test_any_answer_becomes_one_line(body: bytes) -> None:
    text = str(api_error("GET /x", 500, body))
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("answer", "said"), [(b"[]", "is not an object but a list"), (b"{", "is not JSON"), (b'"' * 9_000_000, "more than")]
)
def test_what_is_no_object_is_an_error(api: ApiServer, client: ApiClient, answer: bytes, said: str) -> None:
    api.answer = lambda *_: (200, answer)
    with pytest.raises(ApiError, match=said):
        client.get(HERE)
    api.answer = None
    assert client.get(HERE)["metadata"]["uid"] == "uid-1"


def test_a_server_that_is_away_or_silent_is_an_error_in_time(
    api: ApiServer, client: ApiClient, joined: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = api.port
    api.stop()
    with pytest.raises(ApiError, match=f"no answer from https://127.0.0.1:{port}: Connection refused") as caught:
        client.get(HERE)
    assert caught.value.reason == Reason.API_UNREACHABLE
    monkeypatch.setattr(api_module, "REQUEST_LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", port)):
        begun = time.monotonic()
        with pytest.raises(ApiError, match="timed out"):
            client.get(HERE)
        assert time.monotonic() - begun < 5


@contextmanager
def trickling(api: ApiServer, begin: bytes) -> Iterator[None]:
    """Replace the server by one that answers `begin`, and then a byte now and then: each in time, and without end."""
    port, stop = api.port, threading.Event()
    api.stop()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(api.certificate, api.directory / "api.key")

    def serve(listener: socket.socket) -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as stream, contextlib.suppress(OSError):
            stream.recv(65536)
            stream.sendall(begin)
            while not stop.wait(0.05):
                stream.sendall(b"x")

    with socket.create_server(("127.0.0.1", port)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        timer = threading.Timer(20, stop.set)
        timer.start()
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        stop.set()
        timer.cancel()
        server.join()
    assert took < 10


@pytest.mark.parametrize(
    ("begin", "limit"),
    [
        (b"", "REQUEST_LIMIT"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", "REQUEST_LIMIT"),
        (b"HTTP/1.1 500 Broken\r\n\r\n", "REQUEST_LIMIT"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "WATCH_LIMIT"),
    ],
    ids=["head", "body", "error of a watch", "event"],
)
def test_a_server_that_sends_a_byte_now_and_then_is_an_error_in_time(
    api: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch, begin: bytes, limit: str
) -> None:
    monkeypatch.setattr(api_module, limit, 0.4)
    monkeypatch.setattr(api_module, "WATCH_MARGIN", 0.0)
    watches = begin and b"Content-Length" not in begin
    with trickling(api, begin), pytest.raises(ApiError, match="timed out") as caught:
        list(client.watch(NODES, "1") if watches else client.get(HERE))
    assert caught.value.__traceback__
    wait_for(lambda: not connections(api), 5, "the connection is closed")


def test_a_watch_tells_of_each_change(api: ApiServer, client: ApiClient) -> None:
    version = client.get(NODES, fieldSelector=f"metadata.name={NODE}")["metadata"]["resourceVersion"]
    events = client.watch(NODES, version, fieldSelector=f"metadata.name={NODE}")
    assert next(events) == {}
    api.put(HERE, {"metadata": {"name": NODE, "uid": "uid-2"}})
    event = next(events)
    assert (event["type"], event["object"]["metadata"]["uid"]) == ("MODIFIED", "uid-2")
    api.stop()
    begun = time.monotonic()
    with contextlib.suppress(ApiError):
        list(events)
    assert time.monotonic() - begun < 5, "it ends with the server"


@pytest.mark.parametrize("announces_close", [False, True])
def test_an_idle_watch_goes_on(
    api: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch, announces_close: bool
) -> None:
    """With `Connection: close`, http.client gives up its connection's socket at once, although it reads from it."""
    api.announces_close = announces_close
    version = client.get(HERE)["metadata"]["resourceVersion"]
    monkeypatch.setattr(api_module, "REQUEST_LIMIT", 0.5)
    events = client.watch(NODES, version)
    assert next(events) == {}
    timer = threading.Timer(0.8, api.put, (HERE, {"metadata": {"name": NODE, "uid": "uid-2"}}))
    timer.start()
    assert next(events)["object"]["metadata"]["uid"] == "uid-2"
    timer.join()
    events.close()


@pytest.mark.parametrize("announces_close", [False, True])
def test_a_failed_watch_leaves_no_connection_open(api: ApiServer, client: ApiClient, announces_close: bool) -> None:
    """Whoever keeps the error keeps the answer, too, which http.client does not close after `Connection: close`."""
    api.announces_close = announces_close
    with api.changed:
        api.events.append((1500, NODES, {"type": "ERROR", "object": {"code": 410, "message": "too old"}}))
    events = client.watch(NODES, "1499")
    assert next(events) == {}
    assert connections(api)
    with pytest.raises(ApiError, match="410 Gone: too old") as caught:
        next(events)
    assert caught.value.__traceback__
    assert not connections(api)


WHERE = "/etc/kubernetes/kubelet.conf"
CERTIFICATE = {"client-certificate": "pki/current.pem", "client-key": "/pki/current.pem"}
SECRET = base64.b64encode(b"a secret").decode()


def document(user: dict[str, Any] = CERTIFICATE, **cluster: Any) -> dict[str, Any]:  # noqa: ANN401
    server = {"server": "https://api.example.com:6443", "certificate-authority": "ca.crt"}
    return {
        "kind": "Config",
        "clusters": [{"name": "other", "cluster": {}}, {"name": "c", "cluster": server | cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def parsed(user: dict[str, Any] = CERTIFICATE, **cluster: Any) -> Kubeconfig:  # noqa: ANN401
    return parse_kubeconfig(WHERE, json.dumps(document(user, **cluster)).encode())


def test_a_kubeconfig_names_files_relative_to_itself_or_has_the_content() -> None:
    found = parsed()
    assert (found.host, found.port, found.prefix, found.server_name) == ("api.example.com", 6443, "", "api.example.com")
    assert found.files == ("/etc/kubernetes/ca.crt", "/etc/kubernetes/pki/current.pem", "/pki/current.pem")
    assert not found.token
    inline: dict[str, Any] = {"certificate-authority-data": SECRET}
    found = parsed({**CERTIFICATE, "client-key-data": SECRET}, **inline)
    assert found.key == found.ca == b"a secret"
    assert "secret" not in repr(found)
    assert found.files == ("/etc/kubernetes/pki/current.pem",)
    assert parsed({"token": "abc"}).token == b"abc"
    assert parsed({"token": "abc", "tokenFile": "token"}).token == "/etc/kubernetes/token"
    cluster: dict[str, Any] = {"server": "https://[fd00::1]/k8s/clusters/c-1/", "tls-server-name": "kube"}
    found = parsed(**cluster)
    assert (found.host, found.port, found.prefix, found.server_name) == ("fd00::1", 443, "/k8s/clusters/c-1", "kube")


@pytest.mark.parametrize(
    ("user", "cluster", "message"),
    [
        ({"exec": {"command": "aws"}}, {}, "neither a client certificate with its key nor a token .*no other kind"),
        ({"client-certificate": "x"}, {}, "neither a client certificate with its key nor a token"),
        ({"token": 1}, {}, "key token must be a string, not a whole number"),
        ({"token": "x", "client-key-data": "%%%"}, {}, "key client-key-data is not base64"),
        # JSON can have half a surrogate pair and a null character; system calls and encodings raise ValueError.
        ({"tokenFile": "/\ud800"}, {}, "key tokenFile has characters that are not allowed"),
        ({"tokenFile": "/a\0b"}, {}, "key tokenFile has characters that are not allowed"),
        (CERTIFICATE, {"proxy-url": "http://p"}, r"names a proxy \(proxy-url\), which is not supported .*directly"),
        (CERTIFICATE, {"tls-server-name": "a b"}, "key tls-server-name must be a host's name, not 'a b'"),
        (CERTIFICATE, {"server": "http://api"}, "key server must be an https:// address, not 'http://api'"),
        (CERTIFICATE, {"server": "https://"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://api:port"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://[::1"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://a..b"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://a b"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://a\x7fb"}, "key server must be an https:// address"),
        (CERTIFICATE, {"server": "https://user:s3cret\u2100@h"}, "key server must be an https:// address, not 'h'"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason(
    user: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(AgentError, match=f"{WHERE}: .*{message}") as caught:
        parsed(user, **cluster)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("clusters", "the current cluster is '.*', which is not in `clusters`"),
        ("users", "the current user is '.*', which is not in `users`"),
        ("contexts", "the current context is '.*', which is not in `contexts`"),
        ("current-context", "the current context is '', which is not in"),
    ],
)
def test_what_is_missing_is_named(key: str, message: str) -> None:
    broken = {name: value for name, value in document().items() if name != key}
    with pytest.raises(AgentError, match=f"{WHERE}: {message}"):
        parse_kubeconfig(WHERE, json.dumps(broken).encode())


def test_yaml_is_read_by_kubectl_once_for_all_threads_and_json_without(tmp_path: Path) -> None:
    user, cluster = {"token": "x"}, {"certificate-authority": ""}
    calls = []

    def kubectl(argv: tuple[str, ...], timeout: float) -> Completed:
        calls.append(argv)
        if len(calls) > 1:
            raise FileNotFoundError
        time.sleep(0.2)
        return Completed(0, json.dumps(document(user, **cluster)).encode(), b"")

    system = System(kubectl, str(tmp_path))
    system.write(WHERE, b"apiVersion: v1\nkind: Config\n")
    credentials = Credentials(system, WHERE)
    with ThreadPoolExecutor(4) as threads:
        (session,) = {id(each): each for each in threads.map(lambda _: credentials.session(), range(4))}.values()
    assert session.kubeconfig == parsed(user, **cluster)
    assert calls == [("kubectl", "config", "view", "--raw", "--minify", "--output=json", f"--kubeconfig={WHERE}")]
    with pytest.raises(CommandError, match="install the package that contains kubectl"):
        read_kubeconfig(system, WHERE)
    system.write(WHERE, json.dumps(document()).encode())
    assert read_kubeconfig(system, WHERE) == parsed()
    assert len(calls) == 2


def watches(api: ApiServer) -> int:
    """Return how often a watch was begun."""
    return sum("watch" in query for _, _, query, _ in api.requests)


@contextmanager
def watching(client: ApiClient) -> Iterator[list[float]]:
    """Watch the node, and yield the times of all changes, of which the first list is one."""
    changes: list[float] = []
    thread = Watcher(client, NODES, f"metadata.name={NODE}", lambda: changes.append(time.monotonic()))
    thread.start()
    yield changes
    thread.stop()


def test_only_a_watch_that_has_lasted_is_begun_again_soon(
    api: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the server, which ends each watch after minutes, but not behind a proxy that keeps no connection open."""
    monkeypatch.setattr(api_module, "LASTED", 0.1)
    monkeypatch.setattr(api_module, "SHORT_PAUSE", 0.05)
    api.watch_seconds = 0.2
    with watching(client) as changes:
        wait_for(lambda: watches(api) >= 4, 5, "it is begun again")
        assert len(api.requests) == watches(api) + 1, "only the first one needs a list"
        api.put(f"{NODES}/{NODE}", {"metadata": {"name": NODE, "uid": "2"}})
        wait_for(lambda: len(changes) == 2, 5, "a change is noticed")
        api.watch_seconds = 0.0
        # One watch may go on now, and one may have been waited for.
        time.sleep(0.4)
        before = watches(api)
        time.sleep(0.4)
        assert watches(api) == before


def test_a_watch_that_breaks_is_begun_again_soon(
    api: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "LASTED", 0.1)
    monkeypatch.setattr(api_module, "SHORT_PAUSE", 0.05)
    with watching(client) as changes:
        for number in range(1, 4):
            wait_for(lambda number=number: len(changes) == number, 5, "it is begun")  # type: ignore[misc]
            time.sleep(0.2)
            api.cut(b"no TLS")

        def refuse_late(*_: str) -> tuple[int, Any]:
            time.sleep(0.2)
            return failure(503, "starting")

        api.answer = refuse_late
        before = len(api.requests)
        time.sleep(1)
        assert len(api.requests) - before <= 2, "an attempt that is refused late has not lasted"
