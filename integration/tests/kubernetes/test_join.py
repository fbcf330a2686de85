"""One command makes a node of an empty host, and one command takes it off again."""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from agent.model.paths import machine_unit
from integration.bed.cluster.cluster import pod
from integration.bed.cluster.empty_host import NODE, TOKEN, EmptyHost, pod_network
from integration.bed.debian import SUITE
from integration.bed.machine.node import MACHINE, Node
from integration.bed.ubuntu import UBUNTU
from integration.conftest import INSTALLED

pytestmark = pytest.mark.scenario("003")

HOST = r"""
cd /
find etc usr/local usr/lib/systemd opt -xdev ! -type d -printf '%p %M %U:%G %l\n' | sort
find etc -xdev -type f -exec sha256sum {} + | sort
for kind in trees driver-roots machines nodes staging; do
    find var/lib/unbounded-agent/$kind -mindepth 1 -maxdepth 1 2>/dev/null
done
ls -A run/unbounded-agent/machines
ls -A var/lib/machines | grep -v '^[.]#'
# --root: the files themselves, not the manager's answer, for which a busy host's systemctl does not wait long enough.
enabled=$(systemctl --root=/ list-unit-files --state=enabled --plain --no-legend) || exit 1
echo "$enabled" | sort
findmnt --noheadings --raw --output TARGET,SOURCE | grep -v -e ^/run/credentials -e ^/run/systemd/nspawn | sort
ip -oneline link show | cut -d ' ' -f 2 | sort
ip -oneline address show scope global | tr -s ' ' | cut -d ' ' -f 2-4 | sort
ip route show table all | grep -v fe80 | sed 's, expires [0-9]*sec,,' | sort
ip rule show | sort
(iptables-save; ip6tables-save) 2>/dev/null | grep -e KUBE- -e CNI-
cat /proc/swaps
sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys net.ipv4.ip_forward
"""
"""Prints what `up` and the node's pods change on a host, without systemd-nspawn's own lock and mount, which stay."""


OTHERS = [pytest.param(suite, marks=pytest.mark.exhaustive) for suite in ("bookworm", UBUNTU)]


@pytest.fixture(scope="module", params=[SUITE, *OTHERS])
def empty_host(request: pytest.FixtureRequest) -> Iterator[EmptyHost]:
    """A new host of Debian 12 or Ubuntu; with Debian 13, the one that other tests have booted, without its machine."""
    running = None
    if request.param == SUITE:
        running = request.getfixturevalue("simulated_host")
        running.restore(INSTALLED)
        # For the certificates.
        running.guest.set_clock()
        running.guest.run(["rm", "--recursive", f"/var/lib/machines/{MACHINE}"])
    with EmptyHost(suite=request.param, running=running) as host:
        yield host
    if running:
        running.pause()


@pytest.fixture(scope="module")
def found(empty_host: EmptyHost) -> set[str]:
    """The host as it was before the first `up`."""
    return described(empty_host)


def described(host: EmptyHost) -> set[str]:
    return set(host.guest.run(["sh", "-c", HOST], timeout=240).stdout.splitlines())


def changed(host: EmptyHost, before: set[str]) -> tuple[list[str], list[str]]:
    """Return what is new and what is missing since `before`."""
    now = described(host)
    return sorted(now - before), sorted(before - now)


def test_one_command_makes_a_node_that_runs_a_gpu_pod(empty_host: EmptyHost, found: set[str]) -> None:
    """From a host with a driver and nothing else to a pod on a GPU. The bootstrap token is gone from the machine."""
    checked = json.loads(empty_host.guest.run(["unbounded-agent", "preflight", "--json"], timeout=300).stdout)
    assert checked["ok"], checked
    assert changed(empty_host, found) == ([], [])
    made = empty_host.guest.run(["unbounded-agent", "up"], timeout=1500)
    secret = empty_host.guest.read(TOKEN).decode().strip().partition(".")[2]
    assert secret not in made.stdout + made.stderr
    empty_host.apply(pod_network())
    empty_host.wait("the node is Ready", empty_host.nodes_are_ready)
    empty_host.offer_gpus()
    assert empty_host.run_gpu_pod().count("GPU-") == 1
    node = Node(empty_host.guest)
    # systemd keeps the grep's own command line in a transient unit.
    search = ("grep", "-rls", "--exclude-dir=transient", secret, "/etc", "/var/lib/kubelet", "/run")
    held = node.run(*search, check=False).stdout
    assert not held


def test_up_again_changes_nothing(empty_host: EmptyHost) -> None:
    before = described(empty_host)
    again = empty_host.guest.run(["unbounded-agent", "up", "--json"], timeout=300)
    (result,) = map(json.loads, again.stdout.splitlines())
    assert result["machines"][MACHINE]["node"] == NODE
    assert result["machines"][MACHINE]["ready"] == "True"
    assert changed(empty_host, before) == ([], [])


