"""Lets this machine's Node be drained, with the kubelet's identity, and says what another root would not have. Passes
images to that.

In Kubernetes 1.36 and 1.37, a node's identity may list the pods of its own Node, and evict them (NodeRules of
bootstrappolicy; admitPodEviction of the admission plugin NodeRestriction). It may also cordon it (node_cordon.py). As
there, an annotation tells this cordon from others. Neither of the two lifts the other one's. For a reset of GPUs, only
the pods that were given these are evicted, and the Node is not cordoned: Kubernetes' own eviction from tainted devices
deletes pods, whatever their disruption budgets say (pkg/controller/devicetainteviction).

unbounded-agent-leave.service runs this when a command on the host asks for it. The answer is next to the report.
"""

import contextlib
import posixpath
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from agent.machine.kubelet import Claim, prepared_claims
from agent.machine.notes import InBackground, Owned, in_words
from agent.machine.requests import WithdrawnError, read_request, serve
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType
from agent.model.contract import (
    LOST_LIMIT,
    NAMED,
    PARTITION_INFIX,
    LeaveAnswer,
    LeaveEnd,
    LeaveRequest,
    LeaveTask,
    Lost,
    parse_gpu_states,
    parse_host_status,
    parse_leave_request,
    render_leave_answer,
    slice_name,
)
from agent.model.errors import AgentError, DocumentError, UnreadError
from agent.model.handoff import SIZE_LIMIT
from agent.model.json_document import get, parse_object
from agent.model.paths import (
    CONDITIONS_NAME,
    CORDONED_FOR,
    CORDONED_TO_LEAVE,
    GPU_STATES_NAME,
    IMAGES_NAME,
    LEAVE_NAME,
    LEAVING_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    NODE_CORDON_MARK,
    NODE_FILES,
    STATE,
)
from agent.model.text import counted, one_line, quoted
from agent.system.api_server import ApiClient, ApiError, ConflictError, Credentials, NotFoundError
from agent.system.files import System, mount_points
from agent.system.journal import INFO, say
from agent.system.kubelet_identity import Identity, Kubelet
from agent.system.process import host_runner

REQUEST = f"{MACHINE_HANDOFF_DIRECTORY}/{LEAVE_NAME}"
ANSWER = f"{MACHINE_REPORT_DIRECTORY}/{LEAVING_NAME}"
POLL = 2.0
"""Seconds between two looks at the pods, or two tries."""
LOOK = 1.0
"""Seconds between two looks at whether the host still wants it."""
SAID_AGAIN = 5.0
"""Seconds after which an unchanged answer is written again, so that the host knows that the machine works."""
SHOWN = 500
"""Characters of a message."""


class _UnableError(AgentError):
    """Nothing was changed."""


def main() -> int:
    """Do what the host asks for, and return the exit code."""
    return run(System(host_runner))


def run(system: System) -> int:
    """Do what the host asks for, and return the exit code (agent.machine.requests)."""
    return serve(partial(_requested, system), partial(_answer, system))


def _requested(system: System) -> LeaveRequest | None:
    return read_request(REQUEST, parse_leave_request, system)


