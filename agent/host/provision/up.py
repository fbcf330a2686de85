"""Makes the configured nodes: first checks everything that could keep a node from being made, then runs the steps."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from agent.config.settings import Config, NodeSettings
from agent.host.apply.steps import Progress, apply, given_token
from agent.host.observe.machine import is_enabled
from agent.host.plan.goal import Plan, plan
from agent.host.provision import preflight
from agent.host.provision.apply import performers
from agent.host.provision.binaries import wanted_binaries
from agent.host.provision.host_settings import host_goal, observe_host
from agent.host.provision.image import choose_image, go_architecture, inspect
from agent.host.provision.network import observe_network
from agent.host.provision.node_files import (
    OF_REGISTRATION,
    NodeRecord,
    changed_inputs,
    changed_settings,
    joined_kubeconfig,
    make_record,
    node_files,
    node_inputs,
    node_names,
    read_token,
    root_record,
)
from agent.host.provision.plan import (
    GiveToken,
    HostFacts,
    NodeFacts,
    NodeStep,
    boot_units,
    made_nodes,
    must_make_root,
    observe_found,
    observe_node,
    plan_all,
    plan_boot,
    plan_candidate,
    plan_host,
    plan_root,
)
from agent.host.provision.preflight import Asking, checked, failed_check
from agent.host.vendors import host_vendor
from agent.host.verify.readiness import FROM_VENDORS, Case, conditions
from agent.model.conditions import Status
from agent.model.errors import AgentError, reason
from agent.model.facts import Absent, Facts
from agent.model.goal import Grant
from agent.model.node import Check, Network, NodeBinary, NodeFile, NodeImage
from agent.model.paths import candidate_of, machine_image, machine_root, other_root
from agent.system.copy import refuse_mounts
from agent.system.files import System
from agent.system.http import ask
from agent.system.network import NetworkSource
from agent.vendors.host_vendor import PLAIN_IMAGE

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


def node_remark(found: NodeFacts, config: Config, system: System) -> str:
    """Return which settings and inputs have changed since a node was made, and what to do; empty if none has."""
    machine, record, settings = found.machine, found.record, config.machines[found.machine].node
    assert isinstance(record, NodeRecord), "`up` made the node"
    of_settings = changed_settings(record, settings) if settings else ()
    changed = (*of_settings, *changed_inputs(record, machine, config, system))
    if not changed:
        return ""
    again, new_name = f"run `unbounded-agent switch {machine}`", record.node
    with suppress(AgentError, OSError):
        new_name = node_names(config, system)[machine]
    if not set(OF_REGISTRATION).isdisjoint(changed):
        delete = f"first run `kubectl delete node {record.node}`, because an existing Node keeps its labels and taints"
        again = f"{delete}; then run `unbounded-agent up --rebuild {machine}`"
    elif new_name != record.node:
        delete = f"then `kubectl delete node {record.node}`: it joins as another Node"
        again = f"run `unbounded-agent up --rebuild {machine}`, {delete}"
    return f"node {record.node} was made with other settings: {', '.join(changed)}; {again}"


class NodeWork(Struct, frozen=True):
    """What `up` has to do for one node."""

    facts: NodeFacts
    make: bool = False
    """Whether the root file system has to be made."""
    checks: tuple[Check, ...] = ()
    steps: tuple[NodeStep, ...] = ()
    size: int = 0
    """Bytes of the image to pull, compressed."""
    remark: str = ""
    """What the user should know about a node that exists already."""

    @property
    def machine(self) -> str:
        return self.facts.machine


class Work(Struct, frozen=True):
    """What `up` has to do on the host."""

    checks: tuple[Check, ...]
    """All checks, including those of the nodes."""
    steps: tuple[NodeStep, ...]
    """What has to be done before machines start. Incomplete if a check failed."""
    nodes: tuple[NodeWork, ...]
    remarks: tuple[str, ...]
    """What the user should know about nodes that exist already."""

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.required and not check.passed)

    @property
    def finished(self) -> bool:
        """Whether nothing has to be made or changed."""
        return not self.steps and all(all(node.facts.enabled.values()) for node in self.nodes)


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
        nodes = tuple(self._node(observe_node(name, self.system), facts, planned) for name in names)
        makes_root = any(node.make for node in nodes)
        checks = preflight.check_host(facts, self.system, makes_root=makes_root)
        checks += preflight.refusals(self.config)
        if makes_root:
            checks.append(self._disk_check(nodes))
        steps: tuple[NodeStep, ...] = ()
        try:
            steps = self._host_steps(names, lambda: observe_network(self.network, self.system))
        except AgentError as error:
            checks.append(failed_check("host settings", error))
        checks += (check for node in nodes for check in node.checks)
        steps = plan_all(steps, [step for node in nodes for step in node.steps])
        return Work(tuple(checks), steps, nodes, tuple(node.remark for node in nodes if node.remark))

    def candidate(self, name: str, facts: Facts) -> Work:
        """Return what has to be done to make the candidate of a node. Changes nothing.

        If the node was made from the same image and settings, there are no steps. Raises AgentError if the root file
        system is not the node's, or if the node would be another Node.
        """
        found = observe_node(name, self.system)
        if must_make_root(found):
            raise AgentError(f"machine {name} does not exist", f"run `unbounded-agent up {name}`")
        assert isinstance(found.record, NodeRecord), "`up` made the node"
        self._refuse_foreign_candidate(name)
        node = self._new_node(found, facts, plan(self.config, facts), next_to=found.record)
        checks = [*preflight.refusals(self.config), *node.checks]
        if node.size:
            checks.append(self._disk_check((node,)))
        return Work(tuple(checks), node.steps, (node,), ())

    def preview(
        self, names: tuple[str, ...], planned: Plan
    ) -> tuple[tuple[NodeStep, ...], tuple[NodeStep, ...], dict[str, str]]:
        """Return the steps that `up` would carry out before and after it starts machines. Changes nothing.

        `planned` is the plan as if all machines had root file systems. The last result says, by machine, why some steps
        are unknown. Registries and API servers are not asked, so an image has the name and tag of the settings.
        """
        unknown: dict[str, str] = {}

        def known(observe: Callable[[], tuple[NodeStep, ...]], *names: str) -> tuple[NodeStep, ...]:
            try:
                return observe()
            except AgentError as error:
                unknown.update(dict.fromkeys(names, str(error)))
            except OSError as error:
                unknown.update(dict.fromkeys(names, reason(error, "")))
            return ()

        host = known(partial(self._host_steps, names, Network), *names)
        roots, after = list[NodeStep](), dict[NodeStep, None]()
        for name in names:
            roots += known(partial(self._preview_root, name, planned), name)
            after |= dict.fromkeys(known(partial(self._boot_steps, name), name))
        return plan_all(host, roots), tuple(after), unknown

    def _preview_root(self, name: str, planned: Plan) -> tuple[NodeStep, ...]:
        found, settings = observe_node(name, self.system), self._settings(name)
        if not must_make_root(found):
            return self._token_steps(found) if found.unjoined and settings.bootstrap_token else ()
        if found.staged:
            raise AgentError(f"`up` uses or removes what an interrupted attempt left: {', '.join(found.staged)}")
        image = NodeImage(self._image_name(name, planned), "", go_architecture(self.system), 0)
        return self._root_steps(found, image, {})

    def run(self, steps: tuple[NodeStep, ...]) -> None:
        """Perform steps. Raises AgentError for the first that fails."""
        apply(steps, self.system, self.progress, performers(self.network))

    def enable(self, machine: str) -> None:
        """Let the machine start at each boot of the host. Raises AgentError."""
        self.run(self._boot_steps(machine))

    def _boot_steps(self, machine: str) -> tuple[NodeStep, ...]:
        return plan_boot(observe_node(machine, self.system))

    def late(self, work: Work) -> tuple[Check, ...]:
        """Repeat the checks of API servers that did not answer. Return those of servers that still do not answer."""
        waiting = {check.machine for check in work.failed if check.late}
        names = [node.machine for node in work.nodes if node.machine in waiting]
        return tuple(check for name in names for check in self._server_checks(name) if check.late)

    def _node(self, found: NodeFacts, facts: Facts, planned: Plan) -> NodeWork:
        name, settings = found.machine, self._settings(found.machine)
        try:
            make = must_make_root(found, rebuild=name in self.rebuild)
        except AgentError as error:
            return NodeWork(found, checks=(failed_check("root", error, name),))
        if make:
            return self._new_node(found, facts, planned)
        remark = node_remark(found, self.config, self.system)
        if not (found.unjoined and settings.bootstrap_token):
            return NodeWork(found, remark=remark)
        # A node that was made but has not joined.
        checks = tuple(self._server_checks(name))
        failed = any(check.required and not check.passed for check in checks)
        return NodeWork(found, checks=checks, steps=() if failed else self._token_steps(found), remark=remark)

    def _new_node(self, found: NodeFacts, facts: Facts, planned: Plan, next_to: NodeRecord | None = None) -> NodeWork:
        """Run the checks for a node whose root file system has to be made; `next_to` the one that serves."""
        name, settings, images = found.machine, self._settings(found.machine), list[NodeImage]()
        machine, steps, grants = self.config.machines[name], list[NodeStep](), _grants(name, planned)
        labels = gpu_labels(grants, facts, self.system) if settings.kubelet.gpu_labels else {}

        def inspected() -> str:
            images.append(inspect(settings.image, self._image_name(name, planned), self.system))
            return f"{images[0].name} ({images[0].architecture})"

        def replaceable() -> str:
            refuse_mounts(machine_root(name), self.system)
            return f"{machine_root(name)} can be replaced"

        def complete() -> str:
            if images and next_to:
                steps.extend(self._candidate_steps(found, images[0], labels, next_to))
            elif images:
                steps.extend(self._root_steps(found, images[0], labels))
            else:
                node_files(name, settings, node_inputs(name, self.config, self.system))
            return f"the node is {node_names(self.config, self.system)[name]}"

        checks = [checked("image", inspected, name), *_driver_checks(name, self.config, facts, planned)]
        if not isinstance(found.root, Absent):
            checks.append(checked("root", replaceable, name))
        if not next_to:
            checks += self._server_checks(name)
            checks += preflight.check_former_nodes(name, self.config, self.system)
        checks += preflight.check_network(name, machine, self.system)
        checks += preflight.check_dns(name, machine, facts, self.system)
        checks.append(checked("node", complete, name))
        if images and (binaries := wanted_binaries(settings, images[0].architecture)):
            checks.append(checked("binaries", lambda: preflight.check_binaries(binaries, self.system), name))
        return NodeWork(found, True, tuple(checks), tuple(steps), sum(image.size for image in images))

    def _settings(self, machine: str) -> NodeSettings:
        settings = self.config.machines[machine].node
        assert settings, "the caller chose machines with nodes"
        return settings

    def _image_name(self, machine: str, planned: Plan) -> str:
        images = {host_vendor(each.vendor).image for each in _grants(machine, planned) if each.gpus} - {PLAIN_IMAGE}
        return choose_image(self._settings(machine).image, max(images, default=PLAIN_IMAGE))

    def _candidate_steps(
        self, found: NodeFacts, image: NodeImage, labels: Mapping[str, str], serves: NodeRecord
    ) -> tuple[NodeStep, ...]:
        """Return the steps that make a candidate; none if it would be as the root file system that serves."""
        machine, settings = found.machine, self._settings(found.machine)
        record, binaries, files = self._made_from(machine, image, labels)
        if record.node != serves.node:
            raise AgentError(
                f"it would become node {record.node}, and is node {serves.node}: a switch keeps the Node",
                f"run `unbounded-agent up --rebuild {machine}`, then `kubectl delete node {serves.node}`",
            )
        if record.made_from_the_same(serves):
            return ()
        # An earlier attempt may have left one.
        made = root_record(machine, "next", self.system)
        places = (machine_root(candidate_of(machine)), other_root(machine))
        usable = (
            isinstance(made, NodeRecord)
            and record.made_from_the_same(made)
            and any(made.is_at(path, self.system) for path in places)
        )
        files = (*files, joined_kubeconfig(settings))
        return plan_candidate(found, record, binaries, files, settings.image, usable=usable)

    def _refuse_foreign_candidate(self, machine: str) -> None:
        """Raise AgentError if the candidate's name belongs to somebody else's machine."""
        candidate, record = candidate_of(machine), root_record(machine, "next", self.system)
        path, image = machine_root(candidate), machine_image(candidate)
        ours, has_image = isinstance(record, NodeRecord) and record.is_at(path, self.system), self.system.exists(image)
        if candidate in self.config.machines or (self.system.exists(path) and not ours) or has_image:
            other = image if has_image else "another machine"
            what = f"the candidate of machine {machine} would be named {candidate}, as {other} is"
            raise AgentError(what, "give that machine another name")

    def _made_from(
        self, machine: str, image: NodeImage, labels: Mapping[str, str]
    ) -> tuple[NodeRecord, tuple[NodeBinary, ...], tuple[NodeFile, ...]]:
        """Return what a root file system is made from. Raises AgentError or OSError."""
        settings, inputs = self._settings(machine), node_inputs(machine, self.config, self.system)
        inputs = replace(inputs, labels=labels)
        files, binaries = node_files(machine, settings, inputs), wanted_binaries(settings, image.architecture)
        return make_record(settings, inputs, image, binaries, files), binaries, files

    def _root_steps(self, found: NodeFacts, image: NodeImage, labels: Mapping[str, str]) -> tuple[NodeStep, ...]:
        """Return the steps that make a root file system from an image. Raises AgentError or OSError."""
        settings = self._settings(found.machine)
        record, binaries, files = self._made_from(found.machine, image, labels)
        return plan_root(
            found, record, binaries, files, settings.image, settings.bootstrap_token, tuple(settings.carry)
        )

    def _token_steps(self, found: NodeFacts) -> tuple[NodeStep, ...]:
        """Return the step for a machine that has not joined, and whose bootstrap token is not the configured one."""
        where = self._settings(found.machine).bootstrap_token
        stale = given_token(found.machine, self.system) != read_token(where, self.system)
        return (GiveToken(found.machine, where),) if stale else ()

    def _server_checks(self, machine: str) -> list[Check]:
        checks = preflight.check_server(self._settings(machine), self.system, self.ask)
        return [replace(check, machine=machine) for check in checks]

    def _host_steps(self, names: tuple[str, ...], network: Callable[[], Network]) -> tuple[NodeStep, ...]:
        """Return the steps that change the host's settings. Raises AgentError if `up` must not change them."""
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
        return plan_host(goal, facts, time.time())

    def _disk_check(self, nodes: tuple[NodeWork, ...]) -> Check:
        """Check the free space for images.

        The check is not required if an interrupted attempt left something, which `up` first uses or removes. The space
        is checked again before an image is pulled.
        """
        check = checked("disk", lambda: preflight.check_disk(sum(node.size for node in nodes), self.system))
        return replace(check, required=not any(node.make and node.facts.staged for node in nodes))


def as_if_made(names: tuple[str, ...], facts: Facts) -> Facts:
    """Return the facts as if all these machines had root file systems, so that the plan says which GPUs they get."""
    machines = (
        replace(each, root=machine_root(each.name), identity=True)
        if each.name in names and isinstance(each.root, Absent)
        else each
        for each in facts.machines
    )
    return replace(facts, machines=tuple(machines))


def _grants(machine: str, planned: Plan) -> list[Grant]:
    return [grant for goal in planned.goal.machines if goal.name == machine for grant in goal.grants]


def _driver_checks(machine: str, config: Config, facts: Facts, planned: Plan) -> list[Check]:
    """Return a failed check for each problem with the drivers of the machine's GPUs.

    None of these checks is required, because the node joins in spite of such problems.
    """
    made = next(each for each in facts.machines if each.name == machine)
    silent = replace(made, report=Absent("the machine is not made yet"))
    return [
        Check("driver", f"{each.type}: {each.message}", "see `unbounded-agent doctor`", machine, required=False)
        for goal in planned.goal.machines
        if goal.name == machine
        for each in conditions(Case(config.machines[machine], silent, facts, goal))
        if each.type in FROM_VENDORS and each.status is Status.FALSE
    ]
