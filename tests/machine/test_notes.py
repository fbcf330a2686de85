"""The machine half's notes: damage is removed and reported, and a failed read does not mean "missing"."""

import errno
import json

import pytest

from agent.machine.notes import OWNED_COPY, Notes, Owned
from agent.machine.run import REPORT, run
from agent.model.errors import AgentError
from agent.model.paths import MACHINE_STATE, OWNED, spec_file
from agent.model.text import json_digest
from tests.fakes.machine import EMPTY, Machine, failing, systemctl
from tests.fakes.umask import umask

SPEC, DROP_IN = spec_file("nvidia"), "/etc/containerd/conf.d/99-nvidia.toml"
GOOD = {"RuntimeConfigured": ("True", "ReadBack"), "CDISpecCurrent": ("True", "Verified")}


@pytest.fixture
def machine(machine: Machine) -> Machine:
    run(machine)
    machine.program("systemctl", systemctl("active", 10**15))
    run(machine)
    return machine


def written(machine: Machine) -> dict[str, str]:
    return {kind: status for kind, (status, _) in machine.conditions().items()}


# ---- notes


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b'{"digest": "0", "note": {}}', b"[" * 100_000])
def test_a_damaged_note_is_removed_and_reported(
    machine: Machine, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{MACHINE_STATE}/opened-nvidia.json"
    machine.put(path, content)
    capsys.readouterr()
    assert Notes(machine).load("opened-nvidia") == {}
    assert not machine.exists(path)
    assert f"removed {path}, which was damaged" in capsys.readouterr().err


def test_what_is_saved_can_be_loaded(machine: Machine) -> None:
    """A note of more than 1 MiB was saved, and removed as damaged by each later run."""
    notes, large = Notes(machine), {"text": "x" * (2 << 20)}
    notes.save("spec-nvidia", large)
    assert notes.load("spec-nvidia") == large
    with pytest.raises(OSError, match="too large"):
        notes.save("spec-nvidia", {"text": "x" * (16 << 20)})
    assert notes.load("spec-nvidia") == large


def test_only_root_reads_notes_and_everybody_the_report(machine: Machine) -> None:
    """Whatever the umask. The host half, which has few rights, reads the report."""
    for place in machine.tree.glob("run/unbounded-agent/state/*.json"):
        place.unlink()
    with umask(0):
        run(machine)
    with umask(0o077):
        machine.drop(REPORT)
        run(machine)
    notes = list(machine.tree.glob("run/unbounded-agent/state/*.json"))
    assert len(notes) > 3
    assert {machine.mode(f"{MACHINE_STATE}/{place.name}") for place in notes} == {0o600}
    assert machine.mode(REPORT) == 0o644


def test_what_containerd_really_uses_is_read_again_if_its_note_is_lost(machine: Machine) -> None:
    """Other steps need the note: where containerd reads specifications, and its socket."""
    note = f"{MACHINE_STATE}/containerd-effective.json"
    before = machine.read(note)
    for times in (1, 0):
        machine.calls.clear()
        if times:
            machine.drop(note)
        run(machine)
        assert any(call[-2:] == ("config", "dump") for call in machine.calls) is bool(times)
        assert machine.read(note) == before


def retyped(value: object) -> object:
    """Replace every value with one of another type; keys stay."""
    if isinstance(value, dict):
        return {key: retyped(each) for key, each in value.items()}
    return 7 if isinstance(value, str) else {"x": [None]} if isinstance(value, list) else "x"


def test_notes_of_another_version_do_not_fail_forever(machine: Machine) -> None:
    """Another release within one boot might leave such notes."""
    before = written(machine)
    for file in machine.entries(MACHINE_STATE):
        name, _, ending = file.rpartition(".")
        if ending == "json":
            note = {key: retyped(value) for key, value in Notes(machine).load(name).items()}
            document = {"version": 2, "digest": json_digest(note), "note": note}
            machine.put(f"{MACHINE_STATE}/{file}", json.dumps(document))
    run(machine)
    assert written(machine) == before


def test_an_unreadable_note_costs_no_report_and_nothing_that_exists(machine: Machine) -> None:
    good = {path: machine.read(path) for path in (SPEC, DROP_IN)}
    names = [name for name in machine.entries(MACHINE_STATE) if name.endswith(".json")]
    assert len(names) > 5
    for name in names:
        machine.before_read = failing(errno.EIO, f"{MACHINE_STATE}/{name}")
        machine.remove("/run/unbounded-agent/report/report.json")
        run(machine)
        assert machine.exists("/run/unbounded-agent/report/report.json"), name
        machine.before_read = lambda path: None
        assert {path: machine.read(path) for path in good} == good, name
    run(machine)
    assert GOOD.items() <= machine.conditions().items()


# ---- the record of ownership


def foreign(machine: Machine) -> None:
    machine.put("/usr/bin/nvidia-ctk", "another build")
    machine.remove_tree(MACHINE_STATE)
    machine.put(SPEC, "{}")
    machine.put(DROP_IN, "")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"paths": 7}', b'{"paths": [7]}', "nothing", "a directory", "cannot be read"]
)
@pytest.mark.parametrize("path", [OWNED, OWNED_COPY])
def test_one_copy_of_the_record_is_enough(machine: Machine, path: str, content: bytes | str) -> None:
    good = machine.read(path)
    if content == "cannot be read":
        machine.before_read = failing(errno.EIO, path)
    else:
        machine.remove(path)
    if content == "a directory":
        machine.make_directory(path)
    elif isinstance(content, bytes):
        machine.put(path, content)
    foreign(machine)
    run(machine)
    assert GOOD.items() <= machine.conditions().items()
    machine.before_read = lambda path: None
    assert machine.read(path) == good


