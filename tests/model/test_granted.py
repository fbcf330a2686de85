"""The record of the last grant, which the next pass reads."""

import pytest

from agent.host.state.gpus import GRANTED
from agent.model.errors import DocumentError
from agent.model.facts import Granted


def test_a_note_is_read_back() -> None:
    granted = Granted("0123456789abcdef", ("0000:01:00.0",), {"nvidia": 3})
    assert GRANTED.parse("", GRANTED.render(granted)) == granted


@pytest.mark.parametrize(
    ("roots", "named"),
    [
        (b"[]", "key driver_roots must be an object"),
        (b'{"nvidia": "3"}', r"key driver_roots\['nvidia'\] must be a whole number, not a string"),
        (b'{"nvidia": true}', r"key driver_roots\['nvidia'\] must be a whole number, not a boolean"),
        (b'{"a\\u001b[2J": null}', r"key driver_roots\['a\\x1b\[2J'\] must be a whole number"),
    ],
)
def test_errors_name_the_key(roots: bytes, named: str) -> None:
    with pytest.raises(DocumentError, match=named):
        GRANTED.parse("", b'{"version": 1, "generation": "", "gpus": [], "driver_roots": ' + roots + b"}")