def _answer(system: System, request: LeaveRequest) -> None:
    """Work, and write the answer. A request that was answered is not worked on again. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, DocumentError):
        before = parse_object(ANSWER, system.read(ANSWER, SIZE_LIMIT))
        if before.get("id") == request.id and before.get("end") != LeaveEnd.WORKING:
            return
    work = _Work(system, request)
    work.tell(LeaveEnd.WORKING)
    # Only after that: the host withdraws the request, then looks whether it was begun.
    if _requested(system) != request:
        raise WithdrawnError
    try:
        work.tell(LeaveEnd.DONE, TASKS[request.task](work))
    except WithdrawnError:
        raise
    except _UnableError as error:
        work.tell(LeaveEnd.UNABLE, str(error))
    # Any exception: the host waits for an answer.
    except Exception as error:
        work.tell(LeaveEnd.FAILED, in_words(error))


class _Work:
    """The work on one request."""

    def __init__(self, system: System, request: LeaveRequest) -> None:
        self.system, self._request = system, request
        self._began = self._looked = time.monotonic()
        self._answer = LeaveAnswer(request.id, LeaveEnd.WORKING, 0.0)
        self._written = 0.0

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self._request.seconds - (time.monotonic() - self._began)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left <= 0

    def tell(self, end: LeaveEnd, message: str = "", **facts: Any) -> None:  # noqa: ANN401
        """Write an answer, with these fields of LeaveAnswer; the others stay."""
        now = time.monotonic()
        said = self._answer._replace(end=end, message=one_line(message)[:SHOWN], **facts)
        if said._replace(seconds=0.0) != self._answer._replace(seconds=0.0) and (said.message or said.waiting):
            say(INFO, "; ".join(filter(None, (said.message, *said.waiting))))
        self._answer, self._written = said._replace(seconds=now - self._began), now
        self.system.write(ANSWER, render_leave_answer(self._answer))

    def check(self) -> None:
        """Show the host that the work goes on. Raises WithdrawnError if the host no longer wants it."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        request = _requested(self.system)
        if request is None or request.id != self._request.id:
            raise WithdrawnError
        if now - self._written >= SAID_AGAIN:
            self.tell(self._answer.end, self._answer.message)

    def pause(self) -> None:
        until = time.monotonic() + POLL
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))
            self.check()

    @property
    def gpus(self) -> tuple[str, ...]:
        return self._request.gpus

    def kubelet(self) -> tuple[Identity, ApiClient]:
        """Return the running kubelet, and a client with its identity. Raises _UnableError or OSError."""
        found = Kubelet(self.system).find(ConditionType.NODE_CONDITION_SET)
        if isinstance(found, Condition):
            raise _UnableError(found.message)
        credentials = Credentials(self.system, found.kubeconfig)
        try:
            credentials.session()
        except AgentError as error:
            raise _UnableError(str(error)) from error
        return found, ApiClient(credentials)


# The drain. It waits for budgets and for what pods take to end, until its time is up.

RETRY, LONGEST_RETRY = 5.0, 60.0
"""Seconds after which an eviction that was refused is tried again. The server may say another time."""
TRIES = 3
"""How often a change of the Node is tried if somebody else changes it meanwhile."""
PAGE = 50
"""Pods in one answer of the server."""
ENDED = ("Succeeded", "Failed")
MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a pod that stands for a file of the kubelet."""
REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class _Pod(NamedTuple):
    namespace: str
    name: str
    uid: str
    ends: bool
    """Whether somebody has asked it to end."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def _drain(work: _Work) -> str:
    identity, client = work.kubelet()
    cordoned = False

    def find() -> list[_Pod]:
        nonlocal cordoned
        cordoned = cordoned or _cordon(client, identity.node)
        return [_pod(each) for each in _pods(client, identity.node) if must_leave(each)]

    _evict_all(work, client, find, f"node {identity.node}")
    return f"node {identity.node} is drained"


def _evict_users(work: _Work) -> str:
    """Evict the pods that were given the GPUs, also those of DaemonSets."""
    identity, client = work.kubelet()
    names = ", ".join(work.gpus)

    def find() -> list[_Pod]:
        _require_fence(work)
        if not (users := _users(work, client)):
            return []
        pods = (_pod(each) for each in _pods(client, identity.node) if not _has_ended(each))
        return [each for each in pods if each.uid in users]

    _evict_all(work, client, find, names)
    return f"no pod has {names}"


def _require_fence(work: _Work) -> None:
    """Raise AgentError if new pods may get one of the GPUs: then, pods would be evicted for nothing."""
    states = parse_gpu_states(work.system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_STATES_NAME}", SIZE_LIMIT))
    if offered := [each for each in work.gpus if each not in states or not states[each].effect]:
        raise AgentError(f"new pods may get {', '.join(offered)}: no more pods are evicted")


