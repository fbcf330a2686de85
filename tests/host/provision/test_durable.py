"""Records in two copies: one good copy is enough, and nobody guesses without one."""

import json
from pathlib import Path

import pytest

from agent.host.state.records import Durable
from agent.model.facts import Absent, Broken, Unseen
from agent.model.node import AsFound, FoundFile, HostState
from agent.model.paths import AS_FOUND
from agent.model.text import json_digest
from agent.model.typed_json import Base64
from tests.fakes.host import Host
from tests.fakes.provisioned import FOUND

RECORD = Durable(AsFound)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    RECORD.write(AS_FOUND, FOUND, host)
    return host


def test_what_is_written_is_read_until_it_is_removed(host: Host) -> None:
    document = json.loads(host.read(AS_FOUND[0]))
    assert document["digest"] == json_digest(document["content"])
    assert document["content"]["host"]["files"]["/etc/b"] == {"content": "_wBub3QgdGV4dA==", "mode": 0o600}
    assert RECORD.read(AS_FOUND, host) == FOUND
    RECORD.remove(AS_FOUND, host)
    assert isinstance(RECORD.read(AS_FOUND, host), Absent)


@pytest.mark.parametrize("copy", AS_FOUND)
@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"{}", b"[]"])
def test_one_good_copy_is_enough(host: Host, copy: str, content: bytes) -> None:
    host.file(copy, content)
    assert RECORD.read(AS_FOUND, host) == FOUND
    host.remove(copy)
    assert RECORD.read(AS_FOUND, host) == FOUND


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"kernel.panic": "0"', b'"kernel.panic": "9"', "does not match its digest"),
        (b'"version": 1', b'"version": 2', "a newer release of the agent wrote it"),
    ],
)
def test_a_changed_record_is_not_understood(host: Host, old: bytes, new: bytes, why: str) -> None:
    for path in AS_FOUND:
        host.file(path, host.read(path).replace(old, new))
    found = RECORD.read(AS_FOUND, host)
    assert isinstance(found, Broken)
    assert why in found.why


def test_damage_to_both_copies_is_not_absence(host: Host) -> None:
    host.file(AS_FOUND[0], b"{")
    host.remove(AS_FOUND[1])
    assert isinstance(RECORD.read(AS_FOUND, host), Broken)
    host.failing[AS_FOUND[1]] = PermissionError(13, "Permission denied", AS_FOUND[1])
    assert isinstance(RECORD.read(AS_FOUND, host), Unseen)


def test_a_second_node_adds_what_it_changes_and_keeps_the_older_values() -> None:
    later = HostState(
        sysctls={"kernel.panic": "10", "vm.swappiness": "60"},
        modules={"overlay": True, "br_netfilter": True},
        swaps=(),
        files={"/etc/a": FoundFile(Base64(b"ours"), 0o644), "/etc/d": None},
    )
    both = FOUND.extended(later, {"machines.target": True, "other.target": False})
    assert both.host.sysctls == {**FOUND.host.sysctls, "vm.swappiness": "60"}
    assert both.host.files == {**FOUND.host.files, "/etc/d": None}
    assert (both.host.swaps, both.network) == (FOUND.host.swaps, FOUND.network)
    assert both.units == {"machines.target": False, "other.target": False}
    assert FOUND.extended(FOUND.host, FOUND.units) == FOUND
