"""Faults of the host that no condition shows: each is seeded and found, and a sound host has none."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.cli.doctor.bundle import Report, examine, in_words
from agent.cli.doctor.host import SERVICE, HostDiagnosis, diagnose_host
from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.model.conditions import Reason, Status
from agent.model.facts import Broken, Facts, GpuFault, Granted, HostCheck, Verdict
from agent.model.paths import SERVICE_STATE, STATE, WENT_BACK
from agent.vendors.host_vendor import DriverForPods, Finding
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, VERSION, reconciler, without_gpus
from tests.fakes.host import Host
from tests.fakes.libcuda import LIBCUDA, answer_of_libcuda
from tests.fakes.sound_host import make_sound

EMPTY = Config(machines={})


@pytest.fixture
def sound(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    return gpu_host


def diagnosed(host: Host, seen: Facts | None = None) -> HostDiagnosis:
    return diagnose_host(seen or reconciler(host).preview()[0], EMPTY, host)


def found(host: Host) -> tuple[Finding, ...]:
    return diagnosed(host).findings


def test_a_sound_host_has_no_finding(sound: Host) -> None:
    """Nor has one without GPUs, which has no driver for pods."""
    assert found(sound) == ()
    without = diagnosed(sound, Facts("x86_64", 257, (), (), ()))
    assert (without.findings, without.drivers) == ((), ())


def test_settings_that_no_kubelet_starts_with(sound: Host) -> None:
    """`doctor` found a fault on each host whose machines have no kubelet."""
    sound.file("/proc/sys/kernel/panic", "0\n")
    sound.remove_file("/proc/sys/vm/overcommit_memory")
    wrong, absent = found(sound)
    assert absent.cause == "whether kubelets can start is unknown: cannot read /proc/sys/vm/overcommit_memory"
    assert wrong.cause == "kernel.panic is 0, but kubelets in machines start only if it is 10"
    assert wrong.fix == ("echo 'kernel.panic = 10' >> /etc/sysctl.d/90-kubelet.conf && sysctl --system",)
    assert command(Reconciler(EMPTY, sound, sound), "doctor") == 0
    assert len(examine(reconciler(sound)).host.findings) == 2, "the machine has not reported yet: it may have one"


@pytest.mark.parametrize("status", list(Status))
def test_an_administrators_check_that_is_not_true_is_a_finding(sound: Host, status: Status) -> None:
    seen = reconciler(sound).preview()[0]
    check = HostCheck("DiskHealthy", status, Reason.CHECK_FAILED, "1 % free")
    findings = diagnosed(sound, replace(seen, checks=(check,))).findings
    causes = [f"the host's check DiskHealthy is {status}: CheckFailed"] if status is not Status.TRUE else []
    assert [(each.cause, each.evidence) for each in findings] == [(each, "1 % free") for each in causes]


# ---- the service


def test_a_service_that_is_stopped_or_not_installed(sound: Host) -> None:
    sound.bus.unit(SERVICE, "failed")
    (finding,) = found(sound)
    assert finding.cause.startswith("nothing follows changes on the host")
    assert finding.evidence == "unbounded-agent.service is failed"
    assert finding.fix[0] == "systemctl enable --now unbounded-agent"
    assert not Report((), HostDiagnosis((finding,))).sound
    sound.bus.unit(SERVICE, "inactive", "not-found")
    (finding,) = found(sound)
    assert finding.evidence.startswith("unbounded-agent.service is not installed")
    assert finding.fix[0] == "install the host half: docs/install.md"


@pytest.mark.parametrize("sub_state", ["auto-restart", "auto-restart-queued"])
def test_a_service_that_ends_again_and_again(sound: Host, sub_state: str) -> None:
    """Between two attempts, which is nearly always, systemd calls it `activating`, as while it starts."""
    sound.bus.unit(SERVICE, "activating")
    assert found(sound) == ()
    sound.bus.sub_states[SERVICE] = sub_state
    (finding,) = found(sound)
    assert finding.evidence == "unbounded-agent.service has ended, and systemd will start it again"
    assert finding.fix == ("journalctl -b -u unbounded-agent.service --no-pager -n 50",)


def test_masked_units_are_unmasked_first(sound: Host) -> None:
    """`systemctl enable` and `systemctl start` refuse masked units, and no package removes the mask."""
    sound.bus.unit(SERVICE, "inactive", "masked")
    masked = Broken("/etc/systemd/system/systemd-nspawn@.service: not a regular file")
    template, service = (each.fix for each in diagnosed(sound, Facts("x86_64", 257, masked, (), ())).findings)
    assert template == ("systemctl unmask systemd-nspawn@.service",)
    assert service == ("systemctl unmask unbounded-agent.service", "systemctl enable --now unbounded-agent")


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


def test_another_process_that_answers_prometheus_is_found(sound: Host) -> None:
    """A socket listens on the port, but it is not the service's."""
    why = "configuration key metrics.address: cannot listen on 127.0.0.1:9788: Address already in use"
    SERVICE_STATES.write(SERVICE_STATE, ServiceState(unserved=why), sound)
    (finding,) = found(sound)
    assert (finding.cause, finding.evidence) == ("the service runs, but serves no metrics", why)
    # The service writes a damaged record again when its state changes.
    for damaged in (b"{", b"[]", b'{"unserved": 1}'):
        sound.write(SERVICE_STATE, damaged)
        assert found(sound) == ()


