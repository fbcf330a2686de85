"""docs/configuration.md has what the settings' classes say."""

import pytest
from msgspec.structs import fields

from agent.config.settings import Config
from agent.config.table import Table
from tests.project.configuration_reference import BEGIN, PAGE, TABLES, page


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == page(text), "docs/configuration.md differs from the settings' docstrings: run `make docs`"


def models(model: type[Table]) -> set[type[Table]]:
    """Return the classes that a class's fields consist of, including itself."""
    found = {model}
    pending: list[object] = [field.type for field in fields(model)]
    while pending:
        each = pending.pop()
        pending += getattr(each, "__args__", ())
        if isinstance(each, type) and issubclass(each, Table):
            found |= models(each)
    return found


def test_no_class_of_settings_is_left_out() -> None:
    assert set(TABLES.values()) == models(Config) - {Config}


def test_a_page_without_the_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not contain the line"):
        page(PAGE.read_text().replace(BEGIN, ""))
