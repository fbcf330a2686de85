"""Observes what diagnoses need, and diagnoses the host itself: faults that no condition shows."""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from agent.cli.doctor.machines import Diagnosis, Environment, diagnose
from agent.config.settings import Config, MachineSettings
from agent.host.driver_upgrade import left_to_do
from agent.host.observe.driver_roots import why_state_is_not_mounted
from agent.host.observe.machine import TEMPLATE, observe_joined, observe_units
from agent.host.provision.host_settings import KUBELET_SYSCTLS, sysctl_path
from agent.host.reconcile import MachineOutcome
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_states import health
from agent.model.conditions import Status
from agent.model.facts import Absent, Broken, Facts, Unseen, Verdict
from agent.model.handoff import DRA
from agent.model.paths import HOST_NVIDIA, MACHINE_ROOTS, SERVICE_STATE, STATE, mount_unit
from agent.model.text import rfc3339
from agent.system.files import System
from agent.system.trust import read_seen
from agent.vendors.host_vendor import PLAIN_IMAGE, DriverForPods, Finding

SERVICE = "unbounded-agent.service"
START_SERVICE = "systemctl enable --now unbounded-agent"
SPACE = {STATE: 1 << 29, MACHINE_ROOTS: 1 << 29, "/run": 16 << 20}
"""Bytes below which something fails, by path. A driver root takes half a gigabyte, kubelets evict pods if the disk is
nearly full, and each pass writes some files in /run. The alert UnboundedAgentDiskSpaceLow fires at 2 GiB already, to
leave time to make room before the next driver."""
MODULES = "/sys/module"


class HostDiagnosis(Struct, frozen=True):
    """The findings of the host itself."""

    findings: tuple[Finding, ...] = ()
    """Faults, each with its evidence and the commands that fix it."""
    drivers: tuple[DriverForPods, ...] = ()
    """The drivers that pods get. Users need their versions to choose the pods' images."""
    image: str = PLAIN_IMAGE
    """The image in containerfiles/ that machines of this host need; several are joined with ` and `."""
    remarks: tuple[str, ...] = ()
    """Sentences on what was refused, discarded or not understood. These are not faults: they may be intended."""


class Seeing(Struct, frozen=True):
    """What a check of the host may look at."""

    facts: Facts
    config: Config
    system: System
    rejected: str = ""
    """Why the configuration on disk is not the one in force; empty if it is."""
    kubelets: bool = True
    """Whether a machine may have a kubelet."""


def diagnose_host(
    facts: Facts, config: Config, system: System, rejected: str = "", *, kubelets: bool = True
) -> HostDiagnosis:
    """Return the host's findings, the drivers for pods, and the machine image that its GPUs need."""
    seeing = Seeing(facts, config, system, rejected, kubelets)
    findings = tuple(finding for check in CHECKS for finding in check(seeing))
    drivers = (host_vendor(each.vendor).driver_for_pods(each, system) for each in facts.vendors)
    images = {host_vendor(each.vendor).image for each in facts.vendors if each.gpus} - {PLAIN_IMAGE}
    # If a problem is a finding already, do not list it as a remark too.
    reported = {each.evidence for each in findings}
    remarks = tuple(each for each in facts.all_problems() if each not in reported)
    image = " and ".join(sorted(images)) or PLAIN_IMAGE
    return HostDiagnosis(findings, tuple(filter(None, drivers)), image, remarks)


def faults_in_brief(facts: Facts, config: Config, system: System) -> list[str]:
    """Return a sentence for each fault that no condition shows although it ends the agent's work."""
    found = (
        finding for check in (_driver_upgrade, _service, _space) for finding in check(Seeing(facts, config, system))
    )
    return [f"{each.cause}: {each.evidence}: see `unbounded-agent doctor`" for each in found]


def diagnose_machines(
    machines: Iterable[MachineOutcome], facts: Facts, config: Config, system: System, *, as_root: bool
) -> tuple[Diagnosis, ...]:
    """Return the findings of the machines. `as_root` is whether root reads their commands."""
    names = read_seen(system.entries, MODULES)
    modules = frozenset(names if isinstance(names, tuple) else ())
    vendors = tuple(each for each in facts.vendors if each.gpus)

    def environment(name: str) -> Environment:
        settings = config.machines.get(name) or MachineSettings()
        node, offers = observe_joined(name, system) or "NODE", settings.allocation == DRA
        return Environment(vendors, modules, node, offers, as_root, bool(settings.node))

    return tuple(diagnose(machine, environment(machine.name)) for machine in machines)


def _configuration(seeing: Seeing) -> Iterator[Finding]:
    if seeing.rejected:
        yield Finding(
            "the configuration is invalid; the service, machines that start, and this report use the last good one",
            "; ".join(seeing.rejected.splitlines()),
            ("correct it, then: unbounded-agent plan  # checks it", "systemctl reload unbounded-agent"),
        )


def _release(seeing: Seeing) -> Iterator[Finding]:
    if seeing.facts.went_back:
        yield Finding(
            "the release that was installed last failed, so the former one runs: machines are not affected",
            seeing.facts.went_back,
            (f"journalctl -u {SERVICE} --no-pager -n 200", "install a later release: docs/upgrade.md"),
        )


def _driver_upgrade(seeing: Seeing) -> Iterator[Finding]:
    if left := left_to_do(seeing.system):
        yield Finding(
            "an upgrade of the driver runs, or was interrupted: machines may be stopped, or have no GPUs",
            left,
            ("unbounded-agent driver upgrade --dry-run  # what it would do now", "unbounded-agent driver upgrade"),
        )


