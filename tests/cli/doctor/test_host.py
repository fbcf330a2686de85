"""Faults of the host that no condition shows: each is seeded and found, and a sound host has none."""

import pytest
from msgspec.structs import replace

from agent.cli.doctor.bundle import examine
from agent.cli.doctor.host import SERVICE, diagnose_host
from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.model.facts import GpuFault
from agent.model.paths import SERVICE_STATE, STATE
from agent.vendors.host_vendor import Finding
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda
from tests.fakes.sound_host import make_sound

EMPTY = Config(machines={})


@pytest.fixture
def sound(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    answer_of_libcuda(gpu_host, "12040\n")
    return gpu_host


def found(host: Host) -> tuple[Finding, ...]:
    return diagnose_host(reconciler(host).preview()[0], EMPTY, host).findings


def test_a_sound_host_has_no_finding(sound: Host) -> None:
    assert found(sound) == ()


def test_settings_of_kubelets_matter_only_where_one_may_run(sound: Host) -> None:
    """`doctor` found a fault on each host whose machines have no kubelet."""
    sound.file("/proc/sys/vm/overcommit_memory", "0\n")
    assert [each.cause for each in found(sound)] == [
        "vm.overcommit_memory is 0, but kubelets in machines start only if it is 1"
    ]
    assert command(Reconciler(EMPTY, sound, sound), "doctor") == 0
    unknown_machine = examine(reconciler(sound))
    assert len(unknown_machine.host.findings) == 1, "it has not reported yet"


def test_another_process_that_answers_prometheus_is_found(sound: Host) -> None:
    """A socket listens on the port, but it is not the service's."""
    why = "configuration key metrics.address: cannot listen on 127.0.0.1:9788: Address already in use"
    SERVICE_STATES.write(SERVICE_STATE, ServiceState(unserved=why), sound)
    (finding,) = found(sound)
    assert finding.cause == "the service runs, but serves no metrics"
    assert finding.evidence == why


@pytest.mark.parametrize("state", ["active", "activating", "reloading"])
@pytest.mark.parametrize("unserved", ["", "the port is taken"])
def test_a_service_whose_passes_fail(sound: Host, state: str, unserved: str) -> None:
    """With /etc read-only, `doctor` found no fault of the host."""
    sound.bus.unit(SERVICE, state)
    failed = ServiceState(unserved, failed="cannot write /etc/systemd/nspawn/a.nspawn: Read-only file system")
    SERVICE_STATES.write(SERVICE_STATE, failed, sound)
    finding = found(sound)[0]
    assert finding.cause == "the service runs, but cannot make all of its changes"
    assert finding.evidence == failed.failed
    assert finding.fix[0] == "journalctl -u unbounded-agent -p warning --since -1h --no-pager"
    SERVICE_STATES.write(SERVICE_STATE, ServiceState(unserved, unfinished="no space"), sound)
    finding = found(sound)[0]
    assert finding.cause == "the service runs, but cannot observe or change this host"
    assert finding.evidence == "no space"


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"unserved": 1}'])
def test_a_damaged_record_of_the_service_is_no_fault(sound: Host, content: bytes) -> None:
    """The service writes it again when its state changes."""
    sound.write(SERVICE_STATE, content)
    assert found(sound) == ()


def test_an_invalid_configuration_comes_first_and_the_rest_is_diagnosed(sound: Host, capsys: Capture) -> None:
    sound.file("/proc/sys/kernel/panic", "0\n")
    agent = reconciler(sound)
    agent.rejected = "/etc/unbounded-agent/config.toml: machines.a.gpu: unknown key\nspeed: unknown key"
    first, second = examine(agent).host.findings
    assert first.cause.startswith("the configuration is invalid")
    assert first.evidence == "/etc/unbounded-agent/config.toml: machines.a.gpu: unknown key; speed: unknown key"
    assert second.cause.startswith("kernel.panic is 0")
    assert command(agent, "doctor") == 2
    assert f"{MACHINE}: not ready: NotStaged" in capsys.readouterr().out
    assert command(agent, "doctor --json") == 2


def test_a_gpu_with_a_fatal_error_is_found_once(sound: Host) -> None:
    """An alert sent people to the host, where neither `doctor` nor `gpus` knew of the error."""
    seen = reconciler(sound).preview()[0]
    fault = GpuFault("Xid48", "a double-bit ECC error: reset the GPU", 1.7e9)
    seen = replace(seen, gpus=replace(seen.gpus, faults={"0000:02:00.0": fault}))
    (finding,) = diagnose_host(seen, EMPTY, sound).findings
    assert finding.cause == "GPU 0000:02:00.0 has had a fatal error (Xid48): pods cannot rely on it"
    assert finding.evidence == "a double-bit ECC error: reset the GPU (read 2023-11-14T22:13:20Z)"
    assert finding.fix[-1].startswith("unbounded-agent gpus attach 0000:02:00.0")
    # DevicesPresent reports a GPU that fell off the bus.
    vendor = seen.vendors[0]
    gone = replace(vendor, gpus=tuple(replace(each, why_lost="Xid 79") for each in vendor.gpus))
    assert diagnose_host(replace(seen, vendors=(gone, *seen.vendors[1:])), EMPTY, sound).findings == ()


def test_a_full_disk(sound: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "free_bytes", lambda path: 5 << 20 if path == "/run" else 1 << 40)
    (finding,) = found(sound)
    assert (finding.cause, finding.evidence) == (
        "the file system of /run is nearly full",
        "5 MiB are free, 16 MiB are needed",
    )


def test_what_was_refused_is_a_note_and_no_fault(sound: Host, capsys: Capture) -> None:
    sound.file(f"/var/lib/machines/{MACHINE}.nspawn", "[Exec]\n")
    sound.file(f"/etc/systemd/nspawn/{MACHINE}.nspawn", "[Exec]\n")
    report = examine(reconciler(sound))
    assert report.host.findings == ()
    (note,) = report.host.remarks
    assert note.startswith(f"/var/lib/machines/{MACHINE}.nspawn has no effect")
    assert command(reconciler(sound), "doctor") == 1, "the machine is not ready"
    assert "note: /var/lib/machines" in capsys.readouterr().out


def test_a_problem_that_is_a_finding_is_no_note_as_well(sound: Host) -> None:
    sound.symlink(STATE, "../../elsewhere")
    seen = reconciler(sound).preview()[0]
    (problem,) = seen.staged_problems
    report = diagnose_host(replace(seen, plain_roots=(0,)), EMPTY, sound)
    assert [each.evidence for each in report.findings] == [problem]
    assert report.remarks == ()
