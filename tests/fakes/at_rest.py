"""What must hold on a simulated host, after a pass and when everything has come to rest."""

from agent.config.settings import Config
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.gpus import observe_gpus
from agent.model.conditions import ConditionType, Status
from agent.model.facts import Facts, Granted, MachineFacts, parse_live
from agent.model.goal import MachineGoal
from agent.model.handoff import Handoff, parse_handoff
from agent.model.paths import (
    MANIFESTS,
    OWNED,
    REMEMBERED_GPUS,
    REMOVED,
    STAGING,
    TREES,
    granted_file,
    handed_roots_file,
    handoff_file,
    live_file,
    nspawn_file,
    unit_drop_in,
)
from tests.fakes.lively_host import LivelyHost

NUMBER = "/dev/char/"


def agent_files(machine: str) -> dict[str, str]:
    """Return paths of files of the agent that anybody might remove or replace, by a short name."""
    of_machine = (live_file, granted_file, handed_roots_file, handoff_file, nspawn_file, unit_drop_in)
    return {
        "owned": OWNED,
        "remembered": REMEMBERED_GPUS[0],
        "manifest": f"{MANIFESTS}/0.json",
        **{path.__name__: path(machine) for path in of_machine},
    }


def check_outcome(outcome: Outcome, host: LivelyHost) -> None:
    """Each condition has words, and a machine with GPUs is Ready only if it has answered its handoff."""
    for machine in outcome.machines:
        assert machine.fault is None, machine.fault
        assert {each.type for each in machine.conditions} == set(ConditionType)
        for each in machine.conditions:
            assert each.message, each
            assert each.message.isprintable(), each
        if machine.ready.status is Status.TRUE and machine.gpus:
            handoff = parse_handoff(host.read(handoff_file(machine.name)))
            assert host.running[machine.name].answered == handoff.generation


def check_permissions(agent: Reconciler, host: LivelyHost) -> None:
    """No running machine may open a device whose number belongs to another GPU now than when it was permitted."""
    facts, planned, _ = agent.preview()
    present = _owners(facts)
    for machine in facts.machines:
        running, live = host.running.get(machine.name), machine.live
        if running and live and not live.unsure and machine.name not in planned.held | planned.skipped:
            for node in running.allow & present.keys():
                assert live.owners.get(node) in (None, present[node]), (machine.name, node, present[node])


def check_rest(agent: Reconciler, fresh: Reconciler, host: LivelyHost) -> None:
    """A pass of a new process changes nothing; and files, records, machines and PID 1 agree about each machine."""
    facts, planned, difference = fresh.preview()
    assert difference.actions == ()
    assert planned.goal == agent.preview()[1].goal
    handoffs = {}
    for goal in planned.goal.machines:
        if not difference.refused.get(goal.name):
            handoffs[goal.name] = parse_handoff(host.read(handoff_file(goal.name)))
            _check_machine(goal, handoffs[goal.name], facts, host)
        elif goal.name in host.running and host.exists(live_file(goal.name)):
            assert _numbered(host.running[goal.name].allow) <= {each.node for each in goal.live.allow}
    _check_shares(handoffs, agent.config)
    _check_leftovers(facts, host)


def _check_machine(goal: MachineGoal, handoff: Handoff, facts: Facts, host: LivelyHost) -> None:
    requested = [each for request in handoff.requests for each in request.devices]
    nodes = {each.path: (each.major, each.minor) for each in requested}
    gpus = {gpu for request in handoff.requests for gpu in request.gpus}
    assert {path: host.numbers().get(path) for path in nodes} == nodes
    assert gpus <= {each for each in host.cards if host.is_bound(each)}
    assert {each.pci_address for each in requested} <= {"", *gpus}
    detached = observe_gpus(host)
    assert not gpus & detached.detached
    numbers = {f"{NUMBER}{major}:{minor}" for major, minor in nodes.values()}
    # While a GPU is drained, its users keep it, and the nodes that all GPUs share.
    drained = {node for node, owner in _owners(facts).items() if owner in detached.draining or owner.startswith("/")}
    kept = drained if detached.draining else set()
    drop_in, nspawn = (host.read_text(path).splitlines() for path in (unit_drop_in(goal.name), nspawn_file(goal.name)))
    in_drop_in = _numbered({line[len("DeviceAllow=") :].split(" ")[0] for line in drop_in if "DeviceAllow=/" in line})
    assert numbers <= in_drop_in <= numbers | kept
    bound = {line.partition("=")[2] for line in nspawn if line.startswith(("Bind=/dev/", "BindReadOnly=/dev/"))}
    assert bound - {"/dev/kmsg"} == nodes.keys()
    running = host.running.get(goal.name)
    if running and host.exists(live_file(goal.name)):
        live = parse_live(host.read(live_file(goal.name)))
        allowed = _numbered(running.allow)
        assert numbers <= allowed <= numbers | kept
        assert _numbered({each.node for each in live.allow}) == allowed
        assert {path for path in live.nodes if path.startswith("/dev/")} == nodes.keys()
        assert {path: running.nodes.get(path) for path in nodes} == nodes


def _check_shares(handoffs: dict[str, Handoff], config: Config) -> None:
    """No two machines have a GPU, unless both settings name it or one asks for all."""
    for name, handoff in handoffs.items():
        gpus = {gpu for request in handoff.requests for gpu in request.gpus}
        for other in handoffs.keys() - {name}:
            wanted = (config.machines[name].gpus, config.machines[other].gpus)
            if "all" not in wanted and not all(isinstance(each, list) for each in wanted):
                assert not gpus.intersection(gpu for each in handoffs[other].requests for gpu in each.gpus)


def _check_leftovers(facts: Facts, host: LivelyHost) -> None:
    for directory in (STAGING, REMOVED):
        assert not host.exists(directory) or host.entries(directory) == ()
    (driver,) = (vendor.driver for vendor in facts.vendors if vendor.driver)
    used = [_used_roots(machine) for machine in facts.machines]
    if host.exists(TREES) and isinstance(driver.user_space.files, tuple) and None not in used:
        versions = {root.index: root.version for root in facts.staged}
        unused = {int(name) for name in host.entries(TREES)}.difference(*(each for each in used if each))
        assert {versions[index] for index in unused} <= {driver.module_version, driver.user_space.version}


def _used_roots(machine: MachineFacts) -> set[int] | None:
    named = {*machine.granted.driver_roots.values()} if isinstance(machine.granted, Granted) else set[int]()
    if isinstance(machine.handed_roots, tuple):
        return {*named, *machine.handed_roots}
    return named if machine.ended else None


def _owners(facts: Facts) -> dict[str, str]:
    """Return the GPU's address, or the path of a shared node, by number."""
    nodes = [node for vendor in facts.vendors if isinstance(vendor.devices, tuple) for node in vendor.devices]
    return {f"{NUMBER}{node.number.major}:{node.number.minor}": node.pci_address or node.path for node in nodes}


def _numbered(allow: set[str]) -> set[str]:
    return {each for each in allow if each.startswith(NUMBER)}
