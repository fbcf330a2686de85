"""How records are written and read: what counts as damage, and how it is reported."""

import pytest
from msgspec import Struct

from agent.host.state.records import Record
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken
from agent.system.trust import discarded
from tests.fakes.host import Host

PATH = "/run/unbounded-agent/numbers.json"


class Numbers(Struct, frozen=True):
    numbers: tuple[int, ...]
    name: str = ""


VERSIONED = Record(Numbers, 2, advice="count again")
PLAIN = Record(dict[str, int])


def test_a_record_is_read_back() -> None:
    numbers = Numbers((1, 2), "é")
    assert VERSIONED.parse("", VERSIONED.render(numbers)) == numbers
    assert VERSIONED.parse("", b'{"version": 2, "numbers": []}') == Numbers(())
    assert PLAIN.parse("", PLAIN.render({"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    ("data", "expected"),
    # How keys are named is shown by tests/model/test_typed_json.py.
    [
        (b"[]", "where: the document must be an object, not a list"),
        (b'{"numbers": []}', "key version is missing"),
        (b'{"version": 3, "numbers": []}', "version 3 is unknown"),
        (b'{"version": 2, "numbers": [1.0]}', r"key numbers\[0\] must be a whole number, not a number"),
        (b'{"version": 2, "numbers": [], "other": "\\udc80"}', "where: not JSON"),
        (b'{"version": 2, "numbers": [], "other": NaN}', "where: not JSON"),
        (b'{"version": 2, "numbers": [], "other": ' + b"[" * 100_000, "where: not JSON"),
    ],
)
def test_damage_names_the_key_and_what_follows(data: bytes, expected: str) -> None:
    with pytest.raises(DocumentError, match=expected) as caught:
        VERSIONED.parse("where", data)
    assert caught.value.hint == "count again"


def test_only_damage_is_discarded(host: Host) -> None:
    assert isinstance(PLAIN.read_seen(PATH, host), Absent)
    assert PLAIN.read(PATH, host) is None
    host.file(PATH, "{")
    assert isinstance(PLAIN.read_seen(PATH, host), Broken)
    assert "numbers.json" not in discarded()
    assert PLAIN.read(PATH, host) is None
    assert discarded()["numbers.json"] == 1
    PLAIN.write(PATH, {"a": 1}, host)
    assert PLAIN.read(PATH, host) == {"a": 1}
