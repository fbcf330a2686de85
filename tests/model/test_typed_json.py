"""How errors of typed JSON name the key, and how bytes become text."""

from typing import Any

import pytest
from msgspec import Struct

from agent.model.errors import DocumentError
from agent.model.typed_json import Base64, convert, decode, to_builtins


class Inner(Struct):
    number: int
    numbers: dict[str, int] = {}


class Outer(Struct, forbid_unknown_fields=True):
    inner: dict[str, tuple[Inner, ...]] = {}
    content: Base64 = Base64()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"inner": []}, "key inner must be an object, not a list"),
        ({"inner": {"a": [], "b": [{"number": "1"}]}}, "key inner[...][0].number must be a whole number, not a string"),
        ({"inner": {"é": [{}]}}, "key inner[...][0].number is missing"),
        ({"other": 1}, "key other is unknown"),
        # Such keys look like the paths in msgspec's errors.
        ({"x` - at `$.inner[...]": 1}, "key inner[...].x is unknown"),
        ({"x` - at `$.other[0][...]": 1}, "key other[0][...].x is unknown"),
        ({"x\nü" + "x" * 1000: 1}, "key x\\n\\xfc" + "x" * 97 + " is unknown"),
        ({"content": 1}, "key content: must be a string in base64url"),
        ({"content": "YQ=\n"}, "key content: "),
    ],
)
def test_errors_name_the_key(document: dict[str, Any], expected: str) -> None:
    with pytest.raises(DocumentError) as caught:
        convert("file", document, Outer)
    assert str(caught.value).startswith(f"file: {expected}")
    assert str(caught.value).isascii()


def test_bytes_are_base64url_as_in_the_records_of_older_releases() -> None:
    content = Base64(b"\xff\xfe\0")
    assert to_builtins(Outer(content=content)) == {"inner": {}, "content": "__4A"}
    for text in ("__4A", "//4A"):
        assert convert("", {"content": text}, Outer).content == content


def test_strings_are_utf_8_even_if_nobody_reads_them() -> None:
    assert decode("", '{"number": 1, "other": "é"}'.encode(), Inner) == Inner(1)
    with pytest.raises(DocumentError, match="file: not JSON"):
        decode("file", b'{"number": 1, "other": "\xff"}', Inner)
