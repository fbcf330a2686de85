"""Measure GPUs by Dynamic Resource Allocation at a real API server and scheduler, without a virtual machine.

The service that offers the GPUs runs in a process of its own, as its unit would start it. gRPC's own client calls the
service as the kubelet does.
"""

import http.client
import json
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agent.dra.slices import COLLECTION
from agent.system.api_server import ApiClient, Credentials
from integration.bed.cluster.control_plane import CERTIFICATE_FILES
from integration.bed.cluster.dra_node import Offering, offering
from integration.bed.cluster.stand_in_kubelet import DriverSocket, listed, until
from integration.bed.machine.dra_namespace import KUBECONFIG
from integration.bed.measure.bench_script import Measures
from tests.fakes.dra_machine import GPUS, NODE

PAIRS = 100
CHANGES = 20
CLAIM_NAME = "measured"
CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": CLAIM_NAME},
    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "nvidia-gpu"}}]}},
}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "measured"},
    "spec": {
        "containers": [{"name": "main", "image": "registry.invalid/none", "resources": {"claims": [{"name": "gpu"}]}}],
        "tolerations": [{"operator": "Exists"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": CLAIM_NAME}],
    },
}


def measure_dra(pairs: int = PAIRS, changes: int = CHANGES) -> Measures:
    """Measure how soon changed GPUs are offered, how long a claim's preparation takes, and the service's memory."""
    with offering() as offer:
        idle = offer.service.resident
        slices = _slice_after_cdi(offer, changes)
        bare, prepared = _prepare(offer, pairs)
        ratios = [ours / other for ours, other in zip(prepared, bare, strict=True)]
        return {
            **_spread("slice_vs_cdi_seconds", slices),
            **_spread("bare_get_ms", [1000 * each for each in bare]),
            **_spread("prepare_ms", [1000 * each for each in prepared]),
            **_spread("prepare_vs_bare", ratios),
            "dra_resident_at_start_mib": idle,
            "dra_resident_mib": offer.service.resident,
        }


def _slice_after_cdi(offer: Offering, changes: int) -> list[float]:
    """Publish CDI specifications with changing numbers of GPUs; return the seconds from each to its ResourceSlice."""
    seen, found = watched(offer, len), []
    for number in range(changes):
        count = 3 + number % (len(GPUS) - 2)
        seen.pop(count, None)
        offer.machine.grant(*GPUS[:count])
        begun = time.monotonic()
        until("the slice is there", lambda count=count: count in seen)  # type: ignore[misc]
        found.append(seen[count] - begun)
    return found


def watched(offer: Offering, what: Callable[[Sequence[Any]], int]) -> dict[int, float]:
    """Watch the node's slices. Return when `what` of a slice's devices was seen last, by its result, from now on."""
    seen: dict[int, float] = {}
    client = ApiClient(Credentials(offer.machine, KUBECONFIG))
    selector = f"spec.nodeName={NODE}"
    version = client.get(COLLECTION, fieldSelector=selector)["metadata"]["resourceVersion"]
    watching = threading.Event()

    def watch() -> None:
        for event in client.watch(COLLECTION, version, fieldSelector=selector):
            watching.set()
            seen[what(event.get("object", {}).get("spec", {}).get("devices", ()))] = time.monotonic()

    threading.Thread(target=watch, daemon=True).start()
    watching.wait(10)
    return seen


def _prepare(offer: Offering, pairs: int) -> tuple[list[float], list[float]]:
    """GET a claim and prepare it, again and again; return the seconds of each GET, and those of each preparation."""
    content = {"apiVersion": "v1", "kind": "List", "items": [CLAIM, POD]}
    offer.cluster.kubectl("create", "--filename=-", stdin=json.dumps(content))
    until("the claim is allocated", lambda: listed(offer.cluster, "resourceclaims")[0].get("status"))
    (claim,) = listed(offer.cluster, "resourceclaims")
    bare, prepared = [], []
    path = f"/apis/resource.k8s.io/v1/namespaces/{claim['metadata']['namespace']}/resourceclaims/{CLAIM_NAME}"
    with DriverSocket(offer.machine.kubelet) as driver, getting(offer, path) as get:
        for number in range(pairs + 10):
            before = time.perf_counter()
            get()
            between = time.perf_counter()
            answer = driver.prepare(claim)
            after = time.perf_counter()
            assert answer.devices, answer
            assert not driver.unprepare(claim)
            # The first rounds do not count: connections are made and modules are loaded then.
            if number >= 10:
                bare.append(between - before)
                prepared.append(after - between)
    return bare, prepared


@contextmanager
def getting(offer: Offering, path: str) -> Iterator[Callable[[], None]]:
    """Yield a function that GETs an object as the kubelet's user, on a new connection, without parsing the answer."""
    kubeconfig = json.loads(offer.machine.read(KUBECONFIG))
    files = [offer.machine.full_path(kubeconfig["users"][0]["user"][key]) for key in CERTIFICATE_FILES]
    context = ssl.create_default_context(cadata=offer.cluster.certificate_authority)
    context.load_cert_chain(*files)

    def get() -> None:
        connection = http.client.HTTPSConnection("127.0.0.1", offer.cluster.port, context=context)
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status == http.HTTPStatus.OK, content

    yield get


def _spread(name: str, values: list[float]) -> Measures:
    """Return the median, and the limits between which nine of ten values are."""
    quantiles = statistics.quantiles(values, n=20)
    return {name: statistics.median(values), f"{name}_low": quantiles[0], f"{name}_high": quantiles[-1]}
