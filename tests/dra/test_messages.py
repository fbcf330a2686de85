"""The messages of the kubelet's APIs, compared with a second declaration of them (tests.fakes.kubelet_api)."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from agent.dra.claims import ClaimReference, PreparedDevice
from agent.dra.inventory import Health
from agent.dra.kubelet import (
    HEALTH_MESSAGE_LIMIT,
    DeviceHealth,
    RegistrationStatus,
    decode_claims,
    decode_registration_status,
    encode_health,
    encode_plugin_info,
    encode_prepared,
    encode_unprepared,
)
from agent.model.errors import DocumentError
from tests.fakes.kubelet_api import make, read

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = some.text(max_size=40)
FILLED = some.text(min_size=1, max_size=40)


@given(some.lists(some.tuples(FILLED, FILLED, FILLED), max_size=5))
def test_claims_are_read_as_the_library_writes_them(claims: list[tuple[str, str, str]]) -> None:
    request = make(
        "NodePrepareResourcesRequest",
        claims=[{"namespace": namespace, "name": name, "uid": uid} for namespace, name, uid in claims],
    )
    assert decode_claims(request) == tuple(ClaimReference(*each) for each in claims)


@given(some.booleans(), TEXTS)
def test_a_registration_status_is_read(registered: bool, error: str) -> None:
    data = make("RegistrationStatus", plugin_registered=registered, error=error)
    assert decode_registration_status(data) == RegistrationStatus(registered, error)


@given(TEXTS, TEXTS, TEXTS, some.lists(TEXTS, max_size=4))
def test_plugin_info_is_written(kind: str, name: str, endpoint: str, services: list[str]) -> None:
    info = read("PluginInfo", encode_plugin_info(kind, name, endpoint, tuple(services)))
    assert (info.type, info.name, info.endpoint, list(info.supported_versions)) == (kind, name, endpoint, services)


NAMES = some.lists(TEXTS, max_size=3).map(tuple)
DEVICES = some.builds(PreparedDevice, requests=NAMES, pool=TEXTS, device=TEXTS, cdi_names=NAMES)


@given(some.dictionaries(TEXTS, some.lists(DEVICES, max_size=3).map(tuple)))
def test_prepared_claims_are_written(claims: dict[str, tuple[PreparedDevice, ...]]) -> None:
    found = read("NodePrepareResourcesResponse", encode_prepared(claims)).claims
    assert {
        uid: tuple(
            PreparedDevice(tuple(each.request_names), each.pool_name, each.device_name, tuple(each.cdi_device_ids))
            for each in result.devices
        )
        for uid, result in found.items()
    } == claims


def test_errors_and_shares_of_prepared_claims() -> None:
    device = PreparedDevice(("gpu",), "node", "gpu-0", ("a/b=c",), share="s1", admin=True)
    plain = PreparedDevice(("gpu",), "node", "gpu-1", ("a/b=d",))
    found = read("NodePrepareResourcesResponse", encode_prepared({"u1": "no", "u2": (device, plain), "u3": ()})).claims
    assert (found["u1"].error, list(found["u1"].devices), set(found)) == ("no", [], {"u1", "u2", "u3"})
    assert [(each.HasField("share_id"), each.share_id) for each in found["u2"].devices] == [(True, "s1"), (False, "")]


@given(some.dictionaries(TEXTS, TEXTS, max_size=5))
def test_unprepared_claims_are_written(results: dict[str, str]) -> None:
    found = read("NodeUnprepareResourcesResponse", encode_unprepared(results)).claims
    assert {uid: result.error for uid, result in found.items()} == results


@given(some.lists(some.tuples(TEXTS, some.sampled_from(Health), TEXTS)), some.integers(0, 1 << 40))
def test_health_is_written(devices: list[tuple[str, Health, str]], now: int) -> None:
    data = encode_health([DeviceHealth("node", *each) for each in devices], now, 30)
    answer = read("NodeWatchResourcesResponse", data).devices
    found = [
        (each.device.device_name, each.health, each.message, each.device.pool_name, each.last_updated_time)
        for each in answer
    ]
    assert found == [(*each, "node", now) for each in devices]
    assert all(each.health_check_timeout_seconds == 30 for each in answer)


def test_a_long_health_message_is_cut_between_characters() -> None:
    """The kubelet would cut it after 1021 bytes, and a pod's status cannot have half a character."""
    data = encode_health([DeviceHealth("node", "gpu", Health.UNHEALTHY, "€" * 400)], 1, 1)
    message = read("NodeWatchResourcesResponse", data).devices[0].message
    assert len(message.encode()) <= HEALTH_MESSAGE_LIMIT
    assert message == "€" * 340 + "..."


