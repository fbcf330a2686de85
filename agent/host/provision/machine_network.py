"""Checks whether a node with a network of its own will get an address in it."""

from agent.config.settings import MachineSettings
from agent.host.observe.units import observe_units
from agent.host.plan.nspawn import OWN_NETWORK, own_network
from agent.host.provision.preflight import Check
from agent.system.files import System

NETWORKD = "systemd-networkd.service"


def check_network(machine: str, settings: MachineSettings, system: System) -> list[Check]:
    """Return a list with the check. The list is empty if the machine is on the host's network, or on a configured one.

    The check is not required, because another program may do what systemd-networkd does.
    """
    chosen = settings.nspawn.extra.get("Network", {})
    if not own_network(settings.nspawn) or any(chosen.get(key) for key in OWN_NETWORK):
        return []
    if observe_units([NETWORKD], system)[NETWORKD].state == "active":
        return [Check("network", "systemd-networkd gives the machine an address, and routes for it", machine=machine)]
    advice = (
        "run `systemctl enable --now systemd-networkd`, or name a network in nspawn.extra.Network, such as a Bridge or "
        "MACVLAN, in which a DHCP server assigns addresses"
    )
    what = "systemd-networkd does not run on the host: nothing gives the machine's virtual Ethernet an address"
    return [Check("network", what, advice, machine, required=False)]
