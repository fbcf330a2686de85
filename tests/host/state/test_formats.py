"""The files of the host half's state, byte for byte: the releases before and after this one read them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host.state.gpus import (
    GRANTED,
    LOG_POSITION,
    GpuNote,
    LogPosition,
    forget_detached,
    observe_gpus,
    record_detached,
    record_fault,
    record_lost,
    record_tainted,
)
from agent.host.state.records import HANDED, MANIFEST, OWNED_FILES, Handed, Owned
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, GpuFault, Granted, StagedRoot, Verdict
from agent.model.paths import GPUS
from agent.system.trust import discarded
from tests.fakes.facts import library
from tests.fakes.host import Host

GPU, OTHER = "0000:01:00.0", "0000:02:00.0"
DIGEST = "0123456789abcdef" * 4
ROOT = StagedRoot(
    0,
    "nvidia",
    "550.163.01",
    (
        library("usr/lib/libé.so.1", "", link="libé.so"),
        library("usr/lib/libé.so", "/real/libé.so", size=4, mtime_ns=7, executable=True),
    ),
    "debian",
)
MANIFEST_FILE = b"""{
 "version": 1,
 "index": 0,
 "vendor": "nvidia",
 "driver_version": "550.163.01",
 "files": [
  {
   "target": "usr/lib/lib\\u00e9.so.1",
   "source": "",
   "link": "lib\\u00e9.so",
   "size": 0,
   "mtime_ns": 0,
   "executable": false,
   "text": ""
  },
  {
   "target": "usr/lib/lib\\u00e9.so",
   "source": "/real/lib\\u00e9.so",
   "link": "",
   "size": 4,
   "mtime_ns": 7,
   "executable": true,
   "text": ""
  }
 ],
 "place": "debian"
}
"""
HANDED_BY_START = b'{\n "version": 1,\n "indices": [\n  0,\n  3\n ]\n}\n'
OWNED = f'{{\n "version": 1,\n "files": {{\n  "/etc/a": "{DIGEST}"\n }}\n}}\n'.encode()
GRANT = b'{\n "version": 1,\n "generation": "0f",\n "gpus": [\n  "a"\n ],\n "driver_roots": {\n  "nvidia": 3\n }\n}\n'
POSITION = b'{\n "sequence": 7,\n "bindings": {\n  "a": 1\n }\n}\n'


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    for address in (GPU, OTHER):
        host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
        host.symlink(f"/sys/devices/pci0000:00/{address}/driver", "../../../bus/pci/drivers/nvidia")
    return host


def test_the_files_of_driver_roots_grants_and_owned_files() -> None:
    assert MANIFEST.render(ROOT) == MANIFEST_FILE
    assert MANIFEST.parse("", MANIFEST_FILE) == ROOT
    earlier = MANIFEST_FILE.replace(b',\n "place": "debian"', b"")
    assert [MANIFEST.parse("", each).place for each in (MANIFEST_FILE, earlier)] == ["debian", ""]
    handed = Handed((0, 3))
    assert (HANDED.render(handed), HANDED.parse("", HANDED_BY_START)) == (HANDED_BY_START, handed)
    assert (OWNED_FILES.render(Owned({"/etc/a": DIGEST})), OWNED_FILES.parse("", OWNED).files) == (
        OWNED,
        {"/etc/a": DIGEST},
    )
    granted = Granted("0f", ("a",), {"nvidia": 3})
    assert (GRANTED.render(granted), GRANTED.parse("", GRANT)) == (GRANT, granted)
    position = LogPosition(sequence=7, bindings={"a": 1})
    assert (LOG_POSITION.render(position), LOG_POSITION.parse("", POSITION)) == (POSITION, position)


def test_the_file_of_gpus_has_only_keys_that_matter(host: Host) -> None:
    fault = GpuFault("Xid79", "it fell off the bus", 1000.0, Verdict.NEEDS_REBOOT, 1000.0)
    assert record_fault(host, GPU, fault)
    assert record_lost(host, GPU, "gone")
    assert record_detached(host, GPU, draining=True)
    assert record_tainted(host, OTHER, evict=True)
    path = f"/sys/bus/pci/devices/{GPU}"
    devices = [host.link_inode(f"/sys/bus/pci/devices/{address}") for address in (GPU, OTHER)]
    written = json.loads(host.read(GPUS))
    since, later = written[GPU]["taint"].pop("since"), written[OTHER]["taint"].pop("since")
    assert written == {
        GPU: {
            "device": devices[0],
            "binding": host.link_inode(f"{path}/driver"),
            "lost": "gone",
            "fault": {
                "reason": "Xid79",
                "meaning": "it fell off the bus",
                "since": 1000.0,
                "verdict": "needs-reboot",
                "last": 1000.0,
            },
            "taint": {"evict": False, "detached": True, "draining": True},
        },
        OTHER: {"device": devices[1], "taint": {"evict": True}},
    }
    found = observe_gpus(host)
    assert (found.faults, found.lost) == ({GPU: fault}, {GPU: "gone"})
    assert found.detached == found.draining == {GPU}
    assert {address: (each.evict, each.since) for address, each in found.tainted.items()} == {
        GPU: (False, since),
        OTHER: (True, later),
    }
    assert record_detached(host, OTHER, draining=False)
    again = observe_gpus(host).tainted[OTHER]
    assert (again.evict, again.since) == (True, later), "it was tainted before, to evict pods"


def test_each_part_of_a_note_ends_by_itself(host: Host) -> None:
    assert record_fault(host, GPU, GpuFault("Xid79", "it fell off the bus", 1000.0, Verdict.NEEDS_REBOOT, 1000.0))
    assert record_lost(host, GPU, "gone")
    assert record_detached(host, GPU, draining=False)
    driver = Path(f"{host.root}/sys/devices/pci0000:00/{GPU}/driver")
    again = driver.with_name("bound-again")
    again.symlink_to("../../../bus/pci/drivers/nvidia")
    again.rename(driver)
    found = observe_gpus(host)
    assert not found.faults
    assert not found.lost, "the driver was bound again"
    assert found.detached == {GPU}
    forget_detached(host, GPU)
    (left,) = observe_gpus(host).notes.values()
    assert left.attached, "what it said before does not count"
    assert left == GpuNote(left.device, left.binding, attached=left.attached)


def test_a_detached_gpu_that_is_tainted_again_keeps_its_users(host: Host) -> None:
    """If `gpus detach` is repeated, its first pass must not withdraw the GPU from those that still use it."""
    assert record_detached(host, GPU, draining=True)
    assert record_tainted(host, GPU, evict=False)
    assert observe_gpus(host).detached == observe_gpus(host).draining == {GPU}
    assert record_detached(host, GPU, draining=False)
    assert observe_gpus(host).draining == set()


def test_unknown_keys_of_the_file_of_gpus_are_ignored(host: Host) -> None:
    assert record_detached(host, GPU, draining=False)
    written = json.loads(host.read(GPUS))
    host.write(GPUS, json.dumps({GPU: {**written[GPU], "of_a_later_release": 1}}).encode())
    assert observe_gpus(host).detached == {GPU}, "a rollback must not give a GPU back that is about to be pulled"


@pytest.mark.parametrize(
    ("parse", "data", "old", "new", "expected"),
    # How keys are named is shown by tests/model/test_typed_json.py.
    [
        (HANDED.parse, HANDED_BY_START, HANDED_BY_START, b"[]", "the document must be an object, not a list"),
        (HANDED.parse, HANDED_BY_START, b' "version": 1,', b"", "key version is missing"),
        (HANDED.parse, HANDED_BY_START, b'"version": 1', b'"version": 3', "version 3 is unknown"),
        (HANDED.parse, HANDED_BY_START, b" 3", b' 3], "other": ["\\udc80"', "not JSON"),
        (HANDED.parse, HANDED_BY_START, b" 3", b' 3], "other": [NaN', "not JSON"),
        (HANDED.parse, HANDED_BY_START, b" 3", b' 3], "other": [' + b"[" * 100_000, "not JSON"),
        (MANIFEST.parse, MANIFEST_FILE, b'"source": "",', b"", r"key files[0].source is missing"),
        (MANIFEST.parse, MANIFEST_FILE, b'"size": 4,', b"", r"key files[1].size is missing"),
        (
            MANIFEST.parse,
            MANIFEST_FILE,
            b'"executable": true,',
            b'"executable": 1,',
            "key files[1].executable must be a boo",
        ),
        (MANIFEST.parse, MANIFEST_FILE, b'"usr/lib/lib\\u00e9.so"', b'""', "key files[1].target must be a string of"),
        (MANIFEST.parse, MANIFEST_FILE, b'"size": 4', b'"size": 4.0', "key files[1].size must be a whole number"),
        (MANIFEST.parse, MANIFEST_FILE, b'"index": 0', b'"index": -1', "key index must be a whole number >= 0"),
        (HANDED.parse, HANDED_BY_START, b"3", b"-3", "key indices[1] must be a whole number >= 0"),
        (OWNED_FILES.parse, OWNED, b'f"', b'f\\n"', "key files[...] must be a string matching regex"),
        (OWNED_FILES.parse, OWNED, b'f"', b'F"', "key files[...] must be a string matching regex"),
        (OWNED_FILES.parse, OWNED, b"/etc/a", b"/etc/./a", "key files['/etc/./a'] must be a normal absolute path"),
        (OWNED_FILES.parse, OWNED, b"/etc/a", b"/etc/a\\n", "key files['/etc/a\\n'] must be a normal absolute path"),
        (LOG_POSITION.parse, POSITION, b'"a": 1', b'"a": true', "key bindings[...] must be a whole number, not a bool"),
        (GRANTED.parse, GRANT, b'"nvidia": 3', b'"nvidia": "3"', "key driver_roots[...] must be a whole number"),
    ],
)
def test_damage_is_refused_by_name(
    parse: Callable[[str, bytes], object], data: bytes, old: bytes, new: bytes, expected: str
) -> None:
    assert data.count(old) == 1
    with pytest.raises(DocumentError) as caught:
        parse("file", data.replace(old, new))
    assert str(caught.value).startswith(f"file: {expected}")
    assert parse != HANDED.parse or caught.value.hint == "no driver root is removed until the machine's next start"


def test_only_damage_is_discarded(host: Host) -> None:
    path = "/run/unbounded-agent/numbers.json"
    assert isinstance(HANDED.read_seen(path, host), Absent)
    assert HANDED.read(path, host) is None
    host.file(path, "{")
    assert isinstance(HANDED.read_seen(path, host), Broken)
    assert "numbers.json" not in discarded()
    assert HANDED.read(path, host) is None
    assert discarded()["numbers.json"] == 1
    HANDED.write(path, Handed((1,)), host)
    assert HANDED.read(path, host) == Handed((1,))
