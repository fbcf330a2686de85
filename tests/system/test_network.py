"""Links, routes and rules of a real network namespace are observed and removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pyroute2 import IPRoute
from agent.model.node import Link
from agent.system.network import HostNetwork

network = HostNetwork()
before = network.observe()
with IPRoute() as netlink:
    def index(name):
        return netlink.link_lookup(ifname=name)[0]
    netlink.link("set", index=index("lo"), state="up")
    netlink.link("add", ifname="cni0", kind="bridge")
    netlink.addr("add", index=index("cni0"), address="10.244.0.1", prefixlen=24)
    netlink.link("set", index=index("cni0"), state="up")
    netlink.link("add", ifname="veth1", kind="veth", peer="veth2")
    netlink.link("set", index=index("veth1"), master=index("cni0"))
    netlink.rule("add", table=100, priority=500, fwmark=7)
    netlink.rule("add", table=101, priority=501, src="10.3.0.0/24", iifname="lo")
    netlink.route("add", dst="10.8.0.0/24", gateway="10.244.0.9", table=100, proto=12)
    netlink.route("add", dst="10.7.0.0/24", type="blackhole", proto=12)
    netlink.route("add", dst="default", gateway="10.244.0.9", table=100)
    netlink.route("add", dst="10.6.0.0/24", oif=index("lo"))
    netlink.route("add", dst="fd00::/64", oif=index("cni0"), proto=4)
now = network.observe()
known = (*before.rules, *before.routes, *before.links)
new = [each for each in (*now.rules, *now.routes, *now.links) if each not in known]
assert len(new) == 10, new
assert Link("cni0", "bridge") in new
assert {each.name: each.bridge for each in now.links if each.bridge} == {"veth1": "cni0"}, now.links
for each in new:
    network.remove(each)
    network.remove(each)
assert network.observe() == before

# Another link's route is not removed.
with IPRoute() as netlink:
    for name, peer in (("veth1", "veth2"), ("veth3", "veth4")):
        netlink.link("add", ifname=name, kind="veth", peer=peer)
        netlink.link("set", index=netlink.link_lookup(ifname=name)[0], state="up")
    netlink.route("add", dst="10.8.0.0/24", oif=netlink.link_lookup(ifname="veth1")[0], proto=12)
    (old,) = network.observe().routes
    netlink.link("del", index=netlink.link_lookup(ifname="veth1")[0])
    netlink.route("add", dst="10.8.0.0/24", oif=netlink.link_lookup(ifname="veth3")[0], proto=12)
network.remove(old)
(left,) = network.observe().routes
assert left.device == "veth3", left
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network namespace")
def test_leftovers_are_removed() -> None:
    argv = ("unshare", "--net", sys.executable, "-I", "-B", "-c", CHILD, str(REPOSITORY))
    finished = subprocess.run(argv, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
