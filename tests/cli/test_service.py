"""What `unbounded-agent run` gives the service."""

from agent.cli.doctor.bundle import examine
from agent.cli.service import fixes
from agent.config.load import Loaded
from agent.model.conditions import ConditionType
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda
from tests.fakes.sound_host import make_sound, start


def test_the_page_has_the_commands_of_doctor(gpu_host: Host) -> None:
    """It said what was wrong, and not what to do."""
    make_sound(gpu_host)
    answer_of_libcuda(gpu_host, "12040\n")
    start(gpu_host, reconciler(gpu_host))
    gpu_host.remove_file("/sys/module/nvidia/version")
    agent = reconciler(gpu_host)
    found = fixes(agent.system, Loaded(agent.config), agent.reconcile())[MACHINE]
    (machine,) = examine(agent).machines
    as_root = {kind: each.fix for each in machine.findings for kind in each.conditions if each.fix}
    assert found[ConditionType.DRIVER_LOADED] == as_root[ConditionType.DRIVER_LOADED]
    assert any(line.startswith("modprobe") for line in found[ConditionType.DRIVER_LOADED])
