"""Entries of DeviceAllow= and their text."""

import pytest

from agent.model.facts import DeviceAllow


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("/dev/char/195:0 rw", DeviceAllow("/dev/char/195:0", "rw")),
        ("char-pts r", DeviceAllow("char-pts", "r")),
        ("/dev/fuse", DeviceAllow("/dev/fuse")),
        ("/dev/fuse  rw", DeviceAllow("/dev/fuse", " rw")),
    ],
)
def test_an_entry_has_the_text_that_it_was_read_from(text: str, entry: DeviceAllow) -> None:
    """A template's list is copied to the drop-in: a different text would make running machines look outdated."""
    assert DeviceAllow.parse(text) == entry
    assert str(entry) == text
