"""Makes the configured nodes: first checks everything that could keep a node from being made, then runs the steps."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from agent.config.settings import Config, NodeSettings
from agent.host.apply.steps import given_token
from agent.host.observe.machine import is_enabled
from agent.host.plan.goal import Plan, plan
from agent.host.provision import preflight
from agent.host.provision.apply import Tools, run, run_together
from agent.host.provision.binaries import wanted_binaries
from agent.host.provision.host_settings import NO_SWAP, host_changes, host_goal, host_problems, observe_host
from agent.host.provision.image import PLAIN_IMAGE, Progress, choose_image, go_architecture, inspect
from agent.host.provision.network import observe_network
from agent.host.provision.node_files import (
    OF_REGISTRATION,
    SWAP,
    NodeRecord,
    changed_inputs,
    changed_settings,
    make_record,
    node_files,
    node_inputs,
    node_names,
    read_token,
)
from agent.host.provision.plan import (
    Action,
    GiveToken,
    HostFacts,
    NodeFacts,
    RecordHost,
    RootGoal,
    boot_units,
    made_nodes,
    must_make_root,
    observe_found,
    observe_node,
    plan_boot,
    plan_host,
    plan_root,
)
from agent.host.provision.preflight import (
    Asking,
    check_dns,
    check_former_nodes,
    check_network,
    checked,
    refusals,
)
from agent.host.vendors import host_vendor
from agent.host.verify.readiness import FROM_VENDORS, Case, conditions
from agent.model.conditions import Status
from agent.model.errors import AgentError, reason
from agent.model.facts import Absent, Facts, Seen
from agent.model.goal import Grant, Step
from agent.model.node import AsFound, Check, Network, NodeImage
from agent.model.paths import machine_root
from agent.system.copy import refuse_mounts
from agent.system.files import System
from agent.system.http import ask
from agent.system.network import NetworkSource

# Finds the labels that a Node gets for its GPUs when it registers.


def gpu_labels(grants: Iterable[Grant], facts: Facts, system: System) -> dict[str, str]:
    """Return the labels of a Node whose machine gets these grants.

    The kubelet never changes these labels later, so they keep the versions that the driver and CUDA had when the Node
    registered.
    """
    granted = {grant.vendor for grant in grants if grant.gpus}
    labels: dict[str, str] = {}
    for each in facts.vendors:
        if each.vendor in granted:
            vendor = host_vendor(each.vendor)
            labels |= vendor.node_labels(vendor.driver_for_pods(each, system))
    return labels


# Says which changes of the configuration or of the host have no effect on nodes that exist already.


def node_remark(machine: str, record: NodeRecord, config: Config, system: System) -> str:
    """Return which settings and inputs have changed since a node was made, and what to do; empty if none has."""
    changed = (*_changed(machine, record, config), *changed_inputs(record, machine, config, system))
    if not changed:
        return ""
    again, new_name = f"run `unbounded-agent up --rebuild {machine}`", record.node
    with suppress(AgentError, OSError):
        new_name = node_names(config, system)[machine]
    if not set(OF_REGISTRATION).isdisjoint(changed):
        delete = f"first run `kubectl delete node {record.node}`, because an existing Node keeps its labels and taints"
        again = f"{delete}; then {again}"
    elif new_name != record.node:
        again += f", then `kubectl delete node {record.node}`: it joins as another Node"
    return f"node {record.node} was made with other settings: {', '.join(changed)}; {again}"


def swap_remark(nodes: Mapping[str, NodeRecord], found: Seen[AsFound], config: Config, system: System) -> str:
    """Return a sentence if the settings now keep swap, but an earlier `up` has turned swap off.

    The sentence says that swap stays off, and how to turn it on. Otherwise, return an empty string. Also return an
    empty string if a node was made with host.swap = "off": its kubelet would refuse swap, and `node_remark` says what
    to do.
    """
    files = found.host.files if isinstance(found, AsFound) else {}
    ours = NO_SWAP in files and files[NO_SWAP] is None and system.exists(NO_SWAP)
    if not ours or host_goal(config).swap_off or any(SWAP in _changed(*node, config) for node in nodes.items()):
        return ""
    return (
        f'host.swap is "keep", but swap stays off, as an earlier `up` left it: to use it again, run `rm {NO_SWAP} && '
        "systemctl daemon-reload && systemctl start swap.target`"
    )


def _changed(machine: str, record: NodeRecord, config: Config) -> tuple[str, ...]:
    settings = config.machines[machine].node
    return changed_settings(record, settings) if settings else ()


class NodeWork(Struct, frozen=True):
    """What `up` has to do for one node."""

    machine: str
    settings: NodeSettings
    facts: NodeFacts
    make: bool
    """Whether the root file system has to be made."""
    checks: tuple[Check, ...] = ()
    new_token: bool = False
    """Whether the machine has not joined its cluster, and its bootstrap token is not the configured one."""
    image: NodeImage | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """The Node's labels for its GPUs."""


