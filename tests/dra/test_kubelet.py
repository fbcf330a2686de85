"""What the kubelet meets: who may connect, the messages of its APIs, and the driver as a process."""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as some

from agent.dra.claims import ClaimReference, PreparedDevice
from agent.dra.grpc_server import REPEAT, RpcError
from agent.dra.inventory import Device, Health
from agent.dra.kubelet import (
    HEALTH_MESSAGE_LIMIT,
    METHODS,
    DriverPlugin,
    KubeletPeer,
    decode_claims,
    encode_health,
)
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER
from tests.fakes.dra_node import GPUS, NODE, claim, reference
from tests.fakes.grpc_serving import Serving, memory, this_process
from tests.fakes.kubelet_api import make, read
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.processes
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(60);"
LAST_ID = Path("/proc/sys/kernel/ns_last_pid")
"""The id that the kernel gave to the last process of this PID namespace; the next one gets the next id (proc(5))."""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/sock")
        listening.listen()
        listening.settimeout(LONG)
        yield listening


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_only_the_kubelet_may_connect(listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as client, sleeping() as other:
        client.connect(listener.getsockname())
        connection = listener.accept()[0]
        peer = this_process()
        assert peer.refusal(connection) == ""
        peer.follow(other.pid)
        refusal = peer.refusal(connection)
        assert refusal == f"it is from process {os.getpid()}, and only the kubelet, process {other.pid}, may connect"
        other.kill()
        other.wait()
        assert peer.pidfd < 0
        assert peer.refusal(connection).endswith("and no kubelet runs as a service of this machine")
        peer.follow(other.pid)
        assert not peer.is_followed(other.pid)
        peer.follow(os.getpid())
        assert peer.refusal(connection) == ""
        peer.close()
        assert peer.refusal(connection)
        connection.close()


def test_root_in_a_pod_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It passes every check of users and modes. Refusals are logged, but not every one."""
    server = Serving(f"{tmp_path}/sock", {})
    for _ in range(3):
        argv = [sys.executable, "-c", f"{CONNECT} print(s.recv(100))", f"{tmp_path}/sock"]
        assert subprocess.run(argv, capture_output=True, text=True).stdout == "b''\n"
    assert caplog.text.count("refused a connection") == 1
    assert f"only the kubelet, process {os.getpid()}, may connect" in caplog.text
    with grpc.insecure_channel(f"unix:{tmp_path}/sock") as channel:
        grpc.channel_ready_future(channel).result(LONG)
    server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose the next process id")
def test_a_process_whose_id_the_kubelet_gets_is_refused(listener: socket.socket) -> None:
    """The process connects and ends, another process keeps its connection open, and a new kubelet gets its id."""
    path = listener.getsockname()
    peer = KubeletPeer()
    for _ in range(100):
        first = subprocess.Popen([sys.executable, "-c", f"{CONNECT} s.recv(1)", path])
        connection = listener.accept()[0]
        first.send_signal(signal.SIGKILL)
        first.wait()
        LAST_ID.write_text(str(first.pid - 1))
        with sleeping() as kubelet:
            if kubelet.pid == first.pid:
                peer.follow(kubelet.pid)
                wait_for(lambda: peer.is_followed(kubelet.pid))
                refusal = peer.refusal(connection)
                connection.close()
                assert refusal.startswith("it is from process 0")
                peer.close()
                return
        connection.close()
    pytest.fail("no process got the id")


REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_long_health_message_is_cut_between_characters() -> None:
    """The kubelet would cut it after 1021 bytes, and a pod's status cannot have half a character."""
    data = encode_health("node", [Device("gpu", "vendor", (), "", health_message="€" * 400)], 1)
    message = read("NodeWatchResourcesResponse", data).devices[0].message
    assert len(message.encode()) <= HEALTH_MESSAGE_LIMIT
    assert message == "€" * 340 + "..."


@given(some.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(RpcError):
        decode_claims(data)


@pytest.mark.parametrize(
    "fields",
    [
        b"\x08\x01" + b"\x12\x01u" + b"\x1a\x01c",
        b"\x0a\x01n" + b"\x12\x01\xff" + b"\x1a\x01c",
        b"\x12\x01u" + b"\x1a\x01c",
        b"\x0a\x01n" + b"\x1a\x01c",
        b"\x0a\x01n" + b"\x12\x01u" + b"\x1a\x00",
    ],
    ids=("an integer for a text", "not UTF-8", "no namespace", "no uid", "empty name"),
)
def test_claims_of_the_wrong_form_are_refused(fields: bytes) -> None:
    good = b"\x0a\x01n" + b"\x12\x01u" + b"\x1a\x01c"
    assert decode_claims(b"\x0a" + bytes([len(good)]) + good) == (ClaimReference("n", "c", "u"),)
    with pytest.raises(RpcError, match=r"no namespace, uid or name|malformed"):
        decode_claims(b"\x0a" + bytes([len(fields)]) + fields)


def test_a_request_with_too_many_claims_is_refused() -> None:
    with pytest.raises(RpcError, match="2000 claims"):
        decode_claims(make("NodePrepareResourcesRequest", claims=[reference("c")._asdict()] * 2000))


@pytest.mark.skipif(shutil.which("protoc") is None, reason="needs protoc: Debian's protobuf-compiler")
def test_the_generated_module_is_that_of_the_proto_file(tmp_path: Path) -> None:
    """`make proto` writes it. Other releases of protoc than 3.21 write modules that Debian's runtime refuses."""
    proto = "agent/dra/kubelet.proto"
    version = subprocess.run(("protoc", "--version"), capture_output=True, text=True, check=True).stdout
    assert version.startswith("libprotoc 3.21.")
    argv = ("protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto)
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    for suffix in ("_pb2.py", "_pb2.pyi"):
        name = proto.replace(".proto", suffix)
        assert (tmp_path / name).read_text() == (REPOSITORY / name).read_text(), "run `make proto`"


PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
UNPREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"
LONG = 60.0


SHARES = {"a": "", "b": "share-1"}


class FakeClaims:
    """Prepares every claim but those with a name that begins with `bad`. Names of files may have surrogates."""

    def __init__(self) -> None:
        self.prepared: list[str] = []

    def prepare(self, claim: ClaimReference) -> tuple[PreparedDevice, ...]:
        if claim.name.startswith("bad"):
            raise AgentError("it is bad: /a\udc80", "make it good")
        self.prepared.append(claim.name)
        device = f"gpu-of-{claim.name}"
        return (PreparedDevice(("gpu\udc80",), NODE, device, ("vendor.com/gpu=0",), SHARES[claim.name]),)

    def unprepare(self, claim: ClaimReference) -> None:
        if claim.name == "bad":
            raise OSError("no space left")
        self.prepared.remove(claim.name)


@pytest.fixture
def kubelet() -> Iterator[Path]:
    """The kubelet's root directory. Not in tmp_path, which is too long for grpcio's socket paths."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def serve_driver(kubelet: Path, repeat: float = REPEAT) -> DriverPlugin:
    """Serve the driver in a kubelet's directory. This process is the kubelet."""
    claims = FakeClaims()
    return DriverPlugin(claims.prepare, claims.unprepare, NODE, str(kubelet), this_process().refusal, repeat=repeat)


@pytest.fixture
def plugin(kubelet: Path, request: pytest.FixtureRequest) -> Iterator[DriverPlugin]:
    """A driver which repeats what it says of health every 0.1 seconds, or as a test's parameter says."""
    running = serve_driver(kubelet, repeat=getattr(request, "param", 0.1))
    yield running
    running.stop()


def sockets(kubelet: Path) -> tuple[Path, Path]:
    """Return the sockets of registration and driver."""
    return (kubelet / f"plugins_registry/{DRA_DRIVER}-reg.sock", kubelet / f"plugins/{DRA_DRIVER}/dra.sock")


def call(path: Path, method: str, request: bytes) -> bytes:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        answer: bytes = channel.unary_unary(method)(request, timeout=LONG, wait_for_ready=True)
        return answer


def ask(path: Path, method: str, *claims: ClaimReference) -> Any:  # noqa: ANN401
    """Return the results of claims by uid."""
    fields = [each._asdict() for each in claims]
    kind = "NodePrepareResources" if method == PREPARE else "NodeUnprepareResources"
    return read(f"{kind}Response", call(path, method, make(f"{kind}Request", claims=fields))).claims


def register(kubelet: Path, accept: bool = True, error: str = "") -> Path:
    """Do what the kubelet does when it finds the socket, and return the driver's endpoint."""
    path = sockets(kubelet)[0]
    info = read("PluginInfo", call(path, "/pluginregistration.Registration/GetInfo", b""))
    assert (info.type, info.name) == ("DRAPlugin", DRA_DRIVER)
    assert info.supported_versions[0] == "v1.DRAPlugin"
    assert {f"/{each}/NodeWatchResources" for each in info.supported_versions[1:]} == set(METHODS)
    status = make("RegistrationStatus", plugin_registered=accept, error=error)
    assert call(path, "/pluginregistration.Registration/NotifyRegistrationStatus", status) == b""
    return Path(info.endpoint)


def test_registration(plugin: DriverPlugin, kubelet: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not plugin.registration.registered
    register(kubelet, accept=False, error="not you")
    assert (plugin.registration.registered, plugin.registration.error) == (False, "not you")
    assert "does not register the driver, and will try again: not you" in caplog.text
    endpoint = register(kubelet)
    assert endpoint == sockets(kubelet)[1]
    assert not plugin.registration.registered, "nobody is connected"
    with grpc.insecure_channel(f"unix:{endpoint}") as channel:
        grpc.channel_ready_future(channel).result(LONG)
        wait_for(lambda: plugin.registration.registered)
        assert register(kubelet) == endpoint, "a kubelet may register it again"
        wait_for(lambda: plugin.registration.registered)
    wait_for(lambda: not plugin.registration.registered)


def test_each_claim_has_its_own_result(plugin: DriverPlugin, kubelet: Path) -> None:
    """Surrogates become question marks, and fail no other claim of the pod."""
    endpoint = sockets(kubelet)[1]
    found = ask(endpoint, PREPARE, reference("a"), reference("bad"), reference("b"))
    assert found["uid-of-bad"].error == "it is bad: /a? (make it good)"
    assert not found["uid-of-bad"].devices
    for name, share in SHARES.items():
        (device,) = found[f"uid-of-{name}"].devices
        assert (device.pool_name, device.device_name) == (NODE, f"gpu-of-{name}")
        assert (list(device.request_names), list(device.cdi_device_ids)) == (["gpu?"], ["vendor.com/gpu=0"])
        assert (device.HasField("share_id"), device.share_id) == (bool(share), share)
    found = ask(endpoint, UNPREPARE, reference("a"), reference("bad"))
    assert {uid: each.error for uid, each in found.items()} == {"uid-of-a": "", "uid-of-bad": "no space left"}


def test_a_malformed_request_is_an_error(plugin: DriverPlugin, kubelet: Path) -> None:
    notify = "/pluginregistration.Registration/NotifyRegistrationStatus"
    for number, method in ((1, PREPARE), (1, UNPREPARE), (0, notify)):
        with pytest.raises(grpc.RpcError) as caught:
            call(sockets(kubelet)[number], method, b"\x0a\xff")
        assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("method", METHODS)
def test_health_is_told_when_it_changes_and_again_and_again(plugin: DriverPlugin, kubelet: Path, method: str) -> None:
    gpu = Device("gpu-0", "vendor", (), "", health=Health.HEALTHY)
    lost = gpu._replace(health=Health.UNHEALTHY, health_message="Xid 79: fallen off the bus")
    with grpc.insecure_channel(f"unix:{sockets(kubelet)[1]}") as channel:
        stream = channel.unary_stream(method)(b"", timeout=LONG)
        assert list(read("NodeWatchResourcesResponse", next(stream)).devices) == [], "nothing is known yet"
        for device in (gpu, lost, gpu):
            plugin.publish_health([device])
            answers = (read("NodeWatchResourcesResponse", each).devices for each in stream)
            found = next(each[0] for each in answers if each and each[0].health == device.health)
            assert (found.device.pool_name, found.device.device_name) == (NODE, "gpu-0")
            assert found.message == device.health_message
            assert abs(found.last_updated_time - time.time()) < LONG
            again = read("NodeWatchResourcesResponse", next(stream)).devices[0]
            assert again.health == device.health, "the kubelet forgets what is not repeated"


@pytest.mark.parametrize("plugin", [10 * LONG], indirect=True)
def test_a_change_of_health_does_not_wait_for_the_repeat(plugin: DriverPlugin, kubelet: Path) -> None:
    """Not even if it comes while nothing is sent."""
    with grpc.insecure_channel(f"unix:{sockets(kubelet)[1]}") as channel:
        stream = channel.unary_stream(METHODS[0])(b"", timeout=LONG)
        assert not read("NodeWatchResourcesResponse", next(stream)).devices
        # By then, the server has sent everything, and waits.
        time.sleep(0.2)
        plugin.publish_health([Device("gpu-0", "vendor", (), "", health=Health.UNHEALTHY)])
        assert read("NodeWatchResourcesResponse", next(stream)).devices[0].health == Health.UNHEALTHY


def test_removed_sockets_are_made_again(plugin: DriverPlugin, kubelet: Path) -> None:
    """`kubeadm reset` removes everything below the kubelet's directory."""
    plugin.keep_serving()
    shutil.rmtree(kubelet / "plugins")
    shutil.rmtree(kubelet / "plugins_registry")
    plugin.keep_serving()
    register(kubelet)
    assert ask(sockets(kubelet)[1], PREPARE, reference("a"))["uid-of-a"].error == ""
    plugin.stop()
    assert not any(path.exists() for path in sockets(kubelet))


def make_socket(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    foreign = socket.socket(socket.AF_UNIX, kind)
    foreign.bind(str(path))
    if kind == socket.SOCK_STREAM:
        foreign.listen()
    return foreign


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "make_foreign",
    [
        lambda path: (path / "full").mkdir(parents=True),
        Path.touch,
        lambda path: path.symlink_to("/nowhere/at/all"),
        os.mkfifo,
        make_socket,
        functools.partial(make_socket, kind=socket.SOCK_DGRAM),
    ],
)
def test_what_is_in_a_sockets_place_is_put_aside(
    kubelet: Path, number: int, make_foreign: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Root in a pod that has the kubelet's directory can put it there. The kubelet must not find it, but people can."""
    path = sockets(kubelet)[number]
    path.parent.mkdir(parents=True)
    kept = make_foreign(path)
    inode = path.lstat().st_ino
    plugin = serve_driver(kubelet)
    register(kubelet)
    assert ask(sockets(kubelet)[1], PREPARE, reference("a"))["uid-of-a"].error == ""
    (aside,) = (each for each in path.parent.iterdir() if each != path)
    assert aside.name.startswith(f".{path.name}.put-aside-"), "the kubelet connects to what has no dot before its name"
    assert aside.lstat().st_ino == inode
    assert f"{path} is not from this service: renamed to {aside.name}" in caplog.text
    plugin.stop()
    if isinstance(kept, socket.socket):
        kept.close()


def test_a_link_in_the_place_of_the_drivers_directory_is_not_followed(
    kubelet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dra.sock").touch()
    path = sockets(kubelet)[1].parent
    path.parent.mkdir()
    path.symlink_to(tmp_path)
    plugin = serve_driver(kubelet)
    register(kubelet)
    assert not path.is_symlink()
    assert f"{path} is not from this service: renamed" in caplog.text
    plugin.stop()
    assert os.listdir(tmp_path) == ["dra.sock"]


def test_a_socket_that_was_moved_behind_a_link_is_removed_and_nothing_else(kubelet: Path, tmp_path: Path) -> None:
    """Somebody replaces the driver's directory by a link while the service runs."""
    plugin = serve_driver(kubelet)
    path = sockets(kubelet)[1].parent
    path.rename(kubelet / "moved")
    path.symlink_to(tmp_path)
    make_socket(tmp_path / "dra.sock").close()
    plugin.keep_serving()
    plugin.stop()
    assert os.listdir(kubelet / "moved") == []
    assert os.listdir(tmp_path) == ["dra.sock"]


def test_a_driver_that_another_process_calls_is_not_registered(plugin: DriverPlugin, kubelet: Path) -> None:
    """Root in a pod that has the kubelet's directory says that the kubelet has registered the driver."""
    script = "import grpc, sys; c = grpc.insecure_channel('unix:' + sys.argv[1]);"
    script += "c.unary_unary('/pluginregistration.Registration/NotifyRegistrationStatus')(b'\\x08\\x01', timeout=20)"
    argv = [sys.executable, "-c", script, str(sockets(kubelet)[0])]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=LONG)
    assert "StatusCode.UNAVAILABLE" in finished.stderr
    with grpc.insecure_channel(f"unix:{sockets(kubelet)[1]}") as channel:
        grpc.channel_ready_future(channel).result(LONG)
        assert not plugin.registration.registered


def test_a_failed_start_leaves_nothing(kubelet: Path) -> None:
    sockets(kubelet)[0].parent.touch()
    with pytest.raises(AgentError, match=r"reg\.sock: cannot listen"):
        serve_driver(kubelet)
    assert not sockets(kubelet)[1].exists()


class Driver:
    """The driver as a process of its own."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        (tree / "claims").mkdir(exist_ok=True)
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.fakes.dra_process", str(self.tree)]
        self.process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "serving\n"
        self.process.stdout.close()
        return self.process

    def allocate(self, name: str, *devices: str) -> None:
        (self.tree / "claims" / f"{name}.json").write_text(json.dumps(claim(name, *devices)))

    @property
    def sockets(self) -> tuple[Path, Path]:
        return sockets(self.tree / "var/lib/kubelet")


@pytest.fixture
def driver() -> Iterator[Driver]:
    with tempfile.TemporaryDirectory() as directory:
        running = Driver(Path(directory))
        yield running
        running.process.kill()
        running.process.wait()


def test_kill_9_between_checkpoint_and_answer_and_after_it(driver: Driver) -> None:
    """The kubelet asks again, or unprepares the claim, although it got no answer. No other claim gets the GPU.

    What was answered is noted, too.
    """
    driver.allocate("a", GPUS[0])
    driver.allocate("b", GPUS[0])
    (driver.tree / "die").touch()
    with pytest.raises(grpc.RpcError) as caught:
        ask(driver.sockets[1], PREPARE, reference("a"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert driver.process.wait(LONG) == -signal.SIGKILL
    assert all(path.exists() for path in driver.sockets), "stale"
    (driver.tree / "die").unlink()
    driver.start()
    assert "allocated to claim default/a too" in ask(driver.sockets[1], PREPARE, reference("b"))["uid-of-b"].error
    (device,) = ask(driver.sockets[1], PREPARE, reference("a"))["uid-of-a"].devices
    assert device.device_name == GPUS[0]
    for _ in range(2):
        assert ask(driver.sockets[1], UNPREPARE, reference("a"))["uid-of-a"].error == ""
    assert ask(driver.sockets[1], PREPARE, reference("b"))["uid-of-b"].error == ""
    driver.process.kill()
    driver.process.wait(LONG)
    driver.start()
    assert "allocated to claim default/b too" in ask(driver.sockets[1], PREPARE, reference("a"))["uid-of-a"].error


def test_memory(driver: Driver) -> None:
    """64 MB, however often it is called, and however long a kubelet stays connected."""
    driver.allocate("a", GPUS[0])
    request = make("NodePrepareResourcesRequest", claims=[reference("a")._asdict()])
    with grpc.insecure_channel(f"unix:{driver.sockets[1]}") as channel:
        prepare, streams = channel.unary_unary(PREPARE), []
        for _ in range(3):
            streams.append(channel.unary_stream(METHODS[0])(b"", timeout=LONG))
            assert next(streams[-1])
        for _ in range(100):
            prepare(request, timeout=LONG)
        first = memory(driver.process.pid, "VmRSS")
        for _ in range(700):
            prepare(request, timeout=LONG)
        last = memory(driver.process.pid, "VmRSS")
        for stream in streams:
            stream.cancel()
    assert last < 64_000, f"{last} KiB, {first} KiB at first"
    assert last < first + 1000


def test_a_second_driver_leaves_the_first_one_alone(driver: Driver) -> None:
    """Two would not know each other's claims, and would take each other's sockets away again and again."""
    argv = [sys.executable, "-m", "tests.fakes.dra_process", str(driver.tree)]
    finished = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONG)
    assert finished.returncode == 1
    assert "dra/lock: another process offers this node's GPUs" in finished.stderr
    driver.allocate("a", GPUS[0])
    assert ask(driver.sockets[1], PREPARE, reference("a"))["uid-of-a"].error == ""
