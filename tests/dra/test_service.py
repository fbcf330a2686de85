"""The whole service: documents in, slices and status out. Its kubelet is only a process in a tree."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.dra import service as module
from agent.dra.claims import CHECKPOINT, EXTENDED, ClaimReference, PreparedDevice, render_checkpoint
from agent.dra.service import plugin_resources
from agent.model.conditions import Reason
from agent.model.contract import Effect, GpuState, GpuStatus
from agent.model.errors import AgentError
from agent.model.paths import DRA_STATUS
from agent.system import api_server as api_module
from agent.system.files import READ_LIMIT
from tests.fakes.api_server import NODES, ApiServer, failure
from tests.fakes.dra_machine import GPUS, KUBECONFIG, NODE, DraMachine, healthy
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.processes
SECONDS = 15.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL", "GAP", "NO_KUBELET_PAUSE", "IDENTITY_CHECK"):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(module, "LONGEST_RETRY", 0.3)
    monkeypatch.setattr(api_module, "LONG_PAUSE", 0.3)


def until(what: str, holds: Callable[[], object]) -> None:
    wait_for(holds, SECONDS, what)


def offered(api: ApiServer) -> list[str]:
    return [device["name"][9:11] for each in api.slices for device in each["spec"]["devices"]]


def tainted(api: ApiServer) -> list[str]:
    return [device["name"][9:11] for each in api.slices for device in each["spec"]["devices"] if device.get("taints")]


SOCKET = "plugins_registry/gpu.unbounded-agent.io-reg.sock"


@pytest.fixture
def running(api: ApiServer, joined: DraMachine) -> DraMachine:
    """A service that offers two GPUs."""
    joined.grant(*GPUS[:2])
    joined.start()
    until("two GPUs are offered", lambda: offered(api) == ["01", "02"])
    return joined


def test_an_idle_service_wakes_up_only_for_changes(
    api: ApiServer, joined: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five looks a second kept each machine's processor from sleeping."""
    monkeypatch.setattr(module, "POLL", 600.0)
    monkeypatch.setattr(module, "IDENTITY_CHECK", 600.0)
    joined.grant(GPUS[0])
    joined.start()
    until("a GPU is offered", lambda: offered(api) == ["01"])
    joined.grant(*GPUS[:2])
    until("the machine half's document is noticed", lambda: offered(api) == ["01", "02"])
    joined.change(GpuStatus(GPUS[1], "nvidia", GpuState.UNHEALTHY, "Xid48", "an ECC error", since=7))
    until("the host half's document is noticed", lambda: tainted(api) == ["02"])
    api.wipe()
    until("the API server's change is noticed", lambda: offered(api) == ["01", "02"])
    looks: list[str] = []
    read = joined.read

    def look(path: str, limit: int = READ_LIMIT) -> bytes:
        looks.append(path)
        return read(path, limit)

    def sleeps() -> bool:
        looks.clear()
        time.sleep(0.5)
        return not looks

    monkeypatch.setattr(joined, "read", look)
    until("it sleeps", sleeps)
    joined.grant(*GPUS[:3])
    until("it looks again", lambda: looks)
    socket = Path(joined.kubelet, SOCKET)
    socket.unlink()
    until("the socket is served again", socket.exists)


