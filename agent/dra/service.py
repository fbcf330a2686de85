"""The service: publishes the node's slices, prepares the kubelet's claims, and reports the devices' health.

One thread makes passes: when a document of either half has changed, when the slices or the Node at the API server have
changed, and once a minute while these cannot be watched. Other threads serve the kubelet.

A device plugin and Dynamic Resource Allocation know nothing of each other, so together they would give one GPU to two
pods. Therefore no GPU of a vendor is offered while the node's status has a non-zero resource of the vendor's device
plugin. A count of zero does not matter: the kubelet keeps the resource even when the plugin is gone.
"""

import contextlib
import functools
import logging
import math
import posixpath
import random
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.dra.claims import Checkpoint, NodeClaims, claim_reader, read_record
from agent.dra.evictions import Evictions
from agent.dra.grpc_server import start_thread
from agent.dra.inventory import DRA_VENDORS, GPU_STATES, Device, Inventory, dra_vendor
from agent.dra.kubelet import DriverPlugin, HealthService, KubeletPeer
from agent.dra.slices import COLLECTION, SELECTOR, Node, Published, Publisher
from agent.model.conditions import Condition, ConditionType, Reason, false
from agent.model.contract import RENEWED_AFTER, DraStatus, VendorOffer, render_dra_status
from agent.model.device import gives_gpus, is_zero
from agent.model.errors import AgentError
from agent.model.paths import ALLOCATABLE, DRA_DRIVER, DRA_STATUS
from agent.system import inotify
from agent.system.api_server import ApiClient, ApiError, ConflictError, Credentials, NotFoundError, Watcher
from agent.system.files import System
from agent.system.kubelet_identity import Identity, Kubelet

log = logging.getLogger(__name__)

STEPS = "remove the device plugin from this node: on the host, `unbounded-agent kube allocation dra` prints the steps"


def plugin_resources(node: Mapping[str, Any], prefix: str, harmless: Sequence[str] = ()) -> dict[str, str]:
    """Return the Node object's resources with this prefix whose count is not zero, with their counts.

    `harmless` has patterns (fnmatch) of resources that are ignored.
    """
    resources = {}
    for key in ("capacity", "allocatable"):
        for name, count in _object(_object(node.get("status")).get(key)).items():
            # Capacity counts too: while a plugin is down, its allocatable count is zero although pods still have its
            # GPUs.
            if gives_gpus(name, prefix, harmless) and not is_zero(str(count)):
                resources[name] = str(count)
    return dict(sorted(resources.items()))


def blocked_message(resources: Mapping[str, str]) -> str:
    """Return why no GPU of the vendor is offered, and what to do next."""
    listed = ", ".join(f"{name}: {count}" for name, count in resources.items())
    effect = "so no GPU of this vendor is offered to claims, because one GPU could go to two pods"
    return f"the node's status has {listed} from a device plugin, {effect}; {STEPS}"


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


NO_TAINTS = (
    "the API server drops device taints (feature gate DRADeviceTaints, on since Kubernetes 1.36), so unhealthy devices "
    "are not offered at all"
)


class Result(NamedTuple):
    """What is offered after a pass, and why the pass failed, if it did."""

    offers: tuple[VendorOffer, ...] = ()
    published: Published = Published()
    error: AgentError | None = None
    """Why the pass failed; None if it did not. If it failed, `offers` and `published` are those of the last pass that
    did not fail."""

    @property
    def reason(self) -> str:
        """The reason for a condition; empty if the pass did not fail."""
        match self.error:
            case None:
                return ""
            case NotFoundError() if "/nodes/" in self.error.message:
                return Reason.NODE_NOT_REGISTERED
            case ApiError():
                return self.error.reason
            case _:
                return Reason.FAILED


