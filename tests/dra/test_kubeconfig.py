"""The kubelet's kubeconfig: what is read of it, and what is refused with a reason."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from agent.dra.api import Kubeconfig, Material, parse_kubeconfig, read_kubeconfig
from agent.model.errors import AgentError, CommandError, DocumentError
from agent.system.files import System
from agent.system.process import Completed

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


def test_files_are_relative_to_the_kubeconfig() -> None:
    found = parsed()
    assert (found.host, found.port, found.prefix, found.server_name) == ("api.example.com", 6443, "", "api.example.com")
    assert found.files == ("/etc/kubernetes/ca.crt", "/etc/kubernetes/pki/current.pem", "/pki/current.pem")
    assert not found.token


def test_inline_data_takes_precedence_and_is_not_printed() -> None:
    inline: dict[str, Any] = {"certificate-authority-data": SECRET}
    found = parsed({**CERTIFICATE, "client-key-data": SECRET}, **inline)
    assert found.key == found.ca == Material(data=b"a secret")
    assert "secret" not in repr(found)
    assert found.files == ("/etc/kubernetes/pki/current.pem",)


def test_a_token_file_takes_precedence() -> None:
    assert parsed({"token": "abc"}).token == Material(data=b"abc")
    assert parsed({"token": "abc", "tokenFile": "token"}).token == Material("/etc/kubernetes/token")


def test_the_server_may_have_a_prefix_another_name_and_the_usual_port() -> None:
    cluster: dict[str, Any] = {"server": "https://[fd00::1]/k8s/clusters/c-1/", "tls-server-name": "kube"}
    found = parsed(**cluster)
    assert (found.host, found.port, found.prefix, found.server_name) == ("fd00::1", 443, "/k8s/clusters/c-1", "kube")


@pytest.mark.parametrize(
    ("user", "cluster", "message"),
    [
        ({"exec": {"command": "aws"}}, {}, r"it uses a program that provides credentials \(exec\)"),
        ({"auth-provider": {"name": "gcp"}}, {}, "an authentication provider"),
        ({"username": "x", "password": "y"}, {}, "a password"),
        ({"token": "x", "as": "y"}, {}, "impersonation"),
        ({}, {}, "neither a client certificate with its key nor a token"),
        ({"client-certificate": "x"}, {}, "neither a client certificate with its key nor a token"),
        ({"token": 1}, {}, "key token must be a string, not a whole number"),
        ({"token": "x", "client-key-data": "%%%"}, {}, "key client-key-data is not base64$"),
        (CERTIFICATE, {"server": "http://api"}, "the server must be an https:// address, not 'http://api'"),
        (CERTIFICATE, {"server": "https://api:port"}, "the server must be"),
        (CERTIFICATE, {"server": "https://[::1"}, "the server must be"),
        (CERTIFICATE, {"server": "https://api:0"}, "the server must be"),
        (CERTIFICATE, {"server": "https://a..b"}, "the server must be an https:// address, not 'https://a..b'"),
        (CERTIFICATE, {"server": f"https://{'a' * 64}"}, "the server must be"),
        (CERTIFICATE, {"server": "https://api/\u00e4"}, "the server must be"),
        (CERTIFICATE, {"tls-server-name": "a..b"}, "key tls-server-name must be a host's name, not 'a..b'"),
        (CERTIFICATE, {"insecure-skip-tls-verify": True}, "skips the verification"),
        (CERTIFICATE, {"proxy-url": "socks5://x"}, "names a proxy"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason(
    user: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(AgentError, match=f"{WHERE}: .*{message}"):
        parsed(user, **cluster)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("clusters", "the current context's cluster is '.*', which is not in `clusters`"),
        ("users", "the current context's user is '.*', which is not in `users`"),
        ("contexts", "current-context is '.*', which is not in `contexts`"),
        ("current-context", "current-context is not set"),
    ],
)
def test_what_is_missing_is_named(key: str, message: str) -> None:
    broken = {name: value for name, value in document().items() if name != key}
    with pytest.raises(AgentError, match=f"{WHERE}: {message}"):
        parse_kubeconfig(WHERE, json.dumps(broken).encode())


@pytest.mark.parametrize("key", ["client-certificate", "tokenFile", "token"])
@pytest.mark.parametrize("value", ["/\ud800", "/a\0b"])
def test_what_no_file_can_be_named_is_refused(key: str, value: str) -> None:
    """JSON can have half a surrogate pair and a null character; system calls and encodings raise ValueError."""
    with pytest.raises(DocumentError, match=f"{WHERE}: key {key} has characters that are not allowed"):
        parsed({key: value, "client-key": "/key"})


def test_yaml_is_read_by_kubectl_and_json_without(tmp_path: Path) -> None:
    calls = []

    def kubectl(argv: tuple[str, ...], timeout: float) -> Completed:
        calls.append(argv)
        return Completed(0, json.dumps(document()).encode(), b"")

    system = System(kubectl, str(tmp_path))
    system.write(WHERE, b"apiVersion: v1\nkind: Config\n")
    assert read_kubeconfig(system, WHERE) == parsed()
    assert calls == [("kubectl", "config", "view", "--raw", "--minify", "--output=json", f"--kubeconfig={WHERE}")]
    system.write(WHERE, json.dumps(document()).encode())
    assert read_kubeconfig(system, WHERE) == parsed()
    assert len(calls) == 1


def test_kubectl_that_is_missing_is_named(tmp_path: Path) -> None:
    def nothing(argv: tuple[str, ...], timeout: float) -> Completed:
        raise FileNotFoundError

    system = System(nothing, str(tmp_path))
    system.write(WHERE, b"kind: Config\n")
    with pytest.raises(CommandError, match="install the package that contains kubectl"):
        read_kubeconfig(system, WHERE)
