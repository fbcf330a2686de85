"""The document with the devices that claims may get."""

import json
from typing import Any

import pytest

from agent.model.contract import AllocatableDevice, AllocatableVendor, parse_allocatable, render_allocatable
from agent.model.errors import DocumentError

WHOLE = AllocatableDevice("0000:01:00.0", ("vendor.com/gpu=GPU-1b2c",))
PART = AllocatableDevice("0000:02:00.0", ("vendor.com/gpu=MIG-7:0", "vendor.com/other=x"), (7, 0))
OTHER = AllocatableDevice("0000:00:02.0", ("other.com/gpu=0000:00:02.0",))
ALL = (
    AllocatableVendor("vendor", (WHOLE, PART), "", "550.163.01"),
    AllocatableVendor("other", (OTHER,)),
    AllocatableVendor("third", problem="the CDI specification failed the check"),
)


def document(**changed: Any) -> bytes:  # noqa: ANN401 - whatever JSON holds
    device = {"pci_address": "0000:01:00.0", "cdi_names": ["vendor.com/gpu=0"], "partition": []}
    vendor = {"vendor": "vendor", "devices": [device], "problem": "", "driver_version": ""}
    for item in (device, vendor):
        item.update({key: value for key, value in changed.items() if key in item})
    return json.dumps({"version": changed.get("version", 1), "vendors": [vendor] * changed.get("vendors", 1)}).encode()


def test_a_document_is_read_back() -> None:
    assert parse_allocatable(render_allocatable(ALL)) == ALL
    assert render_allocatable(ALL) == render_allocatable(parse_allocatable(render_allocatable(ALL)))
    assert parse_allocatable(render_allocatable(())) == ()


def test_keys_of_later_releases_are_ignored() -> None:
    later = json.loads(document())
    later["vendors"][0]["devices"][0]["later"] = later["later"] = 1
    assert parse_allocatable(json.dumps(later).encode()) == parse_allocatable(document())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "allocatable.json: version 2 is unknown"),
        ({"vendors": 2}, "allocatable.json: vendor vendor is listed twice"),
        ({"vendor": "../x"}, r"vendors\[0\]: key vendor must be a vendor's name, not '../x'"),
        ({"problem": None}, r"vendors\[0\]: key problem must be a string, not null"),
        (
            {"pci_address": "01:00.0"},
            r"vendors\[0\]: devices\[0\]: key pci_address must be a PCI address, not '01:00.0'",
        ),
        ({"cdi_names": []}, r"devices\[0\]: key cdi_names must be a list of names, not '\[\]'"),
        ({"cdi_names": ["gpu0"]}, r"key cdi_names\[0\] must be the name of a single device, .*, not 'gpu0'"),
        ({"cdi_names": ["vendor.com/gpu=all"]}, "not 'vendor.com/gpu=all'"),
        ({"cdi_names": ["vendor.com/gpu=0\n"]}, r"not 'vendor.com/gpu=0\\n'"),
        ({"cdi_names": ["vendor.com/gpu=0", "vendor.com/gpu=0"]}, "CDI name vendor.com/gpu=0 is listed twice"),
        ({"cdi_names": [f"vendor.com/gpu={'0' * 600}"]}, r"key cdi_names\[0\] must"),
        ({"partition": [True]}, r"key partition\[0\] must be a whole number, not a boolean"),
        ({"partition": [-1]}, r"key partition\[0\] must be a number below 65536"),
        ({"partition": [1, 2, 3, 4, 5]}, "key partition must be"),
        ({"devices": [json.loads(document())["vendors"][0]["devices"][0]] * 2}, "is listed twice"),
    ],
)
def test_errors_name_the_key(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        parse_allocatable(document(**changed))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100000, b'{"version": 1}'])
def test_what_is_no_such_document_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"allocatable\.json"):
        parse_allocatable(data)
