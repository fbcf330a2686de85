"""`gpus`: what is known about each GPU, and what is not."""

import json
import os

import pytest

from agent.cli.host import load
from agent.cli.parser import make_parser
from agent.config.settings import Config
from agent.host.detach import holders
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import record_fault
from agent.model.errors import ConfigError
from agent.model.facts import GpuFault, PciDevice, Unseen, Verdict
from agent.model.paths import granted_file
from agent.system.processes import Held, Holder
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler, units, without_gpus
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
POD = "0b3a2c1d-0000-4000-8000-000000000001"
CGROUP = f"/machine.slice/systemd-nspawn@{MACHINE}.service/kubepods-pod{POD.replace('-', '_')}.slice/x"


pytestmark = pytest.mark.usefixtures("held")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    found = [Held()]
    monkeypatch.setattr("agent.host.detach.find_holders", lambda *_: found[-1])
    return found


def listed(agent: Reconciler, capsys: Capture, code: int = 0) -> list[list[str]]:
    assert command(agent, "gpus") == code
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def document(agent: Reconciler, capsys: Capture, code: int = 0) -> dict[str, dict[str, object]]:
    assert command(agent, "gpus --json") == code
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["command"]) == (1, "gpus")
    return {each["address"]: each for each in found["gpus"]}


def test_the_table_and_the_document(gpu_host: Host, held: list[Held], capsys: Capture) -> None:
    holder = Holder(7, (), "python", CGROUP, ("/dev/nvidia0",))
    held.append(Held((holder, holder)))
    heading, first, second = listed(reconciler(gpu_host, gpus=[FIRST]), capsys)
    assert heading == ["ADDRESS", "STATE", "HEALTH", "MACHINE", "DRIVER", "PODS", "MODEL", "UUID"]
    assert first[:7] == [FIRST, "granted", "healthy", MACHINE, "nvidia", "550.163.01", "1"]
    assert first[-1].startswith("GPU-")
    assert second[:7] == [SECOND, "free", "healthy", "-", "nvidia", "550.163.01", "0"]
    found = document(reconciler(gpu_host), capsys)
    assert found[FIRST]["pods"] == [POD]
    assert (found[FIRST]["processes"], found[SECOND]["processes"]) == (2, 0)
    assert (found[FIRST]["state"], found[FIRST]["machines"]) == ("granted", [MACHINE])
    assert found[FIRST]["usersKnown"] is True


def test_what_is_known_against_a_gpu_is_below_the_table(gpu_host: Host, capsys: Capture) -> None:
    gpu_host.symlink(f"/sys/bus/pci/devices/{SECOND}", f"../../../devices/pci0000:00/{SECOND}")
    assert record_fault(gpu_host, SECOND, GpuFault("Xid48", "Xid 48: simulated", 1.0, Verdict.NEEDS_RESET, 1.0))
    assert command(reconciler(gpu_host), "gpus") == 0
    assert f"{SECOND} needs-reset: Xid 48: simulated" in capsys.readouterr().out.splitlines()
    found = document(reconciler(gpu_host), capsys)[SECOND]
    assert [found[f"health{each}"] for each in ("", "Reason", "Message", "Source", "Asked", "Silence")] == [
        *("needs-reset", "Xid48", "Xid 48: simulated", "kernel log", "", ""),
    ]


def test_processes_that_may_not_be_searched_are_unknown(gpu_host: Host, held: list[Held], capsys: Capture) -> None:
    """A user sees only their own processes: 0 pods would be another answer than root's."""
    held.append(Held((), ("cannot inspect PID 1: Permission denied",)))
    assert listed(reconciler(gpu_host), capsys)[1][6] == "?"
    assert document(reconciler(gpu_host), capsys)[FIRST]["usersKnown"] is False


def test_states_of_gpus_that_no_machine_gets(gpu_host: Host, capsys: Capture) -> None:
    """Some attributes only amdgpu has (Documentation/gpu/amdgpu/driver-misc.rst)."""
    assert isinstance(gpu_host.pci, tuple)
    gpu_host.pci = (
        *gpu_host.pci,
        PciDevice("0000:03:00.0", 0x10DE, 0x030200, "vfio-pci"),
        PciDevice("0000:04:00.0", 0x10DE, 0x030200),
        PciDevice("0000:05:00.0", 0x1002, 0x038000, "amdgpu"),
    )
    for path, text in (
        ("0000:03:00.0/vendor", "0x10de\n"),
        ("0000:03:00.0/device", "0x2330\n"),
        ("0000:05:00.0/unique_id", "a1b2c3d4e5f60718\n"),
        ("0000:05:00.0/product_name", "Instinct MI210\n"),
    ):
        gpu_host.file(f"/sys/bus/pci/devices/{path}", text)
    found = document(reconciler(gpu_host, gpus=[FIRST]), capsys)
    amd = found.pop("0000:05:00.0")
    assert (amd["vendor"], amd["model"], amd["uuid"]) == ("amd", "Instinct MI210", "a1b2c3d4e5f60718")
    assert [each["state"] for each in found.values()] == ["granted", "free", "other-driver", "no-driver"]
    assert found["0000:03:00.0"]["driver"] == "vfio-pci"
    assert found["0000:03:00.0"]["model"] == "PCI ID 10de:2330"
    assert found["0000:04:00.0"]["model"] == ""


