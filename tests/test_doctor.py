"""What `doctor` says: findings of conditions and of the host, in words and as JSON."""

import json
from pathlib import Path

import pytest

from agent.conditions import ConditionType, Status, false, unknown
from agent.doctor import SERVICE, as_json, diagnose, host_findings, in_words, machine_image, sound
from agent.reconcile import MachineOutcome
from agent.vendors.host import HOST_VENDORS
from tests.gpu_host import reconciler
from tests.recorded import Host
from tests.simulated_reconciler import conditions
from tests.test_docs import rows

NOT_LOADED = false(ConditionType.DRIVER_LOADED, "ModuleNotLoaded", "run `modprobe nvidia`")
SILENT = [unknown(kind, "NoReport", "it has not reported") for kind in (*ConditionType,) if "RUNTIME" in kind.name]
NO_DAEMON = false(ConditionType.PERSISTENCE_MODE, "DaemonNotRunning", "start it")


@pytest.fixture
def sound_host(host: Host) -> Host:
    host.bus.unit(SERVICE)
    for name, value in (("vm/overcommit_memory", "1"), ("kernel/panic", "10"), ("kernel/panic_on_oops", "1")):
        host.file(f"/proc/sys/{name}", f"{value}\n")
    return host


def test_a_sound_machine_has_no_finding() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions()))
    assert diagnosis.findings == ()
    assert sound([diagnosis], ())
    assert in_words([diagnosis], (), "agent-ubuntu2404") == [
        "host: nothing found",
        "gpu-node: ready: AllConditionsTrue",
        "image for machines of this host: containerfiles/agent-ubuntu2404",
    ]


def test_faults_come_in_order_with_what_they_look_like() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(*SILENT, NOT_LOADED, NO_DAEMON)))
    assert not sound([diagnosis], ())
    driver, daemon, silent = diagnosis.findings
    assert (driver.conditions, driver.reason) == ((ConditionType.DRIVER_LOADED,), "ModuleNotLoaded")
    assert "couldn't communicate with the NVIDIA driver" in driver.looks_like
    assert (driver.prevents_ready, daemon.prevents_ready) == (True, False)
    assert silent.conditions == (ConditionType.RUNTIME_CONFIGURED, ConditionType.RUNTIME_ACTIVE)
    assert (silent.status, silent.looks_like) == (Status.UNKNOWN, ""), "what is not known is not seen"
    lines = in_words([diagnosis], (), "agent-ubuntu2404")
    assert lines[1:5] == [
        "gpu-node: not ready: ModuleNotLoaded",
        "  - DriverLoaded: False, ModuleNotLoaded",
        "    run `modprobe nvidia`",
        f"    seen as: {driver.looks_like}",
    ]
    assert "  - PersistenceMode: False, DaemonNotRunning (not needed for Ready)" in lines
    assert "  - RuntimeConfigured, RuntimeActive: Unknown, NoReport" in lines


def test_what_is_not_needed_for_ready_is_told_and_no_fault() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(NO_DAEMON)))
    assert len(diagnosis.findings) == 1
    assert sound([diagnosis], ())


def test_the_error_codes_that_are_mixed_up_are_told_apart() -> None:
    fabric = false(ConditionType.FABRIC_READY, "FabricManagerNotRunning", "start it")
    versions = false(ConditionType.LIBRARIES_PRESENT, "VersionMismatch", "reload it")
    found = {
        each.reason: each.looks_like for each in diagnose(MachineOutcome("m", conditions(fabric, versions))).findings
    }
    assert "802 (SYSTEM_NOT_READY)" in found["FabricManagerNotRunning"]
    assert "803 (SYSTEM_DRIVER_MISMATCH)" in found["VersionMismatch"]


def test_as_json() -> None:
    diagnosis = diagnose(MachineOutcome("gpu-node", conditions(NOT_LOADED)))
    assert json.loads(as_json([diagnosis], ("a setting is wrong",), "agent-ubuntu2404")) == {
        "host": ["a setting is wrong"],
        "image": "agent-ubuntu2404",
        "machines": {
            "gpu-node": {
                "ready": "False",
                "findings": [
                    {
                        "conditions": ["DriverLoaded"],
                        "status": "False",
                        "reason": "ModuleNotLoaded",
                        "message": "run `modprobe nvidia`",
                        "looksLike": diagnosis.findings[0].looks_like,
                        "preventsReady": True,
                    }
                ],
            }
        },
    }


def test_symptoms_are_of_reasons_that_there_are() -> None:
    """A reason that was renamed would leave its symptom behind."""
    reasons = {row["reason"] for row in rows() if row["status"] == "False"}
    of_vendors = {reason for vendor in HOST_VENDORS for _, reason in vendor.symptoms if reason}
    assert of_vendors - reasons == set()


# ---- the host


def test_the_image_is_chosen_by_the_gpus_that_are_there(gpu_host: Host) -> None:
    passes = reconciler(gpu_host)
    image = machine_image(passes.look()[0])
    assert image == "agent-ubuntu2404-nvidia"
    assert Path("containerfiles", image, "Containerfile").exists()
    gpu_host.pci = gpu_host.drm = ()
    image = machine_image(passes.look()[0])
    assert image == "agent-ubuntu2404"
    assert Path("containerfiles", image, "Containerfile").exists()


def test_a_host_as_it_should_be(sound_host: Host) -> None:
    assert host_findings(sound_host) == ()


def test_a_service_that_does_not_run_or_is_not_there(sound_host: Host) -> None:
    sound_host.bus.unit(SERVICE, "failed")
    (finding,) = host_findings(sound_host)
    assert finding.startswith("unbounded-agent.service is failed: nothing follows what changes on the host")
    assert finding.endswith("run `systemctl enable --now unbounded-agent`")
    sound_host.bus.unit(SERVICE, "inactive", "not-found")
    (finding,) = host_findings(sound_host)
    assert finding.startswith("unbounded-agent.service is not installed: ")
    assert not sound([diagnose(MachineOutcome("gpu-node", conditions()))], (finding,))


def test_a_setting_that_no_kubelet_starts_with(sound_host: Host) -> None:
    sound_host.file("/proc/sys/kernel/panic", "0\n")
    sound_host.remove_file("/proc/sys/vm/overcommit_memory")
    absent, wrong = host_findings(sound_host)
    assert absent == "/proc/sys/vm/overcommit_memory cannot be read: No such file or directory"
    assert wrong.startswith("kernel.panic is 0, and the kubelet of a machine does not start until it is 10: write ")
