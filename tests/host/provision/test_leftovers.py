"""What a node left in the host's network is removed; what may belong to somebody else is only reported."""

from socket import AF_INET

from agent.host.provision.network import leftovers
from agent.model.node import Link, Network, Route, Rule

BOOT, STATIC, DHCP, BIRD = 3, 4, 16, 12
LO, ETH0 = Link("lo", ""), Link("eth0", "")
DEFAULT = Route(AF_INET, 254, 1, "", "192.0.2.1", "eth0", DHCP, 100)
LOCAL = Rule(AF_INET, 0, 1, 255)
FOUND = Network((ETH0, LO), (DEFAULT,), (LOCAL,))


def plus(*added: Link | Route | Rule) -> Network:
    return Network(
        (*FOUND.links, *(each for each in added if isinstance(each, Link))),
        (*FOUND.routes, *(each for each in added if isinstance(each, Route))),
        (*FOUND.rules, *(each for each in added if isinstance(each, Rule))),
    )


def test_what_pods_networking_made_is_removed_rules_first_links_last() -> None:
    bridge, veth = Link("cni0", "bridge"), Link("veth0a1b2c3d", "veth", "cni0")
    over_gateway = Route(AF_INET, 254, 1, "10.244.3.0/24", "192.0.2.7", "eth0", BOOT, 0)
    blackhole = Route(AF_INET, 254, 6, "10.244.9.0/26", "", "", BIRD, 0)
    on_bridge = Route(AF_INET, 254, 1, "10.9.0.0/24", "", "cni0", BOOT, 0)
    rule = Rule(AF_INET, 500, 1, 2004, mark=0x200, mask=0xF00)
    found = leftovers(FOUND, plus(bridge, veth, over_gateway, blackhole, on_bridge, rule))
    assert found.remove == (rule, over_gateway, blackhole, bridge, veth)
    assert found.keep == ()


def test_what_others_added_since_stays() -> None:
    wireguard, docker, hardware = Link("wg0", "wireguard"), Link("docker0", "bridge"), Link("cni-looks-like-it", "")
    by_wireguard = Route(AF_INET, 51820, 1, "", "", "wg0", BOOT, 0)
    to_wireguard = Rule(AF_INET, 32764, 1, 51820, mark=0xCA6C, mask=0xFFFFFFFF)
    lease = Route(AF_INET, 254, 1, "", "192.0.2.254", "eth0", DHCP, 100)
    to_main = Rule(AF_INET, 32765, 1, 254)
    by_networkd = Route(AF_INET, 254, 1, "10.50.0.0/16", "192.0.2.254", "eth0", STATIC, 0)
    unreachable = Rule(AF_INET, 2000, 7, 0)
    added = (wireguard, docker, hardware, by_wireguard, to_wireguard, lease, to_main, by_networkd, unreachable)
    found = leftovers(FOUND, plus(*added))
    assert found.remove == ()
    assert set(found.keep) == {*added} - {by_wireguard}


OTHERS = (
    *(Link(name, "bridge") for name in ("lxcbr0", "cni-podman0", "incusbr0", "vxlan", "calibration", "gw0")),
    Link("vxlan100", "vxlan"),
    Link("veth0a1b2c3d", "veth", "incusbr0"),
    Link("veth0a1b2c3e", "veth"),
)
NODES = (
    *(Link(name, "veth") for name in ("lxc0a1b2c3d4e5f", "lxc_health", "cali0a1b2c3d4e5", "cilium_host")),
    *(Link(name, "vxlan") for name in ("vxlan.calico", "vxlan-v6.calico", "vxlan-6784", "vxlan_sys_4789", "flannel.1")),
    *(Link(name, "bridge") for name in ("cni0", "cbr0", "kube-bridge")),
    Link("kube-ipvs0", "dummy"),
)


def test_interfaces_of_lxc_incus_podman_and_administrators_only_resemble_a_nodes() -> None:
    """Their containers or networks would lose them."""
    assert leftovers(FOUND, plus(*OTHERS)).remove == ()
    assert set(leftovers(FOUND, plus(*OTHERS)).keep) == {*OTHERS}
    assert set(leftovers(FOUND, plus(*NODES)).remove) == {*NODES}
