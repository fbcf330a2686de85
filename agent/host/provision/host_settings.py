"""Observes the host's settings that nodes need, changes them, and sets them back. Raises OSError or an AgentError."""

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.state.records import MARK
from agent.model.errors import AgentError, CommandError
from agent.model.node import FoundFile, HostSettings, HostState, NodeFile, Swap
from agent.model.typed_json import Base64
from agent.system.files import NOT_FOUND, System
from agent.system.modules import is_loaded, load_module
from agent.system.trust import entries_if_present

Value = TypeVar("Value", bound=str | None)

# Plans the settings of a host with nodes: kernel parameters, modules, swap, and the files that nodes need. Pure.


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
    (IP_FORWARD := "net.ipv4.ip_forward"): "1",
}
"""What CNI plugins and kube-proxy need in the node's network namespace."""
INTERFACES = "net.ipv4.conf."
"""A change of IP_FORWARD changes parameters below this (inet_forward_change in net/ipv4/devinet.c)."""
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
    sysctls = {**KUBELET_SYSCTLS, **FORWARDING}
    if BRIDGE_MODULE not in modules:
        sysctls = {name: value for name, value in sysctls.items() if not name.startswith(BRIDGE)}
    for host in hosts:
        sysctls |= {sysctl_name(name): value for name, value in host.sysctls.items()}
    # A Perl file that keeps needrestart from restarting machines, with all their pods, after an upgrade.
    names = "|".join(f"\\Q{machine}\\E" for machine in sorted(nodes))
    needrestart = f"$nrconf{{override_rc}}{{qr(^systemd-nspawn\\@(?:{names})\\.service$)}} = 0;\n"
    texts = {SYSCTLS: HEADER + sysctl_lines(sysctls), NEEDRESTART: HEADER + needrestart}
    if modules:
        texts[MODULES] = HEADER + "".join(f"{module}\n" for module in modules)
    if swap_off := any(host.swap == "off" for host in hosts):
        texts[NO_SWAP] = ""
    files = tuple(NodeFile(path, text.encode()) for path, text in sorted(texts.items()))
    return HostSettings(dict(_in_order(sysctls)), modules, swap_off, files)


def sysctl_lines(sysctls: Mapping[str, str]) -> str:
    """Return the lines of a sysctl.d(5) file. The `-` makes systemd ignore parameters that the kernel does not have."""
    return "".join(f"-{name} = {value}\n" for name, value in _in_order(sysctls))


