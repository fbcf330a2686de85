"""The service: joins the node's slices, the kubelet's claims, and the devices' health.

One thread makes passes, woken by changes of the documents and of what the API server has. Others serve the kubelet.
"""

import contextlib
import functools
import logging
import threading
import time
from dataclasses import dataclass, replace

from agent.dra.api_client import ApiClient
from agent.dra.api_errors import ConflictError, NotFoundError
from agent.dra.checkpoint import Checkpoint
from agent.dra.claim_reader import claim_reader
from agent.dra.claims import NodeClaims
from agent.dra.credentials import Credentials
from agent.dra.evictions import Evictions
from agent.dra.health import HealthService
from agent.dra.inventory import Inventory
from agent.dra.kubelet_state import read_record
from agent.dra.offer import Offer, Result
from agent.dra.plugin_server import DriverPlugin
from agent.dra.publisher import SELECTOR
from agent.dra.slices import COLLECTION
from agent.dra.watcher import Watcher
from agent.model.conditions import Condition, ConditionType
from agent.model.dra_status import RENEWED_AFTER, DraStatus, render_dra_status
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER, DRA_STATUS
from agent.model.reasons import Reason
from agent.system.files import System
from agent.system.kubelet_identity import Identity, find_identity

log = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between looks at the documents: two files in memory."""
GAP = 0.1
"""Seconds between passes at least, however often the API server says that something has changed."""
RESYNC = 60.0
"""Seconds after which a pass is made although nothing has changed."""
IDENTITY_CHECK = 30.0
"""Seconds between looks for a kubelet with another name or kubeconfig."""
EVICTION_INTERVAL = 5.0
"""Seconds between attempts to evict pods: a disruption budget may forbid the first ones."""
REPORTER = "unbounded-agent-gpu.service"
"""The unit that reports the status to the host. Otherwise it runs only once a minute."""
NO_KUBELET_PAUSE = 1.0
FIRST_RETRY, LONGEST_RETRY = 0.2, 15.0
"""Seconds after a failed pass. The time doubles with each further one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What serves one kubelet."""

    identity: Identity
    offer: Offer
    inventory: Inventory
    plugin: DriverPlugin
    health: HealthService
    claims: NodeClaims
    checkpoint: Checkpoint
    evictions: Evictions

    def publish_health(self) -> None:
        self.health.publish(self.identity.node, self.inventory.all_devices().values())


class Service:
    """Offers this machine's GPUs while a kubelet runs in it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._wake, self._stopping = threading.Event(), False
        self._status = DraStatus(0.0)
        self._written = 0.0
        """When the status was last written, by time.monotonic()."""

    def stop(self) -> None:
        """Let `run` return soon. A signal handler may call this."""
        # Nothing else: an Event that a signal handler sets while the same thread waits for it can lock up.
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`, or until the kubelet's identity is another one. Raises AgentError or OSError."""
        identity = self._wait_for_kubelet()
        if identity is None:
            return
        log.info("node %s, by %s", identity.node, identity.kubeconfig)
        client = ApiClient(Credentials(self._system, identity.kubeconfig))
        checkpoint = Checkpoint(self._system, identity.root)
        with contextlib.closing(checkpoint), contextlib.closing(client):
            self._serve(identity, client, checkpoint)

    def _wait_for_kubelet(self) -> Identity | None:
        """Return the running kubelet's identity; None after `stop`."""
        while not self._stopping:
            found = find_identity(self._system, ConditionType.GPUS_ADVERTISED)
            if isinstance(found, Identity):
                return found
            self._report(DraStatus(0.0, reason=found.reason, message=found.message))
            self._wake.wait(NO_KUBELET_PAUSE)
        return None

    def _serve(self, identity: Identity, client: ApiClient, checkpoint: Checkpoint) -> None:
        inventory = Inventory(self._system)
        record = functools.partial(read_record, self._system, identity.root)
        claims = NodeClaims(identity.node, claim_reader(client), inventory.devices, checkpoint, record)
        health = HealthService()
        plugin = DriverPlugin(DRA_DRIVER, claims, health, identity.root)
        watchers = [
            Watcher(client, COLLECTION, SELECTOR.format(identity.node), self._wake.set),
            Watcher(client, "/api/v1/nodes", f"metadata.name={identity.node}", self._wake.set),
        ]
        try:
            for each in watchers:
                each.start()
            evictions = Evictions(claim_reader(client), client.request)
            offer = Offer(identity.node, client, inventory)
            self._pass_until_stopped(Parts(identity, offer, inventory, plugin, health, claims, checkpoint, evictions))
        finally:
            for each in watchers:
                each.stop()
            plugin.stop()

    def _pass_until_stopped(self, parts: Parts) -> None:
        due, retry, checked, evicted = 0.0, FIRST_RETRY, time.monotonic(), 0.0
        while not self._stopping:
            parts.checkpoint.keep()
            changed, now = parts.inventory.refresh(), time.monotonic()
            if changed:
                parts.publish_health()
            if changed or self._wake.is_set() or now >= due:
                self._wake.clear()
                result = parts.offer.make()
                _log_change(self._status, result)
                retry = _longer(retry) if result.error else FIRST_RETRY
                due = time.monotonic() + (retry if result.error else RESYNC)
                parts.publish_health()
                time.sleep(GAP)
            if changed or now - evicted >= EVICTION_INTERVAL:
                # After the taints are published: a new pod would get the GPU at once.
                evicted = now
                parts.evictions.make(parts.inventory.all_devices().values(), parts.claims.prepared)
            self._keep(parts)
            if now - checked >= IDENTITY_CHECK:
                checked = now
                if self._is_another(parts.identity):
                    return
            self._wake.wait(POLL)

    def _keep(self, parts: Parts) -> None:
        """Serve the kubelet again if something ended that, and report what is offered."""
        plugin, result, node = parts.plugin, parts.offer.result, parts.identity.node
        found = [(result.reason, str(result.error))] if result.error else []
        try:
            plugin.keep()
        except AgentError as error:
            found.append((Reason.FAILED, str(error)))
        registration = plugin.registration
        if registration.error:
            why = f"the kubelet does not register the driver, and will try again: {registration.error}"
            found.append((Reason.NOT_REGISTERED, why))
        reason = found[0][0] if found else ""
        message = "; ".join((*(text for _, text in found), *parts.inventory.problems))
        self._report(DraStatus(0.0, node, registration.registered, result.offers, reason, message))

    def _is_another(self, identity: Identity) -> bool:
        """Return whether the kubelet now has another name, kubeconfig or directory. A stopped one has not."""
        found = find_identity(self._system, ConditionType.GPUS_ADVERTISED)
        if isinstance(found, Condition) or found == identity:
            return False
        log.warning("the kubelet has another identity, so this service starts again: %s", found.node)
        return True

    def _report(self, status: DraStatus) -> None:
        """Write the status if it is another one, or old."""
        now = time.monotonic()
        if status == replace(self._status, at=0.0) and now - self._written < RENEWED_AFTER:
            return
        try:
            self._system.write(DRA_STATUS, render_dra_status(replace(status, at=time.time())))
        except OSError as error:
            log.error("cannot write %s: %s", DRA_STATUS, error.strerror)
            return
        before, self._status, self._written = self._status, status, now
        # Before the kubelet runs, the unit has its turn at boot, and the kubelet's start would wait for another one.
        if status.node and _in_short(status) != _in_short(before):
            try:
                self._system.run("systemctl", "--no-block", "start", REPORTER)
            except AgentError as error:
                log.warning("the host hears of this by the next regular run of %s: %s", REPORTER, error)


def _in_short(status: DraStatus) -> object:
    """Return the part of a status that decides about GPUsAdvertised."""
    return status.registered, status.reason, status.offers


def _longer(retry: float) -> float:
    return min(2 * retry, LONGEST_RETRY)


def _log_change(before: DraStatus, result: Result) -> None:
    """Log what is offered if something was written, and a failure once. Conflicts are solved by the next pass."""
    if result.error and not isinstance(result.error, ConflictError | NotFoundError):
        if str(result.error) not in before.message:
            log.error("%s", result.error)
    elif result.published.written and not result.error:
        published = result.published
        tainted = f", tainted: {', '.join(published.tainted)}" if published.tainted else ""
        log.info("generation %s: %s%s", published.generation, ", ".join(published.devices) or "no device", tainted)
    for offer in result.offers:
        if offer.message and offer not in before.offers:
            log.warning("%s: %s", offer.vendor, offer.message)
