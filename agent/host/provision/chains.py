"""Lists and removes the chains of packet filter rules that kube-proxy, the kubelet and network plugins make.

For chains of iptables, this module runs iptables' own programs, because only they can read the rules that they keep in
the kernel's nftables. kube-proxy and network plugins may also use nftables without iptables: the whole tables that they
make there are listed and removed with nft.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator

from agent.model.errors import CommandError
from agent.model.network import NFT, Chains, Network
from agent.model.paths import CHAINS_REMOVAL
from agent.system.files import System
from agent.system.network import NetworkSource

FAMILIES = ("iptables", "ip6tables")
KINDS = ("nft", "legacy")
"""Variants of iptables. Each has rules of its own, and a host may have both. A variant's programs have the variant in
their names, such as iptables-nft-save. If a host has no such programs, it has only one variant, with programs such as
iptables-save."""
KUBERNETES = re.compile(r"(KUBE|CNI|FLANNEL|ANTREA)-\S+|(OLD_)?CILIUM_\S+|WEAVE(-\S+)?|cali-\S+")
"""Names of chains that kube-proxy, the kubelet, CNI plugins and network plugins make."""
CHAIN = re.compile(r":(\S+) ")
TABLE = re.compile(r"table (ip6? (?:kube-proxy|flannel-ipv[46]|calico))")
"""A line of `nft list tables` with a table of kube-proxy, Flannel or Calico."""
LIMIT = 120.0
"""Seconds for one program to list or change all rules."""


def observe_network(network: NetworkSource, system: System) -> Network:
    """Return the host's network, with Kubernetes' chains and tables. Raises OSError."""
    # `plugin_chains` and `tables` say what `observe_chains` has looked for. Records of earlier releases lack both.
    # Without nft, `tables` is False: there may be tables nevertheless, because any program can make them.
    tables = system.find_program(NFT) is not None
    return dataclasses.replace(network.observe(), chains=observe_chains(system), plugin_chains=True, tables=tables)


def observe_chains(system: System) -> tuple[Chains, ...]:
    """Return Kubernetes' chains of iptables, and Kubernetes' whole tables of nftables.

    For a program that cannot list its chains or tables, return one entry whose `table` is empty.
    """
    chains = (each for program in _programs(system) for each in _chains(program, system))
    return (*chains, *(_tables(system) if system.find_program(NFT) else ()))


def remove_chains(chains: Chains, system: System) -> None:
    """Remove chains, and the rules of other chains that jump to them; for NFT, remove the whole table.

    Raises CommandError or OSError.
    """
    if chains.program == NFT:
        if chains in _tables(system):
            system.run(NFT, "delete", "table", *chains.table.split(), timeout=LIMIT)
        return
    saved = system.run(f"{chains.program}-save", "--table", chains.table, timeout=LIMIT).split("\n")
    present = {found[1] for line in saved if (found := CHAIN.match(line))}
    names = [name for name in chains.names if name in present]
    jumps = [line for line in saved if line.startswith("-A ") and _jumps(line, {*names})]
    # Make all changes with one call, because a cluster with many services has thousands of chains.
    changes = [f"-D{line.removeprefix('-A')}" for line in jumps]
    changes += [f"{flag} {name}" for flag in ("-F", "-X") for name in names]
    content = "\n".join([f"*{chains.table}", *changes, "COMMIT", ""])
    # The rules may have comments of other programs, which are perhaps not UTF-8.
    system.write(CHAINS_REMOVAL, content.encode(errors="surrogateescape"), 0o600)
    try:
        system.run(f"{chains.program}-restore", "--noflush", system.full_path(CHAINS_REMOVAL), timeout=LIMIT)
    finally:
        system.remove(CHAINS_REMOVAL)


def _jumps(rule: str, names: set[str]) -> bool:
    """Return whether a rule leads to one of the chains `names`, and is not itself in one of them."""
    # Do not split rules that contain none of the names: shlex fails on a lone quotation mark, which other programs may
    # have put into a name in a rule, and which iptables-save does not escape.
    if not any(name in rule for name in names):
        return False
    _, chain, *words = shlex.split(rule)
    return chain not in names and any(words[at - 1] in ("-j", "-g") for at, word in enumerate(words) if word in names)


def _programs(system: System) -> Iterator[str]:
    for family in FAMILIES:
        kinds = [f"{family}-{kind}" for kind in KINDS]
        found = [program for program in kinds if system.find_program(f"{program}-save")]
        yield from found or ([family] if system.find_program(f"{family}-save") else [])


def _tables(system: System) -> Iterator[Chains]:
    try:
        listed = system.run(NFT, "list", "tables", timeout=LIMIT)
    except CommandError:
        yield Chains(NFT, "", ())
        return
    for line in listed.splitlines():
        if found := TABLE.fullmatch(line.strip()):
            yield Chains(NFT, found[1], ())


def _chains(program: str, system: System) -> Iterator[Chains]:
    try:
        saved = system.run(f"{program}-save", timeout=LIMIT)
    except CommandError:
        yield Chains(program, "", ())
        return
    tables: dict[str, list[str]] = {}
    names: list[str] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            names = tables.setdefault(line[1:], [])
        elif (found := CHAIN.match(line)) and KUBERNETES.fullmatch(found[1]):
            names.append(found[1])
    yield from (Chains(program, table, tuple(sorted(names))) for table, names in sorted(tables.items()) if names)
