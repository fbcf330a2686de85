"""The host's settings: observed, changed, and set back to exactly what was found."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.host.provision.host_settings import (
    KUBELET_SYSCTLS,
    MODULES,
    NEEDRESTART,
    NO_SWAP,
    SWAPS,
    SYSCTLS,
    apply_host,
    differs,
    host_goal,
    observe_host,
    sysctl_name,
    sysctl_path,
    undo_host,
)
from agent.model.errors import AgentError
from agent.model.node import HostSettings, Swap
from agent.system.modules import RELEASE
from agent.system.process import Completed
from tests.fakes.host import Host, ScriptedRunner
from tests.fakes.node_settings import config

REDIRECTS = "net.ipv4.conf.all.accept_redirects"
FOUND = {
    **{name: "7" for name in KUBELET_SYSCTLS},
    **{"net.ipv4.ip_forward": "0", REDIRECTS: "0", "net.ipv4.conf.default.forwarding": "0"},
    **{"net.ipv4.conf.br0.forwarding": "1", "net.ipv4.conf.eth0/100.forwarding": "0"},
    "vm.max_map_count": "65530",
}
HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


class Interfaces(Host):
    """Their parameters change with that of the host (inet_forward_change in net/ipv4/devinet.c)."""

    def write_kernel(self, path: str, value: str) -> None:
        super().write_kernel(path, value)
        if path == sysctl_path("net.ipv4.ip_forward"):
            for name in FOUND:
                if name.endswith(".forwarding"):
                    self.file(sysctl_path(name), value)
            self.file(sysctl_path(REDIRECTS), str(1 - int(value)))


class Kernel(ScriptedRunner):
    """A host's modules and swap, as modprobe, swapoff and swapon change them."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self.swaps = {"/dev/sda2": -2, "/swap\\040\u00a0file": 5}
        self.blacklisted = ""
        """A module that modprobe.d forbids."""
        self.busy: set[str] = set()
        """Modules that cannot be unloaded."""
        self.unready: set[str] = set()
        """Swaps that something else has to set up first."""
        self.host = host = Interfaces(tree, runner=self)
        host.file(RELEASE, "6.1.0\n")
        host.file("/lib/modules/6.1.0/modules.builtin", "kernel/fs/overlayfs/overlay.ko\n")
        host.file(MODULES.rpartition("/")[0] + "/.keep")
        host.file(SYSCTLS.rpartition("/")[0] + "/.keep")
        host.file(NO_SWAP.rpartition("/")[0] + "/.keep")
        for name, value in FOUND.items():
            host.file(sysctl_path(name), f"{value}\n")
        self._show()

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.calls.append(argv)
        match argv:
            case ("modprobe", "--use-blacklist", "--", module) if module != self.blacklisted:
                self.host.file(f"/sys/module/{module}/refcnt", "0\n")
                for name in ("iptables", "ip6tables") if module == "br_netfilter" else ():
                    self.host.file(f"/proc/sys/net/bridge/bridge-nf-call-{name}", "0\n")
            case ("modprobe", "--remove", "--", module):
                if module in self.busy:
                    return Completed(1, b"", b"modprobe: FATAL: Module is in use.")
                self.host.remove_tree(f"/sys/module/{module}")
                if module == "br_netfilter":
                    self.host.remove_tree("/proc/sys/net/bridge")
            case ("swapoff", path):
                del self.swaps[path.replace(" ", "\\040")]
            case ("swapon", *_, path) if path in self.unready:
                return Completed(255, b"", b"swapon: read swap header failed")
            case ("swapon", *options, path):
                self.swaps[path.replace(" ", "\\040")] = int(options[1]) if options else -3
            case ("systemctl", "daemon-reload") | ("modprobe", "--use-blacklist", "--", _):
                pass
            case _:
                raise AssertionError(f"nobody expected {argv}")
        self._show()
        return Completed(0, b"", b"")

    def _show(self) -> None:
        rows = (f"{path}\t\t\tpartition\t4\t0\t{priority}\n" for path, priority in self.swaps.items())
        self.host.file(SWAPS, HEADER + "".join(rows))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.fixture
def host(kernel: Kernel) -> Host:
    return kernel.host


