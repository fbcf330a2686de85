"""FabricReady: what the GPUs say of their fabric counts; services and modules of the host only say where to look."""

import pytest
from msgspec.structs import replace

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import Absent, Broken, Driver, FabricService, Seen, Unseen, UserSpace, VendorFacts
from agent.model.goal import Grant
from agent.model.handoff import FabricAnswer
from agent.vendors.host_vendor import FabricReport
from agent.vendors.nvidia.conditions import nvidia_conditions, remedies
from agent.vendors.nvidia.driver import FABRIC_UNIT, PERSISTENCE_UNIT, fabric_cause
from agent.vendors.nvidia.host import observe_nvidia
from tests.fakes.host import Host
from tests.fakes.user_space import sources

GPUS = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
NO_SWITCH = Absent("no NVSwitch")
MODULES = ("mlx5_ib", "ib_umad")


def said(state: str, status: str = "N/A", gpus: tuple[str, ...] = GPUS) -> tuple[FabricAnswer, ...]:
    return tuple(FabricAnswer(gpu, state, status) for gpu in gpus)


def driver(fabric: Seen[str], service: FabricService) -> VendorFacts:
    found = Driver("570.1", UserSpace(Absent(""), ()), fabric, "active", fabric_service=service)
    return VendorFacts("nvidia", driver=found)


def ready(
    answers: tuple[FabricAnswer, ...],
    fabric: Seen[str] = NO_SWITCH,
    service: FabricService = FabricService(),  # noqa: B008
    *,
    silence: str = "the machine has not reported",
    remembered: tuple[FabricAnswer, ...] = (),
) -> Condition:
    report = FabricReport(answers, silence, remembered)
    return nvidia_conditions(driver(fabric, service), Grant("nvidia", GPUS), report)[3]


@pytest.mark.parametrize("state", ["In Progress", "Not Started"])
@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("inactive", Status.FALSE),
        ("failed", Status.FALSE),
        (Broken("it is masked"), Status.FALSE),
        ("active", Status.UNKNOWN),
        ("activating", Status.UNKNOWN),
        (Absent("not installed"), Status.UNKNOWN),
        (Unseen("no answer"), Status.UNKNOWN),
    ],
)
@pytest.mark.parametrize("fabric", [NO_SWITCH, "active"])
def test_gpus_that_are_not_registered_are_never_ready(
    state: str, service: Seen[str], status: Status, fabric: Seen[str]
) -> None:
    """As on HGX B200 (NVIDIA/gpu-operator issue 2781): no NVSwitch is to be seen, and FabricReady was True."""
    condition = ready(said(state), fabric, FabricService(service, 0, MODULES))
    assert condition.status is status
    assert condition.reason == ("FabricNotRegistered" if status is Status.FALSE else "FabricRegistering")
    assert f"{', '.join(GPUS)}: fabric.state {state}, fabric.status N/A" in condition.message
    assert "not loaded: mlx5_ib, ib_umad" in condition.message
    assert "error 802" in condition.message


def test_one_gpu_of_eight_is_enough() -> None:
    answers = (*said("Completed", "Success", GPUS[1:]), *said("In Progress", gpus=GPUS[:1]))
    condition = ready(answers, "active", FabricService("active"))
    assert condition.status is Status.UNKNOWN
    assert condition.gpus == GPUS[:1], "the others serve pods"
    assert f"{GPUS[0]}: fabric.state In Progress" in condition.message
    assert GPUS[1] not in condition.message
    assert "modprobe" not in condition.message


@pytest.mark.parametrize("status", ["Insufficient Resources", "Unknown Error", "N/A", ""])
def test_a_registration_that_failed_is_a_fault(status: str) -> None:
    """NVIDIA/NVSentinel issue 883 and Azure/azhpc-images pull request 506: the state alone says Completed."""
    condition = ready(said("Completed", status, GPUS[:1]) + said("Completed", "Success", GPUS[1:]), "active")
    assert (condition.status, condition.reason) == (Status.FALSE, "FabricFailed")
    assert f"{GPUS[0]}: fabric.state Completed, fabric.status {status}".rstrip() in condition.message