def _users(work: _Work, client: ApiClient) -> set[str]:
    """Return the uids of the pods whose claims have one of the GPUs, or a partition of one. Raises ApiError."""
    users, names = set[str](), {slice_name(each) for each in work.gpus}
    for claim in prepared_claims(work.system):
        if not names.isdisjoint(each.partition(PARTITION_INFIX)[0] for each in claim.devices):
            work.check()
            users.update(_consumers(client, claim))
    return users


def _consumers(client: ApiClient, claim: Claim) -> Iterator[str]:
    """Yield the uids of a claim's pods."""
    try:
        found = client.get(f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}")
    except ApiError as error:
        # The node authorizer answers 403 if no pod of this node has the claim (authorizeGet of node_authorizer.go).
        if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
            return
        raise
    if found["metadata"]["uid"] == claim.uid:
        reserved = (found.get("status") or {}).get("reservedFor") or ()
        yield from (each["uid"] for each in reserved if each.get("resource") == "pods")


def _evict_all(work: _Work, client: ApiClient, find: Callable[[], list[_Pod]], place: str) -> None:
    """Evict the pods that `find` returns until there are none. Raises AgentError when the time is up."""
    evictions, problem = _Evictions(client, work), ""
    while True:
        work.check()
        try:
            pods, problem = find(), ""
        except ApiError as error:
            if error.status in REFUSED:
                raise
            pods, problem = None, str(error)
        if pods is not None:
            if not pods:
                work.tell(LeaveEnd.WORKING, pods=0, waiting=())
                return
            work.tell(LeaveEnd.WORKING, pods=len(pods), waiting=evictions.make(pods))
        if work.over:
            left = "" if pods is None else "pods are left on "
            raise AgentError(f"{left}{place}: {problem}" if problem else f"{left}{place}")
        work.pause()


def must_leave(pod: Mapping[str, Any]) -> bool:
    """Return whether a drain has to evict the pod. Pure."""
    metadata = pod["metadata"]
    owners = metadata.get("ownerReferences") or ()
    of_daemon_set = any(each.get("controller") and each.get("kind") == "DaemonSet" for each in owners)
    is_mirror = MIRROR in (metadata.get("annotations") or {})
    return not of_daemon_set and not is_mirror and not _has_ended(pod)


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ENDED


def _pod(item: Mapping[str, Any]) -> _Pod:
    metadata = item["metadata"]
    return _Pod(metadata["namespace"], metadata["name"], metadata["uid"], bool(metadata.get("deletionTimestamp")))


def _pods(client: ApiClient, node: str) -> Iterator[Mapping[str, Any]]:
    parameters = {"fieldSelector": f"spec.nodeName={node}", "limit": str(PAGE)}
    more = ""
    while True:
        page = client.get("/api/v1/pods", **parameters, **({"continue": more} if more else {}))
        yield from page.get("items") or ()
        more = (page.get("metadata") or {}).get("continue") or ""
        if not more:
            return