class Work(Struct, frozen=True):
    """What `up` has to do on the host."""

    checks: tuple[Check, ...]
    """All checks, including those of the nodes."""
    record: tuple[Action, ...]
    """Steps that record the host as it was found, before anything changes."""
    host: tuple[Action, ...]
    """Steps that change the host's settings."""
    nodes: tuple[NodeWork, ...]
    remarks: tuple[str, ...]
    """What the user should know about nodes that exist already, and about the host."""

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.required and not check.passed)

    @property
    def finished(self) -> bool:
        """Whether nothing has to be made or changed, apart from bootstrap tokens."""
        made = all(not node.make and all(node.facts.enabled.values()) for node in self.nodes)
        return made and not self.record and not self.host


class Provisioner(Struct, frozen=True):
    """Makes nodes on a host."""

    config: Config
    system: System
    network: NetworkSource
    progress: Progress = lambda _: None
    ask: Asking = ask
    rebuild: frozenset[str] = field(default_factory=frozenset)
    """Machines whose root file system is made again."""

    def work(self, names: tuple[str, ...], facts: Facts) -> Work:
        """Observe the nodes, run all checks, and return what has to be done. Changes nothing."""
        facts = as_if_made(names, facts)
        planned = plan(self.config, facts)
        nodes = tuple(self._node(name, facts, planned) for name in names)
        makes_root = any(node.make for node in nodes)
        checks = preflight.check_host(facts, self.system, makes_root=makes_root)
        checks += refusals(self.config)
        size = sum(node.image.size for node in nodes if node.image)
        if makes_root:
            checks.append(_disk_check(size, nodes, self.system))
        host, steps, problems = self._host(names, partial(observe_network, self.network, self.system))
        checks += problems
        record = tuple(each for each in steps if isinstance(each, RecordHost))
        change = tuple(each for each in steps if each not in record)
        checks += [check for node in nodes for check in node.checks]
        made = {
            node.machine: node.facts.record
            for node in nodes
            if isinstance(node.facts.record, NodeRecord) and not node.make and must_make_root(node.facts) is False
        }
        remarks = [node_remark(*each, self.config, self.system) for each in made.items()]
        remarks.append(swap_remark(made, host.found, self.config, self.system))
        return Work(tuple(checks), record, change, nodes, tuple(filter(None, remarks)))

    def run(self, steps: tuple[Action, ...]) -> None:
        """Run steps that need no image. Raises AgentError for the first that fails."""
        run(steps, self._tools(None), self.progress)

    def preview(
        self, names: tuple[str, ...], planned: Plan
    ) -> tuple[tuple[Step, ...], tuple[Step, ...], dict[str, str]]:
        """Return the steps that `up` would carry out before and after it starts machines. Changes nothing.

        `planned` is the plan as if all machines had root file systems. The last result says, by machine, why some steps
        are unknown. Registries and API servers are not asked, so an image has the name and tag of the settings.
        """
        unknown: dict[str, str] = {}

        def known(observe: Callable[[], tuple[Step, ...]], *names: str) -> tuple[Step, ...]:
            try:
                return observe()
            except AgentError as error:
                unknown.update(dict.fromkeys(names, str(error)))
            except OSError as error:
                unknown.update(dict.fromkeys(names, reason(error, "")))
            return ()

        before, after = known(partial(self._preview_host, names), *names), dict[Step, None]()
        for name in names:
            before += known(partial(self._preview_root, name, planned), name)
            after |= dict.fromkeys(known(partial(self._boot_steps, name), name))
        return before, tuple(after), unknown

    def _preview_host(self, names: tuple[str, ...]) -> tuple[Step, ...]:
        _, steps, problems = self._host(names, Network)
        for each in problems:
            raise AgentError(each.message, each.advice)
        return steps

    def _preview_root(self, name: str, planned: Plan) -> tuple[Step, ...]:
        found = observe_node(name, self.system)
        make = must_make_root(found)
        settings = self.config.machines[name].node
        assert settings, "the caller chose machines with nodes"
        if isinstance(make, Check):
            raise AgentError(make.message, make.advice)
        if not make:
            token = settings.bootstrap_token if found.unjoined else ""
            stale = token and given_token(name, self.system) != read_token(token, self.system)
            return (GiveToken(name, token),) if stale else ()
        if found.staged:
            raise AgentError(f"`up` uses or removes what an interrupted attempt left: {', '.join(found.staged)}")
        image_name = choose_image(settings.image, _needs_vendor_image(name, planned))
        image = NodeImage(image_name, "", go_architecture(self.system), 0)
        first, parallel, last = astuple(plan_root(self._root_goal(name, settings, image, {}), found))
        return (*first, *parallel, *last)

    def make_root(self, node: NodeWork, host: tuple[Action, ...]) -> None:
        """Make a node's root file system, and at the same time run the steps `host`. Raises AgentError."""
        assert node.image, "the checks passed"
        steps = plan_root(self._root_goal(node.machine, node.settings, node.image, node.labels), node.facts)
        tools = self._tools(node.settings)
        run(steps.first, tools, self.progress)
        run_together((*steps.parallel, *host), tools, self.progress)
        run(steps.last, tools, self.progress)

    def _root_goal(self, machine: str, settings: NodeSettings, image: NodeImage, labels: Mapping[str, str]) -> RootGoal:
        inputs = replace(node_inputs(machine, self.config, self.system), labels=labels)
        files = node_files(machine, settings, inputs)
        binaries = wanted_binaries(settings, image.architecture)
        record = make_record(settings, inputs, image, binaries, files)
        return RootGoal(image, binaries, files, record, settings.bootstrap_token)

    def replace_token(self, node: NodeWork) -> None:
        """Give the configured token to a node that has not joined and still has another token. Raises AgentError."""
        if node.new_token:
            self.run((GiveToken(node.machine, node.settings.bootstrap_token),))

    def late(self, work: Work) -> tuple[Check, ...]:
        """Repeat the checks of API servers that did not answer. Return those of servers that still do not answer."""
        waiting = {check.machine for check in work.failed if check.late}
        nodes = [node for node in work.nodes if node.machine in waiting]
        return tuple(check for node in nodes for check in self._server_checks(node) if check.late)

    def enable(self, machine: str) -> None:
        """Let the machine start at each boot of the host. Raises AgentError."""
        self.run(self._boot_steps(machine))

    def _boot_steps(self, machine: str) -> tuple[Action, ...]:
        return plan_boot(observe_node(machine, self.system))

    def _node(self, name: str, facts: Facts, planned: Plan) -> NodeWork:
        settings = self.config.machines[name].node
        assert settings, "the caller chose machines with nodes"
        found = observe_node(name, self.system)
        make = must_make_root(found, rebuild=name in self.rebuild)
        if isinstance(make, Check):
            return NodeWork(name, settings, found, False, (replace(make, machine=name),))
        work = NodeWork(name, settings, found, make)
        if make:
            return self._with_checks(work, facts, planned)
        if found.unjoined and settings.bootstrap_token:
            return self._with_token_checks(work)
        return work

    def _with_checks(self, work: NodeWork, facts: Facts, planned: Plan) -> NodeWork:
        """Run the checks for a node whose root file system has to be made."""
        settings, name = work.settings, work.machine
        image_name = choose_image(settings.image, _needs_vendor_image(name, planned))
        image: list[NodeImage] = []

        def inspected() -> str:
            image.append(inspect(settings.image, image_name, self.system))
            return f"{image[0].name} ({image[0].architecture})"

        checks = [checked("image", inspected, name), *_driver_checks(name, self.config, facts, planned)]
        if not isinstance(work.facts.root, Absent):
            checks.append(checked("root", lambda: self._replaceable(name), name))
        checks += self._server_checks(work)
        checks += check_former_nodes(name, self.config, self.system)
        checks += check_network(name, self.config.machines[name], self.system)
        checks += check_dns(name, self.config.machines[name], facts, self.system)

        def complete() -> str:
            inputs = node_inputs(name, self.config, self.system)
            node_files(name, settings, inputs)
            return f"the node is {inputs.name}"

        checks.append(checked("node", complete, name))
        if image and (binaries := wanted_binaries(settings, image[0].architecture)):
            checks.append(checked("binaries", lambda: preflight.check_binaries(binaries, self.system), name))
        labels = gpu_labels(_grants(name, planned), facts, self.system) if settings.kubelet.gpu_labels else {}
        return replace(work, checks=tuple(checks), image=image[0] if image else None, labels=labels)

    def _replaceable(self, name: str) -> str:
        refuse_mounts(machine_root(name), self.system)
        return f"{machine_root(name)} can be replaced"

    def _with_token_checks(self, work: NodeWork) -> NodeWork:
        """Run the checks for a node that was made but has not joined, and find out whether it needs a new token."""
        checks = tuple(self._server_checks(work))
        if any(check.required and not check.passed for check in checks):
            return replace(work, checks=checks)
        wanted = read_token(work.settings.bootstrap_token, self.system)
        return replace(work, checks=checks, new_token=given_token(work.machine, self.system) != wanted)

    def _server_checks(self, work: NodeWork) -> list[Check]:
        checks = preflight.check_server(work.settings, self.system, self.ask)
        return [replace(check, machine=work.machine) for check in checks]

    def _host(
        self, names: tuple[str, ...], network: Callable[[], Network]
    ) -> tuple[HostFacts, tuple[Action, ...], list[Check]]:
        """Return facts of the host, the steps that change its settings, and what keeps `up` from changing them."""
        goal, found = host_goal(self.config), observe_found(self.system)
        # Leave out the first unit, which is the machine's own: NodeFacts has it.
        units = {unit: is_enabled(unit, self.system) for name in names for unit in boot_units(name)[1:]}
        facts = HostFacts(
            state=observe_host(goal, self.system),
            units=units,
            # Only the first record of the host needs the network. Otherwise, do not observe it: loading the netlink
            # library takes longer than everything else here.
            network=network() if isinstance(found, Absent) else Network(),
            found=found,
            others=made_nodes(self.system),
        )
        steps = plan_host(goal, facts, time.time(), changes=bool(host_changes(goal, facts.state)))
        problems = [*host_problems(goal, facts.state)]
        return (facts, (), [*problems, steps]) if isinstance(steps, Check) else (facts, steps, problems)

    def _tools(self, settings: NodeSettings | None) -> Tools:
        return Tools(self.system, self.network, settings.image if settings else None)


