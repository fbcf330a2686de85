"""`plan` for machines that do not exist: a misspelt name, or a node that `up` has not made yet."""

from pathlib import Path

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.node_settings import config

MISSPELT = "gpu-nod"


def reconciler_of(host: Host, **machines: object) -> Reconciler:
    host.bus.unit(f"systemd-nspawn@{MISSPELT}.service", "inactive")
    return Reconciler(Config.validated({"machines": machines}), host, host)


def test_a_misspelt_machine_is_bad_input(gpu_host: Host, capsys: Capture) -> None:
    """It said that there is nothing to do, and returned 0. The other machines are planned."""
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}}), "plan") == 2
    printed = capsys.readouterr().out
    assert printed == (
        f"{MISSPELT}: left unchanged: /var/lib/machines/{MISSPELT} does not exist; correct the name, or unpack the "
        f"machine's image into that directory\n"
    )
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}}), "plan --json") == 2
    assert capsys.readouterr().out.startswith("{"), "the role for Ansible accepts it"
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}, MACHINE: {}}), "plan") == 2
    assert f"would write /etc/systemd/nspawn/{MACHINE}.nspawn" in capsys.readouterr().out


def test_a_node_that_up_will_make(gpu_host: Host, capsys: Capture) -> None:
    Path(gpu_host.root, f"var/lib/machines/{MACHINE}").rmdir()
    assert command(Reconciler(config(**{MACHINE: {}}), gpu_host, gpu_host), "plan") == 0
    printed = capsys.readouterr().out
    assert f"/var/lib/machines/{MACHINE} does not exist; run `unbounded-agent up {MACHINE}`, which makes it" in printed
    assert "unpack" not in printed


def test_a_file_in_the_place_of_a_machine(gpu_host: Host, capsys: Capture) -> None:
    Path(gpu_host.root, f"var/lib/machines/{MACHINE}").rmdir()
    gpu_host.file(f"/var/lib/machines/{MACHINE}", "")
    assert command(reconciler(gpu_host), "plan") == 1
    assert "is not a directory" in capsys.readouterr().out