def test_a_gpu_that_the_driver_excludes_is_not_free(gpu_host: Host, capsys: Capture) -> None:
    information = f"/proc/driver/nvidia/gpus/{FIRST}/information"
    gpu_host.file(information, gpu_host.read_text(information).replace("GPU Excluded:\t No", "GPU Excluded:\t Yes"))
    agent = reconciler(gpu_host, gpus="all")
    found = document(agent, capsys)
    assert (found[FIRST]["state"], found[SECOND]["state"]) == ("excluded", "granted")
    assert (
        f"GPU {FIRST} is excluded by a parameter of the kernel module nvidia" in agent.preview()[0].vendors[0].problems
    )


def test_a_lost_gpu_is_listed(gpu_host: Host, capsys: Capture) -> None:
    agent = reconciler(gpu_host)
    agent.reconcile()
    gpu_host.unplug(SECOND)
    agent.reconcile()
    found = document(agent, capsys)
    assert (found[FIRST]["state"], found[SECOND]["state"]) == ("granted", "lost")
    assert found[SECOND]["machines"] == [MACHINE]


def test_what_could_not_be_observed_is_unknown(gpu_host: Host, capsys: Capture) -> None:
    gpu_host.pci = Unseen("the PCI devices in sysfs: time limit")
    assert "unknown: the PCI devices in sysfs: time limit" in " ".join(
        " ".join(each) for each in listed(reconciler(gpu_host), capsys, code=1)
    )


def test_what_a_machine_keeps_is_known(gpu_host: Host, capsys: Capture) -> None:
    """Also while no settings can be planned for it: it does not exist, or is no longer configured."""
    root = f"{gpu_host.root}/var/lib/machines/{MACHINE}"
    os.rmdir(root)
    assert {each["state"] for each in document(reconciler(gpu_host), capsys).values()} == {"free"}
    os.mkdir(root)
    reconciler(gpu_host, gpus=[FIRST]).reconcile()
    os.rmdir(root)
    agent = reconciler(gpu_host, gpus=[FIRST])
    found = document(agent, capsys)
    assert [found[each]["machines"] for each in (FIRST, SECOND)] == [[MACHINE], []]
    assert agent.reconcile().machines[0].gpus == (FIRST,)
    os.mkdir(root)
    units(gpu_host, "active")
    found = document(Reconciler(Config(machines={}), gpu_host, gpu_host), capsys)
    assert [found[each]["state"] for each in (FIRST, SECOND)] == ["granted", "free"]
    gpu_host.write(granted_file(MACHINE), b"damaged")
    assert listed(Reconciler(Config(machines={}), gpu_host, gpu_host), capsys, code=1)[-1][:5] == [
        *("unknown:", "which", "GPUs", "machine", MACHINE)
    ]


def test_a_host_without_machines_or_gpus(gpu_host: Host, capsys: Capture) -> None:
    found = document(Reconciler(Config(machines={}), gpu_host, gpu_host), capsys)
    assert [each["state"] for each in found.values()] == ["free", "free"]
    assert listed(reconciler(without_gpus(gpu_host)), capsys) == [["this", "host", "has", "no", "GPU"]]
    assert holders("", reconciler(gpu_host)) == ("this host has no GPU",)


@pytest.mark.parametrize("name", ["detach", "attach", "forget"])
def test_commands_that_change_something_need_a_configuration(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pass without machines would remove the settings of all machines that have stopped."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="no such file"):
        load(make_parser().parse_args(["gpus", name, FIRST]), gpu_host)


@pytest.mark.parametrize(("name", "code", "said"), [("gpus", 0, FIRST), ("doctor", 1, "no machine is configured")])
def test_no_configuration_is_needed(gpu_host: Host, capsys: Capture, name: str, code: int, said: str) -> None:
    gpu_host.bus.unit("unbounded-agent.service", "inactive", "not-found")
    answer_of_libcuda(gpu_host)
    loaded = load(make_parser().parse_args([name]), gpu_host)
    assert command(Reconciler(loaded.config, gpu_host, gpu_host), name) == code
    printed = capsys.readouterr()
    assert "no such file" in printed.err
    assert said in printed.out
