"""`up` is killed at each step, and the host loses its power at some: the next `up` goes on, and the node joins.

Also: the machine half reports changes of the files that `up` put into the machine.
"""

import json
from collections.abc import Iterator

import pytest

from agent.machine.kubelet import DELAY
from integration.bed.cluster.empty_host import NODE, EmptyHost
from integration.bed.machine.node import MACHINE, Node
from integration.bed.waiting import wait

pytestmark = [pytest.mark.scenario("003"), pytest.mark.exhaustive]

INSTALLED = "installed"
ROOT = f"/var/lib/machines/{MACHINE}"
EVENTS = "/var/tmp/up.jsonl"
SECONDS = 1500

STEPS = (
    "record the host as it was found",
    "change the host's settings",
    "fetch kubectl, kubelet",
    "pull and unpack",
    "pulled ",
    "unpacking ",
    "put kubectl, kubelet and ",
    f"give machine {MACHINE} the bootstrap token",
    f"make {ROOT}",
    f"start machine {MACHINE}",
    f"enable systemd-nspawn@{MACHINE}.service",
)
"""How the messages of its progress begin. The pull and the fetch run at the same time, so one may hide the other."""
HIDDEN = {"change the host's settings", "fetch kubectl, kubelet", "pulled "}
"""Steps that may not appear again after an earlier interruption: what they make is kept."""
KILLED = f"""
: >{EVENTS}
rm -f /var/tmp/up.pipe
mkfifo /var/tmp/up.pipe
unbounded-agent up --json >/var/tmp/up.pipe 2>/var/tmp/up.log & up=$!
while IFS= read -r event; do
    case $event in *'"message": "'"$0"*) kill -KILL $up; wait $up; exit 9 ;; esac
    printf '%s\\n' "$event" >>{EVENTS}
done </var/tmp/up.pipe
wait $up
"""
"""Exits with 9 if `up` was killed at the step $0, and otherwise as `up` does. Starts no process between an event and
the kill: a late kill would let the next step finish as well."""
LEFTOVERS = f"""
ls -A /var/lib/machines | grep -v -x -e {MACHINE} -e '[.]#.*' -e lost+found
find /var/lib/unbounded-agent /etc/systemd /etc/sysctl.d /etc/modules-load.d -name '*.unbounded-agent-new'
find /var/lib/unbounded-agent -name bootstrap-token
"""

CUTS = {
    "while the image is unpacked": "find /var/lib/machines -maxdepth 4 -path '*.partial/root/usr' | grep -q .",
    "after the root file system has its name": f"test -d {ROOT}",
    "after the machine's first boot": f"test -s /run/unbounded-agent/machines/{MACHINE}/report/report.json",
}
"""Conditions on the host, as commands for a shell."""


@pytest.fixture(scope="module")
def installed() -> Iterator[EmptyHost]:
    with EmptyHost() as host:
        # Whatever the kernel has not written after half a minute would be lost with the power.
        host.guest.run(["sync"])
        host.host.snapshot(INSTALLED)
        yield host


@pytest.fixture
def empty_host(installed: EmptyHost) -> EmptyHost:
    """A host on which nothing has been made; the cluster outside may know an earlier node of its name."""
    installed.host.restore(INSTALLED)
    installed.guest.set_clock()
    installed.kubectl("delete", "node", NODE, "--ignore-not-found")
    return installed


def expect_joined(host: EmptyHost) -> None:
    """Run `up` to its end; nothing of what was interrupted is left, and another `up` succeeds."""
    host.guest.run(["unbounded-agent", "up"], timeout=SECONDS)
    assert host.get("node", NODE)["metadata"]["name"] == NODE
    assert host.guest.run(["sh", "-c", LEFTOVERS], check=False).stdout == ""
    (result,) = map(json.loads, host.guest.run(["unbounded-agent", "up", "--json"], timeout=300).stdout.splitlines())
    assert result["machines"][MACHINE]["node"] == NODE
    assert Node(host.guest).run("systemctl", "is-active", "kubelet").stdout.strip() == "active"


def changed_files(host: EmptyHost) -> list[str]:
    """Return the changed files that the machine half reports. The machine must have run for DELAY seconds."""
    Node(host.guest).run("systemctl", "start", "unbounded-agent-gpu.service", timeout=180)
    report = json.loads(host.guest.read(f"/run/unbounded-agent/machines/{MACHINE}/report/report.json"))
    found: list[str] = report.get("changed_files", [])
    return found


def test_a_change_of_the_nodes_files_is_reported(empty_host: EmptyHost) -> None:
    """The real kubelet, containerd and systemd change none of them."""
    expect_joined(empty_host)
    empty_host.guest.run(["sleep", str(DELAY)], timeout=10 * DELAY)
    assert changed_files(empty_host) == []
    settings = "/etc/kubernetes/kubelet.json"
    Node(empty_host.guest).shell(f"echo >>{settings}")
    assert changed_files(empty_host) == [settings]
    shown = empty_host.guest.run(["unbounded-agent", "status", "--wide", MACHINE], timeout=120).stdout
    assert f"up --rebuild {MACHINE}" in shown


def test_up_is_killed_at_each_step(empty_host: EmptyHost) -> None:
    """One `up` after another, each killed at a later step: none of them needs more than what the last one left."""
    reached = {}
    for step in STEPS:
        ended = empty_host.guest.run(["sh", "-c", KILLED, step], timeout=SECONDS, check=False)
        log = empty_host.guest.read("/var/tmp/up.log").decode(errors="replace")
        assert ended.status in (0, 9), f"{step}: {log}\n{empty_host.guest.read(EVENTS).decode()}"
        reached[step] = ended.status == 9
    missed = {step for step, killed in reached.items() if not killed}
    assert missed <= HIDDEN
    expect_joined(empty_host)


@pytest.mark.parametrize("cut", CUTS)
def test_the_host_loses_its_power(empty_host: EmptyHost, cut: str) -> None:
    """The guest's memory is lost, and with it all that was not synced."""
    empty_host.guest.start(["sh", "-c", f"exec unbounded-agent up >{EVENTS} 2>&1"])
    wait(cut, lambda: empty_host.guest.run(["sh", "-c", CUTS[cut]], check=False).status == 0, SECONDS,
         lambda: empty_host.guest.read(EVENTS).decode(errors="replace"), longest_pause=0.2)  # fmt: skip
    empty_host.host.cut_power()
    empty_host.guest.set_clock()
    expect_joined(empty_host)
