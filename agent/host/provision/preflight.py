"""Checks for what would keep a node from being made, before `up` changes anything. Writes nothing.

Each check returns a sentence if all is well, and otherwise raises an error with advice. After an error, only the checks
that need what failed are left out: if the bootstrap token cannot be read, for example, the API server is not asked.
"""

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings, NodeSettings
from agent.host.observe.host import RESOLV_CONF, UPLINK, dns_servers
from agent.host.observe.machine import observe_units
from agent.host.plan.nspawn import OWN_NETWORK, own_network
from agent.host.provision.binaries import check_source
from agent.host.provision.host_settings import KUBELET_SYSCTLS, sysctl_name
from agent.host.provision.image import UNPACKED
from agent.host.provision.node_files import NETWORK_WANTED, NodeRecord, cluster_ca, node_names, read_token
from agent.host.provision.plan import made_nodes, observe_node
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Absent, Facts, Unseen
from agent.model.node import Check, NodeBinary
from agent.model.paths import MACHINE_ROOTS
from agent.system.files import System
from agent.system.http import Answer, ask
from agent.system.trust import read_seen

Asking = Callable[..., Answer]
"""The type of agent.system.http.ask."""

CONTROLLERS = "/sys/fs/cgroup/cgroup.controllers"
NEEDED_CONTROLLERS = {"cpu", "cpuset", "io", "memory", "pids"}
"""Controllers that the kubelet needs (cm.validateSystemRequirements, getCgroupSubsystemsV2), by cgroup v2's names."""
DISK_MINIMUM = 2 << 30
"""Bytes that stay free for pods and logs, in addition to the nodes' root file systems."""
CLOCK_LIMIT = 60.0
"""Seconds by which the clocks of host and API server may differ. Kubernetes' certificates are valid from a few minutes
before their issue, so a smaller difference does no harm."""
PROGRAMS = {
    "skopeo": "skopeo",
    "umoci": "umoci",
    "systemd-nspawn": "systemd-container",
    "modprobe": "kmod",
    "mount": "mount",
}
"""Programs that `up` needs, each with the package of Debian and Ubuntu that contains it."""


CHECKS = (
    *("binaries", "ca_file", "cgroups", "clock", "disk", "dns", "driver", "former nodes", "host settings", "image"),
    *("kubelet", "labels", "network", "node", "nspawn", "programs", "root", "server", "sysctls", "systemd", "token"),
)
"""The names of all checks."""


def without(ignored: Sequence[str], checks: Sequence[Check]) -> tuple[Check, ...]:
    """Return the checks, of which those with an ignored name need not pass. Raises ConfigError for a name of none."""
    if unknown := sorted({*ignored} - {*CHECKS}):
        names = ", ".join(CHECKS)
        raise ConfigError(f"--ignore: there is no check {', '.join(map(ascii, unknown))}", f"the checks are: {names}")
    return tuple(replace(check, required=check.required and check.name not in ignored) for check in checks)


def checked(name: str, check: Callable[[], str], machine: str = "") -> Check:
    """Run a check. Return its sentence or, if it raises an error, the error's message and advice."""
    try:
        return Check(name, check(), machine=machine)
    except (AgentError, OSError) as error:
        return failed_check(name, error, machine)


def failed_check(name: str, error: AgentError | OSError, machine: str = "") -> Check:
    """Return the failed check that an error stands for. Its advice is never empty, even if the error has none."""
    if isinstance(error, AgentError):
        message, advice = error.message, error.hint
    else:
        message, advice = f"{error.filename or ''}: {error.strerror or error}".strip(": "), ""
    return Check(name, message, advice or "correct this, then run `unbounded-agent preflight` again", machine)


def check_host(facts: Facts, system: System, *, makes_root: bool) -> list[Check]:
    """Return the checks of the host itself. Programs are checked only if a root file system is made."""
    return [
        checked("systemd", lambda: _systemd(facts)),
        checked("cgroups", lambda: _cgroups(system)),
        *([checked("programs", lambda: _programs(system))] if makes_root else []),
    ]