@pytest.mark.parametrize("path", [OWNED, OWNED_COPY])
def test_no_damage_of_one_byte_beats_the_good_copy(machine: Machine, path: str) -> None:
    """A copy that is still valid JSON, but has another path, made the agent's own files count as somebody else's."""
    good = machine.read(path)
    recorded = Owned(machine).paths
    assert SPEC in recorded
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        machine.put(path, bytes(damaged))
        assert Owned(machine).paths == recorded, bytes(damaged)
        assert machine.read(path) == good


def test_a_claim_that_could_not_be_recorded_does_not_count(machine: Machine) -> None:
    """Otherwise, a second attempt in the same run would write a file that later runs take for somebody else's."""
    owned, machine.before_write = Owned(machine), failing(errno.ENOSPC, "")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            owned.claim("/etc/cdi/new.yaml")
    with pytest.raises(OSError, match="No space"):
        owned.remove(SPEC)
    assert (owned.has("/etc/cdi/new.yaml"), owned.has(SPEC)) == (False, True)


def test_an_unreadable_record_is_not_overwritten(machine: Machine) -> None:
    """If it were overwritten, the agent's own files would count as foreign from then on."""
    good = machine.read(OWNED)
    machine.before_read = failing(errno.EIO, OWNED, OWNED_COPY)
    foreign(machine)
    assert machine.verdict("CDISpecCurrent") == ("False", "Failed")
    assert "owned.json: Input/output error" in machine.message("CDISpecCurrent")
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")
    machine.before_read = lambda path: None
    assert (machine.read(OWNED), machine.read(OWNED_COPY)) == (good, good)
    run(machine)
    assert GOOD.items() <= machine.conditions().items()


def test_the_advice_for_two_damaged_copies_helps(machine: Machine) -> None:
    for path in (OWNED, OWNED_COPY):
        machine.put(path, "")
    with pytest.raises(AgentError, match=r"owned\.json is damaged; .*owned\.json\.copy is damaged") as raised:
        Owned(machine).has(SPEC)
    assert "if both copies of the record stay unreadable, remove them" in str(raised.value)
    assert "the run after that writes them again" in str(raised.value)
    for path in (OWNED, OWNED_COPY):
        machine.remove(path)
    run(machine)
    assert SPEC in machine.message("CDISpecCurrent")
    assert DROP_IN in machine.message("RuntimeConfigured")
    for path in (SPEC, DROP_IN):
        machine.remove(path)
    run(machine)
    assert GOOD.items() <= machine.conditions().items()


def put_directory(machine: Machine, path: str) -> None:
    machine.put(f"{path}/inner", "somebody's")


def test_a_directory_that_is_in_the_way(machine: Machine) -> None:
    put_directory(machine, "/etc/cdi/other.yaml")
    assert not Owned(machine).make_way("/etc/cdi/other.yaml")
    assert machine.read("/etc/cdi/other.yaml/inner") == b"somebody's"
    machine.drop(SPEC)
    put_directory(machine, SPEC)
    machine.hand(EMPTY)
    assert machine.verdict("CDISpecCurrent") == ("True", "NotApplicable")
    assert not machine.exists(SPEC)
    assert not Owned(machine).has(SPEC)


def test_the_files_of_a_killed_writer_are_removed(machine: Machine) -> None:
    """These files are left over from notes that are never written again. Another service may be writing its own now."""
    for name in ("containerd-changed", "dra-status", "node-condition"):
        machine.put(f"{MACHINE_STATE}/.{name}.json.unbounded-agent-new", "half of i")
    run(machine)
    left = [name for name in machine.entries(MACHINE_STATE) if name.startswith(".")]
    assert left == [f".{name}.json.unbounded-agent-new" for name in ("dra-status", "node-condition")]
