"""What provisioning found on a host."""

from agent.model.node import AsFound, FoundFile, HostState, Link, Network, Route, Rule, Swap
from agent.model.typed_json import Base64

NETWORK = Network((Link("lo", ""),), (Route(2, 254, 1, "", "192.0.2.1", "eth0", 16, 100),), (Rule(2, 0, 1, 255),))
FOUND = AsFound(
    host=HostState(
        sysctls={"kernel.panic": "0", "net.bridge.bridge-nf-call-iptables": None},
        modules={"overlay": True},
        swaps=(Swap("/dev/sda2", -2),),
        files={"/etc/a": None, "/etc/b": FoundFile(Base64(b"\xff\0not text"), 0o600)},
        absent_directories=("/etc/c",),
    ),
    units={"machines.target": False},
    network=NETWORK,
    recorded=1.5e9,
)
