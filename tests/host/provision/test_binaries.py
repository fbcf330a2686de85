"""Kubernetes' programs: from a mirror, a bundle and the cache, and never one with another digest."""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from agent.host.provision.binaries import check_source, fetch, wanted_binaries
from agent.model.errors import AgentError
from agent.model.node import NodeBinary
from tests.fakes.host import Host
from tests.fakes.node_settings import node_settings
from tests.fakes.web_server import certificate, serving

PROGRAM = b"\x7fELF kubelet" * 200_000
DIGEST = hashlib.sha256(PROGRAM).hexdigest()
CACHE = "/var/lib/unbounded-agent/binaries"


class Mirror(BaseHTTPRequestHandler):
    """Serves the program: directly, by a redirect as dl.k8s.io does, and cut short."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        name = self.path.rpartition("/")[2]
        if name == "moved":
            self.send_response(302)
            self.send_header("Location", "/kubelet")
            self.end_headers()
        elif name in ("kubelet", "cut"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(PROGRAM)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(PROGRAM if name == "kubelet" else PROGRAM[:1000])
        elif name.startswith("trickle"):
            if name == "trickle":
                self.send_response(200)
                self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"H")
                    time.sleep(0.1)
        else:
            self.send_error(int(name) if name.isdecimal() else 404)

    do_HEAD = do_GET  # noqa: N815

    def do_CONNECT(self) -> None:
        self.send_error(407)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    Mirror.asked = []
    with serving(Mirror) as port:
        yield f"http://127.0.0.1:{port}"


def program(source: str, digest: str = DIGEST) -> NodeBinary:
    return NodeBinary("kubelet", source, digest, "/usr/local/bin/kubelet")


def test_where_programs_come_from() -> None:
    binaries = {"version": "1.36.3", "sha256": {"kubelet": DIGEST, "kubectl": "0" * 64}}
    kubectl, kubelet = wanted_binaries(node_settings(binaries=binaries), "arm64")
    assert kubelet == program("https://dl.k8s.io/release/v1.36.3/bin/linux/arm64/kubelet")
    assert (kubectl.name, kubectl.path, kubectl.sha256) == ("kubectl", "/usr/local/bin/kubectl", "0" * 64)
    bundle = node_settings(binaries={**binaries, "bundle": "/media/usb"})
    assert wanted_binaries(bundle, "arm64")[1].source == "/media/usb/kubelet"
    assert wanted_binaries(node_settings(), "amd64") == ()


def test_where_archives_come_from() -> None:
    """As the projects name their releases' files."""
    versions = {"crictl_version": "1.36.0", "cni_plugins_version": "1.9.1"}
    binaries = {**versions, "sha256": {"crictl": DIGEST, "cni_plugins": "0" * 64}}
    plugins, crictl = wanted_binaries(node_settings(binaries=binaries), "arm64")
    tools = "https://github.com/kubernetes-sigs/cri-tools/releases/download/v1.36.0/crictl-v1.36.0-linux-arm64.tar.gz"
    assert crictl == NodeBinary("crictl", tools, DIGEST, "/usr/local/bin/crictl", "program")
    cni = "https://github.com/containernetworking/plugins/releases/download/v1.9.1/cni-plugins-linux-arm64-v1.9.1.tgz"
    assert plugins == NodeBinary("cni_plugins", cni, "0" * 64, "/usr/lib/cni", "programs")
    bundle = {**binaries, "bundle": "/media/usb"}
    there = node_settings(binaries=bundle, containerd={"cni_binaries": "/opt/cni/bin"})
    plugins, crictl = wanted_binaries(there, "amd64")
    assert crictl.source == "/media/usb/crictl-v1.36.0-linux-amd64.tar.gz"
    assert (plugins.source, plugins.path) == ("/media/usb/cni-plugins-linux-amd64-v1.9.1.tgz", "/opt/cni/bin")


@pytest.mark.parametrize("name", ["kubelet", "moved"])
def test_a_program_is_fetched_once(host: Host, mirror: str, name: str) -> None:
    path = fetch(program(f"{mirror}/{name}"), CACHE, host)
    assert host.read(path) == PROGRAM
    before = len(Mirror.asked)
    assert fetch(program(f"{mirror}/{name}"), CACHE, host) == path
    assert len(Mirror.asked) == before
    assert host.entries(CACHE) == (DIGEST,)