def goal(**host_table: object) -> HostSettings:
    return host_goal(config(gpu={"host": host_table}))


def settings(host: Host) -> dict[str, bytes]:
    """Return all that is below /etc, and the kernel's parameters."""
    places = [place for part in ("etc", "proc/sys") for place in Path(host.full_path(f"/{part}")).rglob("*")]
    return {str(place): place.read_bytes().strip() if place.is_file() else b"" for place in places}


@pytest.mark.parametrize(("masked", "own"), [(False, {}), (True, {REDIRECTS: "1"})])
def test_up_and_reset_leave_the_host_as_it_was(host: Host, kernel: Kernel, masked: bool, own: dict[str, str]) -> None:
    """Also if somebody masked swap before."""
    if masked:
        host.symlink(NO_SWAP, "/dev/null")
    before, wanted = settings(host), goal(sysctls={"vm/max_map_count": "262144", **own})
    found = observe_host(wanted, host)
    assert differs(wanted, found)
    apply_host(wanted, found, host)
    assert host.read_text(sysctl_path("vm.max_map_count")) == "262144"
    assert host.read_text("/proc/sys/net/bridge/bridge-nf-call-iptables") == "1"
    assert kernel.swaps == {}
    kernel.calls.clear()
    after, state = settings(host), observe_host(wanted, host)
    assert not differs(wanted, state)
    apply_host(wanted, state, host)
    assert (kernel.calls, settings(host)) == ([], after), "a finished host is not touched"
    undo_host(found, host)
    assert observe_host(wanted, host) == found
    assert (settings(host), host.read_link(NO_SWAP)) == (before, "/dev/null" if masked else None)
    assert kernel.swaps == {"/dev/sda2": -3, "/swap\\040\u00a0file": 5}


def test_the_observation_changes_nothing(host: Host, kernel: Kernel) -> None:
    before = settings(host)
    found = observe_host(goal(), host)
    assert found.swaps == (Swap("/dev/sda2", -1), Swap("/swap \u00a0file", 5))
    assert found.modules == {"overlay": True, "br_netfilter": False, "nf_conntrack": False}
    assert found.sysctls["net.bridge.bridge-nf-call-iptables"] is None
    assert found.absent_directories == ("/etc/needrestart", "/etc/needrestart/conf.d")
    assert (kernel.calls, settings(host)) == ([], before)


@pytest.mark.parametrize("what", ["module", "file", "parameter", "swap"])
def test_each_thing_that_was_changed_since_is_a_difference(host: Host, kernel: Kernel, what: str) -> None:
    apply_host(goal(), observe_host(goal(), host), host)
    match what:
        case "module":
            kernel(("modprobe", "--remove", "--", "nf_conntrack"), 1)
        case "file":
            host.remove(MODULES)
        case "parameter":
            host.file(sysctl_path("kernel.panic"), "7")
        case _:
            kernel.swaps["/dev/sda2"] = -2
            kernel(("systemctl", "daemon-reload"), 1)
    assert differs(goal(), observe_host(goal(), host))


def test_a_file_of_somebody_else_is_not_overwritten(host: Host, kernel: Kernel) -> None:
    host.file(SYSCTLS, "kernel.panic = 3\n")
    state = observe_host(goal(), host)
    with pytest.raises(AgentError, match=f"{SYSCTLS} exists, and the agent did not write it"):
        apply_host(goal(), state, host)
    assert kernel.calls == []


def test_what_somebody_else_put_there_or_uses_since_then_stays(host: Host, kernel: Kernel) -> None:
    found = observe_host(goal(), host)
    apply_host(goal(), found, host)
    host.file(SYSCTLS, "kernel.panic = 3\n")
    kernel.busy.add("br_netfilter")
    undo_host(found, host)
    assert host.read_text(SYSCTLS) == "kernel.panic = 3\n"
    assert not host.exists(MODULES)
    assert host.exists("/sys/module/br_netfilter")


def test_undoing_goes_on_after_a_failure(host: Host, kernel: Kernel) -> None:
    found = observe_host(goal(), host)
    apply_host(goal(), found, host)
    host.failing[sysctl_path("kernel.panic")] = PermissionError(errno.EACCES, "Permission denied", "kernel.panic")
    with pytest.raises(AgentError, match=r"kernel\.panic: Permission denied"):
        undo_host(found, host)
    assert host.read_text(sysctl_path("vm.panic_on_oom")) == "7"
    assert kernel.swaps


