"""`doctor` prints findings from conditions and from the host, as text and as JSON."""

import json
import re
from pathlib import Path

import pytest

from agent.cli.doctor.bundle import Report, as_object, in_words
from agent.cli.doctor.host import SERVICE, HostDiagnosis, diagnose_host
from agent.cli.doctor.machines import Diagnosis, diagnose
from agent.config.settings import Config
from agent.host.provision.host_settings import KUBELET_SYSCTLS, sysctl_path
from agent.host.reconcile import MachineOutcome
from agent.host.vendors import HOST_VENDORS
from agent.model.conditions import ConditionType, Reason, Status, false, true, unknown
from agent.model.facts import Broken, Facts
from agent.vendors.host_vendor import DriverForPods, Finding
from tests.fakes.conditions_page import rows
from tests.fakes.gpu_host import VERSION, reconciler
from tests.fakes.host import Host
from tests.fakes.libcuda import LIBCUDA, answer_of_libcuda
from tests.fakes.reconciler import conditions

NOT_LOADED = false(ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED, "run `modprobe nvidia`")
SILENT = [
    unknown(kind, Reason.NO_REPORT, "it has not reported") for kind in (*ConditionType,) if "RUNTIME" in kind.name
]
NOTHING = Facts("x86_64", 257, (), (), ())
NO_DAEMON = false(ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING, "start it")


EMPTY = Config(machines={})
NO_FAULT = HostDiagnosis()


def words(*diagnoses: Diagnosis, host: HostDiagnosis = NO_FAULT) -> list[str]:
    return list(in_words(Report(diagnoses, host), 200))


def sound(*diagnoses: Diagnosis, host: HostDiagnosis = NO_FAULT) -> bool:
    return Report(diagnoses, host).sound


@pytest.fixture
def sound_host(host: Host) -> Host:
    host.bus.unit(SERVICE)
    for name, value in KUBELET_SYSCTLS.items():
        host.file(sysctl_path(name), f"{value}\n")
    return host


def test_a_sound_machine_has_no_finding() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions()))
    assert diagnosis.findings == ()
    assert sound(diagnosis)
    assert words(diagnosis) == [
        "host: no fault found",
        "gpu-node: ready: AllConditionsTrue",
        "image for machines of this host: containerfiles/agent-ubuntu2404",
    ]
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(NO_DAEMON)))
    assert len(diagnosis.findings) == 1
    assert sound(diagnosis)
    settling = false(ConditionType.READY, Reason.SETTLING, "it becomes True in a minute")
    diagnosis = diagnose(MachineOutcome("gpu-node", (*conditions(NO_DAEMON)[:-1], settling)))
    assert [each.prevents_ready for each in diagnosis.findings] == [False, True]
    assert "  - Ready: False, Settling" in words(diagnosis)
    ready = true(ConditionType.READY, Reason.NO_GPU, "this host has no GPU; machine gpu-node does not run")
    diagnosis = diagnose(MachineOutcome("gpu-node", (ready,)))
    assert words(diagnosis)[1:3] == ["gpu-node: ready: NoGPU", f"    {ready.message}"]


def test_faults_come_in_order_with_their_symptoms() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(*SILENT, NOT_LOADED, NO_DAEMON)))
    assert not sound(diagnosis)
    driver, daemon, silent = diagnosis.findings
    assert (driver.conditions, driver.reason) == ((ConditionType.DRIVER_LOADED,), "ModuleNotLoaded")
    assert "couldn't communicate with the NVIDIA driver" in driver.symptoms
    assert (driver.prevents_ready, daemon.prevents_ready) == (True, False)
    assert silent.conditions == (ConditionType.RUNTIME_CONFIGURED, ConditionType.RUNTIME_ACTIVE)
    assert (silent.status, silent.symptoms) == (Status.UNKNOWN, ""), "what is not known is not seen"
    lines = words(diagnosis)
    assert lines[1:5] == [
        "gpu-node: not ready: ModuleNotLoaded",
        "  - DriverLoaded: False, ModuleNotLoaded",
        "    evidence: run `modprobe nvidia`",
        f"    symptoms: {driver.symptoms}",
    ]
    assert "  - PersistenceMode: False, DaemonNotRunning (not needed for Ready)" in lines
    assert "  - RuntimeConfigured, RuntimeActive: Unknown, NoReport" in lines


