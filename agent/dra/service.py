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
from typing import Any

from agent.dra.claims import Checkpoint, Evictions, NodeClaims, fetch_claim
from agent.dra.grpc_server import Admit, start_thread
from agent.dra.inventory import DRA_VENDORS, GPU_STATES, Device, Inventory
from agent.dra.kubelet import DriverPlugin, KubeletPeer
from agent.dra.slices import COLLECTION, SELECTOR, Node, Published, Publisher
from agent.model.conditions import Condition, ConditionType, Reason, false
from agent.model.contract import RENEWED_AFTER, DraStatus, VendorOffer, render_dra_status
from agent.model.device import gives_gpus, is_zero
from agent.model.errors import AgentError
from agent.model.paths import ALLOCATABLE, DRA_STATUS
from agent.system import inotify
from agent.system.api_server import ApiClient, ApiError, ConflictError, Credentials, NotFoundError, Watcher
from agent.system.files import System
from agent.system.kubelet_identity import Identity, Kubelet

log = logging.getLogger(__name__)

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
SETUP_AGAIN = "unbounded-agent-gpu-again.service"
"""The unit that runs the machine half once more, which passes this service's status on to the host. It is started when
the condition GPUsAdvertised may have changed."""
THREAD_LIMIT = 1.0
"""Seconds to wait for the end of the thread that looks for the kubelet."""
NO_KUBELET_PAUSE = 1.0
"""Seconds between checks whether a kubelet runs, while none does. After any other reason why it has no identity, the
next check is only after IDENTITY_CHECK seconds: a check reads the arguments of all processes."""
FIRST_RETRY, LONGEST_RETRY = 0.2, 15.0
"""Seconds to wait after failed passes. After the first failure, the wait is twice FIRST_RETRY. Each further failure
doubles the wait, up to LONGEST_RETRY."""
NO_TAINTS = (
    "not offered, because the API server has dropped device taints: turn on its feature gate DRADeviceTaints; if it is "
    "on, run `systemctl restart unbounded-agent-dra` in the machine"
)


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


