"""The bed for the end-to-end tests: one virtual machine, booted once, and restored to a snapshot before most tests."""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from agent.model.paths import CONDITIONS
from integration.bed.cache import step
from integration.bed.cluster.cluster import Cluster
from integration.bed.machine.node import MACHINE, Node
from integration.bed.measure import pages
from integration.bed.measure.evidence import evidence
from integration.bed.measure.restarts import restarted, starts
from integration.bed.measure.tested_with import MEASURED
from integration.bed.measure.versions import host_versions
from integration.bed.vm.guest import Completed, Guest, GuestError
from integration.bed.vm.installation import install
from integration.bed.vm.saved_host import saved_host
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.waiting import wait

INSTALLED = "installed"
"""The host half is installed and configured; neither it nor a machine runs."""
READY = "ready"
"""The service runs, and the machine is Ready."""
HOSTS = frozenset({"simulated_host", "other", "empty_host"})
"""Names of the fixtures that start a virtual machine. `other` is in test_hosts, `empty_host` in the tests of `up`."""


@dataclass
class Bed:
    """The simulated host, with what tests do on it."""

    host: SimulatedHost

    @property
    def guest(self) -> Guest:
        return self.host.guest

    @property
    def node(self) -> Node:
        return Node(self.guest)

    def starts(self) -> dict[str, str]:
        """Return when each unit that must not restart was started. `restarted` takes the result as `before`."""
        return starts(self.guest)

    def restarted(self, before: dict[str, str]) -> str:
        """Return the names of the units that were restarted since `before`, or the word `nothing`."""
        return ", ".join(sorted(restarted(before, starts(self.guest)))) or "nothing"

    def run(self, *argv: str, timeout: float = 60, check: bool = True) -> Completed:
        """Run a command on the host."""
        return self.guest.run(argv, timeout=timeout, check=check)

    def agent(self, *arguments: str, timeout: float = 240, check: bool = True) -> Completed:
        """Run the agent's command on the host."""
        return self.run("unbounded-agent", *arguments, timeout=timeout, check=check)

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the machine's conditions by type, as `status --json` has them."""
        found = json.loads(self.agent("status", "--json").stdout)
        return {each["type"]: each for each in found["machines"][MACHINE]["conditions"]}

    def last_conditions(self) -> dict[str, dict[str, Any]]:
        """Return by type the conditions that the last pass wrote; if there are none, only Ready with status Unknown.

        Reading the file costs nothing. Running `status` again and again would take processor time from the work that
        the caller waits for.
        """
        try:
            found = json.loads(self.guest.read(CONDITIONS)).get(MACHINE, [])
        except GuestError:
            found = []
        return {each["type"]: each for each in found} or {"Ready": {"status": "Unknown"}}

    def wait_ready(self, seconds: float = 400) -> dict[str, dict[str, Any]]:
        """Wait until Ready is True, and return all conditions. Raises NotReachedError with `evidence`."""
        return wait("the machine is ready", self._conditions_if_ready, seconds, self.evidence)

    def _conditions_if_ready(self) -> dict[str, dict[str, Any]]:
        if self.last_conditions()["Ready"]["status"] == "True":
            conditions = self.conditions()
            if conditions["Ready"]["status"] == "True":
                return conditions
        return {}

    def evidence(self) -> str:
        """Return the agent's status and the end of its journal, for error messages."""
        # Only our units: QEMU's guest agent adds a line to the journal for each query of a command's status.
        units = ("--unit=unbounded-agent*", "--unit=systemd-nspawn@*")
        journal = self.run("journalctl", "--no-pager", "-n", "60", *units, check=False).stdout
        return f"{self.agent('status', check=False).stdout}\n{journal}"

    def page(self, path: str) -> str:
        """Return a page of the service, whatever its HTTP status is."""
        answer = pages.get(self.guest, path)
        assert answer.status, f"the service does not serve {path}"
        return answer.body

    def wait_served(self, seconds: float = 300) -> None:
        """Wait until the service's own page says that the machine is ready.

        The service makes passes at its own pace, so `wait_ready`, which runs `status`, may return earlier.
        """
        path = f"/readyz/machines/{MACHINE}"
        wait(f"the service serves {path}", lambda: pages.get(self.guest, path).status == HTTPStatus.OK, seconds,
             self.evidence)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with a virtual machine as `host`, and put the tests of a cluster first.

    The files with these tests take longest. A process that began such a file late would still be busy with it long
    after the other process has ended.
    """
    items.sort(key=lambda item: not {"cluster", "empty_host"}.intersection(fixtures(item)))
    for item in items:
        if HOSTS.intersection(fixtures(item)):
            item.add_marker(pytest.mark.host)


def fixtures(item: pytest.Item) -> list[str]:
    """Return the names of an item's fixtures, including those that they use."""
    return item.fixturenames if isinstance(item, pytest.Function) else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the agent's output on the simulated host to the report of a failure.

    This cannot wait: the next test may restore a snapshot, in which the output does not exist.
    """
    report = yield
    found = [each for each in item.funcargs.values() if isinstance(each, Bed | Cluster | SimulatedHost)]
    if report.when != "teardown" and report.failed and found:
        host = found[0] if isinstance(found[0], SimulatedHost) else found[0].host
        report.sections += evidence(host.guest)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: with several processes, pytest does so at the end, which a stopped run never reaches."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"{report.nodeid} failed ({report.when}):\n{report.longreprtext}", file=sys.stderr, flush=True)


def prepare(host: SimulatedHost) -> None:
    """Install the agent on a host that has booted, and wait until its machine is ready."""
    with step("install the host half"):
        install(host.guest)
    host.snapshot(INSTALLED)
    bed = Bed(host)
    with step("start the service and wait until the machine is ready"):
        bed.run("systemctl", "enable", "--now", "unbounded-agent.service", timeout=240)
        bed.wait_ready()
        bed.wait_served()
    with step("wait for the pod images"):
        bed.node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    host.snapshot(READY)


@pytest.fixture(scope="session")
def simulated_host() -> Iterator[SimulatedHost]:
    with saved_host(prepare, Path(__file__)) as host:
        host.pause()
        yield host


@pytest.fixture(scope="session")
def host_parts(simulated_host: SimulatedHost) -> dict[str, str]:
    """Versions of the simulated host's real parts."""
    simulated_host.restore(INSTALLED)
    return host_versions(simulated_host.guest)