@pytest.mark.parametrize("service", ["inactive", Absent("not installed"), Unseen("no answer"), "active"])
@pytest.mark.parametrize("fabric", [NO_SWITCH, Unseen("no answer"), "activating"])
def test_registered_gpus_need_no_other_proof(service: Seen[str], fabric: Seen[str]) -> None:
    """On the compute nodes of a rack, and in virtual machines, the Fabric Manager runs elsewhere."""
    condition = ready(said("Completed", "Success"), fabric, FabricService(service, 0, MODULES))
    assert (condition.status, condition.reason) == (Status.TRUE, "FabricRegistered")


@pytest.mark.parametrize(("state", "status"), [("In Progress", "N/A"), ("Completed", "Insufficient Resources")])
@pytest.mark.parametrize(
    ("fabric", "reason"), [("failed", "FabricManagerNotRunning"), (Broken("not installed"), "FabricManagerMissing")]
)
def test_without_a_fabric_manager_one_unregistered_gpu_is_not_the_only_unusable_one(
    fabric: Seen[str], reason: str, state: str, status: str
) -> None:
    """Ready was True with reason SomeGPUsUnusable, although every program that starts fails."""
    answers = (*said("Completed", "Success", GPUS[1:]), *said(state, status, GPUS[:1]))
    condition = ready(answers, fabric, FabricService("failed"))
    assert (condition.status, condition.reason, condition.gpus) == (Status.FALSE, reason, ())
    assert condition.message.endswith(f"; {GPUS[0]}: fabric.state {state}, fabric.status {status}")
    # Also on registered GPUs (nvidia-smi(1), Fabric Manager's ABORT_CUDA_JOBS_ON_FM_EXIT).
    assert ready(said("Completed", "Success"), fabric, FabricService("failed")).reason == reason


@pytest.mark.parametrize("word", ["N/A", "[N/A]", "Not Supported"])
def test_gpus_without_a_fabric_say_so(word: str) -> None:
    condition = ready(said(word))
    assert (condition.status, condition.reason) == (Status.TRUE, "NotApplicable")
    assert condition.message == "the GPUs have no NVLink fabric (fabric.state N/A)"


def test_the_gpus_of_hgx_a100_say_nothing_so_the_service_counts() -> None:
    """GPUs before Hopper have no fabric.state, but need the Fabric Manager."""
    active = ready(said("N/A"), "active")
    assert (active.status, active.reason) == (Status.TRUE, "FabricManagerActive")
    assert "inferred: these GPUs do not say whether they are registered" in active.message
    assert ready(said("N/A"), "failed").reason == "FabricManagerNotRunning"


@pytest.mark.parametrize(("fabric", "reason"), [(NO_SWITCH, "NotApplicable"), ("active", "FabricManagerActive")])
def test_without_answers_it_is_inferred_and_says_so(fabric: Seen[str], reason: str) -> None:
    old = ready(said("", ""), fabric)
    assert old.reason == reason
    assert old.message.endswith("; inferred: the driver is too old to be asked for fabric.state")
    silent = ready((), fabric)
    assert (silent.status, silent.reason) == (Status.TRUE, reason)
    assert silent.message.endswith(f"; inferred: no answer from {', '.join(GPUS)}: the machine has not reported")


def test_only_answers_for_its_gpus_count() -> None:
    """The machine is not trusted."""
    assert ready(said("In Progress", gpus=("0000:ff:00.0",))).reason == "NotApplicable"
    condition = ready(said("Completed", "Success", GPUS[1:]), silence="nvidia-smi got no answer")
    assert condition.reason == "FabricRegistered"
    assert condition.message.endswith(f"; no answer from {GPUS[0]}: nvidia-smi got no answer")


@pytest.mark.parametrize(("state", "status"), [("ERR ", "ERR "), ("Completed", "[Unknown Error]")])
def test_what_is_no_answer_is_no_verdict(state: str, status: str) -> None:
    """A machine half of an earlier release reports such words as answers."""
    condition = ready(said(state, status, GPUS[:1]) + said("Completed", "Success", GPUS[1:]))
    assert condition.reason == "FabricRegistered"
    assert f"no answer from {GPUS[0]}" in condition.message