def test_error_codes_that_people_confuse_are_explained() -> None:
    fabric = false(ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING, "start it")
    versions = false(ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH, "reload it")
    found = {
        each.reason: each.symptoms for each in diagnose(MachineOutcome("m", conditions(fabric, versions))).findings
    }
    assert "802 (SYSTEM_NOT_READY)" in found["FabricManagerNotRunning"]
    assert "`nvidia-smi conf-compute -srs 1`" in found["FabricManagerNotRunning"], "NVIDIA/nvtrust issue 37"
    assert "803 (SYSTEM_DRIVER_MISMATCH)" in found["VersionMismatch"]


def test_for_programs() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(NOT_LOADED)))
    driver = DriverForPods("nvidia", "550.163.01", {"CUDA": "12.4"})
    host = HostDiagnosis((Finding("a setting is wrong", "it is 1", ("set it",)),), (driver,), remarks=("odd",))
    found = as_object(Report((diagnosis,), host))
    expected = {
        "sound": False,
        "host": [{"cause": "a setting is wrong", "evidence": "it is 1", "fix": ("set it",)}],
        "notes": ("odd",),
        "drivers": [
            {"vendor": "nvidia", "version": "550.163.01", "interfaces": {"CUDA": "12.4"}, "unknown": ""},
        ],
        "image": "agent-ubuntu2404",
        "cluster": None,
        "machines": {
            "gpu-node": {
                "ready": "False",
                "reason": "ModuleNotLoaded",
                "message": diagnosis.ready.message,
                "findings": [
                    {
                        "conditions": ("DriverLoaded",),
                        "status": "False",
                        "reason": "ModuleNotLoaded",
                        "message": "run `modprobe nvidia`",
                        "looksLike": diagnosis.findings[0].symptoms,
                        "fix": diagnosis.findings[0].fix,
                        "preventsReady": True,
                    }
                ],
            }
        },
    }
    assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_symptoms_belong_to_existing_reasons() -> None:
    """Renaming a reason would leave its symptom behind."""
    reasons = {row["reason"] for row in rows() if row["status"] == "False"}
    symptom_reasons = {reason for vendor in HOST_VENDORS for _, reason in vendor.symptoms if reason}
    assert symptom_reasons - reasons == set()


# ---- the host


def host_findings(host: Host) -> tuple[Finding, ...]:
    return diagnose_host(NOTHING, EMPTY, host).findings


@pytest.mark.scenario("003")
@pytest.mark.usefixtures("sound_host")
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("12040\n", 0, "nvidia 550.163.01, CUDA 12.4"),
        ("13000\n", 0, "nvidia 550.163.01, CUDA 13.0"),
        ("oops\n", 0, "returned 'oops'"),
        ("", 1, "exit code 1: no"),
    ],
)
def test_the_cuda_version_by_which_images_are_chosen(gpu_host: Host, text: str, status: int, said: str) -> None:
    answer_of_libcuda(gpu_host, text, status)
    host = diagnose_host(reconciler(gpu_host).preview()[0], EMPTY, gpu_host)
    (line,) = (each for each in words(host=host) if each.startswith("driver for pods: "))
    assert said in line


@pytest.mark.usefixtures("sound_host")
def test_only_the_hosts_own_library_is_loaded(gpu_host: Host) -> None:
    """Root in a machine may have changed the copy that machines see."""
    passes = reconciler(gpu_host)
    passes.reconcile()
    answer_of_libcuda(gpu_host, "12040\n")
    assert diagnose_host(passes.preview()[0], EMPTY, gpu_host).drivers == (
        DriverForPods("nvidia", VERSION, {"CUDA": "12.4"}),
    )
    gpu_host.driver("535.261.03", gpus=2)
    (driver,) = diagnose_host(passes.preview()[0], EMPTY, gpu_host).drivers
    assert (driver.version, driver.interfaces) == ("535.261.03", {})
    assert driver.unknown == "this host has no libcuda 535.261.03: see LibrariesPresent"