def _systemd(facts: Facts) -> str:
    template = facts.template_device_allow
    if not isinstance(template, tuple):
        raise AgentError(template.why, "no machine can start without it: run `apt install systemd-container`")
    if not isinstance(facts.systemd_version, int):
        raise AgentError(facts.systemd_version.why, "run this on the host itself, with systemd as its init")
    return f"systemd {facts.systemd_version} with systemd-nspawn"


def _cgroups(system: System) -> str:
    found = read_seen(system.read_text, CONTROLLERS)
    if isinstance(found, Unseen):
        raise AgentError(f"cgroup v2 controllers: {found.why}", "run this as root, on the host itself")
    missing = NEEDED_CONTROLLERS - set(found.split()) if isinstance(found, str) else ()
    if missing or not isinstance(found, str):
        what = found.why if not isinstance(found, str) else f"{', '.join(sorted(missing))} are missing"
        advice = "boot with `systemd.unified_cgroup_hierarchy=1` and without `cgroup_disable=` (kernel's command line)"
        raise AgentError(f"cgroup v2 controllers: {what}", advice)
    return "cgroups v2 with all controllers that the kubelet needs"


def _programs(system: System) -> str:
    missing = [name for name in PROGRAMS if not system.find_program(name)]
    if missing:
        packages = " ".join(PROGRAMS[name] for name in missing)
        raise AgentError(f"not installed: {', '.join(missing)}", f"run `apt install {packages}`")
    return "all needed programs are installed"


def check_disk(size: int, system: System) -> str:
    """Check the free space for root file systems. `size` is the compressed size of all their images, in bytes."""
    needed, directory = size * (1 + UNPACKED) + DISK_MINIMUM, MACHINE_ROOTS
    while not system.is_directory(directory):
        directory = directory.rpartition("/")[0] or "/"
    free = system.free_bytes(directory)
    if free < needed:
        what = f"{MACHINE_ROOTS} has {free // 10**6} MB free, and {needed // 10**6} MB are needed"
        raise AgentError(what, "free some space, or mount a larger file system there")
    return f"{free // 10**6} MB free in {MACHINE_ROOTS}"


def check_server(
    settings: NodeSettings, system: System, ask: Asking = ask, *, with_token: bool = True
) -> Iterator[Check]:
    """Yield the checks of the API server: whether it answers, its CA, the bootstrap token, and the clocks.

    Without `with_token`, the token is not checked.
    """
    server, file, where, token = settings.server, settings.ca_file, settings.bootstrap_token, ""
    try:
        if where and with_token:
            token = read_token(where, system)
    except (AgentError, OSError) as error:
        yield failed_check("token", error)
        return
    try:
        ca = cluster_ca(settings, system)
    except (AgentError, OSError) as error:
        yield failed_check("ca_file", error)
        return
    try:
        answer = ask(f"{server}/api", ca=ca, token=token)
    except ssl.SSLCertVerificationError as error:
        # If the error does not come from OpenSSL, it has no `verify_message`.
        what = f"{server}: its certificate is not accepted: {getattr(error, 'verify_message', '') or error}"
        advice = f"put the cluster's CA into {file}, and check the host's clock: it is {time.ctime()}"
        yield Check("server", what, advice)
        return
    except ValueError as error:
        yield Check("ca_file", f"{file}: {error}", "put the cluster's CA there")
        return
    except OSError as error:
        advice = "check the address, routes and firewalls between this host and the API server"
        yield Check("server", f"{server} does not answer: {error.strerror or error}", advice, late=True)
        return
    yield Check("server", f"{server} answers with a certificate that a CA in {file} has signed")
    if token and answer.status == 401:
        advice = f"make a new one with `kubeadm token create`, write it to {where}, then run `unbounded-agent up` again"
        what = f"the API server does not accept the bootstrap token in {where}: it is wrong, revoked or expired"
        yield Check("token", what, advice)
    elif token and answer.status < 500:
        # A status such as 403 also shows that the server accepts the token.
        yield Check("token", "the API server accepts the bootstrap token")
    if answer.date is not None:
        apart = abs(answer.date - time.time())
        then = "set this host's clock, preferably with systemd-timesyncd or chrony" if apart > CLOCK_LIMIT else None
        yield Check("clock", f"the clocks of host and API server differ by {apart:.0f} s", then)