class Offer:
    """Offers one node's devices."""

    def __init__(self, node: str, client: ApiClient, inventory: Inventory) -> None:
        self._node, self._client, self._inventory = node, client, inventory
        self._publisher = Publisher(client)
        self.result = Result()
        """The result of the last pass."""

    def make(self) -> Result:
        """Make a pass, and return its result."""
        try:
            self._inventory.read_facts()
            node = self._client.get(f"/api/v1/nodes/{urllib.parse.quote(self._node, safe='')}")
            blocked = _blocked(node)
            # Do this before `publish`: while `publish` runs, other threads prepare claims, and claims may get only the
            # devices of vendors that are not blocked.
            self._inventory.allow({each.name for each in DRA_VENDORS} - blocked.keys())
            devices = self._inventory.devices()
            published = self._publisher.publish(_node(self._node, node), tuple(devices.values()))
            self.result = Result(self._offers(devices, published, blocked), published)
        except AgentError as error:
            self.result = Result(self.result.offers, self.result.published, error)
        return self.result

    def _offers(
        self, devices: Mapping[str, Device], published: Published, blocked: Mapping[str, str]
    ) -> tuple[VendorOffer, ...]:
        offers = []
        for vendor in self._inventory.vendors:
            own = [devices[name] for name in published.devices if devices[name].vendor == vendor.vendor]
            names = {each.name for each in own}
            withheld = [name for name in published.withheld if devices[name].vendor == vendor.vendor]
            reason, message = "", ""
            if vendor.vendor in blocked:
                reason, message = Reason.DEVICE_PLUGIN_ACTIVE, blocked[vendor.vendor]
            elif dra_vendor(vendor.vendor) is None:
                reason, message = Reason.UNKNOWN_VENDOR, f"this release does not know GPUs of {vendor.vendor}"
            elif withheld:
                reason, message = Reason.GPUS_MISSING, f"{', '.join(withheld)}: {NO_TAINTS}"
            offers.append(
                VendorOffer(
                    vendor.vendor,
                    tuple(sorted({each.pci_address for each in own})),
                    tuple(sorted(names)),
                    tuple(each for each in published.tainted if each in names),
                    reason,
                    message,
                )
            )
        return tuple(offers)


