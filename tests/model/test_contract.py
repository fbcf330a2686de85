"""The documents next to the handoff: what is written is read back, and what is malformed is refused by its key."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.model.contract import (
    MESSAGE_LIMIT,
    AllocatableDevice,
    AllocatableVendor,
    DraStatus,
    Effect,
    GpuState,
    GpuStatus,
    VendorOffer,
    parse_allocatable,
    parse_dra_status,
    parse_gpu_states,
    render_allocatable,
    render_dra_status,
    render_gpu_states,
)
from agent.model.errors import DocumentError
from agent.system.files import READ_LIMIT

WHOLE = AllocatableDevice("0000:01:00.0", ("vendor.com/gpu=GPU-1b2c",))
PART = AllocatableDevice("0000:02:00.0", ("vendor.com/gpu=MIG-7:0", "vendor.com/other=x"), (7, 0))
OTHER = AllocatableDevice("0000:00:02.0", ("other.com/gpu=0000:00:02.0",))
ALL = (
    AllocatableVendor("vendor", (WHOLE, PART), "", "550.163.01"),
    AllocatableVendor("other", (OTHER,)),
    AllocatableVendor("third", problem="the CDI specification failed the check"),
)
WELL = GpuStatus(
    "0000:01:00.0", "vendor", GpuState.HEALTHY, kernel_driver="vendor", numa_node=1, pcie_root="pci0000:00"
)
FAILED = GpuStatus(
    *("0000:02:00.0", "vendor", GpuState.UNHEALTHY, "Xid48", "a double-bit ECC error", Effect.NO_SCHEDULE, 1700000000)
)
OFFER = VendorOffer("vendor", ("0000:01:00.0",), ("gpu-0000-01-00-0",), (), "Refused", "403")
STATUS = DraStatus(1700000000.5, "node", True, (OFFER,), "", "")

Parse = Callable[[bytes], object]
DOCUMENTS: dict[Parse, bytes] = {
    parse_allocatable: render_allocatable([AllocatableVendor("vendor", (WHOLE,))]),
    parse_gpu_states: render_gpu_states([WELL]),
    parse_dra_status: render_dra_status(STATUS),
}


def changed(parse: Parse, **keys: Any) -> bytes:  # noqa: ANN401 - whatever JSON holds
    """Return a document in which the objects that have one of these keys have another value there."""

    def change(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {name: keys.get(name, change(each)) for name, each in value.items()}
        return [change(each) for each in value] if isinstance(value, list) else value

    return json.dumps(change(json.loads(DOCUMENTS[parse]))).encode()


def test_documents_are_read_back() -> None:
    assert parse_allocatable(render_allocatable(ALL)) == ALL
    assert render_allocatable(ALL) == render_allocatable(parse_allocatable(render_allocatable(ALL)))
    assert parse_allocatable(render_allocatable(())) == ()
    found = parse_gpu_states(render_gpu_states([FAILED, WELL]))
    assert found == {WELL.pci_address: WELL, FAILED.pci_address: FAILED}
    assert render_gpu_states([WELL, FAILED]) == render_gpu_states(found.values())
    assert parse_gpu_states(render_gpu_states([])) == {}
    assert parse_dra_status(render_dra_status(STATUS)) == STATUS


def test_keys_of_later_releases_are_ignored() -> None:
    later = json.loads(DOCUMENTS[parse_allocatable])
    later["vendors"][0]["devices"][0]["later"] = later["later"] = 1
    assert parse_allocatable(json.dumps(later).encode()) == parse_allocatable(DOCUMENTS[parse_allocatable])


def test_messages_are_one_short_line() -> None:
    long = GpuStatus("0000:01:00.0", "vendor", GpuState.LOST, "Xid79", "off\nthe bus \x1b[2J" + "x" * 9000)
    message = parse_gpu_states(render_gpu_states([long]))["0000:01:00.0"].message
    assert message.startswith("off the bus \\x1b[2Jxx")
    assert len(message) == MESSAGE_LIMIT
    assert parse_dra_status(render_dra_status(DraStatus(1.0, message="two\nlines"))).message == "two lines"


def test_the_limit_is_enough_for_a_large_host() -> None:
    worst = (
        GpuStatus(f"0000:{each:02x}:00.0", "v" * 60, GpuState.LOST, "x" * 63, "\U0001f4a5" * 500) for each in range(32)
    )
    assert len(render_gpu_states(worst)) < READ_LIMIT


@pytest.mark.parametrize(
    ("parse", "keys", "message"),
    [
        (parse_allocatable, {"version": 2}, "allocatable.json: version 2 is unknown"),
        (parse_allocatable, {"vendor": "../x"}, r"vendors\[0\]: key vendor must be a vendor's name, not '../x'"),
        (parse_allocatable, {"problem": None}, r"vendors\[0\]: key problem must be a string, not null"),
        (
            parse_allocatable,
            {"pci_address": "01:00.0"},
            r"vendors\[0\]: devices\[0\]: key pci_address must be a PCI address, not '01:00.0'",
        ),
        (parse_allocatable, {"cdi_names": []}, r"devices\[0\]: key cdi_names must be a list of names, not '\[\]'"),
        (parse_allocatable, {"cdi_names": ["gpu0"]}, r"cdi_names\[0\] must be the name of a single .*, not 'gpu0'"),
        (parse_allocatable, {"cdi_names": ["vendor.com/gpu=all"]}, "not 'vendor.com/gpu=all'"),
        (parse_allocatable, {"cdi_names": ["vendor.com/gpu=0\n"]}, r"not 'vendor.com/gpu=0\\n'"),
        (parse_allocatable, {"cdi_names": ["v.com/gpu=0", "v.com/gpu=0"]}, "CDI name v.com/gpu=0 is listed twice"),
        (parse_allocatable, {"cdi_names": [f"vendor.com/gpu={'0' * 600}"]}, r"key cdi_names\[0\] must"),
        (parse_allocatable, {"partition": [True]}, r"key partition\[0\] must be a whole number, not a boolean"),
        (parse_allocatable, {"partition": [-1]}, r"key partition\[0\] must be a number below 65536"),
        (parse_allocatable, {"partition": [1, 2, 3, 4, 5]}, "key partition must be"),
        (
            parse_allocatable,
            {"devices": [{"pci_address": "0000:01:00.0", "cdi_names": ["v.com/gpu=0"]}] * 2},
            "is listed twice",
        ),
        (parse_allocatable, {"vendors": [{"vendor": "vendor"}] * 2}, "vendor vendor is listed twice"),
        (parse_gpu_states, {"version": 7}, "gpus.json: version 7 is unknown"),
        (parse_gpu_states, {"pci_address": "x"}, r"gpus\[0\]: key pci_address must be a PCI address, not 'x'"),
        (parse_gpu_states, {"state": 1}, "key state must be a string"),
        (parse_gpu_states, {"state": "resetting"}, "key state must be one of 'healthy', .*, not 'resetting'"),
        (parse_gpu_states, {"effect": "Pause"}, "key effect must be one of '', .*, not 'Pause'"),
        (parse_gpu_states, {"reason": "Xid 79"}, "key reason must be one word, not 'Xid 79'"),
        (parse_gpu_states, {"since": -1}, "key since must be a time in seconds, not '-1'"),
        (parse_gpu_states, {"since": 1.5}, "key since must be a whole number, not a decimal number"),
        (parse_gpu_states, {"pcie_root": "0000:00"}, "key pcie_root must be a root complex"),
        (parse_gpu_states, {"kernel_driver": "a b"}, "key kernel_driver must be a driver's name"),
        (parse_gpu_states, {"numa_node": None}, "key numa_node must be a whole number"),
        (parse_dra_status, {"version": 2}, "dra-status.json: version 2 is unknown"),
        (parse_dra_status, {"at": "now"}, "key at must be a number, not a string"),
        (parse_dra_status, {"at": True}, "key at must be a number"),
        (parse_dra_status, {"at": -1}, "key at must be a time in seconds, not '-1'"),
        (parse_dra_status, {"registered": 1}, "key registered must be a boolean"),
        (parse_dra_status, {"offers": [1]}, r"offers\[0\]: must be an object"),
        (parse_dra_status, {"offers": [{"gpus": []}]}, r"offers\[0\]: key vendor is missing"),
    ],
)
def test_errors_name_the_key(parse: Parse, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        parse(changed(parse, **keys))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100000, b'{"version": 1}'])
def test_what_is_no_such_document_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"allocatable\.json"):
        parse_allocatable(data)
