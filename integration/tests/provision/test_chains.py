"""The real iptables lists and removes a node's chains, in a network namespace of the test."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.host.provision.network import FAMILIES, observe_chains, remove_chains
from agent.model.node import Chains
from agent.system.files import System
from agent.system.process import Completed
from integration.bed.drivers.host_roots import host_root

pytestmark = pytest.mark.scenario("003")

NODE = """
for program in iptables-nft ip6tables-nft; do
    $program -A INPUT -p tcp --dport 22 -j ACCEPT
    $program -N MINE
    $program -A MINE -j RETURN
    $program -t nat -N KUBE-SERVICES
    $program -t nat -N KUBE-SVC-ABC
    $program -t nat -A KUBE-SERVICES -m comment --comment "a service: -j MINE" -j KUBE-SVC-ABC
    $program -t nat -A KUBE-SVC-ABC -j RETURN
    $program -t nat -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
    $program -t nat -N CNI-0123456789abcdef
    $program -t nat -A POSTROUTING -m comment --comment 'name: "bed" id: "1"' -j CNI-0123456789abcdef
    $program -N KUBE-FIREWALL
    $program -I INPUT -j KUBE-FIREWALL
    $program -A MINE -g KUBE-FIREWALL
    $program -A INPUT -m comment --comment "a
-A INPUT -j ACCEPT
:KUBE-FAKE - [0:0]
COMMIT
" -j KUBE-FIREWALL
    $program -A FORWARD -i 'a"b' -m comment --comment 'it"s \\' -o '"' -j KUBE-FIREWALL
    $program -t nat -A PREROUTING -i "it's" -m comment --comment "its \\\" end" -j KUBE-SERVICES
done
"""
"""What kube-proxy, the kubelet and CNI plugins do, among rules of somebody else."""


class Namespace:
    """Runs programs of Debian 13 in a network namespace; `directory` is at the same path for them."""

    def __init__(self, directory: Path) -> None:
        root = host_root()
        script = 'mount -t tmpfs none "$0/tmp" && mkdir -p "$0$1" && mount --bind "$1" "$0$1" && echo && sleep inf'
        argv = ["unshare", "--net", "--mount", "sh", "-c", script, str(root), str(directory)]
        self._sleeping = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        assert self._sleeping.stdout
        assert self._sleeping.stdout.read(1), "the namespace cannot be made"
        self._enter = ["nsenter", "--net", "--mount", f"--target={self._sleeping.pid}", "chroot", str(root)]

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        done = subprocess.run([*self._enter, *argv], capture_output=True, timeout=timeout)
        return Completed(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        subprocess.run(["kill", "-KILL", "--", f"-{self._sleeping.pid}"], check=False)
        # Waits, and closes the pipe.
        self._sleeping.__exit__(None, None, None)


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    with contextlib.closing(Namespace(tmp_path)) as namespace:
        yield namespace


def rules(namespace: Namespace) -> list[str]:
    saved = [namespace((f"{program}-nft-save",), 30).stdout.decode().splitlines() for program in FAMILIES]
    # Tables and chains of the kernel itself stay, without rules.
    return [line for lines in saved for line in lines if line.startswith("-A") or (line[0] == ":" and " - " in line)]


def test_only_the_nodes_chains_are_removed(namespace: Namespace, tmp_path: Path) -> None:
    system = System(namespace, str(tmp_path))
    for program in FAMILIES:
        place = tmp_path / f"usr/sbin/{program}-nft-save"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(0o755)
    assert observe_chains(system) == ()
    assert namespace(("sh", "-euc", NODE), 60).status == 0
    found = observe_chains(system)
    nat = ("CNI-0123456789abcdef", "KUBE-SERVICES", "KUBE-SVC-ABC")
    assert found == tuple(
        Chains(f"{program}-nft", table, names)
        for program in FAMILIES
        for table, names in (("filter", ("KUBE-FIREWALL",)), ("nat", nat))
    )
    for chains in found:
        remove_chains(chains, system)
        # Again, as after an interruption.
        remove_chains(chains, system)
    assert observe_chains(system) == ()
    assert rules(namespace) == 2 * [
        ":MINE - [0:0]",
        "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT",
        "-A MINE -j RETURN",
    ]