def check_binaries(binaries: Sequence[NodeBinary], system: System) -> str:
    """Check that the mirrors or the bundle have the programs. Raises AgentError or OSError.

    `fetch` verifies the programs' digests later.
    """
    for binary in binaries:
        check_source(binary, system)
    return f"can be fetched: {', '.join(binary.source.rpartition('/')[2] for binary in binaries)}"


def check_dns(machine: str, settings: MachineSettings, facts: Facts, system: System) -> list[Check]:
    """Return a list with the check whether pods will reach the DNS servers that they get from their node.

    The list is empty if a setting of the kubelet or of nspawn chooses the resolv.conf. The check is not required,
    because a node joins even without DNS.
    """
    node = settings.node
    assert node, "the machine is a node"
    if "resolvConf" in node.kubelet.configuration or "ResolvConf" in settings.nspawn.extra.get("Exec", {}):
        return []
    path = UPLINK if facts.stub_resolver else RESOLV_CONF
    servers, remote = dns_servers(path, system)
    if remote:
        return [Check("dns", f"pods can ask {', '.join(remote)} ({path})", machine=machine)]
    what = f"names only {', '.join(servers)}, which pods cannot reach" if servers else "names no DNS server"
    # systemd-resolved writes UPLINK, and replaces what others write there.
    resolved = "with DNS= in /etc/systemd/resolved.conf, and run `systemctl restart systemd-resolved`"
    place = resolved if facts.stub_resolver else "there"
    advice = f"name a server that pods can reach {place}; or set node.kubelet.configuration.resolvConf"
    what = f"{path} {what}: cluster DNS would not resolve names outside the cluster"
    return [Check("dns", what, advice, machine, required=False)]


def check_former_nodes(machine: str, config: Config, system: System) -> Iterator[Check]:
    """Yield a failed check for each node that `up` made, that is no longer configured, and that would conflict.

    The two conflict if both kubelets would be the same Node, or would need the same ports. A former node may still run:
    if somebody renames a machine's table in the configuration, for example, the agent lets the machine with the former
    name run, and the host starts that machine at each boot.
    """
    try:
        name = node_names(config, system)[machine]
    except (AgentError, OSError):
        # Another check says why there is no name.
        return
    shared = not own_network(config.machines[machine].nspawn)
    for other in made_nodes(system):
        settings, facts = config.machines.get(other), observe_node(other, system)
        if (settings and settings.node) or isinstance(facts.root, Absent) or not isinstance(facts.record, NodeRecord):
            continue
        if facts.record.node == name:
            what = f"is the node {name}"
        elif shared and NETWORK_WANTED not in facts.record.files:
            what = "is a node on the host's network"
        else:
            continue
        message = f"machine {other}, which `up` made, {what}, too, although it is no longer configured as a node"
        advice = f"drain it and run `unbounded-agent reset {other}` first, or put its settings back"
        yield Check("former nodes", message, advice, machine)


NETWORKD = "systemd-networkd.service"


def check_network(machine: str, settings: MachineSettings, system: System) -> list[Check]:
    """Return a list with the check whether a node with a network of its own will get an address in it.

    The list is empty if the machine is on the host's network, or on a configured one. The check is not required,
    because another program may do what systemd-networkd does.
    """
    chosen = settings.nspawn.extra.get("Network", {})
    if not own_network(settings.nspawn) or any(chosen.get(key) for key in OWN_NETWORK):
        return []
    if observe_units([NETWORKD], system)[NETWORKD].unit_state == "active":
        return [Check("network", "systemd-networkd gives the machine an address, and routes for it", machine=machine)]
    advice = "run `systemctl enable --now systemd-networkd`, or name a network with DHCP in nspawn.extra.Network"
    what = "systemd-networkd does not run on the host: nothing gives the machine's virtual Ethernet an address"
    return [Check("network", what, advice, machine, required=False)]


# Finds settings that are valid but ask for something that no node can have, and says what to do instead. Pure.
#
# A kubelet may give its own Node only some of the labels in Kubernetes' namespaces, and may not change the Node's
# taints after the registration (NodeRestriction in Kubernetes' plugin/pkg/admission/noderestriction). Only an
# administrator can set other labels or change the taints, with kubectl. With a label that it may not set, a kubelet
# ends at its start.


