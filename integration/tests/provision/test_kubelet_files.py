"""The real kubelet reads a node's files, and joins a real control plane with them: natively, without containerd.

It asks for its certificate while it waits for its container runtime, so these tests need neither a machine nor root in
one. They run it in a mount namespace of its own, where /etc, /run and /var/lib are directories of the test.
"""

import contextlib
import json
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.config.settings import NodeSettings
from agent.host.apply.steps import give_token
from agent.host.provision.node_files import CERTIFICATE, CONTAINERD_SOCKET, KUBECONFIG, UNITS, NodeInputs, node_files
from agent.host.provision.preflight import check_server
from agent.model.paths import MACHINE_HANDOFF_DIRECTORY, handoff_directory, token_file
from agent.system.files import System
from agent.system.process import host_runner
from integration.bed.cluster.control_plane import ControlPlane
from integration.bed.cluster.kubernetes import kubernetes
from integration.bed.waiting import wait

pytestmark = pytest.mark.scenario("003")

NODE, MACHINE = "gpu-1", "gpu"
STARTED = "Kubelet version"
"""What each start of the kubelet logs once."""
SECONDS = 120.0
OLD_CGROUPS = {"failCgroupV1": False}
"""The computer that runs the tests may still have cgroup v1; a node's host never has."""
COMMAND = f"{UNITS}/kubelet.service.d/99-unbounded-agent.conf"
HANDOFF = handoff_directory(MACHINE)
NAMESPACE = f"""
for each in etc var/lib run; do mount --bind "$0/$each" /$each || exit; done
mount --bind "$0/host{HANDOFF}" {MACHINE_HANDOFF_DIRECTORY} &&
mount -o remount,bind,ro {MACHINE_HANDOFF_DIRECTORY} && exec "$@"
"""
"""What systemd-nspawn does for a machine, as far as its kubelet needs it to join."""


class SilentRuntime(socketserver.StreamRequestHandler):
    """A container runtime that accepts connections and never answers a request.

    Without a runtime, the kubelet exits within milliseconds, often before it has asked for a certificate. If the server
    does not even begin HTTP/2, by a SETTINGS frame (RFC 9113, section 3.4), the kubelet exits after 5 s.
    """

    def handle(self) -> None:
        self.wfile.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        self.rfile.read()


