"""The base class of the configuration's tables, and the checks that `Annotated` attaches to the types of their keys.

pydantic validates a document, because it finds all mistakes; msgspec would stop at the first one. Nevertheless, the
tables are msgspec structs: to load pydantic takes 80 ms and 13 MB, so only code that validates a new document loads it.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct
from msgspec.structs import fields

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration. Its `__post_init__` raises ValueError if keys contradict each other."""

    @classmethod
    def validated(cls, document: object) -> Self:
        """Return the table in a document. Raises pydantic.ValidationError."""
        table: Self = _adapter(cls).validate_python(document, strict=True)
        return table

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Tell pydantic how to validate the table (pydantic's documentation, "Custom types")."""
        from pydantic_core import core_schema

        keys = {
            each.name: core_schema.typed_dict_field(handler.generate_schema(each.type), required=each.required)
            for each in fields(cls)
        }
        table = core_schema.typed_dict_schema(keys, extra_behavior="forbid")
        return core_schema.no_info_after_validator_function(lambda values: cls(**values), table)


@cache
def _adapter(table: type[Table]) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(table)


class Check(Struct, frozen=True):
    """Checks the value of a key, or an item in that value."""

    function: Callable[[Any], object]
    """Takes the value, and returns it, perhaps in another form. Raises ValueError if the value is not allowed."""

    def __get_pydantic_core_schema__(self, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Let pydantic call the function after it has checked the type."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(source))


class Range(Struct, frozen=True):
    """Limits a whole number. The limits themselves are allowed."""

    lowest: int
    highest: int

    def __get_pydantic_core_schema__(self, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Let pydantic check the number."""
        from pydantic_core import core_schema

        return core_schema.int_schema(ge=self.lowest, le=self.highest)


def text(pattern: str, expected: str, *, longest: int = 0, secret: bool = False) -> Check:
    """Return a check for strings that match a regular expression as a whole.

    In the error, `expected` says what the string should be. If `longest` is not 0, it limits the string's length. If
    the string may be `secret`, the error does not quote it: everyone can read the error in conditions and on the
    service's pages.
    """

    def check(value: str) -> str:
        # Check the length first: the time that a regular expression takes may grow with the square of the length.
        if longest and len(value) > longest:
            raise ValueError(f"must not be longer than {longest} characters")
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{'it' if secret else repr(value)} is not {expected}")
        return value

    return Check(check)
