"""docs/configuration.md has what the settings' classes say."""

from msgspec.structs import fields

from agent.config.checks import Table
from agent.config.settings import Config
from tests.project.configuration_reference import TABLES


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
