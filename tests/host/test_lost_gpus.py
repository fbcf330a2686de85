"""GPUs that leave the PCI bus without `gpus detach` are remembered across everything until that is acknowledged."""

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.cli.doctor.machines import diagnose
from agent.config.settings import Config
from agent.host.detach import attach, detach, forget
from agent.host.reconcile import MachineOutcome, Reconciler
from agent.host.state.gpus import REMEMBERED
from agent.model.conditions import ConditionType, Status
from agent.model.errors import AgentError, ConfigError, DocumentError
from agent.model.facts import Remembered, RememberedGpu, Unseen
from agent.model.paths import MACHINES_STATE, REMEMBERED_GPUS, RUNTIME
from agent.system.trust import discarded
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.detach_site import FAST, Site
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.reports import condition

FIRST, SECOND, THIRD = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
H100 = "NVIDIA H100 80GB HBM3"


def evaluate(agent: Reconciler) -> MachineOutcome:
    """Return the machine's outcome of a pass."""
    outcome = agent.reconcile()
    assert outcome.failures == ()
    return next(each for each in outcome.machines if each.name == MACHINE)


def complete(machine: MachineOutcome) -> tuple[Status, str]:
    return condition(machine, ConditionType.GPUS_COMPLETE)


def message(machine: MachineOutcome) -> str:
    return machine.condition(ConditionType.GPUS_COMPLETE).message


def ready(machine: MachineOutcome) -> tuple[Status, str]:
    return machine.conditions[-1].status, machine.conditions[-1].reason


def date_losses(host: Host, when: float) -> None:
    """Date the loss of all lost GPUs."""
    before = REMEMBERED.parse("", host.read(REMEMBERED_GPUS[0]))
    gpus = tuple(replace(gpu, lost=when) if gpu.lost else gpu for gpu in before.gpus)
    for copy in REMEMBERED_GPUS:
        host.write(copy, REMEMBERED.render(replace(before, gpus=gpus)))


COMPLETE, LOST = (Status.TRUE, "Complete"), (Status.FALSE, "GPULost")


@pytest.mark.parametrize("gpus", ["all", [FIRST, SECOND]])
def test_a_lost_gpu_is_named_until_it_is_forgotten(gpu_host: Host, gpus: str | list[str]) -> None:
    agent = reconciler(gpu_host, gpus=gpus)
    assert complete(evaluate(agent)) == COMPLETE
    gpu_host.unplug(SECOND)
    machine = evaluate(agent)
    assert complete(machine) == LOST
    assert machine.lost == (SECOND,)
    assert f"{SECOND} ({H100} GPU-00000000-0000-4000-8000-000000000001) since 20" in message(machine)
    assert f"`unbounded-agent gpus forget {SECOND}`" in message(machine)
    assert "hardware log" in message(machine)
    date_losses(gpu_host, 1_700_000_000.0)
    assert "since 2023-11-14T22:13:20Z" in message(evaluate(agent)), "the date of the loss stays"
    (line,) = forget(SECOND, agent)
    assert line.startswith(f"{SECOND} ({H100}")
    assert complete(evaluate(agent)) == COMPLETE
    assert evaluate(agent).lost == ()


def test_the_remaining_gpus_count_for_ready_and_doctor_names_the_loss(tmp_path: Path) -> None:
    """Seven of eight GPUs run pods: the node stays in use despite the eighth."""
    site = Site(tmp_path / "host")
    site.start()
    assert ready(evaluate(site.agent)) == (Status.TRUE, "AllConditionsTrue")
    site.host.unplug(SECOND)
    evaluate(site.agent)
    site.answer()
    machine = evaluate(site.agent)
    assert complete(machine) == LOST
    assert ready(machine) == (Status.TRUE, "AllConditionsTrue")
    (finding,) = (each for each in diagnose(machine).findings if each.reason == "GPULost")
    assert not finding.prevents_ready