OWN_LABELS = re.compile(
    r"(beta\.)?kubernetes\.io/(arch|os)|kubernetes\.io/hostname|(beta|node)\.kubernetes\.io/instance-type|"
    r"(failure-domain\.beta|topology)\.kubernetes\.io/(region|zone)|(.+\.)?(kubelet|node)\.kubernetes\.io/.+"
)
"""Labels of Kubernetes that a kubelet may give its own Node (k8s.io/kubelet/pkg/apis/well_known_labels.go)."""
RESERVED_LABELS = re.compile(r"(.+\.)?(kubernetes|k8s)\.io/")
PROTECTED = (
    *("apiVersion", "kind", "authentication.x509.clientCAFile", "cgroupDriver", "clusterDNS", "clusterDomain"),
    *("containerRuntimeEndpoint", "failSwapOn", "registerNode", "registerWithTaints", "rotateCertificates"),
)
"""Fields of KubeletConfiguration that settings must not set, because the agent needs them or has a key for them."""


def refusals(config: Config) -> tuple[Check, ...]:
    """Return what is wrong with the nodes of a valid configuration."""
    nodes = {name: (machine, machine.node) for name, machine in config.machines.items() if machine.node}
    of_each = (each for name, (machine, node) in nodes.items() for each in _refused(name, machine, node))
    return (*of_each, *_conflicts(nodes))


def _refused(machine: str, settings: MachineSettings, node: NodeSettings) -> Iterator[Check]:
    """Yield what is wrong with one node."""
    kubelet, where = node.kubelet, f"machines.{machine}.node.kubelet"
    for key, value in sorted(kubelet.labels.items()):
        if RESERVED_LABELS.match(key) and not OWN_LABELS.fullmatch(key):
            command = f"kubectl label node {node.name or 'NODE'} --overwrite {key}={value}"
            advice = f"remove it there; when the node has joined, run `{command}` with the rights of an administrator"
            yield Check("labels", f"{where}.labels: no kubelet may give its own Node the label {key}", advice)
    for field in PROTECTED:
        if _has(kubelet.configuration, field.split(".")):
            advice = "remove it; some fields have a key of their own in machines.NAME.node (docs/configuration.md)"
            yield Check("kubelet", f"{where}.configuration: {field} must not be set", advice)
    try:
        json.dumps(kubelet.configuration, allow_nan=False)
    except (TypeError, ValueError) as error:
        what = f"{where}.configuration: JSON has no such value: {error}"
        yield Check("kubelet", what, "write it as a string or a number")
    if not settings.nspawn.kmsg:
        what = f"machines.{machine}.nspawn.kmsg: no kubelet starts without /dev/kmsg"
        yield Check("nspawn", what, "remove kmsg = false")


def _has(table: object, path: list[str]) -> bool:
    """Return whether a table sets the field at a path.

    If a part of the path has a value that is not a table, that counts as setting the field: the value replaces all
    fields below it.
    """
    if not path or not isinstance(table, dict):
        return True
    return path[0] in table and _has(table[path[0]], path[1:])


def _conflicts(nodes: Mapping[str, tuple[MachineSettings, NodeSettings]]) -> Iterator[Check]:
    """Yield what the nodes of one host cannot have together: the host's network, kernel parameters."""
    sysctls: dict[str, tuple[str, str]] = {}
    shared = [name for name, (settings, _) in nodes.items() if not own_network(settings.nspawn)]
    if len(shared) > 1:
        what = f"machines {', '.join(shared)} are nodes on the host's network: their kubelets would need the same ports"
        keys = ", ".join(f"machines.{machine}.nspawn.virtual_ethernet = true" for machine in shared[1:])
        yield Check("network", what, f"give all but one a network of its own: {keys}")
    for machine, (_, node) in nodes.items():
        for name, value in ((sysctl_name(each), value) for each, value in node.host.sysctls.items()):
            where = f"machines.{machine}.node.host.sysctls: {name}"
            if (needed := KUBELET_SYSCTLS.get(name, value)) != value:
                yield Check("sysctls", f"{where} is {value}, but no kubelet starts unless it is {needed}", "remove it")
            other, earlier = sysctls.setdefault(name, (machine, value))
            if earlier != value:
                yield Check("sysctls", f"{where} is {value}, but {earlier} for {other}", "set the same value for both")