class _Evictions:
    """Evicts pods, and remembers why the server refused that."""

    def __init__(self, client: ApiClient, work: _Work) -> None:
        self._client, self._work = client, work
        self._refused: dict[str, tuple[float, str]] = {}
        """By UID: when to try again, and why not now."""

    def make(self, pods: Sequence[_Pod]) -> tuple[str, ...]:
        """Evict those that are due. Return why pods have not left, first those that were refused."""
        for pod in pods:
            self._work.check()
            if not self._work.over and not pod.ends and self._refused.get(pod.uid, (0.0, ""))[0] <= time.monotonic():
                self._evict(pod)
        refused = [f"{quoted(str(pod))}: {self._refused[pod.uid][1]}" for pod in pods if pod.uid in self._refused]
        ends = [f"{quoted(str(pod))}: it is ending" for pod in pods if pod.uid not in self._refused]
        return tuple(each[:SHOWN] for each in (*refused, *ends)[:NAMED])

    def _evict(self, pod: _Pod) -> None:
        self._refused.pop(pod.uid, None)
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            # A new pod of the same name is not meant.
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            self._client.request("POST", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/eviction", eviction)
        except NotFoundError:
            return
        except ApiError as error:
            seconds, why = _refusal(error)
            self._refused[pod.uid] = time.monotonic() + seconds, one_line(why)


def _refusal(error: ApiError) -> tuple[float, str]:
    """Return after how many seconds to try again, and why an eviction was refused. The causes name the budget."""
    causes, after = error.details.get("causes"), error.details.get("retryAfterSeconds")
    said = [str(each.get("message")) for each in causes or () if isinstance(each, dict)]
    seconds = float(after) if isinstance(after, int) and after > 0 else RETRY
    return min(seconds, LONGEST_RETRY), "; ".join(said) or error.message


def _cordon(client: ApiClient, node: str) -> bool:
    """Cordon the Node, unless somebody has. A cordon for a GPU becomes this one: else it might end before the drain.

    Return True. Raises _UnableError or ApiError.
    """

    def change(spec: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any] | None:
        if spec.get("unschedulable") and CORDONED_FOR not in annotations:
            return None
        return {
            "metadata": {"annotations": {CORDONED_TO_LEAVE: "drain", CORDONED_FOR: None}},
            "spec": {"unschedulable": True},
        }

    if not _change_node(client, node, change):
        raise _UnableError(f"the API server has no node {node}: the kubelet has not registered yet")
    return True


def _uncordon(work: _Work) -> str:
    """Lift the cordon of `_cordon`, or leave it to node_cordon.py while a GPU is fenced. Tried until the time is up."""
    while True:
        try:
            identity, client = work.kubelet()
            return _end_cordon(work.system, client, identity.node)
        except AgentError as error:
            if work.over:
                raise
            work.tell(LeaveEnd.WORKING, str(error))
        work.pause()


def _end_cordon(system: System, client: ApiClient, node: str) -> str:
    fenced = False
    with contextlib.suppress(FileNotFoundError):
        fenced = bool(parse_host_status(system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}")).fenced)

    def change(spec: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any] | None:
        if CORDONED_TO_LEAVE not in annotations:
            return None
        hands_over = fenced and bool(spec.get("unschedulable"))
        after: dict[str, str | None] = {CORDONED_TO_LEAVE: None}
        if hands_over:
            system.write(NODE_CORDON_MARK, f"{node}\n".encode(), 0o600)
            after[CORDONED_FOR] = "start"
        return {"metadata": {"annotations": after}, "spec": {"unschedulable": True if hands_over else None}}

    _change_node(client, node, change)
    return f"node {node} stays cordoned for a GPU" if fenced else ""


def _change_node(
    client: ApiClient,
    node: str,
    change: Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any] | None],
) -> bool:
    """Patch the Node with what `change` makes of its spec and its annotations. Return whether the Node exists."""
    for attempt in range(TRIES):
        try:
            found = client.get(f"/api/v1/nodes/{node}")
            patch = change(found.get("spec") or {}, found["metadata"].get("annotations") or {})
            if patch:
                # With a version, the patch fails if somebody else has changed the Node since.
                patch["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
                client.request("PATCH", f"/api/v1/nodes/{node}", patch)
            return True
        except NotFoundError:
            return False
        except ConflictError:
            if attempt == TRIES - 1:
                raise
    return True


# What another root would not have: files that are newer than the root itself, in places that nobody makes again.

MADE_AGAIN = (
    *("/proc", "/sys", "/dev", "/run", "/var/run", "/usr", "/boot", "/lost+found", STATE),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/lib/calico", "/etc/cni", "/opt/cni", "/etc/cdi"),
    *("/var/lib/dpkg", "/var/lib/apt", "/var/lib/systemd", "/var/lib/dbus", "/var/lib/private/systemd"),
)
"""The image, `up`, the kubelet, containerd, network plugins and systemd make these again, and all below them."""
PASSING = ("/tmp", "/var/tmp", "/var/cache", "/var/log")
"""Nobody misses these, but a pod's volume below them."""
LOGS = ("/var/log/pods", "/var/log/containers", "/var/log/journal")
OWN = "/usr/local"
"""Not the image's, although it is below /usr."""
WRITTEN_AT_BOOT = frozenset(
    f"/etc/{name}"
    for name in (
        *("machine-id", "hostname", "hosts", "resolv.conf", "localtime", "timezone", "adjtime", "mtab", ".updated"),
        *("ld.so.cache", ".pwd.lock"),
    )
) | {"/var/.updated"}


def _look(work: _Work) -> str:
    if not work.system.exists(NODE_FILES):
        raise _UnableError(f"{NODE_FILES} is missing, so it is unknown when this root was made: `up` did not make it")
    identity, client = work.kubelet()
    mounts = mount_points(work.system)
    volumes = dict[str, str]()
    for path, whose in _volumes(work, client, identity.node):
        with contextlib.suppress(OSError):
            if is_volume(real := work.system.real_path(path), mounts):
                volumes.setdefault(real, whose)
    edited = (vendor.runtime_config for vendor in VENDORS.values())
    own = {*WRITTEN_AT_BOOT, identity.kubeconfig, *edited, *Owned(work.system).paths}
    found = _Walk(work, mounts, volumes, own).run()
    places = sorted(fold(found, LOST_LIMIT).items())
    work.tell(LeaveEnd.WORKING, lost=tuple(Lost(_text(path), *each, volumes.get(path, "")) for path, each in places))
    return ""


def _text(path: str) -> str:
    """Return a path as JSON can have it."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def is_below(path: str, others: Sequence[str]) -> bool:
    """Return whether the path is one of the others, or lies below one of them. Pure."""
    return f"{path}/".startswith(tuple(f"{other}/" for other in others))


def is_volume(path: str, mounts: frozenset[str]) -> bool:
    """Return whether a pod's volume at this path has files that only this root has. Pure.

    One that has whole directories of the system in it is no place for data: a monitor has it.
    """
    if path in (*PASSING, *LOGS) or (is_below(path, (*MADE_AGAIN, *LOGS)) and not is_below(path, (OWN,))):
        return False
    inside = (*MADE_AGAIN, *PASSING, OWN)
    return not is_below(path, tuple(mounts)) and not any(is_below(each, (path.rstrip("/"),)) for each in inside)


def fold(found: Mapping[str, tuple[int, int]], limit: int) -> dict[str, tuple[int, int]]:
    """Return no more than `limit` places: the deepest ones count for the directories that they are in. Pure."""
    places = dict(found)
    while len(places) > limit:
        deepest = max(path.count("/") for path in places)
        for path in [each for each in places if each.count("/") == deepest]:
            files, size = places.pop(path)
            parent = posixpath.dirname(path)
            more = places.get(parent, (0, 0))
            places[parent] = files + more[0], size + more[1]
    return places


def _volumes(work: _Work, client: ApiClient, node: str) -> Iterator[tuple[str, str]]:
    """Yield the paths of the volumes that the Node's pods have on it, each with whose it is.

    A node's identity may read only the claims of its own pods, and the volumes of these.
    """
    for pod in _pods(client, node):
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        for volume in pod["spec"].get("volumes") or ():
            work.check()
            if path := (volume.get("hostPath") or {}).get("path"):
                yield path, f"pod {namespace}/{name}"
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            claim = f"{name}-{volume['name']}" if "ephemeral" in volume else claim
            if claim and (path := _claimed(client, namespace, claim)):
                yield path, f"claim {namespace}/{claim}"


def _claimed(client: ApiClient, namespace: str, claim: str) -> str:
    """Return where the claim's volume is on this Node; empty if it is elsewhere."""
    with contextlib.suppress(NotFoundError):
        claimed = client.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
        if name := claimed["spec"].get("volumeName"):
            spec = client.get(f"/api/v1/persistentvolumes/{name}")["spec"]
            return str((spec.get("local") or spec.get("hostPath") or {}).get("path") or "")
    return ""


class _Walk:
    """Counts the files of this root that are newer than it. It does not enter mounts, and follows no links."""

    def __init__(self, work: _Work, mounts: frozenset[str], volumes: Mapping[str, str], own: Collection[str]) -> None:
        self._work, self._mounts, self._volumes = work, mounts, volumes
        self._own = own
        """Files that systemd, the kubelet and the agent make again."""
        # The last file that `up` wrote into the root. The image's files have an older ctime, which no program can set.
        self._made = work.system.identity(NODE_FILES).ctime_ns
        self._found: dict[str, tuple[int, int]] = {}
        self._seen = 0

    def run(self) -> dict[str, tuple[int, int]]:
        """Return number and size of the files by directory, or by volume. Raises AgentError if time is up."""
        volumes = [*self._volumes]
        nested = [each for each in volumes if is_below(each, [other for other in volumes if other != each])]
        left = ["/", OWN, *(each for each in volumes if each not in nested and is_below(each, PASSING))]
        while left:
            directory = left.pop()
            # It may be gone by now.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                left += self._look(directory)
            if len(self._found) > 8 * LOST_LIMIT:
                self._found = fold(self._found, 4 * LOST_LIMIT)
        return self._found

    def _look(self, directory: str) -> list[str]:
        """Count a directory's files. Return the directories in it that have to be looked at."""
        inner = []
        for name, status in self._work.system.listing(directory):
            self._seen += 1
            self._work.check()
            if self._work.over:
                raise AgentError(f"after {self._seen} files, not all were looked at: last in {quoted(directory)}")
            if (path := posixpath.join(directory, name)) in self._mounts:
                continue
            if stat.S_ISDIR(status.st_mode):
                if path not in (*MADE_AGAIN, *PASSING):
                    inner.append(path)
            elif stat.S_ISREG(status.st_mode) and status.st_ctime_ns > self._made and path not in self._own:
                self._count(path, status.st_size)
        return inner

    def _count(self, path: str, size: int) -> None:
        of_volumes = [each for each in self._volumes if is_below(path, (each,))]
        place = max(of_volumes, key=len, default=posixpath.dirname(path))
        files, before = self._found.get(place, (0, 0))
        self._found[place] = files + 1, before + size


# The images of this machine's containers, which go to its candidate through the pipe: the candidate has no network.
# Those that need a secret are left out.

PIPE = f"{MACHINE_HANDOFF_DIRECTORY}/{IMAGES_NAME}"
CTR = ("ctr", "--namespace=k8s.io", "images")
SPARE = 0.2
"""Which part of a file system stays free. With less than 0.15, the kubelet removes images
(imageGCHighThresholdPercent)."""
PULLED = "image_manager/pulled"
"""Where the kubelet's directory has its records of the images that it has pulled (pkg/kubelet/images/pullmanager)."""
STORE = "/var/lib"
"""A directory on the file system that containerd has its images on, usually."""


def _give_images(work: _Work) -> str:
    names, missing, withheld = images_of_containers(
        _ctr(work, "ctr", "--namespace=k8s.io", "containers", "ls"),
        _ctr(work, *CTR, "check"),
        {*_images_of_some_pods(f"{work.kubelet()[0].root}/{PULLED}", work.system)},
    )
    without = f"{counted(missing, 'image')} without content (discard_unpacked_layers)" if missing else ""
    secret = f"{counted(withheld, 'image')} that not all pods may use" if withheld else ""
    lacks = " and ".join(filter(None, (without, secret)))
    if not names:
        raise _UnableError("its containers have no image to pass on" + (f": {lacks}" if lacks else ""))
    # By its transfer API, ctr 2.2.1 ends with 0 before it has written all to a reader that is slower than it is.
    local = ["--local"] if "--local" in _ctr(work, *CTR, "export", "--help") else []
    try:
        _through_pipe(work, ">", "export", *local, "-", *names)
    except UnreadError as error:
        raise AgentError("its candidate stopped reading its images") from error
    passed = f"its candidate has {counted(len(names), 'image name')} of its containers"
    return f"{passed}, but lacks {lacks}" if lacks else passed


def _take_images(work: _Work) -> str:
    _through_pipe(work, "<", "import", "-")
    return ""


def _images_of_some_pods(records: str, system: System) -> Iterator[str]:
    """Yield the ids of images that the kubelet lets only pods with certain credentials use. Raises an error.

    Since Kubernetes 1.35, it records that. Without a record, as in a new root, all pods may use an image that is there
    (NeverVerifyPreloadedImages, the default).
    """
    for name in system.entries(records) if system.is_directory(records) else ():
        if name.endswith(".tmp"):
            continue
        record = parse_object(name, system.read(f"{records}/{name}", SIZE_LIMIT))
        by_name = (record.get("credentialMapping") or {}).values()
        if not by_name or not all(each.get("nodePodsAccessible") is True for each in by_name):
            yield get(name, record, "imageRef", str)


def images_of_containers(containers: str, images: str, of_some: Collection[str]) -> tuple[list[str], int, int]:
    """Return the names of containers' images, how many have no name with all content, and how many are withheld. Pure.

    The first two arguments are what `ctr containers ls` and `ctr images check` print; the third are ids of images to
    withhold. An id is the digest of a configuration. Names that are one are left out: containerd makes them itself.
    """
    used = {row[1] for row in _rows(containers)}
    rows = [row for row in _rows(images) if len(row) > 3]
    digests = {digest for name, _, digest, *_ in rows if name in used}
    withheld = digests & {digest for name, _, digest, *_ in rows if name in of_some or digest in of_some}
    given = digests - withheld
    whole = {name: digest for name, _, digest, state, *_ in rows if digest in given and state == "complete"}
    names = sorted(name for name in whole if not name.startswith("sha256:"))
    return names, len(given - {whole[name] for name in names}), len(withheld)


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()[1:]]


