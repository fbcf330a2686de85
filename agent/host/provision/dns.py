"""Checks whether pods will reach the DNS servers that they get from their node."""

from agent.config.settings import MachineSettings
from agent.host.observe.resolver import RESOLV_CONF, UPLINK, dns_servers
from agent.host.provision.preflight import Check
from agent.model.facts import Facts
from agent.system.files import System


def check_dns(machine: str, settings: MachineSettings, facts: Facts, system: System) -> list[Check]:
    """Return a list with the check. The list is empty if a setting of the kubelet or of nspawn chooses the resolv.conf.

    The check is not required, because a node joins even without DNS.
    """
    node = settings.node
    assert node, "the machine is a node"
    chosen = "resolvConf" in node.kubelet.configuration or "ResolvConf" in settings.nspawn.extra.get("Exec", {})
    if chosen:
        return []
    path = UPLINK if facts.stub_resolver else RESOLV_CONF
    servers, remote = dns_servers(path, system)
    if remote:
        return [Check("dns", f"pods can ask {', '.join(remote)} ({path})", machine=machine)]
    what = f"names only {', '.join(servers)}, which pods cannot reach" if servers else "names no DNS server"
    # systemd-resolved writes UPLINK, and replaces what others write there.
    there = (
        "with DNS= in /etc/systemd/resolved.conf, and run `systemctl restart systemd-resolved`"
        if facts.stub_resolver
        else "there"
    )
    advice = (
        f"name a server that pods can reach {there}; or write `nameserver ADDRESS` into a file of the image, and set "
        "node.kubelet.configuration.resolvConf to the path of that file"
    )
    what = f"{path} {what}: cluster DNS would not resolve names outside the cluster"
    return [Check("dns", what, advice, machine, required=False)]
