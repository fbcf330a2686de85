"""Cordons this machine's own Node while its device plugin offers a GPU that no new pod should get.

A plugin that withdraws the GPU fences it alone. Otherwise the whole Node is cordoned, because a node's identity may do
nothing less. In Kubernetes 1.36.3 and 1.37.2, the Node authorizer lets it patch Nodes (authorizeNode in
node_authorizer.go), and NodeRestriction only its own, without the taints and some labels (admitNode in admission.go).
Neither looks at spec.unschedulable or annotations. Pods are never evicted.

The annotation CORDONED_FOR is set by the same patch, and tells the agent's cordon from anybody else's. Nothing else
says whether the Node is cordoned: a machine half that was killed goes on from what the Node says.
"""

import contextlib
from collections.abc import Collection, Sequence

from agent.machine.kubelet import offered_gpus
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType
from agent.model.contract import FencedGpu, parse_host_status
from agent.model.errors import AgentError, DocumentError
from agent.model.handoff import SIZE_LIMIT, parse_handoff
from agent.model.paths import CONDITIONS_NAME, CORDONED_FOR, HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, NODE_CORDON_MARK
from agent.system.api_server import ApiClient, ConflictError, Credentials, NotFoundError
from agent.system.files import System
from agent.system.journal import INFO, Ages, say
from agent.system.kubelet_identity import Identity, Kubelet

TRIES = 3
"""How often one run tries if somebody else changes the Node meanwhile, such as the kubelet."""


def settle_cordon(system: System, kubelet: Kubelet, ages: Ages, before: str) -> str:
    """Cordon or uncordon the Node if needed, and return Report.cordon. `before` is that of the last run."""
    try:
        fenced: tuple[FencedGpu, ...] = ()
        with contextlib.suppress(FileNotFoundError):
            fenced = parse_host_status(system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}")).fenced
    except DocumentError:
        # Another condition names the document. Without it, nothing is known, and so nothing changes.
        return before
    recorded = None
    try:
        recorded = system.read_text(NODE_CORDON_MARK).strip() if system.exists(NODE_CORDON_MARK) else None
        return _settle(system, kubelet, fenced, recorded, ages)
    except (AgentError, OSError) as error:
        problem = f"cannot tell the Node which GPUs are fenced, and tries again: {error}"
        # In a new root, the kubelet may not have joined yet.
        return problem if fenced or recorded != "" else ""


def _settle(system: System, kubelet: Kubelet, fenced: Sequence[FencedGpu], recorded: str | None, ages: Ages) -> str:
    """`recorded` is the content of the mark; None without one."""
    if not fenced and recorded is None:
        return ""
    wanted, awaited = _offered(system, fenced, ages)
    identity = kubelet.find(ConditionType.NODE_CONDITION_SET)
    if isinstance(identity, Condition):
        return f"the node is not changed: {identity.message}" if wanted or recorded else ""
    if recorded not in (None, "", identity.node):
        say(INFO, f"node {recorded} stays cordoned: the kubelet is now that of node {identity.node}: uncordon it")
    for _ in range(TRIES - 1):
        with contextlib.suppress(ConflictError):
            return _change(system, identity, fenced, wanted, recorded or "", awaited)
    return _change(system, identity, fenced, wanted, recorded or "", awaited)


def _offered(system: System, fenced: Sequence[FencedGpu], ages: Ages) -> tuple[tuple[FencedGpu, ...], bool]:
    """Return those of the fenced GPUs that pods may still get from a device plugin, and whether one has never run."""
    if not fenced:
        return (), False
    requests = parse_handoff(system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}", SIZE_LIMIT)).requests
    known = [(VENDORS[each.vendor], each) for each in requests if each.vendor in VENDORS]
    found = [(request.gpus, offered_gpus(system, vendor, request, ages)) for vendor, request in known]
    offered = {gpu for _, gpus in found for gpu in gpus or ()}
    awaited = any(each.pci_address in granted for granted, gpus in found if gpus is None for each in fenced)
    return tuple(each for each in fenced if each.pci_address in offered), awaited


def _change(
    system: System,
    identity: Identity,
    fenced: Sequence[FencedGpu],
    wanted: Sequence[FencedGpu],
    recorded: str,
    awaited: bool,
) -> str:
    client, path = ApiClient(Credentials(system, identity.kubeconfig)), f"/api/v1/nodes/{identity.node}"
    try:
        node = client.get(path)
    except NotFoundError:
        system.remove(NODE_CORDON_MARK)
        return f"the API server has no node {identity.node}" if fenced or recorded else ""
    is_cordoned = (node.get("spec") or {}).get("unschedulable") is True
    found = (node["metadata"].get("annotations") or {}).get(CORDONED_FOR)
    if is_cordoned and found and awaited and not wanted and not recorded:
        # Another root has done that. In this one, the plugin has not started yet: it will offer the GPU.
        return f"the node stays cordoned for {found} until its device plugin runs"
    cordoned, noted, said = decide(is_cordoned, found, _words(fenced), _words(wanted))
    # Until then, `start` may hand over a cordon of its own.
    looks_again = noted is not None or (cordoned and bool(fenced))
    if looks_again:
        # First, so that a run after this one, without the host status, looks at the Node.
        system.write(NODE_CORDON_MARK, f"{identity.node}\n".encode(), 0o600)
    if (cordoned, noted) != (is_cordoned, found):
        # With a version, the patch fails if somebody else has changed the Node since.
        metadata = {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": {CORDONED_FOR: noted}}
        client.request("PATCH", path, {"metadata": metadata, "spec": {"unschedulable": cordoned or None}})
        say(INFO, f"node {identity.node}: {said or 'the cordon for GPUs has ended'}")
    if not looks_again:
        system.remove(NODE_CORDON_MARK)
    return said


def _words(gpus: Sequence[FencedGpu]) -> list[str]:
    return [f"{each.pci_address}={each.reason}" for each in gpus]


def decide(
    cordoned: bool, annotation: str | None, fenced: Collection[str], offered: Collection[str]
) -> tuple[bool, str | None, str]:
    """Return whether the Node should be cordoned, the annotation that it should have, and Report.cordon. Pure.

    The first two parameters are what the Node has now. `offered` are those of the `fenced` GPUs that pods may get.
    """
    names = ", ".join(offered)
    if annotation is None and cordoned:
        return True, None, "somebody else has cordoned the node, and has to uncordon it" if offered else ""
    known = [] if annotation is None else annotation.split(",")
    if set(offered) - set(known) or (offered and cordoned):
        return True, ",".join(offered), f"the node is cordoned, because a device plugin offers {names}"
    if offered:
        said = f"the node is not cordoned, because somebody has uncordoned it although a device plugin offers {names}"
    else:
        said = f"the node need not be cordoned: no device plugin offers {', '.join(fenced)}" if fenced else ""
    # Somebody has uncordoned it. That counts for as long as the GPU is fenced for the same reason.
    kept = [] if cordoned else [each for each in known if each in fenced]
    return False, ",".join(kept) or None, said
