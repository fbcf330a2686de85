"""The contract between the halves survives its own round trip and refuses anything else by key."""

import json
from typing import Any

import pytest

from agent.errors import DocumentError
from agent.handoff import GrantedDevice, GrantedFile, Handoff, Request, parse_handoff, render_handoff

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
    assert parse_handoff(render_handoff(HANDOFF)) == HANDOFF


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not JSON"),
        (b"[]", "an object is needed"),
        (changed(version=2), "version 2 is not understood"),
        (changed(version=True), "key version must be int"),
        (changed(machine=None), "key machine is missing"),
        (changed(requests={}), "key requests must be list"),
        (changed(requests=[3]), r"requests\[0\]: an object is needed"),
        (changed(requests=[{"vendor": "nvidia"}]), r"requests\[0\]: key gpus is missing"),
        (changed(machine="other"), "key generation does not fit"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, named: str) -> None:
    with pytest.raises(DocumentError, match=named):
        parse_handoff(data)