def test_a_stop_of_the_machine_ends_its_pods_through_the_kubelet(
    empty_host: EmptyHost, measured: Callable[[str, object], None]
) -> None:
    """The kubelet's graceful node shutdown: preStop hooks run, and the API server learns that the pod has ended."""
    ended = "/var/lib/machines/gpu-node/var/log/ended"
    script = "trap 'echo SIGTERM >>/ended/by; exit 0' TERM; while :; do sleep 1; done"
    works = pod("works", "sh", "-c", script, pull="IfNotPresent")
    (container,) = works["spec"]["containers"]
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", "echo preStop >>/ended/by"]}}}
    container["volumeMounts"] = [{"name": "ended", "mountPath": "/ended"}]
    host_path = {"path": "/var/log/ended", "type": "DirectoryOrCreate"}
    works["spec"] |= {"terminationGracePeriodSeconds": 20, "volumes": [{"name": "ended", "hostPath": host_path}]}
    empty_host.apply(works)
    empty_host.wait("the pod runs", lambda: empty_host.get("pod", "works")["status"]["phase"] == "Running")
    unit, before = machine_unit(MACHINE), time.monotonic()
    empty_host.guest.run(["systemctl", "stop", unit], timeout=400)
    measured("seconds to stop", f"{time.monotonic() - before:.0f}")
    assert empty_host.guest.read(f"{ended}/by").decode().split() == ["preStop", "SIGTERM"]
    status = empty_host.get("pod", "works")["status"]
    measured("the pod's status", f"{status['phase']} {status.get('reason')}: {status.get('message')}")
    # It ended by itself, so the kubelet gives no reason (Kubernetes 1.36).
    assert status["phase"] == "Succeeded"
    empty_host.kubectl("delete", "pod", "works")
    empty_host.guest.run(["systemctl", "start", unit], timeout=400)
    empty_host.wait("the node is Ready", empty_host.nodes_are_ready)


def test_the_reboot_of_kured_restarts_only_the_machine(empty_host: EmptyHost) -> None:
    """kured runs this command from a privileged pod. The host and its kernel run on (docs/runbooks.md)."""
    host = ["cat", "/proc/sys/kernel/random/boot_id"]
    machine = ["systemctl", "show", "--property=InvocationID", "--value", machine_unit(MACHINE)]
    run = empty_host.guest.run
    before, invocation = run(host).stdout, run(machine).stdout
    reboots = pod("reboots", "nsenter", "-m/proc/1/ns/mnt", "--", "/bin/systemctl", "reboot", pull="IfNotPresent")
    reboots["spec"]["hostPID"] = True
    reboots["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    empty_host.apply(reboots)
    empty_host.wait("the machine started again", lambda: run(machine).stdout not in (invocation, "\n"))
    empty_host.wait("the node is Ready", empty_host.nodes_are_ready)
    assert run(host).stdout == before
    empty_host.kubectl("delete", "pod", "reboots", "--force", "--grace-period=0")


@pytest.mark.exhaustive
def test_a_clock_that_is_set_back_does_not_delay_the_join(
    empty_host: EmptyHost, measured: Callable[[str, object], None]
) -> None:
    """The kubelet's lease is then older than the machine's boot, by the clock, until the clock has caught up."""
    run, seconds = empty_host.guest.run, 240
    joined = ["test", "-s", f"/run/unbounded-agent/machines/{MACHINE}/report/joined"]
    run(["systemctl", "restart", machine_unit(MACHINE)], timeout=400)
    run(["date", f"--set=-{seconds} seconds"])
    before = time.monotonic()
    try:
        empty_host.wait("the node has joined", lambda: run(joined, check=False).status == 0)
        measured("seconds until it has joined", f"{time.monotonic() - before:.0f}")
        assert time.monotonic() - before < seconds / 2
    finally:
        run(["date", f"--set=+{seconds} seconds"])


def test_reset_leaves_the_host_as_it_was(empty_host: EmptyHost, found: set[str]) -> None:
    """Files, units, mounts, kernel parameters, and what the pod network left in the host's network namespace."""
    ended = empty_host.guest.run(["unbounded-agent", "reset", MACHINE], timeout=600)
    # A pod that ignores SIGTERM still ran.
    journal = ("journalctl", "--boot", "--quiet", "--unit", machine_unit(MACHINE))
    assert "timed out. Killing" not in empty_host.guest.run(journal, timeout=120).stdout
    assert f"kubectl delete node {NODE}" in ended.stdout
    assert changed(empty_host, found) == ([], [])
