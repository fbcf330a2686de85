"""Writes the reference parts of pages in docs/ from the code: `make docs`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.project import commands_reference, configuration_reference, metrics_reference

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- Generated from {} by `make docs`. Do not edit below this line. -->\n"
PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "commands.md": (BEGIN.format("the parser"), commands_reference.generated),
    "configuration.md": (BEGIN.format("the settings' classes"), configuration_reference.generated),
    "metrics.md": (BEGIN.format("the service's metrics"), metrics_reference.generated),
}
"""The line before each page's generated part, and a function that returns that part."""


def page(name: str, text: str) -> str:
    """Return a page with its generated part replaced. Raises ValueError if the line before that part is missing."""
    begin, generated = PAGES[name]
    written, mark, _ = text.partition(begin)
    if not mark:
        raise ValueError(f"{name} does not contain the line {begin!r}")
    return written + mark + generated()


if __name__ == "__main__":
    for each in PAGES:
        (DOCS / each).write_text(page(each, (DOCS / each).read_text()))