@pytest.mark.usefixtures("sound_host")
@pytest.mark.parametrize("path", [LIBCUDA, "/usr/lib/x86_64-linux-gnu/nvidia"])
def test_a_library_that_others_may_write_is_not_loaded(gpu_host: Host, path: str) -> None:
    facts = reconciler(gpu_host).preview()[0]
    gpu_host.owners[path] = (0o775, 0)
    (driver,) = diagnose_host(facts, EMPTY, gpu_host).drivers
    assert driver.interfaces == {}
    assert re.search(r"libcuda.* was not loaded: users other than root can write (in|to) .*0775", driver.unknown)


@pytest.mark.usefixtures("sound_host")
def test_the_image_is_chosen_by_the_present_gpus(gpu_host: Host) -> None:
    passes = reconciler(gpu_host)
    answer_of_libcuda(gpu_host, "12040\n")
    image = diagnose_host(passes.preview()[0], EMPTY, gpu_host).image
    assert image == "agent-ubuntu2404-nvidia"
    assert Path("containerfiles", image, "Containerfile").exists()
    for address in ("0000:01:00.0", "0000:02:00.0"):
        gpu_host.unplug(address)
    image = diagnose_host(passes.preview()[0], EMPTY, gpu_host).image
    assert image == "agent-ubuntu2404"
    assert Path("containerfiles", image, "Containerfile").exists()


def test_a_host_as_it_should_be(sound_host: Host) -> None:
    assert host_findings(sound_host) == ()
    assert diagnose_host(NOTHING, EMPTY, sound_host).drivers == ()


def test_a_service_that_is_stopped_or_not_installed(sound_host: Host) -> None:
    sound_host.bus.unit(SERVICE, "failed")
    (finding,) = host_findings(sound_host)
    assert finding.cause.startswith("nothing follows changes on the host")
    assert finding.evidence == "unbounded-agent.service is failed"
    assert finding.fix[0] == "systemctl enable --now unbounded-agent"
    sound_host.bus.unit(SERVICE, "inactive", "not-found")
    (finding,) = host_findings(sound_host)
    assert finding.evidence.startswith("unbounded-agent.service is not installed")
    assert finding.fix[0] == "install the host half: docs/install.md"
    assert not sound(diagnose(MachineOutcome("gpu-node", conditions())), host=HostDiagnosis((finding,)))


@pytest.mark.parametrize("sub_state", ["auto-restart", "auto-restart-queued"])
def test_a_service_that_ends_again_and_again(sound_host: Host, sub_state: str) -> None:
    """Between two attempts, which is nearly always, systemd calls it `activating`, as while it starts."""
    sound_host.bus.unit(SERVICE, "activating")
    assert host_findings(sound_host) == ()
    sound_host.bus.sub_states[SERVICE] = sub_state
    (finding,) = host_findings(sound_host)
    assert finding.evidence == "unbounded-agent.service has ended, and systemd will start it again"
    assert finding.fix == ("journalctl -b -u unbounded-agent.service --no-pager -n 50",)


def test_masked_units_are_unmasked_first(sound_host: Host) -> None:
    """`systemctl enable` and `systemctl start` refuse masked units, and no package removes the mask."""
    sound_host.bus.unit(SERVICE, "inactive", "masked")
    masked = Broken("/etc/systemd/system/systemd-nspawn@.service: not a regular file")
    findings = diagnose_host(Facts("x86_64", 257, masked, (), ()), EMPTY, sound_host).findings
    template, service = (each.fix for each in findings)
    assert template == ("systemctl unmask systemd-nspawn@.service",)
    assert service == ("systemctl unmask unbounded-agent.service", "systemctl enable --now unbounded-agent")


def test_a_setting_that_no_kubelet_starts_with(sound_host: Host) -> None:
    sound_host.file("/proc/sys/kernel/panic", "0\n")
    sound_host.remove_file("/proc/sys/vm/overcommit_memory")
    wrong, absent = host_findings(sound_host)
    assert absent.cause == "whether kubelets can start is unknown: cannot read /proc/sys/vm/overcommit_memory"
    assert wrong.cause.startswith("kernel.panic is 0, but kubelets in machines start only if it is 10")
    assert wrong.fix == ("echo 'kernel.panic = 10' >> /etc/sysctl.d/90-kubelet.conf && sysctl --system",)
