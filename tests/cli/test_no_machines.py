"""With a configuration without machines, files of former machines are removed, and each command says so."""

import json
import sys

import pytest

from agent.config.settings import Config
from agent.host.daemon.health import View, status_line
from agent.host.daemon.metrics import TEXT, Metrics
from agent.host.reconcile import Reconciler
from agent.model.paths import nspawn_file, unit_drop_in
from agent.vendors.nvidia.user_space import READ_VERSION
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler, units
from tests.fakes.host import Host
from tests.fakes.libcuda import LIBCUDA

SETTINGS = (nspawn_file(MACHINE), unit_drop_in(MACHINE))


@pytest.fixture
def empty(gpu_host: Host) -> Reconciler:
    assert not reconciler(gpu_host).reconcile().failures
    gpu_host.bus.unit("unbounded-agent.service", "active")
    gpu_host.command(sys.executable, "-I", "-c", READ_VERSION, LIBCUDA, stdout="12040\n")
    return Reconciler(Config(machines={}), gpu_host, gpu_host)


def test_a_pass_removes_the_files_of_a_stopped_machine(gpu_host: Host, empty: Reconciler) -> None:
    units(gpu_host, "active")
    assert not empty.run_pass().failures
    assert all(gpu_host.exists(path) for path in SETTINGS)
    units(gpu_host, "inactive", stopped_at=1)
    outcome = empty.run_pass()
    assert (outcome.machines, outcome.failures) == ((), ())
    assert not any(gpu_host.exists(path) for path in SETTINGS)
    assert not empty.run_pass().actions
    assert not [argv for argv in gpu_host.runner.calls if "start" in argv]
    page = Metrics().page(View("0.1.0", outcome.machines, outcome, observed=1.7e9), TEXT).body.decode()
    assert "unbounded_agent_host_pci_gpus 2.0" in page
    assert f'machine="{MACHINE}"' not in page
    assert status_line(outcome.machines) == "no machine is configured"


@pytest.mark.parametrize("name", ["plan", "apply", "status", "doctor"])
def test_each_command_says_that_no_machine_is_configured(empty: Reconciler, capsys: Capture, name: str) -> None:
    """The simulated host lacks the kubelet's sysctls, but no machine has a kubelet: `doctor` finds no fault."""
    assert command(empty, name) == 0
    assert capsys.readouterr().out.splitlines().count("no machine is configured") == 1
    if name in ("status", "doctor"):
        command(empty, f"{name} --json")
        assert json.loads(capsys.readouterr().out)["machines"] == {}