@given(some.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read_message in (decode_claims, decode_registration_status):
        with contextlib.suppress(DocumentError):
            read_message(data)


@given(some.lists(some.tuples(FILLED, FILLED, FILLED), min_size=1, max_size=3), some.data())
def test_damaged_messages_are_read_or_refused(claims: list[tuple[str, str, str]], data: some.DataObject) -> None:
    request = bytearray(
        make(
            "NodePrepareResourcesRequest",
            claims=[dict(zip(("namespace", "name", "uid"), each, strict=True)) for each in claims],
        )
    )
    place = data.draw(some.integers(0, len(request) - 1))
    request[place] = data.draw(some.integers(0, 255))
    with contextlib.suppress(DocumentError):
        decode_claims(bytes(request))


def test_unknown_fields_are_skipped() -> None:
    """A newer kubelet may send more: an integer, a text, and numbers of 32 and 64 bits."""
    newer = (
        make("Claim", namespace="n", name="c", uid="u") + b"\x50\x05" + b"\x4a\x03new" + b"\x5d1234" + b"\x6112345678"
    )
    assert decode_claims(b"\x18\x01\x0a" + bytes([len(newer)]) + newer) == (ClaimReference("n", "c", "u"),)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x0a\x00",
        b"\x0f",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x08" + b"\x80" * 10 + b"\x01",
        b"\x08\x80",
        b"\x0d\x01",
    ],
    ids=("field 0", "wire type 7", "cut off", "huge length", "endless integer", "cut integer", "cut number"),
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    for read_message in (decode_claims, decode_registration_status):
        with pytest.raises(DocumentError):
            read_message(data)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (b"\x08\x01" + b"\x12\x01u" + b"\x1a\x01c", "no namespace, uid or name"),
        (b"\x0a\x01n" + b"\x12\x01\xff" + b"\x1a\x01c", "."),
        (b"\x12\x01u" + b"\x1a\x01c", "no namespace, uid or name"),
        (b"\x0a\x01n" + b"\x1a\x01c", "no namespace, uid or name"),
        (b"\x0a\x01n" + b"\x12\x01u" + b"\x1a\x00", "no namespace, uid or name"),
    ],
    ids=("an integer for a text", "not UTF-8", "no namespace", "no uid", "empty name"),
)
def test_claims_of_the_wrong_form_are_refused(fields: bytes, why: str) -> None:
    good = b"\x0a\x01n" + b"\x12\x01u" + b"\x1a\x01c"
    assert decode_claims(b"\x0a" + bytes([len(good)]) + good) == (ClaimReference("n", "c", "u"),)
    with pytest.raises(DocumentError, match=why):
        decode_claims(b"\x0a" + bytes([len(fields)]) + fields)


def test_texts_that_are_not_unicode_are_sent_with_a_question_mark() -> None:
    """The name of a file or a text in JSON may have a surrogate, and must not fail the other claims of the pod."""
    device = PreparedDevice(("gpu\udc80",), "node", "gpu-0", ("a/b=\udc80",))
    found = read("NodePrepareResourcesResponse", encode_prepared({"u": (device,), "v": "/a\udc80"})).claims
    assert (list(found["u"].devices[0].request_names), found["v"].error) == (["gpu?"], "/a?")
    unprepared = read("NodeUnprepareResourcesResponse", encode_unprepared({"u": "/a\udc80"}))
    assert unprepared.claims["u"].error == "/a?"


def test_a_request_with_too_many_claims_is_refused() -> None:
    claim = {"namespace": "n", "name": "c", "uid": "u"}
    with pytest.raises(DocumentError, match="2000 claims"):
        decode_claims(make("NodePrepareResourcesRequest", claims=[claim] * 2000))


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("protoc") is None, reason="needs protoc: Debian's protobuf-compiler")
def test_the_generated_module_is_that_of_the_proto_file(tmp_path: Path) -> None:
    """`make proto` writes it. Other releases of protoc than 3.21 write modules that Debian's runtime refuses."""
    proto = "agent/dra/kubelet.proto"
    version = subprocess.run(("protoc", "--version"), capture_output=True, text=True, check=True).stdout
    assert version.startswith("libprotoc 3.21.")
    argv = ("protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto)
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    for suffix in ("_pb2.py", "_pb2.pyi"):
        name = proto.replace(".proto", suffix)
        assert (tmp_path / name).read_text() == (REPOSITORY / name).read_text(), "run `make proto`"
