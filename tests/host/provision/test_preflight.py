"""Each thing that would keep a node from being made has its own sentence with the next step."""

import errno
import ssl
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent.config.settings import NodeSettings
from agent.host.provision.preflight import NETWORKD, check_host, check_network, check_server, checked
from agent.model.errors import AgentError
from agent.model.node import Check
from agent.system.http import Answer
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host
from tests.fakes.node_settings import config

SERVER, CA, TOKEN = "https://192.0.2.1:6443", "/etc/kubernetes/ca.crt", "/etc/unbounded-agent/token"
CERTIFICATE = "-----BEGIN CERTIFICATE-----"
SECRET = "abcdef.0123456789abcdef"


def settings(**changes: object) -> NodeSettings:
    image = {"name": "docker://registry.example.com/nodes/agent:1"}
    values = {"server": SERVER, "ca_file": CA, "bootstrap_token": TOKEN, "image": image, **changes}
    return NodeSettings.validated(values)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.file(CA, CERTIFICATE)
    host.file(TOKEN, f"{SECRET}\n")
    host.owners[TOKEN] = (0o600, 0, 0)
    return host


class Server:
    """An API server."""

    def __init__(self, result: Answer | Exception) -> None:
        self.result = result
        self.asked: list[tuple[str, bytes, str]] = []

    def __call__(self, url: str, *, ca: bytes = b"", token: str = "") -> Answer:
        self.asked.append((url, ca, token))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def failed(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: f"{check.message} ({check.advice})" for check in checks if not check.passed}


# ---- the API server


ACCEPTED = ["server", "token", "clock"]


@pytest.mark.parametrize(("status", "checks"), [(200, ACCEPTED), (403, ACCEPTED), (503, ["server", "clock"])])
def test_a_good_server_accepts_the_token_over_its_own_ca(host: Host, status: int, checks: list[str]) -> None:
    """An error of the server does not say that it accepts the token."""
    server = Server(Answer(status, time.time()))
    found = [*check_server(settings(), host, server)]
    assert [check.name for check in found] == checks
    assert failed(found) == {}
    assert server.asked == [(f"{SERVER}/api", CERTIFICATE.encode(), SECRET)]


@pytest.mark.parametrize(
    ("result", "check", "sentence"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "server", "does not answer: Connection refused"),
        (TimeoutError(110, "no answer within 15 s", SERVER), "server", "does not answer: no answer within 15 s"),
        (
            ssl.SSLCertVerificationError(1, "verify failed"),
            "server",
            "put the cluster's CA into /etc/kubernetes/ca.crt",
        ),
        (ValueError("no certificate in PEM format"), "ca_file", f"{CA}: no certificate in PEM format"),
        (Answer(401, None), "token", "kubeadm token create"),
        (Answer(200, time.time() - 3600), "clock", "clocks of host and API server differ by"),
    ],
)
def test_what_is_wrong_with_the_server_is_said(
    host: Host, result: Answer | Exception, check: str, sentence: str
) -> None:
    found = failed(check_server(settings(), host, Server(result)))
    assert list(found) == [check]
    assert sentence in found[check]
    assert SECRET not in str(found)


def test_a_token_that_others_can_read_is_not_sent_anywhere(host: Host) -> None:
    host.owners[TOKEN] = (0o644, 0, 0)
    server = Server(Answer(200, None))
    assert list(failed(check_server(settings(), host, server))) == ["token"]
    assert server.asked == []


# ---- programs, disk and network


@pytest.mark.parametrize(
    ("state", "nspawn", "passed"),
    [
        ("active", {"virtual_ethernet": True}, True),
        ("inactive", {"virtual_ethernet": True}, False),
        ("failed", {"virtual_ethernet": True}, False),
        ("inactive", {}, None),
        ("inactive", {"extra": {"Network": {"Bridge": "br0"}}}, None),
        ("inactive", {"extra": {"Network": {"MACVLAN": "eth0"}}}, None),
    ],
)
def test_somebody_must_give_a_network_of_its_own_addresses(
    host: Host, state: str, nspawn: dict[str, object], passed: bool | None
) -> None:
    """The host's network needs nothing, and a named network has addresses of its own."""
    host.bus.unit(NETWORKD, state)
    checks = check_network("gpu", config(gpu={"nspawn": nspawn}).machines["gpu"], host)
    assert [each.passed for each in checks] == ([] if passed is None else [passed])
    advised = [each for each in checks if not each.required]
    assert [each.passed for each in advised] == [False] * (passed is False), "the node joins all the same"
    assert all("systemctl enable --now systemd-networkd" in (each.advice or "") for each in advised)


# ---- the host


@pytest.mark.parametrize("error", [AgentError("/x is not what it should be"), OSError(errno.EIO, "Input/output error")])
def test_an_error_without_advice_is_a_failed_check(error: AgentError | OSError) -> None:
    def check() -> str:
        raise error

    assert "again)" in failed([checked("token", check)])["token"]
    assert not Check("token", "/x is not what it should be", "").passed, "somebody forgot the fallback"


def test_everything_that_is_wrong_with_a_host_is_said_at_once(gpu_host: Host) -> None:
    gpu_host.remove("/usr/lib/systemd/system/systemd-nspawn@.service")
    facts = reconciler(gpu_host).preview()[0]
    found = failed(check_host(facts, gpu_host, makes_root=True))
    assert set(found) == {"systemd", "cgroups", "programs"}
    assert "apt install skopeo umoci systemd-container kmod mount`" in found["programs"]
    assert "programs" not in failed(check_host(facts, gpu_host, makes_root=False))


def test_a_missing_controller_is_named(gpu_host: Host) -> None:
    facts = reconciler(gpu_host).preview()[0]
    for controllers, missing in (("cpuset cpu io memory hugetlb pids rdma misc", ""), ("cpuset cpu io pids", "memory")):
        gpu_host.file("/sys/fs/cgroup/cgroup.controllers", f"{controllers}\n")
        found = failed(check_host(facts, gpu_host, makes_root=False))
        assert found.get("cgroups", "").partition(" (")[0] == (
            f"cgroup v2 controllers: {missing} are missing" if missing else ""
        )
    gpu_host.failing["/sys/fs/cgroup/cgroup.controllers"] = PermissionError(errno.EACCES, "Permission denied")
    assert "(run this as root" in failed(check_host(facts, gpu_host, makes_root=False))["cgroups"], "no reboot helps"
