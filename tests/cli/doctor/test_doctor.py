"""`doctor` prints findings from conditions and from the host, as text and as JSON."""

import json

from agent.cli.doctor.bundle import Report, as_object, in_words
from agent.cli.doctor.host import HostDiagnosis
from agent.cli.doctor.machines import Diagnosis, Environment, diagnose
from agent.host.reconcile import MachineOutcome
from agent.host.vendors import HOST_VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, true, unknown
from agent.vendors.host_vendor import DriverForPods, Finding
from tests.fakes import facts
from tests.fakes.conditions_page import rows
from tests.fakes.reconciler import conditions

NOT_LOADED = false(ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED, "run `modprobe nvidia`")
SILENT = [
    unknown(kind, Reason.NO_REPORT, "it has not reported") for kind in (*ConditionType,) if "RUNTIME" in kind.name
]
NO_DAEMON = false(ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING, "start it")


def diagnosed(*found: Condition) -> Diagnosis:
    return diagnose(MachineOutcome("gpu-node", found))


def words(diagnosis: Diagnosis) -> list[str]:
    return list(in_words(Report((diagnosis,), HostDiagnosis()), 200))


def sound(diagnosis: Diagnosis) -> bool:
    return Report((diagnosis,), HostDiagnosis()).sound


def test_a_sound_machine_has_no_finding() -> None:
    diagnosis = diagnosed(*conditions())
    assert diagnosis.findings == ()
    assert sound(diagnosis)
    assert words(diagnosis) == [
        "host: no fault found",
        "gpu-node: ready: AllConditionsTrue",
        "image for machines of this host: containerfiles/agent-ubuntu2404",
    ]
    diagnosis = diagnosed(*conditions(NO_DAEMON))
    assert len(diagnosis.findings) == 1
    assert sound(diagnosis)
    settling = false(ConditionType.READY, Reason.SETTLING, "it becomes True in a minute")
    diagnosis = diagnosed(*conditions(NO_DAEMON)[:-1], settling)
    assert [each.prevents_ready for each in diagnosis.findings] == [False, True]
    assert "  - Ready: False, Settling" in words(diagnosis)
    ready = true(ConditionType.READY, Reason.NO_GPU, "this host has no GPU; machine gpu-node does not run")
    assert words(diagnosed(ready))[1:3] == ["gpu-node: ready: NoGPU", f"    {ready.message}"]


def test_faults_come_in_order_with_their_symptoms() -> None:
    diagnosis = diagnosed(*conditions(*SILENT, NOT_LOADED, NO_DAEMON))
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


def test_what_is_listed() -> None:
    """Causes without what follows from them, and what is True but calls for an action."""
    stopped = false(ConditionType.MACHINE_RUNNING, Reason.STOPPED, "it was stopped")
    follows = unknown(ConditionType.CDI_SPEC_CURRENT, Reason.MACHINE_NOT_RUNNING, "it is not running")
    (finding,) = diagnosed(*conditions(stopped, follows)).findings
    assert finding.reason == "Stopped"
    ready = false(ConditionType.READY, Reason.NO_GPU, "this host has no GPU, and require_gpus is set")
    (finding,) = diagnosed(ready).findings
    assert finding.conditions == (ConditionType.READY,)
    set_it = "set machines.gpu-node.require_gpus = false, then: systemctl reload"
    assert any(set_it in each for each in finding.fix)
    waits = true(ConditionType.LIBRARIES_PRESENT, Reason.RELOAD_NEEDED, "libraries 575 take effect later")
    (finding,) = diagnose(MachineOutcome("m", conditions(waits)), Environment((facts.nvidia(),))).findings
    assert (finding.status, finding.prevents_ready, finding.symptoms) == (Status.TRUE, False, "")
    assert any(each.startswith("rmmod") for each in finding.fix)


def test_error_codes_that_people_confuse_are_explained() -> None:
    fabric = false(ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING, "start it")
    versions = false(ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH, "reload it")
    found = {each.reason: each.symptoms for each in diagnosed(*conditions(fabric, versions)).findings}
    assert "802 (SYSTEM_NOT_READY)" in found["FabricManagerNotRunning"]
    assert "`nvidia-smi conf-compute -srs 1`" in found["FabricManagerNotRunning"], "NVIDIA/nvtrust issue 37"
    assert "803 (SYSTEM_DRIVER_MISMATCH)" in found["VersionMismatch"]


def test_for_programs() -> None:
    diagnosis = diagnosed(*conditions(NOT_LOADED))
    driver = DriverForPods("nvidia", "550.163.01", {"CUDA": "12.4"})
    host = HostDiagnosis((Finding("a setting is wrong", "it is 1", ("set it",)),), (driver,), remarks=("odd",))
    finding = {
        "conditions": ["DriverLoaded"],
        "status": "False",
        "reason": "ModuleNotLoaded",
        "message": "run `modprobe nvidia`",
        "looksLike": diagnosis.findings[0].symptoms,
        "fix": [*diagnosis.findings[0].fix],
        "preventsReady": True,
    }
    ready = {"ready": "False", "reason": "ModuleNotLoaded", "message": diagnosis.ready.message, "findings": [finding]}
    assert json.loads(json.dumps(as_object(Report((diagnosis,), host)))) == {
        "sound": False,
        "host": [{"cause": "a setting is wrong", "evidence": "it is 1", "fix": ["set it"]}],
        "notes": ["odd"],
        "drivers": [{"vendor": "nvidia", "version": "550.163.01", "interfaces": {"CUDA": "12.4"}, "unknown": ""}],
        "image": "agent-ubuntu2404",
        "cluster": None,
        "machines": {"gpu-node": ready},
    }


def test_symptoms_belong_to_existing_reasons() -> None:
    """Renaming a reason would leave its symptom behind."""
    reasons = {row["reason"] for row in rows() if row["status"] == "False"}
    symptom_reasons = {reason for vendor in HOST_VENDORS for _, reason in vendor.symptoms if reason}
    assert symptom_reasons - reasons == set()