@pytest.mark.parametrize("fabric", [NO_SWITCH, "active", "activating", Unseen("no answer")])
def test_the_last_word_of_a_silent_gpu_counts(fabric: Seen[str]) -> None:
    """An inference makes no GPU registered. To say nothing is not to say that all is well."""
    last = said("Completed", "Insufficient Resources", GPUS[:2])
    condition = ready(said("Completed", "Success", GPUS[1:]), fabric, remembered=last)
    assert (condition.status, condition.reason, condition.gpus) == (Status.FALSE, "FabricFailed", GPUS[:1])
    assert f"{GPUS[0]}: fabric.state Completed, fabric.status Insufficient Resources; no answer" in condition.message
    assert ready((), fabric, remembered=last).gpus == GPUS[:2]
    assert ready((), "failed", remembered=last).reason == "FabricManagerNotRunning"
    assert ready((), fabric, remembered=said("Completed", "Success")).reason == ready((), fabric).reason


NONE = Absent("not found")


def observed(host: Host, unit: Seen[str], started: Seen[int] = 4711, daemon: Seen[str] = NONE) -> Driver:
    units = {FABRIC_UNIT: unit, PERSISTENCE_UNIT: daemon}
    found = observe_nvidia(replace(sources(host), units=units, started=lambda _: started)).driver
    assert found
    return found


def test_the_host_says_where_to_look(host: Host) -> None:
    host.driver("570.1", gpus=1)
    assert observed(host, "active").fabric_service == FabricService("active", 4711, MODULES)
    host.make_directory("/sys/module/mlx5_ib")
    assert observed(host, "inactive").fabric_service == FabricService("inactive", 4711, ("ib_umad",))
    host.node("/dev/nvidia-nvswitch0", 510, 0)
    assert observed(host, "active").fabric_service.missing_modules == (), "older NVSwitches are PCI devices"


def test_whatever_may_change_the_answer_is_published(host: Host) -> None:
    host.driver("570.1", gpus=1)
    causes = [fabric_cause(observed(host, "active")), fabric_cause(observed(host, "active", 4712))]
    causes += [fabric_cause(observed(host, state)) for state in ("inactive", Broken("it is masked"))]
    host.make_directory("/sys/module/ib_umad")
    causes.append(fabric_cause(observed(host, "active")))
    causes += [fabric_cause(observed(host, NONE, started, "active")) for started in (4711, 4712)]
    causes.append(fabric_cause(observed(host, NONE, daemon="inactive")))
    assert len(set(causes)) == len(causes)
    assert fabric_cause(observed(host, NONE)) == ""


@pytest.mark.parametrize(("unit", "started"), [(Unseen("no answer"), 0), ("active", Unseen("no answer"))])
def test_what_could_not_be_observed_is_no_change(host: Host, unit: Seen[str], started: Seen[int]) -> None:
    host.driver("570.1", gpus=1)
    assert fabric_cause(observed(host, unit, started)) is None
    assert fabric_cause(observed(host, NONE, started, unit)) is None


def commands(reason: str, service: FabricService, fabric: Seen[str] = NO_SWITCH) -> tuple[str, ...]:
    return remedies(ConditionType.FABRIC_READY, reason, driver(fabric, service), frozenset())


@pytest.mark.parametrize("modules", [(), MODULES])
def test_doctor_restarts_no_unit_that_does_not_exist(modules: tuple[str, ...]) -> None:
    """In virtual machines and on trays of a rack, the fabric is managed elsewhere; a driver container has no unit."""
    lines = commands("FabricNotRegistered", FabricService(Absent(""), 0, modules))
    for start in ("apt install nvidia-fabricmanager-570", "systemctl enable --now"):
        (line,) = (line for line in lines if line.startswith(start))
        assert "  # only if this host manages the fabric" in line
    assert not [line for line in lines if "restart" in line or "unmask" in line]
    lines = commands("FabricNotRegistered", FabricService("running", 0, modules), "running")
    assert not [line for line in lines if "systemctl" in line or "journalctl" in line]
    assert [line for line in lines if "restart the container" in line]
    unseen = commands("FabricFailed", FabricService(Unseen("no answer"), 0, modules))
    assert not [line for line in unseen if "restart" in line]


def test_the_commands_fit_the_fault() -> None:
    for reason in ("FabricRegistering", "FabricNotRegistered", "FabricFailed"):
        lines = commands(reason, FabricService("inactive", 0, MODULES))
        assert lines[0].startswith("modprobe -a mlx5_ib ib_umad  #")
        assert "systemctl restart nvidia-fabricmanager" in lines