def _template(seeing: Seeing) -> Iterator[Finding]:
    template = seeing.facts.template_device_allow
    if not isinstance(template, tuple):
        fix = "apt install systemd-container" if isinstance(template, Absent) else f"systemctl unmask {TEMPLATE}"
        yield Finding("no machine can start", template.why, (fix,))


def _service(seeing: Seeing) -> Iterator[Finding]:
    effect = "nothing follows changes on the host, and no metrics are served"
    service = observe_units([SERVICE], seeing.system)[SERVICE]
    log = f"journalctl -b -u {SERVICE} --no-pager -n 50"
    match service.unit_state:
        case "activating" if service.restarts:
            yield Finding(effect, f"{SERVICE} has ended, and systemd will start it again", (log,))
        case "active" | "activating" | "reloading":
            # The service counts as started only after the first pass that finishes. Until then, passes may fail.
            yield from _running_service(seeing, active=service.unit_state == "active")
        case Unseen(why):
            yield Finding(f"whether {SERVICE} runs is unknown", why, (f"systemctl status {SERVICE}",))
        case Absent(why):
            yield Finding(effect, why, ("install the host half: docs/install.md", START_SERVICE))
        case Broken(why):
            unmask = (f"systemctl unmask {SERVICE}",) if service.masked else ()
            yield Finding(effect, why, (*unmask, START_SERVICE))
        case state:
            yield Finding(effect, f"{SERVICE} is {state}", (START_SERVICE, log))


def _running_service(seeing: Seeing, *, active: bool) -> Iterator[Finding]:
    recorded = SERVICE_STATES.read_seen(SERVICE_STATE, seeing.system)
    state = recorded if isinstance(recorded, ServiceState) else ServiceState()
    steps = ("journalctl -u unbounded-agent -p warning --since -1h --no-pager", "unbounded-agent apply")
    serve = ("journalctl -u unbounded-agent --no-pager | grep -i 'cannot serve'", "systemctl restart unbounded-agent")
    for what, evidence, fix in (
        ("cannot observe or change this host", state.unfinished, steps),
        ("cannot make all of its changes", state.failed, steps),
        ("serves no metrics", state.unserved if active else "", serve),
    ):
        if evidence:
            yield Finding(f"the service runs, but {what}", evidence, fix)


def _plain_roots(seeing: Seeing) -> Iterator[Finding]:
    roots = seeing.facts.plain_roots
    cause = "driver roots are plain directories, so root in one machine can change them for all others"
    if roots and (linked := why_state_is_not_mounted(seeing.system)):
        yield Finding(cause, linked, ("do this while no machine is running",))
    elif roots:
        yield Finding(
            cause,
            f"driver roots {', '.join(map(str, roots))} are not mounts",
            (
                f"modprobe overlay && systemctl reset-failed '{mount_unit(HOST_NVIDIA)}'",
                "stop all machines, then: unbounded-agent apply  # starts them again",
            ),
        )


def _gpu_faults(seeing: Seeing) -> Iterator[Finding]:
    """Yield a finding for each unhealthy GPU that no machine has. GPUsHealthy and DevicesPresent report the others."""
    granted = {gpu for machine in seeing.facts.machines for gpu in machine.kept_gpus}
    for gpu in (gpu for vendor in seeing.facts.vendors for gpu in vendor.gpus):
        found, address = health(gpu, seeing.facts), gpu.pci_address
        if found.verdict.fenced and address not in granted and not gpu.detached:
            reset = f"unbounded-agent gpus reset {address}"
            yield Finding(
                f"GPU {address} {found.verdict.in_words}: pods could not rely on it",
                f"{found.message} (since {rfc3339(found.since)})" if found.since else found.message,
                (reset if found.verdict is Verdict.NEEDS_RESET else "do what the evidence says",),
            )


def _space(seeing: Seeing) -> Iterator[Finding]:
    for path, wanted in SPACE.items():
        try:
            free = seeing.system.free_bytes(path)
        except OSError:
            # The path is missing or cannot be read. Passes report that.
            continue
        if free < wanted:
            yield Finding(
                f"the file system of {path} is nearly full",
                f"{free >> 20} MiB are free, {wanted >> 20} MiB are needed",
                # The whole file system: most of it is usually not the agent's.
                (f"df -h {path}", f'du -xh --max-depth=3 "$(df --output=target {path} | tail -n 1)" | sort -h | tail'),
            )


def _kernel_settings(seeing: Seeing) -> Iterator[Finding]:
    # The kubelet cannot set these in a machine, where /proc/sys is read-only.
    for key, wanted in KUBELET_SYSCTLS.items() if seeing.kubelets else ():
        path = sysctl_path(key)
        value = read_seen(seeing.system.read_text, path)
        if not isinstance(value, str):
            yield Finding(f"whether kubelets can start is unknown: cannot read {path}", value.why)
        elif value.strip() != wanted:
            yield Finding(
                f"{key} is {value.strip()}, but kubelets in machines start only if it is {wanted}",
                f"{path} contains {value.strip()}",
                (f"echo '{key} = {wanted}' >> /etc/sysctl.d/90-kubelet.conf && sysctl --system",),
            )


def _own_checks(seeing: Seeing) -> Iterator[Finding]:
    for each in seeing.facts.checks:
        if each.status is not Status.TRUE:
            cause = f"the host's check {each.type} is {each.status}: {each.reason}"
            yield Finding(cause, each.message, ("systemctl start unbounded-agent-checks  # runs the checks again",))


CHECKS: tuple[Callable[[Seeing], Iterator[Finding]], ...] = (
    _configuration,
    _release,
    _driver_upgrade,
    _template,
    _service,
    _plain_roots,
    _gpu_faults,
    _own_checks,
    _space,
    _kernel_settings,
)
"""The checks of the host, in the order in which their findings are listed."""