def _in_order(sysctls: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Return parameters in the order in which they have to be set: IP_FORWARD before those that it changes."""
    return sorted(sysctls.items(), key=lambda each: (each[0].startswith(INTERFACES), each[0]))


SWAPPED = str.maketrans("./", "/.")


def sysctl_name(name: str) -> str:
    """Return a parameter's name with dots, as sysctl(8) prints it. `name` may have slashes instead (sysctl.d(5))."""
    dot, slash = name.find("."), name.find("/")
    return name if slash < 0 or 0 <= dot < slash else name.translate(SWAPPED)


def sysctl_path(name: str) -> str:
    """Return the file of a parameter, whose name is in the form that `sysctl_name` returns."""
    return f"/proc/sys/{name.translate(SWAPPED)}"


def _same_value(one: str | None, other: str) -> bool:
    """Return whether two values of a parameter differ in blanks at most: the kernel prints tabs between numbers."""
    return one is not None and one.split() == other.split()


def _is_ours(content: bytes) -> bool:
    """Return whether a file with this content is the agent's. Empty files count, because NO_SWAP is empty."""
    return not content or content.startswith(MARK)


def differs(goal: HostSettings, state: HostState) -> bool:
    """Return whether anything has to be changed."""
    return (
        not all(state.modules.get(module) for module in goal.modules)
        or any(_needs_writing(file, state) for file in goal.files)
        or not all(_same_value(state.sysctls.get(name), value) for name, value in goal.sysctls.items())
        or (goal.swap_off and bool(state.swaps))
    )


def refuse_foreign(goal: HostSettings, state: HostState) -> None:
    """Raise AgentError if a file of the goal would replace a file that the agent did not write."""
    for file in goal.files:
        found = state.files.get(file.path)
        if found and _needs_writing(file, state) and not _is_ours(found.content):
            raise AgentError(f"{file.path} exists, and the agent did not write it", "rename or remove it")


def _needs_writing(file: NodeFile, state: HostState) -> bool:
    found = state.files.get(file.path)
    return found is None or found.content != file.content


SWAPS = "/proc/swaps"
ESCAPED = re.compile(r"\\([0-7]{3})")
"""A blank or backslash of a path, as the kernel writes it (seq_file_path in mm/swapfile.c)."""
NOWHERE = "/dev/null"
"""A unit file that is a link to /dev/null masks its unit, as an empty unit file does."""
UNITS = "/etc/systemd/system/"
MODPROBE_LIMIT = 60.0
"""Seconds to load or unload a module."""
SWAP_LIMIT = 600.0
"""Seconds to turn a swap on or off. swapoff(8) reads back everything that is swapped out."""
RELOAD_LIMIT = 90.0
"""Seconds that systemd may take to reload its units."""


def observe_host(goal: HostSettings, system: System) -> HostState:
    """Return the current values of everything that a goal names. Swap is always observed, whatever the goal says."""
    # The directories of the files, outermost first, without `/`.
    parts = [posixpath.dirname(file.path).split("/") for file in goal.files]
    directories = dict.fromkeys("/".join(each[:length]) for each in parts for length in range(2, len(each) + 1))
    return HostState(
        sysctls={name: _sysctl(name, system) for name in (*_lost_with_forwarding(goal, system), *goal.sysctls)},
        modules={module: is_loaded(module, system) for module in goal.modules},
        swaps=tuple(sorted(_swaps(system), key=lambda swap: swap.path)),
        files={file.path: _file(file.path, system) for file in goal.files},
        absent_directories=tuple(each for each in directories if not system.exists(each)),
    )


def _lost_with_forwarding(goal: HostSettings, system: System) -> Iterator[str]:
    """Yield the parameters that have other values once IP_FORWARD was changed to the goal's and then set back."""
    forward = _sysctl(IP_FORWARD, system)
    if forward is None or goal.sysctls.get(IP_FORWARD, forward) == forward:
        return
    if _sysctl(redirects := f"{INTERFACES}all.accept_redirects", system) == forward:
        yield redirects
    for interface in entries_if_present(system, sysctl_path(INTERFACES)):
        name = sysctl_name(f"net/ipv4/conf/{interface}/forwarding")
        if interface != "all" and _sysctl(name, system) != forward:
            yield name


def apply_host(goal: HostSettings, before: HostState, system: System) -> None:
    """Change what differs from the goal; `before` is the observed state. Can be repeated after a failure."""
    refuse_foreign(goal, before)
    # Load modules first: some sysctls exist only while their module is loaded.
    for module in goal.modules:
        if not before.modules.get(module):
            load_module(module, MODPROBE_LIMIT, system)
    written = [file for file in goal.files if _needs_writing(file, before)]
    for file in written:
        system.write(file.path, file.content, file.mode)
    _reload((file.path for file in written), system)
    for name, value in goal.sysctls.items():
        _set_sysctl(name, value, system)
    for swap in before.swaps if goal.swap_off else ():
        system.run("swapoff", swap.path, timeout=SWAP_LIMIT)


def restorable(found: HostState, system: System) -> tuple[HostState, tuple[str, ...]]:
    """Return the part of the found state that `reset` restores, and a sentence on each thing that it cannot restore.

    A swap or parameter that no longer exists cannot be restored. If no `up` has turned swap off, no swap has to be
    restored, so the returned part has none.
    """
    lost = {name for name, value in found.sysctls.items() if value is not None and _sysctl(name, system) is None}
    swaps = found.swaps if NO_SWAP in found.files else ()
    kept = tuple(swap for swap in swaps if system.exists(swap.path))
    sentences = [f"the kernel no longer has the parameter {name}, which was {found.sysctls[name]}" for name in lost]
    sentences += [f"{swap.path} was used as swap and no longer exists" for swap in swaps if swap not in kept]
    sysctls = {name: value for name, value in found.sysctls.items() if name not in lost}
    return replace(found, sysctls=sysctls, swaps=kept), tuple(sorted(sentences))


def undo_host(found: HostState, system: System) -> None:
    """Set the host back to what was found, except files that others have replaced and modules that are in use.

    If a step fails, the other steps still run. Raises AgentError at the end with all failures.
    """
    steps: list[Callable[[], object]] = []
    changed = [path for path, file in found.files.items() if _file(path, system) != file]
    steps += [partial(_restore, path, found.files[path], system) for path in changed]
    steps += [partial(system.remove_temporary, path) for path in found.files]
    steps += [partial(system.remove_empty_directory, each) for each in reversed(found.absent_directories)]
    steps.append(partial(_reload, changed, system))
    steps += [
        partial(_set_sysctl, name, value, system) for name, value in _in_order(found.sysctls) if value is not None
    ]
    active = {swap.path for swap in _swaps(system)}
    steps += [partial(_swap_on, swap, system) for swap in found.swaps if swap.path not in active]
    steps += [partial(_unload, module, system) for module, loaded in found.modules.items() if not loaded]
    failures: list[str] = []
    for step in steps:
        try:
            step()
        except AgentError as error:
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{error.filename or 'system call'}: {error.strerror or error}")
    if failures:
        raise AgentError("; ".join(failures), "correct this, then run the same command again")


def _sysctl(name: str, system: System) -> str | None:
    try:
        return system.read_text(sysctl_path(name)).strip()
    except OSError as error:
        if error.errno in NOT_FOUND:
            return None
        raise


def _set_sysctl(name: str, value: str, system: System) -> None:
    """Set a parameter, unless it has the value already."""
    if _same_value(_sysctl(name, system), value):
        return
    try:
        system.write_kernel(sysctl_path(name), value)
    except OSError as error:
        missing = "correct node.host.sysctls, or add the module that has it to node.host.kernel_modules"
        advice = missing if error.errno in NOT_FOUND else ""
        raise AgentError(f"cannot set {name} to {value}: {error.strerror}", advice) from error


def _unload(module: str, system: System) -> None:
    # If something else uses the module by now, it stays loaded.
    with suppress(CommandError):
        system.run("modprobe", "--remove", "--", module, timeout=MODPROBE_LIMIT)


def _swaps(system: System) -> Iterator[Swap]:
    """Yield the swaps in use (proc(5)). If the kernel does not support swap, SWAPS is missing."""
    if not system.exists(SWAPS):
        return
    for line in [*system.lines(SWAPS)][1:]:
        # Split before decoding: the kernel escapes only ASCII's blanks, but str.split() also splits at other blanks.
        path, *_, priority = (word.decode(errors="surrogateescape") for word in line.split())
        path = ESCAPED.sub(lambda found: chr(int(found[1], 8)), path)
        # If a swap is turned on without a priority, the kernel chooses a negative one. Here, all of these become -1:
        # they mean only that nobody chose a priority.
        yield Swap(path, max(int(priority), -1))


def _swap_on(swap: Swap, system: System) -> None:
    priority = ("--priority", str(swap.priority)) if swap.priority >= 0 else ()
    try:
        system.run("swapon", *priority, swap.path, timeout=SWAP_LIMIT)
    except CommandError as error:
        # zram, for example, is set up by its own unit, which swap.target starts. At this point, swap.target is not
        # masked any longer.
        hint = "turn it on with `systemctl start swap.target`"
        raise AgentError(f"cannot use {swap.path} as swap again: {error.message}", hint) from error


def _file(path: str, system: System) -> FoundFile | None:
    if system.read_link(path) == NOWHERE:
        return FoundFile(Base64(), 0o644)
    try:
        return FoundFile(Base64(system.read(path)), system.mode(path))
    except FileNotFoundError:
        return None


def _restore(path: str, found: FoundFile | None, system: System) -> None:
    """Restore a file as it was found, or remove it if there was none. If others have replaced it since, leave it."""
    now = _file(path, system)
    if now is not None and not _is_ours(now.content):
        return
    if found is None:
        system.remove(path)
    else:
        system.write(path, found.content, found.mode)


def _reload(paths: Iterable[str], system: System) -> None:
    if any(path.startswith(UNITS) for path in paths):
        system.run("systemctl", "daemon-reload", timeout=RELOAD_LIMIT)
