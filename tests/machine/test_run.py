"""The machine half from handoff to report, on a simulated machine."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from agent.machine.notes import Notes, Owned
from agent.machine.run import HANDOFF, REPORT, run
from agent.model.errors import CommandError, DocumentError
from agent.model.handoff import Request, Variable
from agent.model.paths import OWNED
from agent.system.process import Completed
from agent.vendors.nvidia.nvidia_ctk import with_additions, with_no_gpu
from tests.fakes.machine import (
    DEVICES,
    EMPTY,
    GPUS,
    LIBRARIES,
    REQUEST,
    Answer,
    Machine,
    failing,
    hang,
    nvidia_ctk,
    opening,
    recorded_spec,
    recorded_syncs,
    settle,
    systemctl,
    without_a_gpu,
)

SPEC = "/etc/cdi/nvidia.yaml"


def test_a_run_loads_only_the_standard_library() -> None:
    """The unit's command. Imports take time at every boot, before containerd starts."""
    repository = Path(__file__).parents[2]
    unit = (repository / "systemd/machine/unbounded-agent-gpu.service").read_text()
    command = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart=")))
    code = command[-1].replace("sys.exit(main())", "print(*sys.modules)")
    done = subprocess.run(
        [sys.executable, *command[1:-1], code],
        capture_output=True,
        text=True,
        cwd=repository,
        env={"PYTHONPATH": str(repository)},
    )
    modules = set(done.stdout.split())
    assert "agent.machine.run" in modules
    assert not {each.partition(".")[0] for each in modules} - set(sys.stdlib_module_names) - {"agent", "__main__"}


def completed(spec: dict[str, Any]) -> object:
    return with_no_gpu(with_additions(spec, REQUEST)[0])