class Root:
    """A directory with a node's files, in which the kubelet runs."""

    def __init__(self, directory: Path, settings: NodeSettings, inputs: NodeInputs) -> None:
        self.directory = directory
        for name in ("resolv.conf", "hosts", "passwd", "group", "nsswitch.conf"):
            self._copy(Path("/etc", name))
        for name in ("/var/lib", MACHINE_HANDOFF_DIRECTORY, f"host/{HANDOFF}"):
            self.place(name).mkdir(parents=True)
        self.host = System(host_runner, str(self.place("host")))
        for file in node_files(MACHINE, settings, inputs):
            place = self.place(file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.content)
            place.chmod(file.mode)
        command = self.place(COMMAND).read_text().partition("ExecStart=kubelet")[2]
        self.arguments = command.replace("\\\n", "").split()

    def place(self, path: str) -> Path:
        return self.directory / path.lstrip("/")

    def argv(self) -> list[str]:
        kubelet = [str(kubernetes() / "kubelet"), "--v=2", *self.arguments]
        return ["unshare", "--mount", "sh", "-c", NAMESPACE, str(self.directory), *kubelet]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the kubelet, and start it again whenever it exits, as its unit does."""
        script = 'while :; do "$@"; sleep 1; done'
        argv = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", script, "sh", *self.argv()]
        with (self.directory / "kubelet.log").open("ab") as log, self._silent_runtime():
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            try:
                yield
            finally:
                subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False)
                process.wait()

    @contextlib.contextmanager
    def _silent_runtime(self) -> Iterator[None]:
        place = self.place(CONTAINERD_SOCKET.removeprefix("unix://"))
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        # The name of a socket may have 107 bytes (unix(7)), and the test's directory has a long one.
        with contextlib.chdir(place.parent):
            server = socketserver.ThreadingUnixStreamServer(place.name, SilentRuntime)
        with server:
            threading.Thread(target=server.serve_forever).start()
            try:
                yield
            finally:
                server.shutdown()

    def log(self) -> str:
        return (self.directory / "kubelet.log").read_text(errors="replace")

    def _copy(self, source: Path) -> None:
        place = self.place(str(source))
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copy(source, place)


def settings(server: str = "https://127.0.0.1:1", **kubelet: Any) -> NodeSettings:  # noqa: ANN401
    overlay = {**OLD_CGROUPS, **kubelet.pop("configuration", {})}
    return NodeSettings.validated(
        {
            "server": server,
            "ca_file": "/ca.crt",
            "bootstrap_token": "/token",
            "image": {"repository": "docker://registry.example.com/nodes"},
            "kubelet": {**kubelet, "configuration": overlay},
        }
    )


def root(directory: Path, wanted: NodeSettings, ca: str = "", token: str = "abcdef.0123456789abcdef") -> Root:
    made = Root(directory, wanted, NodeInputs(NODE, "127.0.0.1", ca.encode()))
    give_token(MACHINE, token, made.host)
    return made


def refused(place: Root) -> str:
    """Run a kubelet that exits at once, and return what it printed."""
    return subprocess.run(place.argv(), capture_output=True, text=True, timeout=60).stderr


def test_the_kubelet_knows_every_field(tmp_path: Path) -> None:
    """It only warns of unknown ones, and ignores them."""
    everything = settings(
        labels={"example.com/rack": "7", "node.kubernetes.io/pool": "a"},
        taints=["a=b:NoSchedule", "c:PreferNoSchedule"],
        startup_taint="example.com/not-ready:NoExecute",
        configuration={"maxPods": 42, "evictionHard": {"memory.available": "1Gi"}},
    )
    # Without a CA, this one exits right after it has validated all that it was given.
    printed = refused(root(tmp_path, everything))
    assert "strict decoding" not in printed
    assert "failed to validate" not in printed
    assert "missing content for CA bundle" in printed


def test_a_wrong_field_is_noticed(tmp_path: Path) -> None:
    """So the test above can fail."""
    assert "strict decoding error" in refused(root(tmp_path, settings(configuration={"maxPodz": 1})))


@pytest.mark.parametrize("label", ["node-role.kubernetes.io/gpu", "example.kubernetes.io/a", "k8s.io/a"])
def test_the_kubelet_exits_at_labels_that_the_agent_refuses(tmp_path: Path, label: str) -> None:
    assert "unknown 'kubernetes.io' or 'k8s.io' labels" in refused(root(tmp_path, settings(labels={label: "x"})))


def test_a_node_joins_with_the_token_and_goes_on_without_it(tmp_path: Path) -> None:
    with ControlPlane((NODE,)) as cluster:
        wanted = settings(f"https://127.0.0.1:{cluster.port}")
        node = root(tmp_path, wanted, cluster.certificate_authority, cluster.bootstrap_token())
        with node.running():
            # A link, whose target is an absolute path in the node.
            wait_until("the certificate is there", node.place(CERTIFICATE).is_symlink, node)
        (request,) = {each["spec"]["username"] for each in requests(cluster)}
        assert request.startswith("system:bootstrap:")
        issued = node.place(str(node.place(CERTIFICATE).readlink()))
        subject = ["openssl", "x509", "-noout", "-subject", "-in", str(issued)]
        assert f"CN = system:node:{NODE}" in subprocess.run(subject, capture_output=True, text=True).stdout

        used = node.place(f"host{token_file(MACHINE)}")
        assert used.read_text().partition(".")[2].strip() not in everything(node)
        used.unlink()
        before = len(node.log())
        with node.running():
            wait_until("it uses its certificate", lambda: "no bootstrap necessary" in node.log()[before:], node)
        assert "unable to load bootstrap kubeconfig" not in node.log()[before:]


def test_the_kubeconfig_does_not_show_that_a_node_has_joined(tmp_path: Path) -> None:
    """A kubelet whose request nobody approves has a kubeconfig, and no certificate."""
    with ControlPlane((NODE,), controllers=False) as cluster:
        wanted = settings(f"https://127.0.0.1:{cluster.port}")
        node = root(tmp_path, wanted, cluster.certificate_authority, cluster.bootstrap_token())
        with node.running():
            wait_until("it has asked", lambda: bool(requests(cluster)), node)
        assert node.place(KUBECONFIG).is_file()
        assert not node.place(CERTIFICATE).exists()


def test_a_new_token_reaches_a_kubelet_whose_token_has_expired(tmp_path: Path) -> None:
    """Without a restart of anything in the machine. Nothing in its root file system changes either."""
    with ControlPlane((NODE,)) as cluster:
        expired = cluster.bootstrap_token(valid_until="2020-01-01T00:00:00Z")
        node = root(tmp_path, settings(f"https://127.0.0.1:{cluster.port}"), cluster.certificate_authority, expired)
        with node.running():
            wait_until("the token is refused", lambda: "Unauthorized" in node.log(), node)
            assert not node.place(CERTIFICATE).exists()
            starts = node.log().count(STARTED)
            advice = failed(node, cluster, expired)["token"]
            assert "`kubeadm token create`, write it to /token, then run `unbounded-agent up`" in advice
            valid = cluster.bootstrap_token()
            assert failed(node, cluster, valid) == {}
            give_token(MACHINE, valid, node.host)
            wait_until("the certificate is there", node.place(CERTIFICATE).is_symlink, node)
            assert node.log().count(STARTED) == starts == 1


def failed(node: Root, cluster: ControlPlane, token: str) -> dict[str, str]:
    """Return what `up` says before it does anything, by check, if this is the configured token."""
    node.host.write("/ca.crt", cluster.certificate_authority.encode())
    node.host.write("/token", token.encode(), 0o600)
    checks = check_server(settings(f"https://127.0.0.1:{cluster.port}"), node.host)
    return {check.name: check.advice or "" for check in checks if not check.passed}


def everything(node: Root) -> str:
    """Return the content of all files of the node, as root in the machine sees them."""
    places = (node.place(name) for name in ("etc", "var"))
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return "".join(path.read_text(errors="replace") for path in files)


def requests(cluster: ControlPlane) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "csr", "-o", "json"))["items"]
    return found


def wait_until(what: str, reached: Callable[[], bool], node: Root) -> None:
    wait(what, reached, SECONDS, lambda: node.log()[-3000:])