def test_a_change_is_reported_at_once_and_nothing_else_is(
    api: ApiServer, running: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's GPU setup reads the status. By itself it runs once a minute."""

    def reports() -> int:
        return running.calls.count(("systemctl", "--no-block", "start", "unbounded-agent-gpu-again.service"))

    until("the offer is reported", lambda: running.status.offers and reports())
    monkeypatch.setattr(module, "RENEWED_AFTER", 0.02)
    time.sleep(0.3)
    before = reports()
    time.sleep(0.3)
    assert reports() == before, "the status is only written again"
    running.change(GpuStatus(GPUS[1], "nvidia", GpuState.UNHEALTHY, "Xid48", "an ECC error", since=7))
    until("the taint is reported", lambda: reports() > before)
    assert running.status.offers[0].tainted == ("gpu-0000-02-00-0",)
    running.change(healthy(GPUS[1]))
    until("it is well", lambda: tainted(api) == [])


def test_pods_are_evicted_from_a_gpu_that_is_taken_by_force(
    api: ApiServer, joined: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pods that requested an extended resource are evicted by the agent: Kubernetes leaves these out."""
    monkeypatch.setattr(module, "EVICTION_INTERVAL", 0.05)
    claim = ClaimReference("team", "train-gpu", "c1")
    device = PreparedDevice(("gpu",), NODE, "gpu-0000-02-00-0", ("nvidia.com/gpu=GPU-02",))
    joined.put(CHECKPOINT, render_checkpoint({claim: (device,)}))
    joined.grant(*GPUS[:2])
    joined.start()
    api.put(
        "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/train-gpu",
        {
            "metadata": {"name": "train-gpu", "uid": "c1", "annotations": {EXTENDED: "true"}},
            "status": {"reservedFor": [{"resource": "pods", "name": "train", "uid": "p1"}]},
        },
    )

    def asked() -> int:
        eviction = "/api/v1/namespaces/team/pods/train/eviction"
        return sum((method, path) == ("POST", eviction) for method, path, _, _ in api.requests)

    taint = GpuStatus(GPUS[1], "nvidia", GpuState.DRAINING, "Detaching", "", Effect.NO_SCHEDULE, 7)
    joined.change(taint)
    until("it is tainted", lambda: tainted(api) == ["02"])
    assert asked() == 0
    # A new pod would get the GPU at once if the API server did not know of the taint.
    api.answer = lambda method, path: failure(HTTPStatus.FORBIDDEN, "no") if "/resourceslices" in path else None
    joined.change(taint._replace(effect=Effect.NO_EXECUTE))
    until("the status says so", lambda: joined.status.reason == Reason.REFUSED)
    assert asked() == 0
    api.answer = None
    until("the eviction is tried again", lambda: asked() > 2)


def test_a_device_plugin_ends_the_offer_until_it_is_gone(api: ApiServer, running: DraMachine) -> None:
    path = f"{NODES}/{NODE}"
    api.put(path, {**api.objects[path], "status": {"capacity": {"nvidia.com/gpu": "2"}}})
    until("nothing is offered", lambda: offered(api) == [])
    until("the status says so", lambda: running.status.offers[0].reason == Reason.DEVICE_PLUGIN_ACTIVE)
    assert "nvidia.com/gpu: 2" in running.status.offers[0].message
    assert "unbounded-agent kube allocation dra" in running.status.offers[0].message
    api.put(path, {**api.objects[path], "status": {"capacity": {"nvidia.com/gpu": "0"}}})
    until("two GPUs are offered", lambda: offered(api) == ["01", "02"])
    until("the status says so", lambda: running.status.offers[0].reason == "")


def test_a_server_that_was_away_gets_what_changed_meanwhile(api: ApiServer, running: DraMachine) -> None:
    api.stop()
    running.grant(*GPUS[:3])
    until("the status says so", lambda: running.status.reason == Reason.API_UNREACHABLE)
    assert running.status.offers[0].gpus == GPUS[:2], "what is there is still offered"
    api.wipe()
    api.start()
    until("three GPUs are offered", lambda: offered(api) == ["01", "02", "03"])
    until("the status says so", lambda: not running.status.reason)


@pytest.mark.parametrize("fault", ["refused", "no node", "credentials"])
def test_what_keeps_gpus_from_being_offered_is_told(api: ApiServer, joined: DraMachine, fault: str) -> None:
    node, kubeconfig = api.objects[f"{NODES}/{NODE}"], joined.read(KUBECONFIG)
    if fault == "refused":
        api.answer = lambda method, path: failure(HTTPStatus.FORBIDDEN, "no") if method == "POST" else None
        reason, said = Reason.REFUSED, "authorization mode Node"
    elif fault == "no node":
        api.drop(f"{NODES}/{NODE}")
        reason, said = Reason.NODE_NOT_REGISTERED, "404 Not Found"
    else:
        joined.put(KUBECONFIG, api.kubeconfig(username="x"))
        reason, said = Reason.FAILED, "no other kind is supported"
    joined.grant(GPUS[0])
    joined.start()
    until("the status says so", lambda: joined.status.reason == reason)
    assert said in joined.status.message
    api.answer = None
    api.put(f"{NODES}/{NODE}", node)
    joined.put(KUBECONFIG, kubeconfig)
    until("it is offered", lambda: offered(api) == ["01"])


def test_a_watch_that_keeps_failing_is_logged_once(
    api: ApiServer, joined: DraMachine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    api.answer = lambda method, path: failure(HTTPStatus.FORBIDDEN, "no") if path == NODES else None
    joined.grant(GPUS[0])
    joined.start()
    until("it has failed often", lambda: sum(path == NODES for _, path, _, _ in api.requests) > 4)
    assert caplog.text.count(f"changes to {NODES} are noticed up to a minute late: GET {NODES}: 403 Forbidden") == 1
    api.answer = None
    until("the log says so", lambda: f"changes to {NODES} are noticed at once again" in caplog.text)


def test_a_kubelet_that_starts_later_is_waited_for(api: ApiServer, machine: DraMachine) -> None:
    machine.grant(GPUS[0])
    machine.start()
    until("the status says so", lambda: machine.status.reason == Reason.KUBELET_NOT_RUNNING)
    machine.put("/etc/ca.crt", api.certificate.read_bytes())
    machine.run_kubelet(api.kubeconfig())
    until("it is offered", lambda: offered(api) == ["01"])


def test_another_kubeconfig_ends_the_service_and_a_stopped_kubelet_does_not(
    api: ApiServer, running: DraMachine
) -> None:
    running.put(f"/proc/{os.getpid()}/cmdline", "gone")
    time.sleep(0.3)
    assert running.thread is not None
    assert running.thread.is_alive()
    running.put("/etc/other.conf", api.kubeconfig())
    arguments = f"kubelet\0--kubeconfig=/etc/other.conf\0--root-dir={running.kubelet}\0"
    running.put(f"/proc/{os.getpid()}/cmdline", arguments)
    until("it has ended", lambda: not (running.thread and running.thread.is_alive()))


@contextlib.contextmanager
def another_kubelet(machine: DraMachine) -> Iterator[tuple[Callable[[], None], grpc.UnaryUnaryMultiCallable]]:
    """Serve another process. Yield what lets it end and this process be the kubelet, and a method of the service."""
    kubeconfig = machine.read(KUBECONFIG).decode()
    # Not in the tree, whose path is too long for grpcio.
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen(["sleep", "1000"]) as kubelet:
        Path(machine.kubelet).symlink_to(directory)
        machine.drop_process(os.getpid())
        machine.run_kubelet(kubeconfig, kubelet.pid)
        machine.start()
        until("it serves", Path(directory, SOCKET).exists)

        def end() -> None:
            kubelet.kill()
            kubelet.wait()
            machine.drop_process(kubelet.pid)
            machine.run_kubelet(kubeconfig)

        with grpc.insecure_channel(f"unix:{directory}/{SOCKET}") as channel:
            yield end, channel.unary_unary("/pluginregistration.Registration/GetInfo")
        assert machine.failure is None
        machine.stop()


def test_only_the_kubelet_may_call_also_after_it_was_started_again(joined: DraMachine) -> None:
    with another_kubelet(joined) as (end, ask):
        with pytest.raises(grpc.RpcError):
            ask(b"", timeout=SECONDS)
        end()
        assert ask(b"", timeout=60, wait_for_ready=True)


def test_a_process_that_is_gone_at_the_second_look_may_not_call(
    joined: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look and the pidfd, another process can have got the id of a kubelet that had just ended."""
    followed, pidfd_open = threading.Event(), os.pidfd_open

    def ends_meanwhile(process: int, flags: int = 0) -> int:
        found = pidfd_open(process, flags)
        if process == os.getpid():
            joined.drop_process(process)
            followed.set()
        return found

    with another_kubelet(joined) as (end, ask):
        monkeypatch.setattr(os, "pidfd_open", ends_meanwhile)
        end()
        until("the other process is followed", followed.is_set)
        time.sleep(0.3)
        with pytest.raises(grpc.RpcError):
            ask(b"", timeout=SECONDS)


@pytest.mark.parametrize("serves", [True, False], ids=["again", "at all"])
def test_the_service_ends_if_it_cannot_serve(joined: DraMachine, serves: bool) -> None:
    """Only another process sees the kubelet's new directory if the one that the unit's sandbox has is removed."""
    directory = Path(joined.kubelet, "plugins_registry")
    if serves:
        joined.start()
        until("it serves", lambda: directory.exists() and any(directory.iterdir()))
        shutil.rmtree(directory)
    directory.parent.mkdir(exist_ok=True)
    directory.touch()
    if not serves:
        joined.start()
    until("it has ended", lambda: isinstance(joined.failure, AgentError))
    assert joined.status.reason == Reason.FAILED
    assert "plugins_registry" in joined.status.message


def test_an_idle_service_asks_nothing_that_its_watches_answer(
    api: ApiServer, joined: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests a minute and node otherwise, and two more with each watch that the server ends.

    Each question to systemd started a program, every 30 seconds.
    """
    monkeypatch.setattr(module, "RESYNC", 0.02)
    monkeypatch.setattr(module, "FACTS_CHECK", 0.02)
    api.watch_seconds = 1.0
    monkeypatch.setattr(api_module, "SHORT_PAUSE", 0.01)
    monkeypatch.setattr(api_module, "LASTED", 0.01)
    joined.grant(*GPUS[:2])
    joined.start()
    until("the watches go on", lambda: sum("watch" in query for _, _, query, _ in api.requests) >= 4)
    before = len(api.requests)
    until("the watches go on", lambda: sum("watch" in query for _, _, query, _ in api.requests[before:]) >= 4)
    assert [path for _, path, query, _ in api.requests[before:] if "watch" not in query] == []
    assert [argv[-1] for argv in joined.calls if argv[:2] == ("systemctl", "show")] == ["kubelet.service"]
    api.wipe()
    until("a change is still noticed", lambda: offered(api) == ["01", "02"])


def test_without_a_watch_a_pass_is_made_now_and_then(
    api: ApiServer, running: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESYNC", 0.1)
    monkeypatch.setattr(api_module, "LONG_PAUSE", 60.0)
    monkeypatch.setattr(api_module, "SHORT_PAUSE", 60.0)
    api.answer = lambda method, path: failure(HTTPStatus.FORBIDDEN, "no") if path == NODES else None
    api.cut()
    api.wipe()
    until("the slices are written again", lambda: offered(api) == ["01", "02"])


def test_a_program_with_a_kubelet_inside_is_not_looked_for_all_the_time(
    machine: DraMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays: each look reads the arguments of all processes."""
    monkeypatch.setattr(module, "IDENTITY_CHECK", 1.0)
    machine.run_kubelet()
    machine.put(f"/proc/{os.getpid()}/cmdline", "/usr/local/bin/k3s agent\0\0")
    looked: list[str] = []
    entries = machine.entries

    def look(path: str) -> tuple[str, ...]:
        looked.append(path)
        return entries(path)

    monkeypatch.setattr(machine, "entries", look)
    machine.start()
    until("the status says so", lambda: machine.status.reason == Reason.UNSUPPORTED_DISTRIBUTION)
    time.sleep(0.5)
    assert looked.count("/proc") == 1
    assert machine.calls == []
    machine.run_kubelet()
    until("the kubelet is found", lambda: machine.status.reason != Reason.UNSUPPORTED_DISTRIBUTION or machine.failure)


def test_the_status_is_renewed_and_a_failure_logged_once(
    running: DraMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    until("the offers are reported", lambda: running.status.offers)
    monkeypatch.setattr(module, "RENEWED_AFTER", 0.05)
    before = running.status.at
    until("it has a later time", lambda: running.status.at > before)
    running.full.add(DRA_STATUS)
    Path(running.full_path(DRA_STATUS)).unlink(missing_ok=True)
    until("the log says so", lambda: "cannot write" in caplog.text)
    time.sleep(0.3)
    assert caplog.text.count("cannot write") == 1
    running.full.clear()
    until("it is there again", lambda: running.status.at > 0)


PREFIX, HARMLESS = "vendor.com/", ("vendor.com/net*",)


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, {}),
        ({"capacity": {"cpu": "4", "vendor.com/gpu": "0"}, "allocatable": {"vendor.com/gpu": "0k"}}, {}),
        ({"capacity": {"vendor.com/gpu": "0.0", "vendor.com/mig": "10"}}, {"vendor.com/mig": "10"}),
        ({"capacity": {"vendor.com/gpu": "8"}, "allocatable": {"vendor.com/gpu": "0"}}, {"vendor.com/gpu": "8"}),
        ({"allocatable": {"vendor.com/mig-1g.10gb": "1k"}}, {"vendor.com/mig-1g.10gb": "1k"}),
        ({"allocatable": {"vendor.com/net1": "8", "other.com/gpu": "8", "vendor.community/gpu": "1"}}, {}),
        ({"allocatable": None, "capacity": []}, {}),
        ({"allocatable": {"vendor.com/gpu": 2}}, {"vendor.com/gpu": "2"}),
    ],
)
def test_counts_that_are_not_zero_are_found(status: dict[str, Any], found: dict[str, str]) -> None:
    assert plugin_resources({"status": status}, PREFIX, HARMLESS) == found