def test_a_swap_that_its_own_unit_sets_up(host: Host, kernel: Kernel) -> None:
    found = observe_host(goal(), host)
    apply_host(goal(), found, host)
    kernel.unready.add("/dev/sda2")
    with pytest.raises(AgentError, match=r"cannot use /dev/sda2 as swap again: .*`systemctl start swap\.target`"):
        undo_host(found, host)


@pytest.mark.parametrize("module", ["br_netfilter", "nf_conntrack"])
def test_a_module_that_the_host_forbids(host: Host, kernel: Kernel, module: str) -> None:
    """modprobe succeeds without loading it."""
    kernel.blacklisted = module
    with pytest.raises(AgentError, match=rf"module {module} was not loaded: modprobe\.d .*`modprobe --show-depends"):
        apply_host(goal(), observe_host(goal(), host), host)
    assert not host.exists(SYSCTLS)


def test_a_parameter_that_the_kernel_does_not_have(host: Host, kernel: Kernel) -> None:
    wanted = goal(sysctls={"net.odd.setting": "1"})
    with pytest.raises(AgentError, match=r"cannot set net\.odd\.setting to .*kernel_modules"):
        apply_host(wanted, observe_host(wanted, host), host)


def test_a_parameter_that_the_kernel_refuses(host: Host) -> None:
    """No module has it, so advice about modules would mislead."""
    state = observe_host(goal(), host)
    host.refusing[sysctl_path("vm.overcommit_memory")] = OSError(errno.EINVAL, "Invalid argument")
    with pytest.raises(AgentError, match=r"Invalid argument") as caught:
        apply_host(goal(), state, host)
    assert "kernel_modules" not in str(caught.value)


def test_nodes_of_one_host_share_its_settings() -> None:
    both = host_goal(
        config(
            a={"host": {"kernel_modules": ["overlay"], "swap": "keep"}},
            b={"host": {"kernel_modules": ["ip_vs", "overlay"], "sysctls": {"vm.swappiness": "1"}}},
        )
    )
    assert both.modules == ("overlay", "ip_vs")
    assert both.sysctls["vm.swappiness"] == "1"
    assert both.swap_off


@pytest.mark.parametrize(
    ("name", "normal", "path"),
    [
        ("vm.swappiness", "vm.swappiness", "vm/swappiness"),
        ("vm/swappiness", "vm.swappiness", "vm/swappiness"),
        ("net/ipv4/conf/eth0.100/forwarding", "net.ipv4.conf.eth0/100.forwarding", "net/ipv4/conf/eth0.100/forwarding"),
        ("net.ipv4.conf.eth0/100.forwarding", "net.ipv4.conf.eth0/100.forwarding", "net/ipv4/conf/eth0.100/forwarding"),
    ],
)
def test_both_ways_to_write_a_parameter(name: str, normal: str, path: str) -> None:
    assert sysctl_name(name) == normal
    assert sysctl_path(sysctl_name(name)) == f"/proc/sys/{path}"


@pytest.mark.processes
def test_needrestart_never_restarts_our_machines() -> None:
    """The file is Perl, which needrestart evaluates; it compares services with each key as an expression."""
    if not shutil.which("perl"):
        pytest.skip("perl is not installed")
    made = host_goal(config(**{"gpu.1": {}, "gpu-2": {"name": "gpu-2"}}))
    (file,) = (file for file in made.files if file.path == NEEDRESTART)
    units = [*(f"systemd-nspawn@{name}.service" for name in ("gpu.1", "gpu-2", "gpux1")), "a.service"]
    script = "our %nrconf = (override_rc => {}); eval do { local $/; <STDIN> }; die $@ if $@;"
    script += "foreach my $rc (@ARGV) { print grep({ $rc =~ /$_/ } keys %{$nrconf{override_rc}}) ? 1 : 0 }"
    found = subprocess.run(["perl", "-e", script, *units], input=file.content, capture_output=True, check=True)
    assert found.stdout == b"1100", found.stderr
