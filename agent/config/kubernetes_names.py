"""Validates settings that become names and values in Kubernetes' API. Pure.

The rules are those of IsQualifiedName and IsValidLabelValue (util/validation of k8s.io/apimachinery).
"""

import ipaddress
import re
from typing import Annotated

from agent.config.table import Check, text

NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
SUBDOMAIN_LIMIT = 253
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

NodeName = Annotated[
    str,
    text(
        SUBDOMAIN, "a DNS name (lower-case letters, digits and hyphens, parts joined by dots)", longest=SUBDOMAIN_LIMIT
    ),
]
"""A DNS subdomain (RFC 1123) in lower case, as Kubernetes requires it."""


def is_subdomain(text: str) -> bool:
    """Return whether the text is a DNS subdomain, as the name of a Node must be."""
    return len(text) <= SUBDOMAIN_LIMIT and bool(re.fullmatch(SUBDOMAIN, text))


def label_key(value: str) -> str:
    """Check a key of a label or taint, and return it. Raises ValueError if it is not a qualified name."""
    prefix, slash, name = value.rpartition("/")
    if slash and not is_subdomain(prefix):
        raise ValueError(f"{value!r} is not a key: what precedes the slash must be a DNS subdomain in lower case")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{value!r} is not a key: its name must have 1 to 63 letters, digits, dots, hyphens and underscores, and "
            "must begin and end with a letter or digit"
        )
    return value


def label_value(value: str) -> str:
    """Check a value of a label or taint, and return it. Raises ValueError if Kubernetes would reject it."""
    if value and not NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a value: it must have at most 63 letters, digits, dots, hyphens and underscores, and "
            "must begin and end with a letter or digit"
        )
    return value


def taint(value: str) -> str:
    """Check a taint, and return it. Raises ValueError if it is neither KEY=VALUE:EFFECT nor KEY:EFFECT."""
    split_taint(value)
    return value


def startup_taint(value: str) -> str:
    """Return the taint, which may be empty. Raises ValueError if it is malformed, or its effect keeps no pod away."""
    if value and split_taint(value)[2] == "PreferNoSchedule":
        raise ValueError(f"{value!r} keeps no pod away: use NoSchedule or NoExecute")
    return value


def split_taint(text: str) -> tuple[str, str, str]:
    """Return the key, value and effect of a taint. Raises ValueError if it is malformed."""
    key_and_value, colon, effect = text.rpartition(":")
    key, _, value = key_and_value.partition("=")
    if not colon or effect not in EFFECTS:
        raise ValueError(f"{text!r} is not a taint: write KEY=VALUE:EFFECT with one of {', '.join(EFFECTS)}")
    return label_key(key), label_value(value), effect


def ip_address(value: str) -> str:
    """Return the IP address in its usual form. Raises ValueError if it is malformed."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address") from None


def node_addresses(value: str) -> str:
    """Return at most one IPv4 and one IPv6 address, separated by a comma. Raises ValueError for anything else."""
    addresses = [ip_address(each) for each in value.split(",")] if value else []
    if len(addresses) > 2 or len({":" in each for each in addresses}) != len(addresses):
        raise ValueError(f"{value!r}: a node has one address, or one of IPv4 and one of IPv6")
    return ",".join(addresses)


LabelKey = Annotated[str, Check(label_key)]
LabelValue = Annotated[str, Check(label_value)]
Taint = Annotated[str, Check(taint)]
StartupTaint = Annotated[str, Check(startup_taint)]
IpAddress = Annotated[str, Check(ip_address)]
NodeAddresses = Annotated[str, Check(node_addresses)]