def test_the_first_run_settles_everything(machine: Machine) -> None:
    assert run(machine) == 0
    assert machine.conditions() == {
        "DevicesAllowed": ("True", "Opened"),
        "LibrariesLinked": ("True", "Linked"),
        "CDISpecCurrent": ("True", "Verified"),
        "RuntimeConfigured": ("True", "ReadBack"),
        "RuntimeActive": ("Unknown", "RestartPending"),
        "GPUsAdvertised": ("Unknown", "NoKubelet"),
    }
    assert ("systemctl", "--no-block", "try-restart", "containerd.service") in machine.calls
    assert os.readlink(machine.tree / LIBRARIES / "libcuda.so.1") == (
        "../../../run/host-nvidia/0/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    )
    assert os.readlink(machine.tree / "usr/bin/nvidia-smi") == "../../run/host-nvidia/0/usr/bin/nvidia-smi"
    assert json.loads(machine.read(SPEC)) == completed(recorded_spec())
    assert machine.report()["cdi_devices"] == [*(each["name"] for each in recorded_spec()["devices"]), "none"]
    added = f"added what /usr/bin/nvidia-ctk leaves out: {LIBRARIES}/libnvidia-api.so.1"
    assert added in machine.message("CDISpecCurrent")
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    assert machine.verdict("RuntimeActive") == ("True", "Running")
    # Now from the notes: nvidia-ctk does not run again.
    assert added in machine.message("CDISpecCurrent")


def test_runtimes_read_the_specification_as_yaml(machine: Machine) -> None:
    machine.hand(REQUEST._replace(environment=(Variable("A", "\U0001f3ae"),)))
    run(machine)
    spec = yaml.load(machine.read(SPEC), yaml.CSafeLoader)
    assert "A=\U0001f3ae" in spec["containerEdits"]["env"]


def test_the_second_run_only_asks_systemd_and_containerd(machine: Machine) -> None:
    settle(machine)
    before = {path: path.lstat().st_mtime_ns for path in machine.tree.rglob("*") if not path.is_dir()}
    os.utime(machine.tree / REPORT.lstrip("/"), (0, 0))
    run(machine)
    assert [call[:2] for call in machine.calls] == [("systemctl", "show"), ("ctr", "plugins")]
    after = {path: path.lstat().st_mtime_ns for path in machine.tree.rglob("*") if not path.is_dir()}
    assert {path.name for path in after if after[path] != before.get(path)} == {"report.json"}
    assert (machine.tree / REPORT.lstrip("/")).stat().st_mtime > 0


@pytest.mark.parametrize("program", ["containerd", "ctr", "ldconfig", "nvidia-ctk", "systemctl"])
def test_a_program_that_is_slow_on_a_busy_machine_costs_nothing(machine: Machine, program: str) -> None:
    """At boot, everything starts at the same time: `containerd --version` has taken more than 10 seconds."""
    machine.durations[program] = 25
    settle(machine)
    run(machine)
    assert [each for each in machine.conditions().values() if each[0] != "True"] == [("Unknown", "NoKubelet")]


def test_systemd_answers_while_links_are_made(machine: Machine) -> None:
    """Both take about as long as a generator has left, so one must not wait for the other."""
    asked = threading.Event()
    in_time: list[bool] = []

    def answer(argv: tuple[str, ...]) -> Completed:
        asked.set()
        return systemctl("active", 10)(argv)

    machine.program("systemctl", answer)
    machine.before_link = lambda path: in_time.append(asked.wait(0 if in_time else 10))
    run(machine)
    assert set(in_time) == {True}


def test_the_report_does_not_wait_for_the_disk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = recorded_syncs(machine, monkeypatch)
    run(machine)
    assert synced.index(SPEC) > synced.index(REPORT)
    assert synced.index("/etc/cdi", synced.index(SPEC)) > 0


def test_only_changes_go_to_the_journal(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    run(machine)
    assert "<4>RuntimeActive Unknown RestartPending" in capsys.readouterr().err
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    run(machine)
    assert [line.split()[:2] for line in capsys.readouterr().err.splitlines()] == [["<6>RuntimeActive", "True"]]
    run(machine)
    assert capsys.readouterr().err == ""


def test_a_missing_handoff_is_not_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The image has the agent, but nobody configured the machine."""
    machine = Machine(tmp_path / "machine")
    assert run(machine) == 0
    assert "this machine is not configured, or unbounded-agent.service has not published" in capsys.readouterr().err
    assert not machine.exists(REPORT)


@pytest.mark.parametrize(
    ("handoff", "why"),
    [
        (b'{"version": 99}', "version 99 is unknown.*upgrade the agent in the machine's image"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_handoff_changes_nothing_and_the_report_says_why(machine: Machine, handoff: bytes, why: str) -> None:
    settle(machine)
    machine.put(HANDOFF, handoff)
    with pytest.raises(DocumentError, match=why):
        run(machine)
    report, status = machine.report(), os.stat(machine.full_path(HANDOFF))
    assert (report["generation"], report["conditions"]) == ("", [])
    assert report["publication"] == [status.st_ino, status.st_mtime_ns]
    assert re.search(why, report["refused"])
    assert not machine.calls


def test_observations_older_than_the_handoff_are_not_reported(machine: Machine) -> None:
    """The host publishes the same handoff again after it has bound missing nodes, and waits for the report on that."""
    handoff, written = machine.read(HANDOFF), list[str]()
    missing = machine.nodes.pop(DEVICES[0].path)

    def settled(path: str) -> None:
        written.append(path)
        if path.endswith("/logged.json") and HANDOFF not in written:
            machine.nodes[DEVICES[0].path] = missing
            machine.write(HANDOFF, handoff)

    machine.program("systemctl", systemctl("active", 10))
    machine.before_write = settled
    run(machine)
    assert written.count(REPORT) == 1
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")


def test_each_report_names_the_publication_that_it_answers(machine: Machine) -> None:
    """The host cannot tell by the times of the files: the handoff may be published while the report is written."""
    handoff, answered = machine.read(HANDOFF), list[object]()

    def publish(path: str) -> None:
        if path == REPORT and not answered:
            status = os.stat(machine.full_path(HANDOFF))
            answered.append([status.st_ino, status.st_mtime_ns])
            machine.write(HANDOFF, handoff)
        elif path == REPORT:
            answered.append(machine.report()["publication"])

    machine.program("systemctl", systemctl("active", 10))
    machine.before_write = publish
    run(machine)
    first, named_by_first = answered
    status = os.stat(machine.full_path(HANDOFF))
    assert named_by_first == first != [status.st_ino, status.st_mtime_ns]
    assert machine.report()["publication"] == [status.st_ino, status.st_mtime_ns]


def test_containerd_is_restarted_after_the_last_report(machine: Machine) -> None:
    """containerd stops at once, and starts when this run has ended: another round would be time without a CRI.

    There are several rounds, because systemd's path units miss a change while the service runs.
    """
    seen: list[str] = []

    def answer(argv: tuple[str, ...]) -> Completed:
        if argv[1] == "show":
            machine.hand(REQUEST._replace(devices=DEVICES[:-1]))
        else:
            seen.append(machine.report()["generation"])
        return systemctl("active", 10)(argv)

    machine.program("systemctl", answer)
    run(machine)
    assert seen == [json.loads(machine.read(HANDOFF))["generation"]]
    assert machine.calls[-1] == ("systemctl", "--no-block", "try-restart", "containerd.service")
    assert machine.conditions()["RuntimeActive"] == ("Unknown", "RestartPending")
    machine.program("systemctl", systemctl("activating", time.monotonic_ns() // 1000, "start-post"))
    assert machine.verdict("RuntimeActive") == ("True", "Running")


def refuse_restart(machine: Machine) -> None:
    refused = Completed(1, b"", b"Failed to restart containerd.service: Access denied")
    machine.program("systemctl", lambda argv: systemctl("active", 10)(argv) if argv[1] == "show" else refused)


def test_a_failed_restart_is_reported_and_retried(machine: Machine) -> None:
    """The report is written already: the journal and the unit's result say it."""
    refuse_restart(machine)
    for _ in range(2):
        machine.calls.clear()
        with pytest.raises(CommandError, match="Access denied"):
            run(machine)
        assert machine.calls[-1][2:] == ("try-restart", "containerd.service")
    assert machine.conditions()["RuntimeActive"] == ("Unknown", "RestartPending")


def test_a_report_that_cannot_be_written_delays_no_restart(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system of the reports may be full. Pods need the new configuration all the same."""
    machine.before_write = failing(errno.ENOSPC, REPORT)
    with pytest.raises(OSError, match="No space"):
        run(machine)
    assert machine.calls[-1] == ("systemctl", "--no-block", "try-restart", "containerd.service")
    # The run ends with the restart's error, which its caller logs.
    refuse_restart(machine)
    with pytest.raises(CommandError, match="Access denied"):
        run(machine)
    assert f"<3>[Errno 28] No space left on device: '{REPORT}'\n" in capsys.readouterr().err


def test_a_missing_report_directory_is_reported(machine: Machine) -> None:
    (machine.tree / "run/unbounded-agent/report").rmdir()
    machine.put(HANDOFF, b'{"version": 99}')
    with pytest.raises(DocumentError):
        run(machine)
    machine.hand(REQUEST)
    with pytest.raises(Exception, match="is missing, so nothing can be reported"):
        run(machine)


@pytest.mark.parametrize("requests", [(), (EMPTY,), (Request("other", (), ()),)])
def test_what_a_vendor_without_a_grant_had_is_removed(machine: Machine, requests: tuple[Request, ...]) -> None:
    """Even if the handoff does not name the vendor."""
    settle(machine)
    machine.hand(*requests)
    run(machine)
    assert not machine.exists(SPEC)
    assert SPEC not in json.loads(machine.read(OWNED))["paths"]
    assert not [name for name in machine.entries(f"/{LIBRARIES}") if name.startswith("lib")]
    if requests == (EMPTY,):
        assert {status for status, _ in machine.conditions().values()} == {"True"}
    machine.hand(REQUEST)
    run(machine)
    assert machine.exists(SPEC)


def own(machine: Machine, path: str) -> None:
    Owned(machine).claim(path)
    machine.put(path, "{}")


def test_a_spec_that_is_no_longer_wanted_is_removed(machine: Machine) -> None:
    run(machine)
    own(machine, "/etc/cdi/unbounded-agent.json")
    own(machine, "/etc/elsewhere.json")
    machine.put("/etc/cdi/site.json", "{}")
    machine.put(remains := "/etc/cdi/.nvidia.yaml.unbounded-agent-new", '{"half')
    run(machine)
    assert not machine.exists("/etc/cdi/unbounded-agent.json")
    assert machine.exists("/etc/elsewhere.json"), "no CDI spec"
    assert machine.exists("/etc/cdi/site.json"), "not ours"
    assert machine.exists(SPEC)
    assert not machine.exists(remains)
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_a_failed_removal_does_not_cost_the_report(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    run(machine)
    own(machine, "/etc/cdi/unbounded-agent.json")
    machine.before_write = failing(errno.ENOSPC, OWNED)
    run(machine)
    assert "cannot remove leftovers" in capsys.readouterr().err
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_an_unknown_vendor_and_gpus_without_driver_files(machine: Machine) -> None:
    machine.hand(REQUEST._replace(vendor="other"))
    run(machine)
    assert machine.conditions() == {"CDISpecCurrent": ("False", "UnknownVendor")}
    # nvidia-ctk would take an empty driver root for the machine's own root directory.
    machine.hand(REQUEST._replace(driver_root="", driver_version="", files=()))
    assert machine.verdict("CDISpecCurrent") == ("False", "NoDriverRoot")
    assert not [call for call in machine.calls if call[0].endswith("nvidia-ctk")]


# ---- devices


def gpus_of_fault(machine: Machine) -> list[str]:
    return next(each.get("gpus", []) for each in machine.report()["conditions"] if each["type"] == "DevicesAllowed")


def test_a_wrong_number_is_named_with_the_expected_one(machine: Machine) -> None:
    """It does not keep the other nodes from being tried: nothing was known of them until the host had bound it."""
    machine.drop("/dev/nvidia1")
    del machine.nodes["/dev/nvidia1"]
    machine.program("open_nodes", opening(errno.EIO, "/dev/nvidia0"))
    assert machine.verdict("DevicesAllowed") == ("False", "WrongNode")
    assert "/dev/nvidia1 must be character device 195:1, found nothing" in machine.message("DevicesAllowed")
    assert "/dev/nvidia0 does not open (EIO)" in machine.message("DevicesAllowed")
    assert gpus_of_fault(machine) == [GPUS[1], GPUS[0]]
    machine.node("/dev/nvidia-uvm", 511, 0)
    assert machine.verdict("DevicesAllowed") == ("False", "WrongNode")
    assert "/dev/nvidia-uvm must be character device 234:0, found 511:0" in machine.message("DevicesAllowed")
    assert machine.conditions()["CDISpecCurrent"] == ("False", "SpecRefused")
    assert not machine.exists(SPEC)


@pytest.mark.parametrize(
    ("code", "reason", "retried", "advice"),
    [
        (errno.EPERM, "NotPermitted", True, "does not allow it: run `unbounded-agent apply` on the host"),
        (errno.ENXIO, "NoDriver", True, "load the kernel module"),
        (errno.ENODEV, "NoDriver", True, "the driver knows no such device"),
        # Only then is the node opened again.
        (errno.EIO, "GPUFailed", False, f"`unbounded-agent gpus attach {GPUS[1]}` on the host"),
        (errno.ETIMEDOUT, "OpenTimedOut", False, "see `dmesg` on the host"),
        (errno.EAGAIN, "OpenFailed", True, "the machine has reached its limit of memory or processes"),
        (errno.EMFILE, "OpenFailed", True, "see `dmesg` on the host"),
    ],
)
def test_a_node_that_does_not_open(machine: Machine, code: int, reason: str, retried: bool, advice: str) -> None:
    machine.program("open_nodes", opening(code, "/dev/nvidia1"))
    assert machine.verdict("DevicesAllowed") == ("False", reason)
    assert machine.message("DevicesAllowed").startswith(f"/dev/nvidia1 does not open ({errno.errorcode[code]})")
    assert advice in machine.message("DevicesAllowed")
    assert gpus_of_fault(machine) == [GPUS[1]]
    machine.calls.clear()
    run(machine)
    opened = [call for call in machine.calls if any("open_nodes" in each for each in call)]
    assert [call[5:] for call in opened] == ([("/dev/nvidia1",)] if retried else [])
    machine.program("open_nodes", opening(code, "/dev/nvidia1", "/dev/nvidiactl"))
    Notes(machine).save("opened-nvidia", {})
    assert machine.verdict("DevicesAllowed") == ("False", reason)
    assert gpus_of_fault(machine) == [], "a shared node concerns all"


@pytest.mark.parametrize("detached", [(), (GPUS[0],), GPUS], ids=["no GPU", "one of two GPUs", "all GPUs"])
def test_a_failed_gpu_is_opened_again_when_the_host_publishes_the_same_handoff(
    machine: Machine, detached: tuple[str, ...]
) -> None:
    """It does so after `gpus attach`, which says that the GPU was reset: before, perhaps it was detached."""
    machine.program("open_nodes", opening(errno.EIO, "/dev/nvidia0"))
    assert machine.verdict("DevicesAllowed") == ("False", "GPUFailed")
    vendors = {each["type"]: each.get("vendors") for each in machine.report()["conditions"]}
    assert (vendors["DevicesAllowed"], vendors["LibrariesLinked"]) == (["nvidia"], None), "only faults name them"
    machine.program("open_nodes", opening())
    if detached:
        gpus = tuple(each for each in GPUS if each not in detached)
        kept = tuple(each for each in DEVICES if gpus and each.pci_address not in detached)
        machine.hand(REQUEST._replace(gpus=gpus, devices=kept))
        run(machine)
        for device in DEVICES:
            machine.node(device.path, device.major, device.minor)
    else:
        assert machine.verdict("DevicesAllowed") == ("False", "GPUFailed")
    machine.hand(REQUEST)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")


def test_nodes_are_opened_again_only_if_they_changed(machine: Machine) -> None:
    settle(machine)
    changed = tuple(each._replace(major=235) if each.kind.startswith("uvm") else each for each in DEVICES)
    for device in changed:
        machine.node(device.path, device.major, device.minor)
    machine.hand(REQUEST._replace(devices=changed))
    run(machine)
    opened = next(call for call in machine.calls if any("open_nodes" in each for each in call))
    assert opened[5:] == ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def open_nodes(*paths: str, seconds: str = "5", before: str = "") -> set[str]:
    program = str(Path(__file__).parents[2] / "agent/machine/open_nodes.py")
    code = f"import errno, os, runpy, sys, time, _thread\n{before}\nsys.argv = {['x', seconds, *paths]!r}\n"
    code += f"runpy.run_path({program!r}, run_name='__main__')"
    argv = [sys.executable, "-I", "-S", "-c", code]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines())


def test_open_nodes_program(tmp_path: Path) -> None:
    gone, fifo = str(tmp_path / "gone"), str(tmp_path / "fifo")
    os.mkfifo(fifo)
    assert open_nodes("/dev/null", gone, fifo) == {"0 /dev/null", f"{errno.ENOENT} {gone}", f"0 {fifo}"}


HANGS = "real = os.open; os.open = lambda path, *more: time.sleep(60) if path == '/dev/zero' else real(path, *more)"
INITIALISES = """
real = os.open
def initialise(path, flags, *rest):
    if path == '/dev/zero' and not flags & os.O_NONBLOCK:
        raise OSError(errno.EIO, 'the GPU does not initialise', path)
    return real(path, flags, *rest)
os.open = initialise"""
NO_THREAD = """
real, answers = _thread.start_new_thread, [RuntimeError("can't start new thread")]
def start(*arguments):
    if answers: raise answers.pop()
    return real(*arguments)
_thread.start_new_thread = start"""
KILLED = "_thread.start_new_thread = lambda *_: os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("before", "zero", "null"),
    [
        # A child that sleeps in place of open(2) simulates a driver that does not answer.
        (HANGS, errno.ETIMEDOUT, 0),
        # Since release 550, the driver answers a non-blocking open before it initialises the GPU: it always succeeds.
        (INITIALISES, errno.EIO, 0),
        # A limit of tasks; for the second node, it works again. Not ETIMEDOUT, which would hold until the next handoff:
        # a GPU that was never opened would count as one that hangs.
        (NO_THREAD, errno.EAGAIN, 0),
        # The kernel kills the child, because memory runs out.
        (KILLED, errno.EAGAIN, errno.EAGAIN),
    ],
    ids=["an open hangs", "the driver's result", "no thread", "killed"],
)
def test_open_nodes_program_reports_in_time_and_blames_the_right_one(before: str, zero: int, null: int) -> None:
    begin = time.monotonic()
    assert open_nodes("/dev/zero", "/dev/null", seconds="0.5", before=before) == {
        f"{zero} /dev/zero",
        f"{null} /dev/null",
    }
    assert time.monotonic() - begin < 5


def test_open_nodes_program_keeps_the_nodes_open(tmp_path: Path) -> None:
    """Without persistence mode, a GPU that nobody has open is shut down, and must be initialised again."""
    closed = tmp_path / "closed"
    before = f"""
real = os.close
def close(file):
    os.readlink(f'/proc/self/fd/{{file}}') == '/dev/zero' and open({str(closed)!r}, 'w')
    real(file)
os.close = close"""
    assert (open_nodes("/dev/zero", before=before), closed.exists()) == ({"0 /dev/zero"}, False)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 30), (5, 50), (20, 80)])
def test_many_gpus_get_more_time_to_open(machine: Machine, nodes: int, seconds: int) -> None:
    """The driver may initialise one after another."""
    gpu = next(each for each in DEVICES if each.path == "/dev/nvidia0")
    devices = tuple(gpu._replace(path=f"/dev/nvidia{index}", minor=index) for index in range(nodes))
    for device in devices:
        machine.node(device.path, device.major, device.minor)
    machine.hand(REQUEST._replace(devices=devices))
    run(machine)
    opened = next(call for call in machine.calls if any("open_nodes" in each for each in call))
    assert (opened[4], len(opened[5:])) == (str(seconds), nodes)


# ---- CDI spec


def test_a_worse_spec_never_replaces_an_unreadable_one(machine: Machine) -> None:
    """The unreadable specification may be good. Only if it were missing, one with fewer GPUs would be published."""
    settle(machine)
    good = machine.read(SPEC)
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, without_a_gpu()))
    machine.put("/usr/bin/nvidia-ctk", "another build")
    machine.before_read = failing(errno.EIO, SPEC)
    assert machine.verdict("CDISpecCurrent") == ("False", "Failed")
    assert "Input/output error" in machine.message("CDISpecCurrent")
    machine.before_read = lambda path: None
    assert machine.read(SPEC) == good
    machine.drop(SPEC)
    assert machine.verdict("CDISpecCurrent") == ("False", "GPUMissing")
    assert machine.read(SPEC) != good


WITHOUT_MOUNTS = recorded_spec() | {"containerEdits": recorded_spec()["containerEdits"] | {"mounts": []}}
"""nvidia-ctk leaves libraries out with exit code 0."""


WRITTEN: dict[str, tuple[Completed | dict[str, Any] | Answer | bytes | int, str, str]] = {
    "exit code": (Completed(1, b"", b"NVML: Driver Not Loaded"), "GenerationFailed", "Driver Not Loaded"),
    "time limit": (hang, "GenerationFailed", "time limit"),
    "no mounts": (WITHOUT_MOUNTS, "SpecRefused", "libcuda.so is not in it"),
    "empty": (b"", "GenerationFailed", ""),
    "zeros": (b"\0" * 4096, "GenerationFailed", ""),
    "half": (b'{"cdiVersion": "0.5.0", "kind": "nvid', "GenerationFailed", ""),
    "no text": (b"\xff\xfe{}", "GenerationFailed", ""),
    "no object": (b"null", "GenerationFailed", ""),
    "1 GiB": (1 << 30, "GenerationFailed", ""),
    # json raises RecursionError, which is not a ValueError: the report must be written nevertheless.
    "too deep": (b"[" * 100_000 + b"]" * 100_000, "GenerationFailed", ""),
    "deep": (b"[" * 300 + b"]" * 300, "GenerationFailed", ""),
}


@pytest.mark.parametrize(("written", "reason", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_a_failed_generation_keeps_the_spec(
    machine: Machine, written: Completed | dict[str, Any] | Answer | bytes | int, reason: str, expected: str
) -> None:
    settle(machine)
    good = machine.read(SPEC)

    def generate(argv: tuple[str, ...]) -> Completed:
        if argv[1:] == ("--version",) or isinstance(written, dict | bytes):
            return nvidia_ctk(machine, argv, written)
        if isinstance(written, int):
            answer = nvidia_ctk(machine, argv, b"")
            (output,) = (each.removeprefix("--output=") for each in argv if each.startswith("--output="))
            os.truncate(machine.full_path(output), written)
            return answer
        return written if isinstance(written, Completed) else written(argv)

    machine.program("nvidia-ctk", generate)
    machine.put("/usr/bin/nvidia-ctk", "another build")
    before = time.process_time()
    assert machine.verdict("CDISpecCurrent") == ("False", reason)
    assert time.process_time() - before < 20
    assert machine.read(SPEC) == good
    assert expected in machine.message("CDISpecCurrent")
    assert "The last good CDI specification stays in use" in machine.message("CDISpecCurrent")
    assert machine.report()["cdi_devices"]
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


@pytest.mark.parametrize("error", [TypeError("unhashable type: 'list'"), ValueError("too many digits\n\0")])
def test_a_defect_costs_only_its_step(machine: Machine, error: Exception) -> None:
    def fail(_: object) -> Completed:
        raise error

    machine.program("open_nodes", fail)
    machine.program("nvidia-ctk", fail)
    run(machine)
    for kind in ("DevicesAllowed", "CDISpecCurrent"):
        assert machine.conditions()[kind] == ("False", "Failed")
        assert machine.message(kind).startswith(f"{type(error).__name__}: {str(error).split(chr(10))[0]}")
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


def test_without_threads_the_steps_run_one_after_the_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod may have used up the processes that the machine may have (TasksMax=)."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert run(machine) == 0
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")
    assert machine.conditions()["RuntimeActive"] == ("Unknown", "RestartPending")


@pytest.mark.parametrize(
    ("version", "status"), [("1.17.8", "False"), ("1.18.1", "False"), ("1.18.2", "True"), ("1.20.0", "True")]
)
def test_toolkit_version(machine: Machine, version: str, status: str) -> None:
    """Older than 1.18.2 is refused with the reason; older than 1.19.1 works with a remark."""
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, recorded_spec(), version))
    assert machine.verdict("CDISpecCurrent")[0] == status
    message = machine.message("CDISpecCurrent")
    needed = f"nvidia-ctk is {version}, but 1.18.2 is needed for pods with NVIDIA_VISIBLE_DEVICES=none"
    assert (needed in message) == (status == "False")
    assert ("1.19.1, which fixes a race" in message) == (version == "1.18.2")


def test_configured_hooks(machine: Machine) -> None:
    machine.hand(REQUEST._replace(cdi_hooks=("enable-cuda-compat", "update-application-profile")))
    spec = recorded_spec()
    arguments = ["nvidia-cdi-hook", "enable-cuda-compat", f"--host-driver-version={REQUEST.driver_version}"]
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": arguments}
    spec["containerEdits"]["hooks"].insert(0, hook)
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, spec))
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    remark = "nvidia-ctk 1.19.1 lacks these hooks: update-application-profile; upgrade the toolkit"
    assert remark in machine.message("CDISpecCurrent")
    (command,) = (call for call in machine.calls if call[1:3] == ("cdi", "generate"))
    asked = [each.removeprefix("--enable-hook=") for each in command if each.startswith("--enable-hook=")]
    assert asked == ["create-symlinks", "update-ldcache", "enable-cuda-compat", "update-application-profile"]
    assert hook in json.loads(machine.read(SPEC))["containerEdits"]["hooks"]


def test_a_foreign_spec_is_not_overwritten(machine: Machine) -> None:
    machine.put(SPEC, "theirs")
    assert machine.verdict("CDISpecCurrent") == ("False", "ForeignFile")
    machine.hand(EMPTY)
    run(machine)
    assert machine.read(SPEC) == b"theirs"


def test_attack_a_replaced_spec_with_many_mounts_is_made_again_at_once(machine: Machine) -> None:
    """To look up 3000 slow paths took each run more than its 120 seconds, so that none of them ended."""
    run(machine)
    good = machine.read(SPEC)
    spec = json.loads(good)
    spec["containerEdits"]["mounts"] += [{"hostPath": f"/pod/{number}"} for number in range(3000)]
    machine.put(SPEC, json.dumps(spec))
    with mock.patch.object(os, "readlink", wraps=os.readlink) as readlink:
        assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert machine.read(SPEC) == good
    assert not [call for call in readlink.call_args_list if "/pod" in call.args[0]]


def test_a_failed_gpu_costs_only_that_gpu(machine: Machine) -> None:
    """The first run publishes the other GPUs. Later, only a faulty specification is replaced by one with fewer GPUs."""
    machine.hand(REQUEST._replace(cdi_hooks=("update-application-profile",)))
    fewer = without_a_gpu()
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, fewer))
    assert machine.verdict("CDISpecCurrent") == ("False", "GPUMissing")
    assert GPUS[1] in machine.message("CDISpecCurrent")
    assert "lacks these hooks: update-application-profile" in machine.message("CDISpecCurrent"), "remarks are kept"
    assert json.loads(machine.read(SPEC)) == completed(fewer)
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, recorded_spec()))
    run(machine)
    assert json.loads(machine.read(SPEC)) == completed(recorded_spec())
    machine.put("/usr/bin/nvidia-ctk", "another build")
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, fewer))
    assert machine.verdict("CDISpecCurrent") == ("False", "SpecRefused")
    assert json.loads(machine.read(SPEC)) == completed(recorded_spec())
    machine.put(SPEC, json.dumps(WITHOUT_MOUNTS))
    assert machine.verdict("CDISpecCurrent") == ("False", "GPUMissing")
    assert json.loads(machine.read(SPEC)) == completed(fewer), "with the faulty one, no pod would start"


def test_the_published_text_is_the_verified_one(machine: Machine) -> None:
    """The text has a key twice, and parsers differ in which one they use."""
    text = json.dumps(recorded_spec()).replace('"kind"', '"kind": "evil.com/gpu", "kind"').encode()
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, text))
    run(machine)
    assert b"evil" not in machine.read(SPEC)
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_the_toolkits_version_is_read_once(machine: Machine) -> None:
    """A new driver's specification does not wait for it; a new toolkit is run."""
    asked = ("/usr/bin/nvidia-ctk", "--version")
    run(machine)
    assert machine.calls.count(asked) == 1
    machine.hand(REQUEST._replace(driver_version="550.163.02"))
    run(machine)
    assert machine.calls.count(asked) == 1
    machine.put("/usr/bin/nvidia-ctk", "another one")
    run(machine)
    assert machine.calls.count(asked) == 2
