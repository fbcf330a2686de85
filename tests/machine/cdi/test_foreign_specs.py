"""CDI specifications of other programs: how they affect the agent's devices, and what is reported."""

import builtins
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent.machine.containerd import EFFECTIVE_NOTE
from agent.machine.containerd_tables import CRI_2, MAIN
from agent.machine.foreign_specs import NOTE, SIZE_LIMIT
from agent.machine.notes import Notes
from agent.machine.run import run
from agent.model.paths import MACHINE_STATE
from tests.fakes.machine import Machine, failing, recorded_spec

SPEC = "/etc/cdi/nvidia.yaml"
REFRESHED = "/var/run/cdi/nvidia.yaml"
OTHER = "/etc/cdi/site.json"


def spec(*names: str, kind: str = "nvidia.com/gpu") -> str:
    """Return a specification as the toolkit writes it in YAML."""
    devices = "".join(f'- containerEdits:\n    env:\n    - A=B\n  name: "{name}"\n' for name in names)
    return f"---\ncdiVersion: 0.5.0\ndevices:\n{devices}kind: {kind}\n"


def told(machine: Machine, reason: str) -> str:
    """Run, and return the condition's message; this is its reason."""
    assert machine.verdict("CDISpecCurrent") == (str(reason == "Verified"), reason)
    return machine.message("CDISpecCurrent")


def known(machine: Machine) -> int:
    """Return of how many files the devices are known, so that they need not be checked again."""
    return len(Notes(machine).load(NOTE))


@pytest.mark.parametrize("before", [True, False], ids=["before ours", "after ours"])
def test_a_spec_that_outranks_ours(machine: Machine, before: bool) -> None:
    """Pods get the other file's devices. The agent's is published, updated, and stays when the other is removed."""
    if not before:
        run(machine)
    machine.put(REFRESHED, spec("0", "all"))
    message = told(machine, "Shadowed")
    assert message.startswith(
        f"pods get nvidia.com/gpu=0, nvidia.com/gpu=all from {REFRESHED} instead of {SPEC}, whose"
    )
    units = "nvidia-cdi-refresh.path nvidia-cdi-refresh.service"
    assert f"`systemctl disable --now {units}; systemctl mask {units}`, then remove" in message
    machine.put("/var/run/cdi/site.yaml", spec("all"))
    both = f"then remove {REFRESHED}; remove /var/run/cdi/site.yaml, and stop what writes it"
    assert both in told(machine, "Shadowed"), "the advice about NVIDIA's units alone would leave the other file"
    machine.drop("/var/run/cdi/site.yaml")
    run(machine)
    assert not {"0", "all"} & set(machine.report()["cdi_devices"])
    assert "1" in machine.report()["cdi_devices"]
    machine.drop(REFRESHED)
    told(machine, "Verified")
    assert "all" in machine.report()["cdi_devices"]


@pytest.mark.parametrize("name", [".yaml", ".json", "site.json", "x.yaml; all is well\u3164.yaml"])
def test_an_outranking_spec_of_another_writer(machine: Machine, name: str) -> None:
    """No advice about units that do not write it. Go's filepath.Ext calls `.json` a suffix, so runtimes load it.

    Text that a pod chose is quoted.
    """
    path = f"/var/run/cdi/{name}"
    machine.put(path, json.dumps(recorded_spec()))
    message = told(machine, "Shadowed")
    shown = ascii(path) if " " in path else path
    assert f"and 1 more from {shown} instead of" in message
    assert message.endswith(f"; remove {shown}, and stop what writes it")


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        (["/etc/cdi", "/var/run/cdi", "/srv/cdi"], "Shadowed"),
        (["/etc/cdi", "/srv/cdi"], "Shadowed"),
        (["/srv/cdi", "/etc/cdi", "/srv/cdi/"], "Shadowed"),
        (["/etc/cdi", "/srv/link"], "Shadowed"),
        (["/srv/cdi", "/etc/cdi"], "Verified"),
        (["/srv/cdi"], "Verified"),
        (["srv/cdi"], "Verified"),
        ([], "Verified"),
        (["/srv/missing", "/srv/same"], "Verified"),
    ],
)
def test_containerd_looks_into_further_directories(machine: Machine, listed: list[str], reason: str) -> None:
    """The condition was True, although pods got the devices of a later directory."""
    machine.put(MAIN, f'version = 2\n[plugins."{CRI_2}"]\ncdi_spec_dirs = {json.dumps(listed)}\n')
    machine.put("/srv/cdi/site.json", json.dumps(recorded_spec()))
    machine.link("/srv/link", "cdi")
    machine.link("/srv/same", "/etc/cdi")
    for _ in range(2):
        message = told(machine, reason)
        assert ("/site.json instead of /etc/cdi/nvidia.yaml" in message) == (reason == "Shadowed")


