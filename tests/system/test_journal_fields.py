"""Entries with fields for the journal: a socket of the test is the journal's."""

import io
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.system.journal_fields import COMMAND_ID, JournalHandler, record_command, write_entry

Read = Callable[[], list[str]]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[tuple[str, Read]]:
    """Yield the socket's path, and what reads the lines of the next entry."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(path)
        receiving.settimeout(5)
        yield path, lambda: receiving.recv(65536).decode().splitlines()


def test_a_value_begins_no_field_of_its_own(journal: tuple[str, Read]) -> None:
    path, read = journal
    write_entry(4, "two\nlines", {"MACHINE": "gpu\nPRIORITY=0"}, path)
    expected = ["PRIORITY=4", "SYSLOG_IDENTIFIER=unbounded-agent", "MACHINE=gpu PRIORITY=0", "MESSAGE=two lines"]
    assert read() == expected


def test_a_field_for_each_gpu_finds_the_entry_by_any_of_them(journal: tuple[str, Read]) -> None:
    path, read = journal
    write_entry(4, "hot", {"GPU": "0000:01:00.0 0000:02:00.0\nPRIORITY=0"}, path)
    gpus = ["GPU=0000:01:00.0", "GPU=0000:02:00.0", "GPU=PRIORITY=0"]
    assert read() == [*gpus, "PRIORITY=4", "SYSLOG_IDENTIFIER=unbounded-agent", "MESSAGE=hot"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's commands change the host")
def test_a_command_is_recorded_with_its_exit_code(journal: tuple[str, Read], monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = journal
    monkeypatch.setenv("SUDO_USER", "alice")
    record_command(["gpus", "detach", "0000:02:00.0"], 1, path)
    entry = read()
    assert "COMMAND=gpus detach 0000:02:00.0" in entry
    assert "EXIT_CODE=1" in entry
    assert entry[-1] == "MESSAGE=unbounded-agent gpus detach 0000:02:00.0: exit code 1, by alice with sudo"
    assert "GPU=0000:02:00.0" in entry
    assert not [each for each in entry if each.startswith("MACHINE=")]
    record_command(["restart", "gpu-node"], 0, path, machine="gpu-node")
    assert "MACHINE=gpu-node" in read()
    record_command(["apply"], 0, f"{path}-missing")


def logged(stream: io.TextIOWrapper, path: str, **extra: dict[str, str]) -> None:
    record = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "it is %s", "args": ("hot",), **extra})
    JournalHandler(stream, path).handle(record)


def test_the_log_has_fields_only_in_the_journal(
    journal: tuple[str, Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the journal takes no entry, the line goes to the stream, which systemd has connected to the journal."""
    path, read = journal
    with (tmp_path / "stream").open("w+") as stream:
        found = os.fstat(stream.fileno())
        logged(stream, path, fields={"MACHINE": "gpu"})
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        logged(stream, path, fields={"MACHINE": "gpu"})
        assert {"PRIORITY=4", "MACHINE=gpu", "MESSAGE=it is hot"} < set(read())
        logged(stream, path)
        logged(stream, f"{path}-missing", fields={"MACHINE": "gpu"})
        stream.seek(0)
        assert stream.read() == "<4>it is hot\n" * 3


def test_the_page_names_the_message_of_commands() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
    assert f"journalctl _UID=0 MESSAGE_ID={COMMAND_ID} " in page.read_text()
