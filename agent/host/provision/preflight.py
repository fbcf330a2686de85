"""Checks for what would keep a node from being made, before `up` changes anything. Writes nothing.

Each check returns a sentence if all is well, and otherwise raises an error with advice. After an error, only the checks
that need what failed are left out: if the bootstrap token cannot be read, for example, the API server is not asked.
"""

import ssl
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from agent.config.node import NodeSettings
from agent.host.provision.binaries import check_source
from agent.host.provision.image import UNPACKED
from agent.host.provision.secrets import read_token
from agent.model.errors import AgentError
from agent.model.facts import Facts, Unseen
from agent.model.node import NodeBinary
from agent.model.paths import MACHINE_ROOTS
from agent.system.files import System
from agent.system.https import Answer, ask
from agent.system.seen import read_seen

Asking = Callable[..., Answer]
"""The type of agent.system.https.ask."""

CONTROLLERS = "/sys/fs/cgroup/cgroup.controllers"
NEEDED_CONTROLLERS = {"cpu", "cpuset", "io", "memory", "pids"}
"""Controllers that the kubelet needs (cm.validateSystemRequirements, getCgroupSubsystemsV2), by cgroup v2's names."""
MEMORY = "/proc/meminfo"
MEMORY_MINIMUM = 1 << 30
"""Bytes. With less, the kubelet and containerd alone use so much that pods are evicted."""
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


class Check(Struct, frozen=True):
    """The result of one check."""

    name: str
    message: str
    advice: str = ""
    """What to do; empty if all is well."""
    machine: str = ""
    """Empty if the check is about the host."""
    required: bool = True
    """Whether the check must pass before a node can be made."""
    late: bool = False
    """Whether a check that failed may soon pass by itself, because the API server may not have started yet."""

    @property
    def passed(self) -> bool:
        return not self.advice


def checked(name: str, check: Callable[[], str], machine: str = "") -> Check:
    """Run a check. Return its sentence or, if it raises an error, the error's message and advice."""
    try:
        return Check(name, check(), machine=machine)
    except AgentError as error:
        message, advice = error.message, error.hint
    except OSError as error:
        message, advice = f"{error.filename or ''}: {error.strerror or error}".strip(": "), ""
    return Check(name, message, advice or "correct this, then run `unbounded-agent preflight` again", machine)


def check_host(facts: Facts, system: System, *, makes_root: bool) -> list[Check]:
    """Return the checks of the host itself. Programs are checked only if a root file system is made."""
    return [
        checked("systemd", lambda: _systemd(facts)),
        checked("cgroups", lambda: _cgroups(system)),
        checked("memory", lambda: _memory(system)),
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
    found = read_seen(system.read, CONTROLLERS)
    if isinstance(found, Unseen):
        raise AgentError(f"cannot read the cgroup controllers: {found.why}", "run this as root, on the host itself")
    if not isinstance(found, bytes):
        why = f"the host does not use only cgroups v2: {found.why}"
        raise AgentError(why, "boot it with `systemd.unified_cgroup_hierarchy=1` on the kernel's command line")
    missing = NEEDED_CONTROLLERS - set(found.decode().split())
    if missing:
        advice = "remove `cgroup_disable=` from the kernel's command line, or use a kernel that has them"
        raise AgentError(f"cgroup controllers are missing: {', '.join(sorted(missing))}", advice)
    return "cgroups v2 with all controllers that the kubelet needs"


def _memory(system: System) -> str:
    fields = dict(line.split(":", 1) for line in system.read_text(MEMORY).splitlines() if ":" in line)
    size = int(fields["MemTotal"].split()[0]) << 10
    if size < MEMORY_MINIMUM:
        raise AgentError(
            f"the host has {size // 10**6} MB of memory",
            "give it 2 GiB: 1 GiB is too little, because the kernel keeps a part of it",
        )
    return f"{size // 10**6} MB of memory"


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


def check_server(settings: NodeSettings, system: System, ask: Asking = ask, *, with_token: bool = True) -> list[Check]:
    """Return the checks of the API server: whether it answers, its CA, the bootstrap token, and the clocks.

    Without `with_token`, the token is not checked.
    """
    results: list[Check] = []
    token = ""
    if settings.bootstrap_token and with_token:

        def read() -> str:
            nonlocal token
            token = read_token(settings.bootstrap_token, system)
            return "the bootstrap token can be read"

        results.append(checked("token", read))
        if not token:
            return results
    return [*results, *_server(settings, system, token, ask)]


def _server(settings: NodeSettings, system: System, token: str, ask: Asking) -> Iterable[Check]:
    server = settings.server
    ca = read_seen(system.read, settings.ca_file)
    if not isinstance(ca, bytes):
        return [Check("ca_file", ca.why, "put the cluster's CA there")]
    try:
        answer = ask(f"{server}/api", ca=ca, token=token)
    except ssl.SSLCertVerificationError as error:
        advice = f"put the cluster's CA into {settings.ca_file}, and check the host's clock: it is {time.ctime()}"
        return [Check("server", f"{server}: its certificate is not accepted: {_why(error)}", advice)]
    except ValueError as error:
        return [Check("ca_file", f"{settings.ca_file}: {error}", "put the cluster's CA there")]
    except OSError as error:
        advice = "check the address, routes and firewalls between this host and the API server"
        return [Check("server", f"{server} does not answer: {error.strerror or error}", advice, late=True)]
    answers = Check("server", f"{server} answers with a certificate that a CA in {settings.ca_file} has signed")
    return [answers, *_answer_checks(answer, token, settings.bootstrap_token)]


def _why(error: ssl.SSLCertVerificationError) -> str:
    # If the error does not come from OpenSSL, it has no `verify_message`.
    return getattr(error, "verify_message", "") or str(error)


def _answer_checks(answer: Answer, token: str, where: str) -> Iterable[Check]:
    """Yield the checks of the bootstrap token and the clocks, according to the API server's answer."""
    if token and answer.status == 401:
        advice = f"make a new one with `kubeadm token create`, write it to {where}, then run `unbounded-agent up` again"
        what = f"the API server does not accept the bootstrap token in {where}: it is wrong, revoked or expired"
        yield Check("token", what, advice)
    elif token and answer.status < 500:
        # A status such as 403 also shows that the server accepts the token.
        yield Check("token", "the API server accepts the bootstrap token")
    if answer.date is not None:
        apart = abs(answer.date - time.time())
        if apart > CLOCK_LIMIT:
            advice = "set this host's clock, preferably with systemd-timesyncd or chrony"
            yield Check("clock", f"the clocks of host and API server differ by {apart:.0f} s", advice)
        else:
            yield Check("clock", "the clocks of host and API server agree")


def check_binaries(binaries: Sequence[NodeBinary], system: System) -> str:
    """Check that the mirrors or the bundle have the programs, and return a sentence. Raises ApplyError or OSError.

    `fetch` verifies the programs' digests later.
    """
    for binary in binaries:
        check_source(binary, system)
    return f"can be fetched: {', '.join(binary.source.rpartition('/')[2] for binary in binaries)}"
