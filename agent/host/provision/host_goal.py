"""Plans the settings of a host with nodes: kernel parameters, modules, swap, and the files that nodes need. Pure."""

from collections.abc import Iterable, Mapping

from agent.config.node import HostNodeSettings
from agent.config.settings import Config
from agent.host.state.owned_files import MARK
from agent.model.node import HostSettings, HostState, NodeFile, Problem

KUBELET_SYSCTLS: Mapping[str, str] = {
    "kernel.keys.root_maxbytes": "25000000",
    "kernel.keys.root_maxkeys": "1000000",
    "kernel.panic": "10",
    "kernel.panic_on_oops": "1",
    "vm.overcommit_memory": "1",
    "vm.panic_on_oom": "0",
}
"""The kubelet does not start with other values (setupKernelTunables in pkg/kubelet/cm/container_manager_linux.go)."""
FORWARDING: Mapping[str, str] = {
    "net.bridge.bridge-nf-call-ip6tables": "1",
    "net.bridge.bridge-nf-call-iptables": "1",
    "net.ipv4.ip_forward": "1",
}
"""What CNI plugins and kube-proxy need in the node's network namespace."""
BRIDGE = "net.bridge."
BRIDGE_MODULE = "br_netfilter"
"""The module that provides the parameters below BRIDGE."""

SYSCTLS = "/etc/sysctl.d/99-unbounded-agent.conf"
"""This name sorts after the names that administrators and packages use. So the agent's values win: those of the last
file count (sysctl.d(5))."""
MODULES = "/etc/modules-load.d/unbounded-agent.conf"
NO_SWAP = "/etc/systemd/system/swap.target"
"""An empty unit file masks its unit (systemd.unit(5)), so no boot turns on any swap."""
NEEDRESTART = "/etc/needrestart/conf.d/unbounded-agent.conf"

HEADER = f"{MARK.decode()} up; `unbounded-agent reset` removes it.\n"


def host_goal(config: Config) -> HostSettings:
    """Return what the host gets for all nodes of a configuration; nothing if the configuration has no nodes."""
    nodes = {name: machine.node for name, machine in config.machines.items() if machine.node}
    if not nodes:
        return HostSettings({}, (), swap_off=False, files=())
    hosts = [settings.host for settings in nodes.values()]
    modules = tuple(dict.fromkeys(module for host in hosts for module in host.kernel_modules))
    sysctls = _sysctls(hosts, modules)
    swap_off = any(host.swap == "off" for host in hosts)
    files = [
        NodeFile(SYSCTLS, (HEADER + sysctl_lines(sysctls)).encode()),
        NodeFile(NEEDRESTART, _needrestart(nodes).encode()),
    ]
    if modules:
        files.append(NodeFile(MODULES, (HEADER + "".join(f"{module}\n" for module in modules)).encode()))
    if swap_off:
        files.append(NodeFile(NO_SWAP, b""))
    return HostSettings(sysctls, modules, swap_off, tuple(sorted(files, key=lambda file: file.path)))


def sysctl_lines(sysctls: Mapping[str, str]) -> str:
    """Return the lines of a sysctl.d(5) file. The `-` makes systemd ignore parameters that the kernel does not have."""
    return "".join(f"-{name} = {value}\n" for name, value in sorted(sysctls.items()))


def sysctl_name(name: str) -> str:
    """Return a parameter's name with dots, as sysctl(8) prints it. `name` may have slashes instead (sysctl.d(5))."""
    dot, slash = name.find("."), name.find("/")
    if slash < 0 or 0 <= dot < slash:
        return name
    return name.translate(str.maketrans("./", "/."))


def sysctl_path(name: str) -> str:
    """Return the file of a parameter, whose name is in the form that `sysctl_name` returns."""
    return f"/proc/sys/{name.translate(str.maketrans('./', '/.'))}"


def same_value(one: str | None, other: str) -> bool:
    """Return whether two values of a parameter differ in blanks at most: the kernel prints tabs between numbers."""
    return one is not None and one.split() == other.split()


def is_ours(content: bytes) -> bool:
    """Return whether a file with this content is the agent's. Empty files count, because NO_SWAP is empty."""
    return not content or content.startswith(MARK)


def host_changes(goal: HostSettings, state: HostState) -> tuple[str, ...]:
    """Return in words what has to be changed."""
    values = ((name, state.sysctls.get(name), value) for name, value in sorted(goal.sysctls.items()))
    return (
        *(f"load kernel module {module}" for module in goal.modules if not state.modules.get(module)),
        *(f"write {file.path}" for file in goal.files if needs_writing(file, state)),
        *(f"set {name} to {value} (now {now})" for name, now, value in values if not same_value(now, value)),
        *(f"turn off swap on {swap.path}" for swap in state.swaps if goal.swap_off),
    )


def host_problems(goal: HostSettings, state: HostState) -> tuple[Problem, ...]:
    """Return a problem for each file of the goal that would replace a file that the agent did not write."""
    return tuple(
        Problem("host settings", f"{file.path} exists, and the agent did not write it", "rename or remove it")
        for file in goal.files
        if needs_writing(file, state) and (found := state.files.get(file.path)) and not is_ours(found.content)
    )


def needs_writing(file: NodeFile, state: HostState) -> bool:
    """Return whether a file has to be written."""
    found = state.files.get(file.path)
    return found is None or found.content != file.content


def _sysctls(hosts: Iterable[HostNodeSettings], modules: Iterable[str]) -> dict[str, str]:
    sysctls = {
        name: value
        for name, value in {**KUBELET_SYSCTLS, **FORWARDING}.items()
        if not name.startswith(BRIDGE) or BRIDGE_MODULE in modules
    }
    for host in hosts:
        sysctls |= {sysctl_name(name): value for name, value in host.sysctls.items()}
    return dict(sorted(sysctls.items()))


def _needrestart(machines: Iterable[str]) -> str:
    """Return a Perl file that keeps needrestart from restarting machines, with all their pods, after an upgrade."""
    names = "|".join(f"\\Q{machine}\\E" for machine in sorted(machines))
    return f"{HEADER}$nrconf{{override_rc}}{{qr(^systemd-nspawn\\@(?:{names})\\.service$)}} = 0;\n"