def _disk_check(size: int, nodes: tuple[NodeWork, ...], system: System) -> Check:
    """Check the free space for images.

    If an interrupted attempt left something, a failed check is not a required one: `up` first uses or removes what is
    left, so the space may be enough. The space is checked again before an image is pulled.
    """
    check = checked("disk", lambda: preflight.check_disk(size, system))
    left = [path for node in nodes if node.make for path in node.facts.staged]
    if check.passed or not left:
        return check
    first = f"`up` first uses or removes what an interrupted attempt left ({', '.join(left)}), which may be enough"
    advice = f"{first}; if it is not, {check.advice}"
    return replace(check, advice=advice, required=False)


def as_if_made(names: tuple[str, ...], facts: Facts) -> Facts:
    """Return the facts as if all these machines had root file systems, so that the plan says which GPUs they get."""
    machines = (
        replace(each, root=machine_root(each.name)) if each.name in names and isinstance(each.root, Absent) else each
        for each in facts.machines
    )
    return replace(facts, machines=tuple(machines))


def _needs_vendor_image(machine: str, planned: Plan) -> bool:
    return any(host_vendor(grant.vendor).image != PLAIN_IMAGE for grant in _grants(machine, planned) if grant.gpus)


def _grants(machine: str, planned: Plan) -> list[Grant]:
    return [grant for goal in planned.goal.machines if goal.name == machine for grant in goal.grants]


def _driver_checks(machine: str, config: Config, facts: Facts, planned: Plan) -> list[Check]:
    """Return a failed check for each problem with the drivers of the machine's GPUs.

    None of these checks is required, because the node joins in spite of such problems.
    """
    silent = replace(
        next(each for each in facts.machines if each.name == machine), report=Absent("the machine is not made yet")
    )
    goals = [goal for goal in planned.goal.machines if goal.name == machine]
    cases = [Case(config.machines[machine], silent, facts, goal) for goal in goals]
    return [
        Check("driver", f"{each.type}: {each.message}", "see `unbounded-agent doctor`", machine, required=False)
        for case in cases
        for each in conditions(case)
        if each.type in FROM_VENDORS and each.status is Status.FALSE
    ]