@pytest.mark.parametrize("wrong", ["", "/something"])
def test_a_damaged_cache_is_filled_again(host: Host, mirror: str, wrong: str) -> None:
    """What a killed attempt left, or anything else in the file's place, is replaced too."""
    host.file(f"{CACHE}/{DIGEST}{wrong}", "damaged")
    host.file(f"{CACHE}/.{DIGEST}.unbounded-agent-new", "a part")
    assert host.read(fetch(program(f"{mirror}/kubelet"), CACHE, host)) == PROGRAM
    assert host.entries(CACHE) == (DIGEST,)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("429", "429 Too Many Requests", "wait, then run the command again"),
        ("503", "503 Service Unavailable", "wait, then run the command again"),
        ("407", "407 Proxy Authentication Required", "HTTPS_PROXY"),
        ("cut", "the connection broke [0-9]+ bytes before the end", "network"),
    ],
)
def test_what_goes_wrong_with_a_mirror(host: Host, mirror: str, name: str, message: str, hint: str) -> None:
    with pytest.raises(AgentError, match=message) as caught:
        fetch(program(f"{mirror}/{name}"), CACHE, host)
    assert f"{mirror}/{name}" in caught.value.message
    assert hint in caught.value.hint
    assert host.entries(CACHE) == ()


def test_a_proxy_that_refuses(host: Host, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For HTTPS, which most mirrors have, the answer is the proxy's to CONNECT, and no HTTPError."""
    monkeypatch.setenv("https_proxy", mirror)
    with pytest.raises(AgentError, match=r"mirror.example/kubelet: .*407 Proxy Authentication Required") as caught:
        fetch(program("https://mirror.example/kubelet"), CACHE, host)
    assert "HTTPS_PROXY" in caught.value.hint


def test_another_digest(host: Host, mirror: str) -> None:
    with pytest.raises(AgentError, match=f"digest is {DIGEST}, not {'0' * 64} .sha256.kubelet."):
        fetch(program(f"{mirror}/kubelet", "0" * 64), CACHE, host)
    assert host.entries(CACHE) == ()


@pytest.mark.parametrize("name", ["trickle", "trickle-headers"])
def test_attack_a_mirror_that_sends_a_byte_now_and_then_is_not_waited_for(host: Host, mirror: str, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(AgentError, match=f"{mirror}/{name}: no answer in time.*network to the mirror"):
        fetch(program(f"{mirror}/{name}"), CACHE, host, limit=0.5)
    assert time.monotonic() - started < 5
    assert host.entries(CACHE) == ()


@pytest.mark.processes
def test_a_mirror_whose_certificate_the_host_does_not_accept(host: Host, tmp_path: Path) -> None:
    made = certificate(tmp_path)
    with serving(Mirror, made) as port, pytest.raises(AgentError, match=r"self-signed certificate") as caught:
        fetch(program(f"https://localhost:{port}/kubelet"), CACHE, host)
    assert "update-ca-certificates" in caught.value.hint


def test_a_look_fetches_nothing(host: Host, mirror: str) -> None:
    for name in ("kubelet", "moved"):
        check_source(program(f"{mirror}/{name}"), host)
    assert Mirror.asked == ["HEAD /kubelet", "HEAD /moved", "HEAD /kubelet"]
    host.file("/srv/kubelet")
    check_source(program("/srv/kubelet"), host)
    assert not host.exists(CACHE)


@pytest.mark.parametrize(
    ("source", "looked", "fetched"),
    [
        ("{}/nothing", r"404 Not Found .*binaries.version", r"404 Not Found .*binaries.version"),
        ("http://127.0.0.1:9/kubelet", r"refused .*network to the mirror", r"refused.*network to the mirror"),
        ("/srv/none", r"no such file .*binaries.bundle", r"No such file or directory .*binaries.bundle"),
    ],
)
def test_what_is_not_there(host: Host, mirror: str, source: str, looked: str, fetched: str) -> None:
    wanted = program(source.format(mirror))
    with pytest.raises(AgentError, match=looked):
        check_source(wanted, host)
    with pytest.raises(AgentError, match=fetched):
        fetch(wanted, CACHE, host)
    archive = NodeBinary("crictl", f"{mirror}/nothing", DIGEST, "/usr/local/bin/crictl", "program")
    with pytest.raises(AgentError, match=r"404 Not Found .*binaries.crictl_version or binaries.github_mirror"):
        check_source(archive, host)