def test_the_loss_of_all_is_not_a_host_without_gpus(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    for address in (FIRST, SECOND):
        gpu_host.unplug(address)
    machine = evaluate(agent)
    assert complete(machine) == LOST
    assert ready(machine) == LOST
    assert machine.lost == (FIRST, SECOND)
    assert "for each GPU that was removed on purpose" in message(machine)
    for lost_at_a_reboot in (RUNTIME, MACHINES_STATE):
        gpu_host.remove_tree(lost_at_a_reboot)
    assert evaluate(reconciler(gpu_host)).lost == (FIRST, SECOND)
    assert len(forget("", agent)) == 2
    assert ready(evaluate(agent)) == (Status.FALSE, "NoGPU"), "a driver is installed"
    assert ready(evaluate(reconciler(gpu_host, require_gpus=False))) == (Status.TRUE, "NoGPU")


@pytest.mark.parametrize(
    ("slot", "card"), [(SECOND, 1), (THIRD, 1), (SECOND, 5)], ids=["it returns", "in another slot", "another card"]
)
def test_a_gpu_that_returns_or_is_replaced_is_not_lost(gpu_host: Host, slot: str, card: int) -> None:
    """A card in another slot is known by its UUID; another card in its slot was put there by somebody."""
    agent = reconciler(gpu_host)
    evaluate(agent)
    gpu_host.unplug(SECOND)
    assert complete(evaluate(agent)) == LOST
    gpu_host.gpu(slot, card)
    machine = evaluate(agent)
    assert complete(machine) == COMPLETE
    assert machine.gpus == (FIRST, slot)
    gpu_host.unplug(slot)
    assert evaluate(agent).lost == (slot,)


def test_a_gpu_that_settings_no_longer_name_is_not_missed(gpu_host: Host) -> None:
    """Whether the settings changed before or after the removal. Nor one that a virtual machine has."""
    agent = reconciler(gpu_host)
    evaluate(agent)
    evaluate(reconciler(gpu_host, gpus=[FIRST]))
    gpu_host.unplug(SECOND)
    assert complete(evaluate(reconciler(gpu_host, gpus=[FIRST]))) == COMPLETE
    gpu_host.unplug(FIRST)
    assert evaluate(reconciler(gpu_host)).lost == (FIRST,)
    assert evaluate(reconciler(gpu_host, gpus=[THIRD])).lost == ()
    gpu_host.gpu(SECOND, 1)
    evaluate(reconciler(gpu_host, gpus=[SECOND]))
    gpu_host.rebind(SECOND, "vfio-pci")
    evaluate(reconciler(gpu_host, gpus=[SECOND]))
    gpu_host.unplug(SECOND)
    assert evaluate(reconciler(gpu_host, gpus=[SECOND])).lost == ()


def test_a_machine_that_is_not_configured_misses_nothing(gpu_host: Host) -> None:
    gpu_host.make_directory("/var/lib/machines/other")
    gpu_host.bus.unit("systemd-nspawn@other.service", "inactive")
    both = Config.validated({"machines": {MACHINE: {"gpus": [FIRST]}, "other": {"gpus": [SECOND]}}})
    agent = Reconciler(both, gpu_host, gpu_host)
    assert complete(evaluate(agent)) == COMPLETE
    gpu_host.unplug(SECOND)
    lost = {machine.name: machine.lost for machine in agent.reconcile().machines}
    assert lost == {MACHINE: (), "other": (SECOND,)}
    assert evaluate(reconciler(gpu_host, gpus=[FIRST])).lost == ()
    assert [gpu.pci_address for gpu in REMEMBERED.parse("", gpu_host.read(REMEMBERED_GPUS[0])).gpus] == [FIRST]


def test_detaching_acknowledges_and_attaching_reverts_that(tmp_path: Path, clock: Clock) -> None:
    site = Site(tmp_path / "host", clock)
    site.start()
    assert detach(SECOND, site.agent, FAST).done
    assert attach(SECOND, site.agent, FAST).done
    site.host.unplug(SECOND)
    assert evaluate(site.agent).lost == (SECOND,)
    site.host.gpu(SECOND, 1)
    evaluate(site.agent)
    assert detach(SECOND, site.agent, FAST).done
    site.host.unplug(SECOND)
    assert complete(evaluate(site.agent)) == COMPLETE


def test_a_bus_that_cannot_be_listed_loses_nothing(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    record, listed = gpu_host.read(REMEMBERED_GPUS[0]), gpu_host.pci
    gpu_host.pci = Unseen("simulated")
    # The driver's own list would help, but fails too.
    gpu_host.failing["/proc/driver/nvidia/gpus"] = OSError(errno.EIO, "Input/output error")
    machine = evaluate(agent)
    assert complete(machine) == COMPLETE
    assert gpu_host.read(REMEMBERED_GPUS[0]) == record
    gpu_host.pci = listed
    gpu_host.failing.clear()
    assert complete(evaluate(agent)) == COMPLETE


def test_a_machine_without_its_root_directory_keeps_its_gpus_in_the_record(gpu_host: Host) -> None:
    """Its file system may not be mounted yet."""
    agent = reconciler(gpu_host)
    evaluate(agent)
    root = Path(gpu_host.root, f"var/lib/machines/{MACHINE}")
    root.rename(root.with_name("elsewhere"))
    evaluate(agent)
    gpu_host.unplug(SECOND)
    assert evaluate(agent).lost == (SECOND,)


@pytest.mark.parametrize(
    ("copy", "damage"),
    [
        (REMEMBERED_GPUS[0], lambda _: b""),
        (REMEMBERED_GPUS[0], lambda _: b"[]"),
        # Otherwise the machine would miss a GPU that never existed, and not the one that was removed.
        (REMEMBERED_GPUS[0], lambda record: record.replace(SECOND.encode(), THIRD.encode())),
        (REMEMBERED_GPUS[1], lambda _: b""),
    ],
)
def test_one_damaged_copy_is_replaced_by_the_other(gpu_host: Host, copy: str, damage: Callable[[bytes], bytes]) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    whole = gpu_host.read(copy)
    gpu_host.write(copy, damage(whole))
    gpu_host.unplug(SECOND)
    counted = discarded().get(os.path.basename(copy), 0)
    assert evaluate(agent).lost == (SECOND,)
    assert discarded()[os.path.basename(copy)] == counted + 1
    first, second = (gpu_host.read(each) for each in REMEMBERED_GPUS)
    assert first == second != whole


def test_the_damage_of_both_copies_is_a_condition_until_it_is_acknowledged(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    for copy in REMEMBERED_GPUS:
        gpu_host.write(copy, b"{")
    for _ in range(2):
        machine = evaluate(agent)
        assert complete(machine) == (Status.UNKNOWN, "RecordDamaged")
        assert f"{REMEMBERED_GPUS[1]}: not JSON" in message(machine)
    gpu_host.unplug(SECOND)
    assert complete(evaluate(agent)) == LOST, "what goes from now on is remembered"
    forget(SECOND, agent)
    assert complete(evaluate(agent)) == (Status.UNKNOWN, "RecordDamaged")
    assert "acknowledged" in forget("", agent)[-1]
    assert complete(evaluate(agent)) == COMPLETE


def test_an_unreadable_record_is_left_alone(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    record = gpu_host.read(REMEMBERED_GPUS[0])
    for copy in REMEMBERED_GPUS:
        gpu_host.failing[copy] = OSError(errno.EIO, "Input/output error")
    gpu_host.unplug(SECOND)
    assert complete(evaluate(agent)) == (Status.UNKNOWN, "ObservationFailed")
    with pytest.raises(AgentError, match="Input/output error"):
        forget(SECOND, agent)
    gpu_host.failing.clear()
    assert gpu_host.read(REMEMBERED_GPUS[0]) == record
    assert evaluate(agent).lost == (SECOND,)


def test_only_lost_gpus_are_forgotten(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    evaluate(agent)
    assert forget("", agent) == ("no GPU is lost: nothing to do",)
    for address in (FIRST, THIRD, "nonsense"):
        with pytest.raises(ConfigError, match="no lost GPU has this PCI address"):
            forget(address, agent)
    gpu_host.unplug(SECOND)
    with pytest.raises(ConfigError, match=f"lost GPUs: {SECOND}"):
        forget(FIRST, agent)
    with pytest.raises(ConfigError):
        forget("GPU-00000000-0000-4000-8000-000000000000", agent)
    assert "is forgotten" in forget("GPU-00000000-0000-4000-8000-000000000001", agent)[0]
    gpu_host.gpu(SECOND, 1)
    evaluate(agent)
    gpu_host.unplug(SECOND)
    assert forget(f"0000{SECOND}".upper(), agent), "as nvidia-smi prints it, and before any pass saw the loss"
    assert complete(evaluate(agent)) == COMPLETE


GPUS = st.builds(
    RememberedGpu,
    *(st.text() for _ in range(4)),
    machines=st.lists(st.text()).map(tuple),
    lost=st.floats(min_value=0, max_value=1 << 35),
)


@given(st.builds(Remembered, st.lists(GPUS).map(tuple), st.text()))
def test_the_record_is_read_back(remembered: Remembered) -> None:
    assert REMEMBERED.parse("", REMEMBERED.render(remembered)) == remembered


@pytest.mark.parametrize("lost", ["NaN", "1e300", "-1.0", "true", '"1"'])
def test_times_that_are_not_dates_are_refused(lost: str) -> None:
    good = REMEMBERED.render(Remembered((RememberedGpu(FIRST, "nvidia", lost=1.0),)))
    with pytest.raises(DocumentError, match="not JSON" if lost == "NaN" else "lost must be"):
        REMEMBERED.parse("", good.replace(b'"lost": 1.0', f'"lost": {lost}'.encode()))


def test_a_machine_that_gets_nothing_has_no_gpu_of_an_earlier_configuration(gpu_host: Host) -> None:
    """The record of its grant outlives its settings."""
    reconciler(gpu_host).reconcile()
    config = Config.validated({"machines": {}})
    Reconciler(config, gpu_host, gpu_host).reconcile()
    for address in (FIRST, SECOND):
        gpu_host.unplug(address)
    Reconciler(config, gpu_host, gpu_host).reconcile()
    machine = evaluate(reconciler(gpu_host))
    assert ready(machine) == (Status.FALSE, "NoGPU"), "it is not GPULost"
    assert (machine.gpus, machine.expected) == ((), 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_is_asked_before_all_lost_gpus_are_forgotten(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One that is named is forgotten at once. A dry run only says which."""
    agent = reconciler(gpu_host)
    evaluate(agent)
    for address in (FIRST, SECOND):
        gpu_host.unplug(address)
    assert command(agent, "gpus forget --dry-run") == 0
    assert command(agent, f"gpus forget {FIRST} --dry-run") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [FIRST in line for line in shown] == [True, False, True]
    assert evaluate(agent).lost == (FIRST, SECOND)
    monkeypatch.setattr(sys, "stderr", asked := Terminal())
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    with pytest.raises(AgentError, match="nothing was changed"):
        command(agent, "gpus forget")
    assert SECOND in asked.getvalue()
    assert evaluate(agent).lost == (FIRST, SECOND)
    assert command(agent, f"gpus forget {FIRST}") == 0
    assert evaluate(agent).lost == (SECOND,)
    assert command(agent, "gpus forget --yes") == 0
    assert evaluate(agent).lost == ()