def test_a_further_directory_that_no_run_noted(machine: Machine) -> None:
    """A pipe there blocks runtimes too."""
    machine.put(MAIN, f'version = 2\n[plugins."{CRI_2}"]\ncdi_spec_dirs = ["/etc/cdi", "/srv/cdi"]\n')
    run(machine)
    Notes(machine).save(EFFECTIVE_NOTE, {})
    machine.put("/srv/cdi/site.json", json.dumps(recorded_spec()))
    told(machine, "Shadowed")
    os.mkfifo(machine.tree / "srv/cdi/x.yaml")
    told(machine, "RuntimeBlocked")


def test_same_names_in_our_directory_are_dropped(machine: Machine) -> None:
    """The agent's specification stays if it was published first, and is still updated."""
    run(machine)
    machine.put(OTHER, json.dumps(recorded_spec() | {"devices": recorded_spec()["devices"][:1]}))
    message = told(machine, "NamesCollide")
    assert f"{SPEC} and {OTHER} define the same names, so no pod can get nvidia.com/gpu=0;" in message
    assert f"remove {OTHER}, and stop what writes it" in message
    assert machine.exists(SPEC)
    machine.drop(OTHER)
    told(machine, "Verified")


def test_a_working_spec_is_not_made_useless_by_ours(machine: Machine) -> None:
    """Pods use the other program's. The agent's is generated once, and published when that one is removed."""

    def generated() -> bool:
        machine.calls.clear()
        told(machine, "NamesCollide")
        assert not machine.exists(SPEC)
        assert machine.report()["cdi_devices"] == []
        return any("generate" in call for call in machine.calls)

    machine.put(OTHER, json.dumps(recorded_spec()))
    assert generated()
    assert not generated()
    machine.put(OTHER, json.dumps(recorded_spec() | {"devices": recorded_spec()["devices"][:1]}))
    assert not generated()
    not_published = f"{SPEC} is not published, because pods already get nvidia.com/gpu=0 from"
    assert not_published in machine.message("CDISpecCurrent")
    machine.put("/usr/bin/nvidia-ctk", "another build")
    assert generated()
    machine.drop(OTHER)
    told(machine, "Verified")
    assert machine.exists(SPEC)


@pytest.mark.parametrize(
    ("path", "reason"), [("/etc/cdi/site.yaml", "NamesCollide"), ("/var/run/cdi/site.yaml", "Shadowed")]
)
def test_further_devices_of_our_kind_harm_nothing(machine: Machine, path: str, reason: str) -> None:
    run(machine)
    machine.put(path, spec("site-0"))
    machine.put("/var/run/cdi/plugin.yaml", spec("0", kind="k8s.device-plugin.nvidia.com/gpu"))
    message = told(machine, "Verified")
    assert f"{path} has further devices of this kind: nvidia.com/gpu=site-0" in message
    assert "plugin.yaml" not in message
    machine.put(path, spec("0"))
    told(machine, reason)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: [", "cannot be read: neither JSON nor plain YAML, see line 2"),
        ("", "is not a valid CDI specification, so runtimes skip it"),
        ("kind: nvidia.com/gpu\n", "is not a valid CDI specification, so runtimes skip it"),
        # Runtimes may be able to read it, so nothing is claimed about it.
        ("x" * (2 << 20), "is NotChecked: it is larger than 262144 bytes"),
    ],
    ids=["no YAML", "empty", "no devices", "large"],
)
def test_a_broken_spec_is_named_and_harms_nothing(machine: Machine, text: str, expected: str) -> None:
    machine.put("/var/run/cdi/site.yaml", text)
    message = told(machine, "Verified")
    assert f"/var/run/cdi/site.yaml {expected}" in message


