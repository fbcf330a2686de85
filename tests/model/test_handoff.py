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

CAPABILITY = GrantedDevice(
    "/dev/nvidia-caps/nvidia-cap12", "capability", 510, 12, "0000:01:00.0", "gpu0/mig/gi1/access"
)


def changed(**keys: Any) -> bytes:  # noqa: ANN401
    document = json.loads(render_handoff(HANDOFF))
    for key, value in keys.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    return json.dumps(document).encode()


def test_the_generation_is_that_of_the_grant() -> None:
    document = json.loads(render_handoff(HANDOFF))
    assert document.pop("version") == 1
    assert document.pop("generation") == HANDOFF.generation
    assert document.keys() == {*Handoff._fields}
    # A withdrawn node is no other grant.
    withdrawn = HANDOFF._replace(withdrawn=("/dev/kvm",))
    assert parse_handoff(render_handoff(withdrawn)) == withdrawn
    assert withdrawn.generation == HANDOFF.generation
    del document["withdrawn"]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
    assert digest == HANDOFF.generation
    for changed_handoff in (
        HANDOFF._replace(restart_device_plugin=True, default_runtime=True),
        HANDOFF._replace(requests=(HANDOFF.requests[0]._replace(devices=(CAPABILITY,)),)),
        HANDOFF._replace(containerd_drop_in="/etc/cri/conf.d/20-nvidia.part"),
        HANDOFF._replace(validation_markers=True),
        HANDOFF._replace(allocation=DRA),
    ):
        assert changed_handoff.generation != HANDOFF.generation
        assert parse_handoff(render_handoff(changed_handoff)) == changed_handoff


def test_another_version_says_which_half_to_upgrade() -> None:
    for version, advice in ((2, "upgrade the agent in the machine's image"), (0, "upgrade the agent on the host")):
        with pytest.raises(DocumentError, match=f"version {version} is unknown") as caught:
            parse_handoff(changed(version=version))
        assert advice in caught.value.hint


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
