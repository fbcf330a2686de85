"""The versions of the real parts that a test ran with, read from the parts themselves."""

import re

from integration.bed.machine.node import Node
from integration.bed.vm.guest import Computer

HOST = """
. /etc/os-release && echo "host=$PRETTY_NAME"
echo "host's systemd=$(systemctl --version | sed -n '1s/systemd \\([0-9.]*\\).*/\\1/p')"
echo "host's kernel=$(uname -r)"
echo "NVIDIA driver=$(cat /sys/module/nvidia/version)"
"""
MACHINE = """
. /etc/os-release && echo "machine=$PRETTY_NAME"
echo "machine's systemd=$(systemctl --version | sed -n '1s/systemd \\([0-9.]*\\).*/\\1/p')"
echo "machine's Python=$(python3 -c 'import platform; print(platform.python_version())')"
echo "containerd=$(containerd --version)"
echo "runc=$(runc --version | head -1)"
echo "NVIDIA Container Toolkit=$(nvidia-ctk --version | head -1)"
"""


def host_versions(host: Computer) -> dict[str, str]:
    """Return versions by part, of a host whose driver is loaded."""
    return _parse(host.run(["sh", "-c", HOST]).stdout)


def machine_versions(node: Node) -> dict[str, str]:
    """Return versions by part, of a running machine."""
    return _parse(node.shell(MACHINE).stdout)


def _parse(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        part, _, value = line.partition("=")
        # A program prints its version among other words. The values of `host` and `machine` are names of distributions,
        # such as "Debian GNU/Linux 13 (trixie)", and are kept whole.
        version = re.search(r"\d+\.\d+[\w.]*", value)
        found[part] = version[0] if version and part not in ("host", "machine") else value
    return found
