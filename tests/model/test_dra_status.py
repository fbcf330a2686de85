"""The document with what agent.dra offers."""

import json

import pytest

from agent.model.contract import DraStatus, VendorOffer, parse_dra_status, render_dra_status
from agent.model.errors import DocumentError

OFFER = VendorOffer("vendor", ("0000:01:00.0",), ("gpu-0000-01-00-0",), (), "Refused", "403")
STATUS = DraStatus(1700000000.5, "node", True, (OFFER,), "", "")


def test_a_document_is_read_back() -> None:
    assert parse_dra_status(render_dra_status(STATUS)) == STATUS
    assert parse_dra_status(render_dra_status(DraStatus(1.0, message="two\nlines"))).message == "two lines"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 2, "dra-status.json: version 2 is unknown"),
        ("at", "now", "key at must be a number, not a string"),
        ("at", True, "key at must be a number"),
        ("at", -1, "key at must be a time in seconds, not '-1'"),
        ("registered", 1, "key registered must be a boolean"),
        ("offers", [1], r"offers\[0\]: must be an object"),
        ("offers", [{"gpus": []}], r"offers\[0\]: key vendor is missing"),
    ],
)
def test_errors_name_the_key(key: str, value: object, message: str) -> None:
    content = {**json.loads(render_dra_status(STATUS)), key: value}
    with pytest.raises(DocumentError, match=message):
        parse_dra_status(json.dumps(content).encode())
