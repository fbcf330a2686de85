"""Handoffs and reports survive a round trip. Malformed documents are refused, with the name of the wrong key."""

import hashlib
import json
from typing import Any

import pytest

from agent.model.errors import DocumentError
from agent.model.handoff import DRA, GrantedDevice, GrantedFile, Handoff, Request, parse_handoff, render_handoff

HANDOFF = Handoff(
    machine="gpu-node",
    architecture="x86_64",
    requests=(
        Request(
            vendor="nvidia",
            gpus=("0000:01:00.0",),
            devices=(GrantedDevice("/dev/nvidia0", "gpu", 195, 0, "0000:01:00.0"),),
            driver_version="550.163.01",
            driver_root="/run/host-nvidia/0",
            files=(GrantedFile("usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcuda.so.550.163.01"),),
        ),
    ),
)


def changed(**keys: Any) -> bytes:  # noqa: ANN401
    document = json.loads(render_handoff(HANDOFF))
    for key, value in keys.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    return json.dumps(document).encode()


def test_round_trip() -> None:
    for handoff in (HANDOFF, HANDOFF._replace(default_runtime=True, restart_device_plugin=True)):
        assert parse_handoff(render_handoff(handoff)) == handoff


def test_an_unchanged_handoff_is_rendered_once() -> None:
    """Each pass asks for the documents of all machines; rendering them would be most of its work."""
    once = render_handoff(HANDOFF)
    assert render_handoff(HANDOFF._replace()) is once
    other = HANDOFF._replace(machine="other")
    assert other.generation != HANDOFF.generation
    assert parse_handoff(render_handoff(other)) == other


def version_1() -> dict[str, Any]:
    """Return the content that the previous release knows."""
    (request,) = HANDOFF.requests
    return {
        **{key: getattr(HANDOFF, key) for key in ("machine", "architecture", "default_runtime")},
        "requests": [
            {
                **{key: getattr(request, key) for key in ("vendor", "gpus", "driver_version", "driver_root")},
                "devices": [
                    {key: getattr(each, key) for key in ("path", "kind", "major", "minor", "pci_address")}
                    for each in request.devices
                ],
                "files": [each._asdict() for each in request.files],
            }
        ],
    }


def digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def test_halves_that_do_not_know_the_restart_key() -> None:
    """An older host half leaves the key out; an older machine half computes its digest without the key."""
    assert parse_handoff(changed(restart_device_plugin=None)) == HANDOFF._replace(restart_device_plugin=None)
    assert HANDOFF._replace(restart_device_plugin=True).generation == HANDOFF.generation
    assert json.loads(render_handoff(HANDOFF))["generation"] == digest(version_1())


def test_halves_that_do_not_know_withdrawn_nodes() -> None:
    """An older machine half ignores the key, and computes its digest without it."""
    withdrawn = HANDOFF._replace(withdrawn=("/dev/kvm",))
    assert parse_handoff(render_handoff(withdrawn)) == withdrawn
    assert json.loads(render_handoff(withdrawn))["version"] == 1
    assert withdrawn.generation == HANDOFF.generation
    assert "withdrawn" not in json.loads(render_handoff(HANDOFF))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not JSON"),
        (b"[]", "must be an object"),
        (changed(version=3), "version 3 is unknown"),
        (changed(version=True), "key version must be a whole number"),
        (changed(machine=None), "key machine is missing"),
        (changed(requests={}), "key requests must be a list"),
        (changed(requests=[3]), r"requests\[0\]: must be an object"),
        (changed(requests=[{"vendor": "nvidia"}]), r"requests\[0\]: key gpus is missing"),
        (changed(machine="other"), "key generation does not match"),
        (changed(restart_device_plugin="yes"), "key restart_device_plugin must be a boolean"),
        (changed(validation_markers="yes"), "key validation_markers must be a boolean"),
        (changed(allocation=True), "key allocation must be a string"),
    ],
)
def test_errors_name_the_key(data: bytes, named: str) -> None:
    with pytest.raises(DocumentError, match=named):
        parse_handoff(data)


CAPABILITY = GrantedDevice(
    "/dev/nvidia-caps/nvidia-cap12", "capability", 510, 12, "0000:01:00.0", "gpu0/mig/gi1/access"
)


def test_a_document_has_the_oldest_version_that_can_express_it() -> None:
    """An older image keeps its GPUs until the machine is granted something that only newer images know."""
    document = json.loads(render_handoff(HANDOFF))
    assert document["version"] == 1
    assert set(document["requests"][0]["devices"][0]) == {"path", "kind", "major", "minor", "pci_address"}
    request = HANDOFF.requests[0]._replace(devices=(*HANDOFF.requests[0].devices, CAPABILITY))
    assert not {"containerd_drop_in", "validation_markers", "allocation"} & document.keys()
    for newer in (
        HANDOFF._replace(requests=(request,)),
        HANDOFF._replace(containerd_drop_in="/etc/cri/conf.d/20-nvidia.part"),
        HANDOFF._replace(validation_markers=True),
        HANDOFF._replace(allocation=DRA),
    ):
        assert json.loads(render_handoff(newer))["version"] == 2
        assert parse_handoff(render_handoff(newer)) == newer
        assert newer.generation != HANDOFF.generation


def test_a_version_1_document_is_understood() -> None:
    """Its generation is accepted too, although a host of the previous release computed it."""
    written = json.dumps({"version": 1, "generation": digest(version_1()), **version_1()}).encode()
    assert parse_handoff(written) == HANDOFF._replace(restart_device_plugin=None)