@pytest.mark.parametrize("path", ["/etc/cdi/site.yaml", "/var/run/cdi/site.json"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_would_block_runtimes(machine: Machine, path: str, link: bool) -> None:
    """Runtimes read a FIFO like a file, before they start any container with CDI devices."""
    place = "/tmp/fifo" if link else path
    machine.make_directory("/tmp")
    machine.make_directory(path.rsplit("/", 1)[0])
    os.mkfifo(machine.tree / place[1:])
    if link:
        machine.link(path, place)
    message = told(machine, "RuntimeBlocked")
    assert message.startswith(f"{path} is not a regular file: ")
    assert message.endswith("; remove it")
    machine.drop(path)
    told(machine, "Verified")


def test_files_that_runtimes_skip(machine: Machine) -> None:
    machine.make_directory("/etc/cdi/directory.yaml")
    machine.link("/etc/cdi/dangling.json", "/nowhere")
    message = told(machine, "Verified")
    assert "directory.yaml" not in message
    assert "/etc/cdi/dangling.json cannot be read" in message
    # Only the suffix shows what is a specification (scanSpecDirs).
    for name in ("nvidia.yml", "nvidia.yaml.bak", ".nvidia.json.x"):
        machine.put(f"/var/run/cdi/{name}", spec("0"))
    told(machine, "Verified")


@pytest.mark.parametrize("path", ["/etc/cdi/site.yaml", "/var/run/cdi/site.json"])
def test_attack_a_link_to_a_secret_is_not_read(machine: Machine, path: str) -> None:
    """A pod with access to the directory can make it; the tool's error once showed everybody the first line."""
    machine.write("/etc/shadow", b"root:$6$hash:1:0:::::\n", 0o600)
    machine.link(path, "/etc/shadow")
    message = told(machine, "Verified")
    assert f"{path} cannot be read: " in message
    assert "hash" not in machine.read("/run/unbounded-agent/report/report.json").decode()
    machine.link(path, "/etc/other.yaml")
    machine.put("/etc/other.yaml", spec("7"))
    assert told(machine, "Verified").endswith("nvidia.com/gpu=7"), "what everybody may read, runtimes read too"


def test_a_file_in_yaml_is_read_as_soon_as_pyyaml_is_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:  # noqa: ANN401
        if name == "agent.vendors.cdi_yaml":
            raise ImportError(name)
        return imported(name, *arguments)

    machine.put(REFRESHED, spec("0"))
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without)
        message = told(machine, "Verified")
    assert f"{REFRESHED} cannot be read: not JSON, and PyYAML cannot be loaded" in message
    told(machine, "Shadowed")


def test_what_is_known_is_noted_if_a_directory_cannot_be_read(machine: Machine) -> None:
    """All files were parsed again in each run."""
    machine.put(OTHER, spec("9"))
    machine.put(REFRESHED, spec("8"))
    machine.before_list = failing(errno.EIO, "/var/run/cdi")
    told(machine, "Failed")
    assert known(machine) == 1


def test_attack_many_files_do_not_keep_a_run_from_its_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """13,000 files once took more than the unit's 120 seconds, and what was found out was lost with the run."""
    run(machine)
    clock, seconds = [time.monotonic()], [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    seen = set[str]()

    def slow(path: str) -> None:
        clock[0] += seconds[0] * (path.startswith("/etc/cdi/") and path not in seen)
        seen.add(path)

    machine.before_read = slow
    for number in range(300):
        machine.put(f"/etc/cdi/{number}.json", json.dumps({"n": number}))
    machine.put(REFRESHED, spec("9"))
    message = told(machine, "Verified")  # pods can use the GPUs
    assert known(machine) == 10
    assert "/etc/cdi has more than 256 specifications of other programs, and the others are NotChecked" in message
    assert "/etc/cdi/107.json is NotChecked yet: a run takes 10 s at most to check new files" in message
    seconds[0] = 0.1
    for _ in range(3):
        run(machine)
    assert known(machine) == 257, "each run checks some more, of 256 in each directory"
    message = told(machine, "Verified")
    assert f"{REFRESHED} has further devices of this kind: nvidia.com/gpu=9" in message
    assert "and 253 more" in message
    assert len(message) < 2000


def test_attack_what_is_read_is_limited_in_all(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    # The time that checks take is limited too, and a busy computer needs more.
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run(machine)
    for number in range(24):
        machine.put(f"/etc/cdi/{number:02}.json", json.dumps({"n": number}).ljust(256 * 1024))
    message = told(machine, "Verified")
    assert "and 20 more" in message, "15 are invalid, and 9 were not read"
    assert known(machine) == 15


def test_attack_what_is_noted_is_limited_in_all(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are noted in JSON, in which one character may take 12 bytes. All of it is known to the next run."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    devices = [{"name": "\U0001f600" * 200 + str(number)} for number in range(300)]
    for number in range(20):
        machine.put(f"/etc/cdi/{number:02}.json", json.dumps({"kind": "a/b", "devices": devices}, ensure_ascii=False))
    run(machine)
    assert known(machine) == 5
    path = f"{MACHINE_STATE}/{NOTE}.json"
    assert len(machine.read(path, 1 << 30)) < 4 << 20


BOMBS = {
    "a long kind": json.dumps({"kind": "a/" + "b" * 100_000, "devices": [{"name": "a"}] * 10_000}),
    "many devices": json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": str(n)} for n in range(13_000)]}),
    "brackets": "[" * 262_000,
    "many objects": "[" + "{}," * 87_000 + "{}]",
    "aliases": "a: &a [" + "x," * 1000 + "]\n" + "".join(f"b{n}: [" + "*a," * 1000 + "]\n" for n in range(60)),
    "one device often": f"x: &a {{{','.join(f'k{n}: ' for n in range(5_000))}}}\ndevices: [{'*a,' * 10_000}]\n",
    "one name often": f"kind: a/b\nx: &a {{name: {'b' * 100_000}}}\ndevices: [{'*a,' * 10_000}]\n",
    "one long name": f"kind: a/b\nx: &a {'b' * 100_000}\ndevices: [{'{name: *a},' * 10_000}]\n",
    "one long key": f"kind: a/b\nx: &a {'b' * 100_000}\ndevices: [{'{*a : x},' * 10_000}]\n",
}
READ = """
import resource, sys, time
from agent.model.errors import AgentError
from agent.vendors.cdi import device_names
text, before = sys.stdin.read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    device_names(text)
except AgentError:
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time())
"""


@pytest.mark.processes
@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_attack_no_file_that_is_read_takes_much_memory_or_time(text: str) -> None:
    """The largest file that is read, parsed: it takes no more than 200 times its size, and three seconds."""
    assert len(text) <= SIZE_LIMIT
    command = [sys.executable, "-c", READ]
    finished = subprocess.run(
        command, input=text, capture_output=True, text=True, check=True, timeout=600, cwd=Path(__file__).parents[3]
    )
    memory, seconds = finished.stdout.split()
    assert int(memory) < 200 * SIZE_LIMIT / 1024
    assert float(seconds) < 3


@pytest.mark.parametrize("count", [1024, 1025])
def test_attack_a_file_with_too_many_devices_is_not_kept(machine: Machine, count: int) -> None:
    machine.put("/var/run/cdi/site.yaml", spec(*(f"d{number}" for number in range(count))))
    message = told(machine, "Verified")
    assert ("site.yaml is NotChecked: it has more than 1024 devices" in message) is (count > 1024)


@pytest.mark.parametrize("masked", [False, True])
def test_enabled_refresh_units_are_named(machine: Machine, masked: bool) -> None:
    """Enabled units are named before they write anything. The image masks them."""
    for unit in ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"):
        machine.link(f"/etc/systemd/system/multi-user.target.wants/{unit}", f"/etc/systemd/system/{unit}")
        if masked:
            machine.link(f"/etc/systemd/system/{unit}", "/dev/null")
    message = told(machine, "Verified")
    units = "nvidia-cdi-refresh.path and nvidia-cdi-refresh.service are"
    expected = f"{units} enabled and would write /var/run/cdi/nvidia.yaml"
    assert (expected in message) is not masked