def _blocked(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the vendors whose GPUs must not be offered, each with the reason."""
    by_vendor = {
        each.name: plugin_resources(node, each.resource_prefix, each.harmless_resources) for each in DRA_VENDORS
    }
    return {name: blocked_message(resources) for name, resources in by_vendor.items() if resources}


def _node(name: str, document: Mapping[str, Any]) -> Node:
    metadata = document.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(uid, str) or not uid:
        raise ApiError(f"GET /api/v1/nodes/{name}", "the Node object has no uid")
    return Node(name, uid)


POLL = 5.0
"""Seconds between checks whether something has changed that was not noticed at once."""
GAP = 0.1
"""Minimum seconds between checks, and so between passes, however many changes are noticed."""
DOCUMENTS = tuple(posixpath.dirname(path) for path in (ALLOCATABLE, GPU_STATES))
CHANGES = inotify.MOVED_TO | inotify.MOVED_FROM | inotify.DELETE | inotify.MOVE_SELF
"""Events of documents and sockets: documents are replaced by a rename."""
RESYNC = 60.0
"""Seconds after which a pass is made although nothing has changed, if a watch of the API server does not work."""
WATCHED_RESYNC = 1800.0
"""The same if both watches work. Both times are shortened at random by up to half, so that the nodes of a cluster do
not ask all at once."""
FACTS_CHECK = 60.0
"""Seconds between checks whether a vendor's tool has to be run. The API server is asked only if facts have changed."""
IDENTITY_CHECK = 30.0
"""Seconds between checks whether the kubelet's identity has changed."""
EVICTION_INTERVAL = 5.0
"""Seconds between attempts to evict pods: a disruption budget may forbid the first attempts."""
SETUP = "unbounded-agent-gpu.service"
"""The machine half's unit. It passes this service's status on to the host, once a minute."""
SETUP_AGAIN = "unbounded-agent-gpu-again.service"
"""The unit that starts SETUP once more. It is started when the condition GPUsAdvertised may have changed."""
THREAD_LIMIT = 1.0
"""Seconds to wait for the end of the thread that looks for the kubelet."""
NO_KUBELET_PAUSE = 1.0
"""Seconds between checks whether a kubelet runs, while none does. After any other reason why it has no identity, the
next check is only after IDENTITY_CHECK seconds: a check reads the arguments of all processes."""
FIRST_RETRY, LONGEST_RETRY = 0.2, 15.0
"""Seconds to wait after failed passes. After the first failure, the wait is twice FIRST_RETRY. Each further failure
doubles the wait, up to LONGEST_RETRY."""


class Bell:
    """What a thread waits for: others ring, a name in a watched directory changes, or a process ends."""

    def __init__(self) -> None:
        self._ringer, self._heard = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._inotify: inotify.Inotify | None = None
        self._unwatched = ""
        """Why directories are not watched; empty if they are."""

    def ring(self) -> None:
        """End the current wait, or the next one. A signal handler may call this."""
        # If the buffer is full, the bell has been rung. If the socket is closed, nobody waits.
        with contextlib.suppress(OSError):
            self._ringer.send(b"\0")

    def watch(self, directories: Iterable[str]) -> None:
        """Watch these directories, as they are now. A directory that was replaced is watched from the next call on."""
        try:
            self._inotify = self._inotify or inotify.Inotify()
            for each in directories:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._inotify.add(each, CHANGES | inotify.ONLYDIR)
            self._unwatched = ""
        except OSError as error:
            if str(error) != self._unwatched:
                log.warning("changes of documents are noticed up to %s s late: %s", POLL, error)
            self._unwatched = str(error)

    def wait(self, seconds: float, process: int = -1) -> bool:
        """Wait until something has happened, and return whether somebody has rung.

        `process` is a pidfd; -1 if no process matters.
        """
        waiting = select.poll()
        for each in (self._heard.fileno(), self._inotify.fileno() if self._inotify else -1, process):
            if each >= 0:
                waiting.register(each, select.POLLIN)
        waiting.poll(1000 * seconds)
        if self._inotify:
            self._inotify.read()
        with contextlib.suppress(BlockingIOError):
            return bool(self._heard.recv(1 << 16))
        return False

    def close(self) -> None:
        self._ringer.close()
        self._heard.close()
        if self._inotify:
            self._inotify.close()


class Parts(NamedTuple):
    """The objects that serve one kubelet."""

    identity: Identity
    offer: Offer
    inventory: Inventory
    plugin: DriverPlugin
    health: HealthService
    claims: NodeClaims
    checkpoint: Checkpoint
    evictions: Evictions
    watchers: tuple[Watcher, ...]

    @property
    def resync(self) -> float:
        """Seconds from a pass to the next one if nothing changes."""
        # No watch says that the API server keeps taints now.
        watched = all(each.watching for each in self.watchers) and not self.offer.result.published.withheld
        return WATCHED_RESYNC if watched else RESYNC

    def publish_health(self) -> None:
        self.health.publish(self.identity.node, self.inventory.all_devices().values())


class Service:
    """Offers this machine's GPUs while a kubelet runs in it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._bell, self._stopping = Bell(), False
        self._changed = False
        """Whether a watch of the API server has noticed a change since the last pass."""
        self._kubelet, self._peer = Kubelet(system), KubeletPeer()
        self._identity_changed = False
        self._jitter = 1.0
        """By what the time to the next pass is multiplied. It is drawn again after each pass."""
        self._status = DraStatus(0.0)
        self._written = 0.0
        """When the status was last written, by time.monotonic()."""
        self._not_written = ""
        """Why the last status could not be written; empty if it was."""

    def stop(self) -> None:
        """Make `run` return soon. A signal handler may call this."""
        # No threading.Event: if a signal handler sets it while the same thread waits for it, that thread can deadlock.
        self._stopping = True
        self._bell.ring()

    def _note_change(self) -> None:
        self._changed = True
        self._bell.ring()

    def run(self) -> None:
        """Serve until `stop`, or until the kubelet's identity has changed. Raises AgentError or OSError.

        Can be called once.
        """
        with contextlib.closing(self._bell):
            self._run()

    def _run(self) -> None:
        identity = self._wait_for_kubelet()
        if identity is None:
            return
        log.info("serving node %s with kubeconfig %s", identity.node, identity.kubeconfig)
        client = ApiClient(Credentials(self._system, identity.kubeconfig))
        checkpoint = Checkpoint(self._system, identity.root, self._bell.ring)
        with contextlib.closing(checkpoint), contextlib.closing(client), contextlib.closing(self._peer):
            try:
                self._serve(identity, client, checkpoint)
            except AgentError as error:
                self._report(
                    self._status._replace(
                        node=identity.node, registered=False, reason=Reason.FAILED, message=str(error)
                    )
                )
                raise

    def _wait_for_kubelet(self) -> Identity | None:
        """Return the running kubelet's identity; None after `stop`."""
        due, status = 0.0, DraStatus(0.0)
        while not self._stopping:
            if time.monotonic() >= due:
                found = self._find_kubelet()
                if isinstance(found, Identity):
                    return found
                due = time.monotonic() + _further_pause(found)
                status = DraStatus(0.0, reason=found.reason, message=found.message)
            self._report(status)
            self._bell.wait(NO_KUBELET_PAUSE)
        return None

    def _find_kubelet(self) -> Identity | Condition:
        """Return the running kubelet's identity, and let only this kubelet connect; a condition if there is none."""
        found = self._kubelet.find(ConditionType.GPUS_ADVERTISED)
        # A process that is not followed yet is followed, and then looked for again: before, another process could have
        # got the id of a kubelet that had just ended.
        if isinstance(found, Identity) and not self._peer.is_followed(found.process):
            self._peer.follow(found.process)
            found = self._kubelet.find(ConditionType.GPUS_ADVERTISED)
            if not isinstance(found, Identity):
                # Nobody knows whether the process that is followed was the kubelet.
                self._peer.close()
        if isinstance(found, Identity) and not self._peer.is_followed(found.process):
            self._peer.close()
            return false(
                ConditionType.GPUS_ADVERTISED,
                Reason.KUBELET_NOT_RUNNING,
                "the kubelet keeps ending and starting: see `journalctl -u kubelet`",
            )
        return found

    def _follow_kubelet(self, identity: Identity, ended: Bell) -> None:
        """Find the kubelet again after each of its starts, until `ended` rings, or until its identity has changed.

        In a thread of its own, because passes wait for the API server, and the kubelet must not wait for them.
        """
        further = 0.0
        while True:
            pidfd = self._peer.pidfd
            if ended.wait(NO_KUBELET_PAUSE + further if pidfd < 0 else IDENTITY_CHECK, pidfd):
                return
            try:
                current = self._find_kubelet()
            except OSError as error:
                log.warning("cannot look for the kubelet: %s", error)
                continue
            further = _further_pause(current)
            if isinstance(current, Identity) and not current.is_same(identity):
                log.warning(
                    "the kubelet's name, kubeconfig or directory has changed: this service starts again for node %s",
                    current.node,
                )
                self._identity_changed = True
                self._bell.ring()
                return

    def _serve(self, identity: Identity, client: ApiClient, checkpoint: Checkpoint) -> None:
        inventory = Inventory(self._system)
        record = functools.partial(read_record, self._system, identity.root)
        claims = NodeClaims(identity.node, claim_reader(client), inventory.devices, checkpoint, record)
        health = HealthService()
        plugin = DriverPlugin(DRA_DRIVER, claims, health, identity.root, self._peer.refusal, self._bell.ring)
        watchers = [
            Watcher(client, COLLECTION, SELECTOR.format(identity.node), self._note_change),
            Watcher(client, "/api/v1/nodes", f"metadata.name={identity.node}", self._note_change),
        ]
        ended = Bell()
        following = threading.Thread(
            target=self._follow_kubelet, args=(identity, ended), name="follow the kubelet", daemon=True
        )
        try:
            for each in (following, *watchers):
                start_thread(each, each.name)
            evictions = Evictions(claim_reader(client), client.request)
            offer = Offer(identity.node, client, inventory)
            parts = Parts(identity, offer, inventory, plugin, health, claims, checkpoint, evictions, tuple(watchers))
            self._pass_until_stopped(parts)
        finally:
            ended.ring()
            for each in watchers:
                each.stop()
            plugin.stop()
            if following.ident:
                following.join(THREAD_LIMIT)
            ended.close()

    def _pass_until_stopped(self, parts: Parts) -> None:
        """Make passes until `stop`, or until the kubelet's identity has changed."""
        passed, wait, retry, evicted, checked = -math.inf, 0.0, FIRST_RETRY, 0.0, 0.0
        while not self._stopping and not self._identity_changed:
            # Before anything is read: then each later change ends the wait.
            self._bell.watch((*map(self._system.full_path, DOCUMENTS), *parts.plugin.directories))
            parts.checkpoint.sync()
            changed, now = parts.inventory.refresh(), time.monotonic()
            if not changed and now - checked >= FACTS_CHECK:
                checked = now
                changed = parts.inventory.read_facts()
            if changed:
                parts.publish_health()
            if not parts.offer.result.error:
                wait = parts.resync * self._jitter
            if changed or self._changed or now - passed >= wait:
                self._changed = False
                result = parts.offer.make()
                _log_change(self._status, result)
                retry = min(2 * retry, LONGEST_RETRY) if result.error else FIRST_RETRY
                passed, checked = time.monotonic(), time.monotonic()
                wait, self._jitter = retry, random.uniform(0.5, 1.0)
                parts.publish_health()
            # Evict pods only after the taints are published: otherwise, a new pod would get the GPU at once.
            if (changed or now - evicted >= EVICTION_INTERVAL) and not parts.offer.result.error:
                evicted = now
                parts.evictions.make(parts.inventory.all_devices().values(), parts.claims.prepared)
            self._keep_serving(parts)
            self._bell.wait(max(0.0, min(POLL, passed + wait - time.monotonic())))
            time.sleep(GAP)

    def _keep_serving(self, parts: Parts) -> None:
        """Serve the driver's sockets again if one is gone or its server has failed, and report what is offered.

        Raises AgentError.
        """
        plugin, result, node = parts.plugin, parts.offer.result, parts.identity.node
        plugin.keep_serving()
        problems = [(result.reason, str(result.error))] if result.error else []
        registration = plugin.registration
        if registration.error:
            why = f"the kubelet does not register the driver, and will try again: {registration.error}"
            problems.append((Reason.NOT_REGISTERED, why))
        reason = problems[0][0] if problems else ""
        message = "; ".join((*(text for _, text in problems), *parts.inventory.problems))
        self._report(DraStatus(0.0, node, registration.registered, result.offers, reason, message))

    def _report(self, status: DraStatus) -> None:
        """Write the status if it has changed, or if the written one is RENEWED_AFTER seconds old."""
        now = time.monotonic()
        if status == self._status._replace(at=0.0) and now - self._written < RENEWED_AFTER:
            return
        try:
            self._system.write(DRA_STATUS, render_dra_status(status._replace(at=time.time())))
        except OSError as error:
            # Log each cause once: the write is tried again several times a second.
            why = error.strerror or str(error)
            if why != self._not_written:
                log.error("cannot write %s: %s", DRA_STATUS, why)
            self._not_written = why
            return
        self._not_written = ""
        before, self._status, self._written = self._status, status, now
        # Start SETUP_AGAIN only if a kubelet runs already. At boot, SETUP runs anyway, and the kubelet waits for that
        # run. If SETUP_AGAIN were started then, the kubelet would have to wait for a second run too.
        if status.node and _advertised_part(status) != _advertised_part(before):
            try:
                self._system.run("systemctl", "--no-block", "start", SETUP_AGAIN)
            except AgentError as error:
                log.warning(
                    "the host sees the new content of %s only after the next timed run of %s: %s",
                    DRA_STATUS,
                    SETUP,
                    error,
                )


def _further_pause(found: Identity | Condition) -> float:
    """Return how many seconds, beyond NO_KUBELET_PAUSE, to wait before the kubelet is looked for again if it has ended.

    Only a kubelet that does not run may be there at any moment.
    """
    return 0.0 if isinstance(found, Identity) or found.reason == Reason.KUBELET_NOT_RUNNING else IDENTITY_CHECK


def _advertised_part(status: DraStatus) -> object:
    """Return the part of a status on which GPUsAdvertised depends."""
    return status.registered, status.reason, status.offers


def _log_change(before: DraStatus, result: Result) -> None:
    """Log what is offered if something was written, and each failure once.

    A conflict or a missing object is not logged: as a rule, the next attempt succeeds. Also log each new message about
    a vendor's offer.
    """
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