def _ctr(work: _Work, *argv: str) -> str:
    """Run a command that uses ctr, and return what it prints. Raises an error, also if the disk gets too full."""
    if work.system.find_program("ctr") is None:
        raise _UnableError("its image has no ctr")

    def look() -> None:
        if work.system.free_share(STORE) < SPARE:
            raise AgentError(f"less than {SPARE:.0%} of the disk would be free")

    return _run(work, argv, max(work.left, 1.0), look)


def _through_pipe(work: _Work, direction: str, *arguments: str) -> None:
    """Run ctr with the pipe as its output or input."""
    _ctr(work, "sh", "-c", f'exec "$@" {direction}{PIPE}', "sh", *CTR, *arguments)


# The programs of a node, which do not run in a candidate: its kubelet is masked.

PROGRAMS = (("kubelet", "--version"), ("kubectl", "version", "--client"))
PROGRAM_LIMIT = 60.0
"""Seconds for a program's first run: the disk may be slow."""


def _try_programs(work: _Work) -> str:
    """Raise an error if one does not run, for example because it was made for other processors."""
    for name, *arguments in PROGRAMS:
        if work.system.find_program(name):
            _run(work, (name, *arguments), PROGRAM_LIMIT)
        elif name == "kubelet":
            raise AgentError("its root file system has no kubelet")
    return ""


def _run(work: _Work, argv: Sequence[str], limit: float, look: Callable[[], None] = lambda: None) -> str:
    """Run a program, and return what it prints. Raises an error, also that of a `look`, one each second.

    Meanwhile, the host hears that the machine works, and may withdraw its request: a program that hangs must not keep a
    drain waiting.
    """

    def ends() -> str | Exception:
        try:
            return work.system.run(*argv, timeout=limit)
        except Exception as error:
            return error

    running = InBackground(ends)
    while not running.ends_within(LOOK):
        work.check()
        look()
    if isinstance(printed := running.result(), Exception):
        raise printed
    return printed


TASKS: Mapping[LeaveTask, Callable[[_Work], str]] = {
    LeaveTask.DRAIN: _drain,
    LeaveTask.UNCORDON: _uncordon,
    LeaveTask.LOOK: _look,
    LeaveTask.EVICT: _evict_users,
    LeaveTask.GIVE_IMAGES: _give_images,
    LeaveTask.TAKE_IMAGES: _take_images,
    LeaveTask.TRY_PROGRAMS: _try_programs,
}
"""Each returns a message for the host."""