# ---- the configuration, GPUs, disks


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


def test_a_release_that_went_back_is_a_finding(sound: Host) -> None:
    sound.file(WENT_BACK, "release 1.1 failed at noon, and 1.0 runs again: it crashed (SEGV)\n")
    (finding,) = found(sound)
    assert finding.cause.startswith("the release that was installed last failed")
    assert finding.evidence == "release 1.1 failed at noon, and 1.0 runs again: it crashed (SEGV)"


def test_a_gpu_with_a_fatal_error_is_found_once(sound: Host) -> None:
    """An alert sent people to the host, where neither `doctor` nor `gpus` knew of the error."""
    seen = reconciler(sound).preview()[0]
    fault = GpuFault("Xid48", "a double-bit ECC error: reset the GPU", 1.7e9, Verdict.NEEDS_RESET, 1.7e9)
    # After an error of a degraded GPU, pods may rely on it.
    degraded = replace(fault, reason="Xid63", verdict=Verdict.DEGRADED)
    seen = replace(seen, gpus=replace(seen.gpus, faults={"0000:01:00.0": degraded, "0000:02:00.0": fault}))
    (finding,) = diagnosed(sound, seen).findings
    assert finding.cause == "GPU 0000:02:00.0 needs a reset: pods could not rely on it"
    assert finding.evidence == "a double-bit ECC error: reset the GPU (since 2023-11-14T22:13:20Z)"
    assert finding.fix == ("unbounded-agent gpus reset 0000:02:00.0",)
    # A condition of the machine that has the GPU reports it.
    granted = tuple(replace(each, granted=Granted("0f", ("0000:02:00.0",), {})) for each in seen.machines)
    assert diagnosed(sound, replace(seen, machines=granted)).findings == ()


def test_a_full_disk(sound: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "free_bytes", lambda path: 5 << 20 if path == "/run" else 1 << 40)
    (finding,) = found(sound)
    assert finding.cause == "the file system of /run is nearly full"
    assert finding.evidence == "5 MiB are free, 16 MiB are needed"


def test_what_was_refused_is_a_note_and_no_fault(sound: Host, capsys: Capture) -> None:
    sound.file(f"/var/lib/machines/{MACHINE}.nspawn", "[Exec]\n")
    sound.file(f"/etc/systemd/nspawn/{MACHINE}.nspawn", "[Exec]\n")
    assert found(sound) == ()
    assert command(reconciler(sound), "doctor") == 1, "the machine is not ready"
    assert f"note: /var/lib/machines/{MACHINE}.nspawn has no effect" in capsys.readouterr().out


def test_a_problem_that_is_a_finding_is_no_note_as_well(sound: Host) -> None:
    sound.symlink(STATE, "../../elsewhere")
    seen = reconciler(sound).preview()[0]
    report = diagnosed(sound, replace(seen, plain_roots=(0,)))
    assert [each.evidence for each in report.findings] == [*seen.staged_problems]
    assert (len(report.findings), report.remarks) == (1, ())


# ---- the driver and the image for pods


@pytest.mark.scenario("003")
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("12040\n", 0, "nvidia 550.163.01, CUDA 12.4"),
        ("13000\n", 0, "nvidia 550.163.01, CUDA 13.0"),
        ("oops\n", 0, "returned 'oops'"),
        ("", 1, "exit code 1: no"),
    ],
)
def test_the_cuda_version_by_which_images_are_chosen(sound: Host, text: str, status: int, said: str) -> None:
    answer_of_libcuda(sound, text, status)
    (line,) = (each for each in in_words(Report((), diagnosed(sound)), 200) if each.startswith("driver for pods: "))
    assert said in line


def test_only_the_hosts_own_library_is_loaded(sound: Host) -> None:
    """Root in a machine may have changed the copy that machines see."""
    reconciler(sound).reconcile()
    assert diagnosed(sound).drivers == (DriverForPods("nvidia", VERSION, {"CUDA": "12.4"}),)
    sound.driver("535.261.03", gpus=2)
    (driver,) = diagnosed(sound).drivers
    assert (driver.version, driver.interfaces) == ("535.261.03", {})
    assert driver.unknown == "this host has no libcuda 535.261.03: see LibrariesPresent"


@pytest.mark.parametrize("path", [LIBCUDA, "/usr/lib/x86_64-linux-gnu/nvidia"])
def test_a_library_that_others_may_write_is_not_loaded(sound: Host, path: str) -> None:
    facts = reconciler(sound).preview()[0]
    sound.owners[path] = (0o775, 0)
    (driver,) = diagnosed(sound, facts).drivers
    assert driver.interfaces == {}
    assert re.search(r"libcuda.* was not loaded: users other than root can write (in|to) .*0775", driver.unknown)


def test_the_image_is_chosen_by_the_present_gpus(sound: Host) -> None:
    images = [diagnosed(sound).image, diagnosed(without_gpus(sound)).image]
    assert images == ["agent-ubuntu2404-nvidia", "agent-ubuntu2404"]
    assert all(Path("containerfiles", image, "Containerfile").exists() for image in images)