def blocked_vendors(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the vendors whose GPUs must not be offered, each with the reason and what to do next."""
    blocked = {}
    for vendor in DRA_VENDORS.values():
        resources = plugin_resources(node, vendor.resource_prefix, vendor.harmless_resources)
        if resources:
            listed = ", ".join(f"{name}: {count}" for name, count in resources.items())
            blocked[vendor.name] = (
                f"claims get no GPU, because the node's status has {listed} from a device plugin: on the host, "
                "`unbounded-agent kube allocation dra` prints how to remove it from this node"
            )
    return blocked


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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
        """Wait until something has happened, also to the process with this pidfd. Return whether somebody has rung."""
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


class Offer:
    """Offers the devices of one kubelet's node."""

    def __init__(
        self, system: System, identity: Identity, client: ApiClient, checkpoint: Checkpoint, admit: Admit, bell: Bell
    ) -> None:
        """Start serving the kubelet. `admit` is as in DriverPlugin; `bell` rings when `check` has something to do.

        Raises AgentError.
        """
        self._node, self._client, self._checkpoint, self._bell = identity.node, client, checkpoint, bell
        self._inventory, self._publisher = Inventory(system), Publisher(client)
        fetch = functools.partial(fetch_claim, client)
        self._claims = NodeClaims(self._node, fetch, self._inventory.devices, checkpoint)
        self._evictions = Evictions(fetch, client.request)
        self._plugin = DriverPlugin(
            self._claims.prepare, self._claims.unprepare, self._node, identity.root, admit, bell.ring
        )
        self.directories = self._plugin.directories
        """`check` has something to do when a name in them has changed."""
        self.watchers = (
            Watcher(client, COLLECTION, SELECTOR.format(self._node), self._note_change),
            Watcher(client, "/api/v1/nodes", f"metadata.name={self._node}", self._note_change),
        )
        self._changed = False
        """Whether a watch of the API server has noticed a change since the last pass."""
        self._passed, self._evicted, self._checked = -math.inf, 0.0, 0.0
        """When the last pass was made, pods were evicted, and facts were checked, by time.monotonic()."""
        self._wait, self._retry, self._jitter = 0.0, FIRST_RETRY, 1.0
        """The seconds from a pass to the next; those after the last failure; by what the time without a change is
        multiplied, drawn again after each pass."""
        self._error: AgentError | None = None
        """Why the last pass failed; None if it did not. The next two are of the last pass that did not fail."""
        self._offers: tuple[VendorOffer, ...] = ()
        self._published = Published()

    def stop(self) -> None:
        for each in self.watchers:
            each.stop()
        self._plugin.stop()

    def check(self) -> float:
        """Make a pass if it is due, evict pods, and keep the sockets served. Return the seconds to the next check.

        Raises AgentError.
        """
        self._checkpoint.sync()
        changed, now = self._inventory.refresh(), time.monotonic()
        if not changed and now - self._checked >= FACTS_CHECK:
            self._checked = now
            changed = self._inventory.read_facts()
        if changed:
            self._plugin.publish_health(self._inventory.all_devices().values())
        if not self._error:
            watched = all(each.watching for each in self.watchers)
            self._wait = (WATCHED_RESYNC if watched else RESYNC) * self._jitter
        if changed or self._changed or now - self._passed >= self._wait:
            self._changed = False
            self._make_pass()
            self._retry = min(2 * self._retry, LONGEST_RETRY) if self._error else FIRST_RETRY
            self._passed = self._checked = time.monotonic()
            self._wait, self._jitter = self._retry, random.uniform(0.5, 1.0)
            self._plugin.publish_health(self._inventory.all_devices().values())
        # Evict pods only after the taints are published: otherwise, a new pod would get the GPU at once.
        if (changed or now - self._evicted >= EVICTION_INTERVAL) and not self._error:
            self._evicted = now
            self._evictions.make(self._inventory.all_devices().values(), self._claims.prepared)
        self._plugin.keep_serving()
        return max(0.0, min(POLL, self._passed + self._wait - time.monotonic()))

    @property
    def status(self) -> DraStatus:
        """What is offered, and what prevents more."""
        registration, problems, reason = self._plugin.registration, list(self._inventory.problems), ""
        if registration.error:
            reason = Reason.NOT_REGISTERED
            problems.insert(0, f"the kubelet does not register the driver, and will try again: {registration.error}")
        if self._error:
            problems.insert(0, str(self._error))
            match self._error:
                case NotFoundError() if "/nodes/" in self._error.message:
                    reason = Reason.NODE_NOT_REGISTERED
                case ApiError():
                    reason = self._error.reason
                case _:
                    reason = Reason.FAILED
        return DraStatus(0.0, self._node, registration.registered, self._offers, reason, "; ".join(problems))

    def _note_change(self) -> None:
        self._changed = True
        self._bell.ring()

    def _make_pass(self) -> None:
        """Publish what can be offered now, and log each change and each new problem."""
        before = self._offers
        try:
            self._inventory.read_facts()
            node = self._client.get(f"/api/v1/nodes/{urllib.parse.quote(self._node, safe='')}")
            uid = _object(node.get("metadata")).get("uid")
            if not isinstance(uid, str) or not uid:
                raise ApiError(f"GET /api/v1/nodes/{self._node}", "the Node object has no uid")
            blocked = blocked_vendors(node)
            # Do this before `publish`: while `publish` runs, other threads prepare claims, and claims may get only the
            # devices of vendors that are not blocked.
            self._inventory.allow(DRA_VENDORS.keys() - blocked.keys())
            devices = self._inventory.devices()
            self._published = self._publisher.publish(Node(self._node, uid), tuple(devices.values()))
        except AgentError as error:
            # A conflict or a missing object is not logged: as a rule, the next attempt succeeds.
            if not isinstance(error, ConflictError | NotFoundError) and str(error) != str(self._error):
                log.error("%s", error)
            self._error = error
            return
        self._error = None
        self._offers = self._vendor_offers(devices, blocked)
        if self._published.written:
            tainted = f", tainted: {', '.join(self._published.tainted)}" if self._published.tainted else ""
            listed = ", ".join(self._published.devices) or "no device"
            log.info("generation %s: %s%s", self._published.generation, listed, tainted)
        for offer in self._offers:
            if offer.message and offer not in before:
                log.warning("%s: %s", offer.vendor, offer.message)

    def _vendor_offers(self, devices: Mapping[str, Device], blocked: Mapping[str, str]) -> tuple[VendorOffer, ...]:
        offers = []
        for vendor in (each.vendor for each in self._inventory.vendors):
            own = [devices[name] for name in self._published.devices if devices[name].vendor == vendor]
            names = {each.name for each in own}
            withheld = [name for name in self._published.withheld if devices[name].vendor == vendor]
            reason, message = "", ""
            if vendor in blocked:
                reason, message = Reason.DEVICE_PLUGIN_ACTIVE, blocked[vendor]
            elif vendor not in DRA_VENDORS:
                reason, message = Reason.UNKNOWN_VENDOR, f"this release does not know GPUs of {vendor}"
            elif withheld:
                reason, message = Reason.GPUS_MISSING, f"{', '.join(withheld)}: {NO_TAINTS}"
            offers.append(
                VendorOffer(
                    vendor,
                    tuple(sorted({each.pci_address for each in own})),
                    tuple(sorted(names)),
                    tuple(each for each in self._published.tainted if each in names),
                    reason,
                    message,
                )
            )
        return tuple(offers)


class Service:
    """Offers this machine's GPUs while a kubelet runs in it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._bell, self._stopping = Bell(), False
        self._kubelet, self._peer = Kubelet(system), KubeletPeer()
        self._identity_changed = False
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

    def run(self) -> None:
        """Serve until `stop`, or until the kubelet's identity has changed. Raises AgentError or OSError.

        Can be called once.
        """
        with contextlib.closing(self._bell):
            identity = self._wait_for_kubelet()
            if identity is None:
                return
            log.info("serving node %s with kubeconfig %s", identity.node, identity.kubeconfig)
            client = ApiClient(Credentials(self._system, identity.kubeconfig))
            checkpoint = Checkpoint(self._system, identity.root, self._bell.ring)
            with contextlib.closing(checkpoint), contextlib.closing(self._peer):
                try:
                    self._serve(identity, client, checkpoint)
                except AgentError as error:
                    failed = self._status._replace(node=identity.node, registered=False)
                    self._report(failed._replace(reason=Reason.FAILED, message=str(error)))
                    raise

    def _serve(self, identity: Identity, client: ApiClient, checkpoint: Checkpoint) -> None:
        offer = Offer(self._system, identity, client, checkpoint, self._peer.refusal, self._bell)
        ended = Bell()
        following = threading.Thread(
            target=self._follow_kubelet, args=(identity, ended), name="follow the kubelet", daemon=True
        )
        try:
            for each in (following, *offer.watchers):
                start_thread(each, each.name)
            while not self._stopping and not self._identity_changed:
                # Before anything is read: then each later change ends the wait.
                self._bell.watch((*map(self._system.full_path, DOCUMENTS), *offer.directories))
                pause = offer.check()
                self._report(offer.status)
                self._bell.wait(pause)
                time.sleep(GAP)
        finally:
            ended.ring()
            offer.stop()
            if following.ident:
                following.join(THREAD_LIMIT)
            ended.close()

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
            if not isinstance(found, Identity) or not self._peer.is_followed(found.process):
                # Nobody knows whether the process that is followed was the kubelet.
                self._peer.close()
        if isinstance(found, Identity) and not self._peer.is_followed(found.process):
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
        # Start SETUP_AGAIN only if a kubelet runs already. At boot, the machine half runs anyway, and the kubelet waits
        # for that run. If SETUP_AGAIN were started then, the kubelet would have to wait for a second run too.
        if status.node and _advertised_part(status) != _advertised_part(before):
            try:
                self._system.run("systemctl", "--no-block", "start", SETUP_AGAIN)
            except AgentError as error:
                log.warning("the host sees %s up to a minute late: %s", DRA_STATUS, error)


def _further_pause(found: Identity | Condition) -> float:
    """Return how many seconds, beyond NO_KUBELET_PAUSE, to wait before a kubelet that ended is looked for again."""
    # Only a kubelet that does not run may be there at any moment.
    return 0.0 if isinstance(found, Identity) or found.reason == Reason.KUBELET_NOT_RUNNING else IDENTITY_CHECK


def _advertised_part(status: DraStatus) -> object:
    """Return the part of a status on which GPUsAdvertised depends."""
    return status.registered, status.reason, status.offers
