"""Every fault comes with the command that fixes it, and with no command of another vendor."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.cli.doctor.bundle import examine
from agent.cli.doctor.host import diagnose_machines
from agent.cli.doctor.machines import AS_ROOT, KERNEL_LOG, REMEDIES, START, Environment, diagnose, remedy
from agent.config.settings import Config
from agent.host.reconcile import MachineOutcome, Reconciler
from agent.host.vendors import HOST_VENDORS
from agent.model.conditions import ConditionType, Reason, false, unknown
from agent.model.facts import Absent, Gpu, VendorFacts
from agent.model.goal import Grant
from agent.system.files import System
from agent.vendors.nvidia.conditions import FIXED, nvidia_conditions
from tests.fakes import facts
from tests.fakes.conditions_page import DOCUMENT, rows
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host, ScriptedRunner
from tests.fakes.node_host import node_host, node_reconciler
from tests.fakes.reconciler import conditions
from tests.fakes.sound_host import make_sound

KIND = ConditionType
NVIDIA = (facts.nvidia(),)
FIRST, SECOND = NVIDIA[0].gpus
AROUND = Environment(
    NVIDIA, frozenset({"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem"}), "n1"
)
AMD = VendorFacts("amd", (Gpu("0000:0a:00.0", "amdgpu"),))
INTEL = Environment((VendorFacts("intel", (Gpu("0000:00:02.0", "intel"),)),))
START_IT = "unbounded-agent start gpu-node  # if its node was drained, with --kubeconfig FILE"
WAIT = {"NotEvaluated", "StaleEvidence", "NotTried", "RestartPending", "NotApplicable"}
"""Reasons without a command: only metrics have them, or they pass by themselves."""
SEE = {"NothingToStage", "NothingFits", "NoDriverRoot", "NotProven", "NotPublished", "NotConfigured"}
"""Reasons whose message names the condition to see."""


def documented() -> list[tuple[ConditionType, str]]:
    """Return condition and reason of each row of docs/conditions.md that is not True; of all conditions, any one."""
    found, kind = [], KIND.MACHINE_RUNNING
    # Checks are conditions of the host, and their author knows the remedy.
    for line in DOCUMENT.read_text().partition("## Your own checks")[0].splitlines():
        if heading := re.fullmatch(r"## (\w+)", line):
            kind = ConditionType(heading[1])
        row = re.match(r"\| `(\w+)` \| (False|Unknown) \|", line)
        if row and row[1] not in WAIT | SEE:
            found.append((kind, row[1]))
    return found


def with_gpus(*gpus: Gpu) -> Environment:
    return replace(AROUND, vendors=(replace(NVIDIA[0], gpus=gpus),))


def fix(
    kind: ConditionType,
    reason: str,
    around: Environment = AROUND,
    *,
    gpus: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    vendors: tuple[str, ...] = (),
) -> tuple[str, ...]:
    fault = false(kind, Reason(reason), "it is so", gpus)._replace(vendors=vendors)
    machine = MachineOutcome("gpu-node", conditions(fault), lost=lost)
    return diagnose(machine, around).findings[0].fix


def test_every_documented_fault_has_a_remedy() -> None:
    def has_one(kind: ConditionType, reason: str) -> bool:
        special = (vendor.remedies(kind, reason, NVIDIA[0], frozenset()) for vendor in HOST_VENDORS)
        return bool(remedy(kind, reason)) or any(special)

    assert [each for each in documented() if not has_one(*each)] == []
    known = {row["reason"] for row in rows()}
    assert {each if isinstance(each, str) else each[1] for each in REMEDIES} - known == set()
    faults = [false(kind, Reason(reason), reason) for kind, reason in documented() if kind is not KIND.READY]
    found = [line for fault in faults for line in fix(fault.type, fault.reason)]
    assert found
    assert [line for line in found if "{" in line] == []


def test_what_no_command_does() -> None:
    """A machine whose unit failed would then count as stopped by somebody, and its alert would end."""
    resets = [line for fix in REMEDIES.values() for line in fix if "reset-failed" in line]
    assert resets
    assert [line for line in resets if not re.search(r"reset-failed \S*@\{machine\}", line)] == []
    # The images of containerfiles/ have none. A copy of the unit would not change its drop-ins either.
    assert [line for fix in REMEDIES.values() for line in fix if line.startswith("systemctl edit")] == []
    # A host may have several, and the fault of one is no reason to end the pods of another.
    fixes = [*REMEDIES.values(), *FIXED.values(), fix(KIND.DRIVER_LOADED, Reason.WRONG_DRIVER)]
    fixes.append(fix(KIND.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH))
    reboots = [line for lines in fixes for line in lines if line.startswith("systemctl reboot")]
    assert len(reboots) > 3
    assert [line for line in reboots if "all machines" not in line] == []


@pytest.mark.parametrize("as_root", [True, False])
def test_only_who_is_not_root_is_told_to_be(as_root: bool) -> None:
    """Root was sent to run the same command again, and not to the kernel log, which says why a read hangs."""
    unseen = unknown(KIND.DRIVER_LOADED, Reason.OBSERVATION_FAILED, "information: no answer within 5 s")
    (finding,) = diagnose(MachineOutcome("gpu-node", conditions(unseen)), replace(AROUND, as_root=as_root)).findings
    assert (AS_ROOT in finding.fix) is not as_root
    assert KERNEL_LOG in finding.fix


# ---- the rows of the troubleshooting pages


def test_the_driver_is_reloaded_in_the_order_of_its_modules() -> None:
    lines = fix(KIND.LIBRARIES_PRESENT, Reason.RELOAD_NEEDED)
    (unload,) = (each for each in lines if each.startswith("rmmod"))
    assert unload == "rmmod nvidia_peermem nvidia_drm nvidia_modeset nvidia_uvm nvidia  # in this order"
    assert lines[0].startswith("unbounded-agent gpus holders")
    assert fix(KIND.DRIVER_ROOT_STAGED, Reason.NOTHING_FITS) == lines
    mismatch = fix(KIND.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH)
    assert mismatch[1:] == lines
    assert mismatch[0].startswith("update-alternatives --config nvidia && ldconfig  # Debian: if driver 550.163.01 is")


@pytest.mark.parametrize(
    ("kind", "reason", "steps"),
    [
        # After `machinectl start`, the node that `stop` had drained stayed cordoned, and nothing said so.
        (KIND.MACHINE_RUNNING, Reason.NOT_STARTED, ("systemctl status unbounded-agent-prepare@", START_IT)),
        (KIND.MACHINE_RUNNING, Reason.STOPPED, (START_IT,)),
        (KIND.MACHINE_RUNNING, Reason.NOT_RUNNING, (START_IT,)),
        # It reads the name, and registers the Node, only when it starts.
        (KIND.NODE_CONDITION_SET, Reason.BAD_NODE_NAME, ("hostnamectl hostname NAME && systemctl restart kubelet",)),
        (
            KIND.FABRIC_READY,
            Reason.FABRIC_MANAGER_MISSING,
            ("apt install nvidia-fabricmanager-550  # exactly version",),
        ),
        # docs/conditions.md says so; `doctor` named only the kernel log.
        (KIND.CDI_SPEC_CURRENT, Reason.PARTITION_MISSING, ("nvidia-smi -L  # ", KERNEL_LOG)),
        # The plugin would offer GPUs that are unhealthy to pods again: `doctor` said it without the if.
        (
            KIND.GPUS_ADVERTISED,
            Reason.GPUS_MISSING,
            (KERNEL_LOG, "kubectl -n NAMESPACE delete pod POD  # only once the"),
        ),
        # `doctor` knew only what acknowledges the loss, and not what brings the GPU back.
        (
            KIND.GPUS_COMPLETE,
            Reason.GPU_LOST,
            (
                *("unbounded-agent stop gpu-node", "systemctl poweroff", "unbounded-agent start"),
                "unbounded-agent gpus forget",
            ),
        ),
        # A machine that hangs is not only sent commands that hang too.
        (
            KIND.CDI_SPEC_CURRENT,
            Reason.REPORT_STALE,
            (
                "systemctl -M gpu-node restart unbounded-agent-gpu.timer",
                "unbounded-agent restart gpu-node --kubeconfig",
            ),
        ),
        # The message and the runbooks say so; `doctor` knew only the reboot, which ends all machines of the host.
        (
            KIND.DEVICES_ALLOWED,
            Reason.GPU_FAILED,
            (
                *("dmesg", "unbounded-agent stop gpu-node", "unbounded-agent gpus reset"),
                *("systemctl reboot  # only if", "unbounded-agent start gpu-node"),
            ),
        ),
    ],
)
def test_the_commands_come_in_this_order(kind: ConditionType, reason: Reason, steps: tuple[str, ...]) -> None:
    lines = fix(kind, reason)
    found = [next(place for place, line in enumerate(lines) if line.startswith(step)) for step in steps]
    assert found == sorted(found)
    assert found[-1] == len(lines) - 1 or reason is Reason.FABRIC_MANAGER_MISSING
    assert len({line.partition("  #")[0] for line in lines}) == len(lines), "nothing stands there twice"


def test_a_gpu_whose_uuid_is_not_known_yet_may_be_the_missing_one() -> None:
    missing = (KIND.DEVICES_PRESENT, Reason.GPU_NOT_FOUND)
    lines = fix(*missing, with_gpus(FIRST, replace(SECOND, uuid="")))
    assert lines[0].startswith(f"nvidia-smi -L  # initialises {SECOND.pci_address}")
    assert lines[1].startswith("unbounded-agent gpus")
    assert fix(*missing)[0].startswith("unbounded-agent gpus")


def test_a_failed_gpu_gets_the_commands_of_its_vendor() -> None:
    """On a host with GPUs of two vendors, only NVIDIA's commands were printed, also for the other vendor's GPU."""
    both, amds = replace(AROUND, vendors=(*NVIDIA, AMD)), replace(AROUND, vendors=(AMD,))
    failed = (KIND.DEVICES_ALLOWED, Reason.GPU_FAILED)
    assert fix(*failed, both, vendors=("nvidia",)) == fix(*failed)
    assert fix(*failed, both, vendors=("amd",)) == fix(*failed, amds)
    for vendors in (("nvidia", "amd"), (), ("unknown",)):
        assert {*fix(*failed, both, vendors=vendors)} >= {*fix(*failed), KERNEL_LOG}
    intels = fix(*failed, INTEL)
    assert not any("nvidia" in line for line in intels)
    assert any(line.startswith("systemctl reboot") for line in intels)
    unloaded = (KIND.DRIVER_LOADED, Reason.MODULE_NOT_LOADED)
    assert "modprobe DRIVER, as named above" in fix(*unloaded, both)
    assert any("dkms autoinstall" in line for line in fix(*unloaded, amds)), "conditions.md"


def test_a_node_that_up_did_not_make_is_drained_with_kubectl() -> None:
    """`stop` and `restart` do not know such a node, and refuse --kubeconfig. `start` does not uncordon it.

    `up` refuses its machine.
    """
    faults = [false(kind, Reason(reason), reason) for kind, reason in (*documented(), *FIXED) if kind is not KIND.READY]
    around = replace(AROUND, made_by_up=False)
    lines = {line for fault in faults for line in fix(fault.type, fault.reason, around)}
    refused = re.compile(
        "unbounded-agent ((start|stop|restart) gpu-node .*--kubeconfig|up (?!gpu-node  # if it has a table))"
    )
    assert {line for line in lines if refused.match(line)} == set()
    assert lines >= {"install the kubelet yourself", "make the node with kubeadm"}
    assert "unbounded-agent restart gpu-node  # drain its node with kubectl first" in lines
    assert "unbounded-agent stop gpu-node  # drain its node with kubectl" in lines
    assert "unbounded-agent start gpu-node  # uncordon its node with kubectl" in lines
    assert "unbounded-agent start gpu-node  # if its node was drained, uncordon it with kubectl" in lines


def test_doctor_knows_from_the_configuration_who_makes_the_node(gpu_host: Host, tmp_path: Path) -> None:
    make_sound(gpu_host)
    settings = node_reconciler(node_host(tmp_path / "node")).config
    by_hand, of_up = (
        {line for each in examine(agent).machines for found in each.findings for line in found.fix}
        for agent in (reconciler(gpu_host), Reconciler(settings, gpu_host, gpu_host))
    )
    assert "unbounded-agent start gpu-node  # if its node was drained, uncordon it with kubectl" in by_hand
    assert START.replace("{machine}", "gpu-node") in of_up


def test_a_gpu_is_bound_to_a_driver_that_is_loaded_already() -> None:
    """modprobe would do nothing then."""
    around, unbound = with_gpus(FIRST, replace(SECOND, driver="")), (KIND.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER)
    lines, address = fix(*unbound, around), SECOND.pci_address
    assert lines[0].startswith("echo PCI-ADDRESS > /sys/bus/pci/drivers/nvidia/bind")
    assert not any("modprobe" in line for line in lines)
    bind = f"echo {address} > /sys/bus/pci/drivers/nvidia/bind"
    assert fix(*unbound, around, gpus=(address,))[0] == bind
    messages = [each.message for each in nvidia_conditions(around.vendors[0], Grant("nvidia", (address,)))]
    assert any(each.startswith(f"no driver is bound to {address}; run `{bind}`") for each in messages)
    assert fix(*unbound, replace(around, modules=frozenset()))[0].startswith("modprobe")


def test_no_driver_is_bound_again_to_a_gpu_that_it_could_not_take() -> None:
    """It would fail the same way: the kernel log says why."""
    why, address = "the driver does not support the GPU; install one that does", SECOND.pci_address
    around = with_gpus(FIRST, replace(SECOND, driver="", why_unbound=why))
    lines = fix(KIND.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER, around)
    assert not any("bind" in line or "modprobe" in line for line in lines)
    driver = around.vendors[0].driver
    assert driver is not None
    unloaded = replace(around.vendors[0], driver=replace(driver, module_version=Absent("not loaded")))
    for vendor, start in ((around.vendors[0], f"no driver is bound to {address}: {why}"), (unloaded, "libraries")):
        messages = [each.message for each in nvidia_conditions(vendor, Grant("nvidia", (address,)))]
        (message,) = (each for each in messages if why in each and each.startswith(start))
        assert "bind`" not in message


def test_commands_name_the_gpus_that_are_known() -> None:
    """They had a placeholder for the address, or for the number of the node, although both were known."""
    around = with_gpus(FIRST, replace(SECOND, detached=True))
    first, second = FIRST.pci_address, SECOND.pci_address
    failed = fix(KIND.DEVICES_ALLOWED, Reason.GPU_FAILED, around, gpus=(first, second))
    resets = [f"unbounded-agent gpus reset {each}  # names what still has the GPU open" for each in (first, second)]
    assert [line for line in failed if line.startswith("unbounded-agent gpus")] == resets
    evil = fix(KIND.DEVICES_ALLOWED, Reason.GPU_FAILED, around, gpus=("$(reboot)",))
    assert resets[0].replace(first, "PCI-ADDRESS") in evil, "a machine may report any text"
    detached = fix(KIND.DEVICES_PRESENT, Reason.GPU_DETACHED, around)
    assert detached[-1] == f"unbounded-agent gpus attach {second}"
    gone = ("0000:0a:00.0", "0000:0b:00.0")
    forgotten = [line for line in fix(KIND.GPUS_COMPLETE, Reason.GPU_LOST, around, lost=gone) if " forget " in line]
    assert [line.split("  #")[0] for line in forgotten] == [f"unbounded-agent gpus forget {each}" for each in gone]
    vendor = facts.without_second_gpu()
    without = replace(around, vendors=(replace(vendor, gpus=around.vendors[0].gpus),))
    missing = fix(KIND.DEVICES_PRESENT, Reason.NODES_MISSING, without)
    assert f"nvidia-modprobe -c {SECOND.minor}  # for /dev/nvidia{SECOND.minor}" in missing
    assert not [line for line in missing if "-c N" in line]


def test_other_drivers_are_blacklisted_by_their_names() -> None:
    for drivers in (("nouveau",), ("nouveau", "nova_core")):
        gpus = (replace(facts.gpu(index), driver=driver) for index, driver in enumerate(drivers))
        lines = fix(KIND.DRIVER_LOADED, Reason.WRONG_DRIVER, with_gpus(*gpus))
        assert [line.split("'")[1] for line in lines[: len(drivers)]] == [f"blacklist {each}" for each in drivers]


def test_vendors_without_a_gpu_have_no_symptoms_and_no_commands(tmp_path: Path) -> None:
    """NVIDIA's hosts need no `vainfo`, and Intel's no `nvidia-smi`."""
    fault = MachineOutcome("m", conditions(false(KIND.DRIVER_LOADED, Reason.MODULE_NOT_LOADED, "no")))
    (nvidias,) = diagnose(fault, AROUND).findings
    (intels,) = diagnose(fault, INTEL).findings
    assert ("nvidia-smi" in nvidias.symptoms, "vainfo" in nvidias.symptoms) == (True, False)
    assert ("nvidia-smi" in intels.symptoms, "vainfo" in intels.symptoms) == (False, True)
    assert [line for line in intels.fix if "nvidia" in line] == []
    host = replace(facts.facts(), vendors=(*NVIDIA, VendorFacts("intel")))
    system = System(ScriptedRunner(), str(tmp_path))
    (found,) = diagnose_machines([fault], host, Config(machines={}), system, as_root=False)
    assert [each.symptoms for each in found.findings] == [nvidias.symptoms]