@pytest.fixture
def record_host(host_parts: dict[str, str], record_property: Callable[[str, object], None]) -> None:
    """Record the host's versions in the test's result, from which docs/compatibility.md is made."""
    for part, version in host_parts.items():
        record_property(part, version)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Return a function that records a measurement in the test's result, and prints it."""

    def record(name: str, value: object) -> None:
        record_property(MEASURED + name, value)
        print(f"    {name}: {value}", file=sys.stderr, flush=True)

    return record


@pytest.fixture
def installed(simulated_host: SimulatedHost, record_host: None) -> Iterator[Bed]:
    """A fresh host with its driver, where the agent is installed but has never run."""
    simulated_host.restore(INSTALLED)
    yield Bed(simulated_host)
    simulated_host.pause()


@pytest.fixture
def ready(simulated_host: SimulatedHost, record_host: None) -> Iterator[Bed]:
    """A host whose machine is ready and whose service runs."""
    simulated_host.restore(READY)
    yield Bed(simulated_host)
    simulated_host.pause()


@pytest.fixture(scope="module")
def shared_host(simulated_host: SimulatedHost, host_parts: dict[str, str]) -> Iterator[SimulatedHost]:
    """A ready host that a module's tests share: none of them changes what another one checks.

    So it is restored once, not for each test: after each restore, QEMU has to translate the guest's programs again.
    """
    simulated_host.restore(READY)
    yield simulated_host
    simulated_host.pause()


@pytest.fixture
def shared(request: pytest.FixtureRequest, shared_host: SimulatedHost, record_host: None) -> Bed:
    # pytest-rerunfailures counts the runs of a test here. A test runs again only if the guest's kernel has crashed, and
    # then the shared host is of no use without a restore.
    if getattr(request.node, "execution_count", 1) > 1:
        shared_host.restore(READY)
    return Bed(shared_host)


@pytest.fixture(scope="module")
def cluster(simulated_host: SimulatedHost) -> Iterator[Cluster]:
    """A Kubernetes cluster whose node is the ready machine, with NVIDIA's device plugin.

    No snapshot is restored between its tests: the guest would go back in time, but the API server, which runs outside
    the guest, would not.
    """
    simulated_host.restore(READY)
    # The guest's clock shows the time of the snapshot, when the certificates were not valid yet. Once the clock is set,
    # the machine's last report counts as outdated, so the machine half has to report again.
    simulated_host.guest.set_clock()
    Bed(simulated_host).node.run("systemctl", "start", "unbounded-agent-gpu.service")
    with Cluster(simulated_host) as cluster:
        cluster.apply("runtime-class")
        with step("deploy NVIDIA's device plugin"):
            cluster.deploy_plugin(gpus=len(simulated_host.gpus))
        yield cluster
    simulated_host.pause()
