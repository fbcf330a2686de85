"""Whether containerd serves the kubelet (CRI): containerd itself says so, and its unit does not."""

import time
from pathlib import Path

import pytest

from agent.machine.containerd_tables import CRI_2, MAIN
from agent.machine.run import run
from agent.system.process import Completed
from tests.fakes.containerd_files import MAIN_2
from tests.fakes.machine import SERVES_CRI, Machine, hang, systemctl

OUTPUTS = Path(__file__).parents[2] / "data" / "fuzz_corpus" / "containerd-plugins"
FAILED_17, SERVES_21, FAILED_21 = ((OUTPUTS / str(number)).read_text() for number in range(3))
"""What the real ctr printed of containerd 1.7.24 and 2.1.9. In two cases, a registry had two settings."""
SAID = "invalid cri image config: `mirrors` cannot be set when `config_path` is provided"


def restarted(machine: Machine, *, main_process: int = 0) -> None:
    """Run until containerd was restarted with the agent's settings, and once more."""
    run(machine)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000, main_process=main_process))
    machine.calls.clear()
    run(machine)


def asked(machine: Machine) -> list[tuple[str, ...]]:
    return [call for call in machine.calls if call[0] == "ctr"]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (FAILED_17, SAID.replace("cri image", "plugin")),
        (FAILED_21, f"unable to load CRI image service plugin dependency: {SAID}"),
        (SERVES_21.replace("io.containerd.grpc.v1", "io.containerd.grpc.v9"), f"it has no plugin {CRI_2}"),
        ("", f"it has no plugin {CRI_2}"),
        (f"{SERVES_CRI}Error:        \n               Code:        Unknown\n", "Code: Unknown"),
        (f"{SERVES_CRI}Error:        \n", "it failed"),
        (f"{SERVES_CRI}Error:\n\tCode:\tUnknown\n\tMessage:\tone\n\ttwo\n\nType:\tx.v1\nID:\truntime\n", "one two"),
    ],
    ids=["1.7", "2.1", "no plugin", "nothing", "no message", "no code", "several lines"],
)
def test_a_plugin_that_failed_is_reported_in_containerds_words(machine: Machine, output: str, said: str) -> None:
    """containerd and its unit stay active then, and `containerd config dump` shows the settings without a word."""
    machine.program("ctr", output)
    restarted(machine)
    assert machine.conditions()["RuntimeActive"] == ("False", "CRIFailed")
    message = machine.message("RuntimeActive")
    assert message.startswith(f"containerd.service runs, but does not serve the kubelet (CRI): {said}: correct ")
    assert message.count("cannot be set") <= 1
    for serves in (SERVES_CRI, SERVES_21):
        machine.program("ctr", serves)
        assert machine.verdict("RuntimeActive") == ("True", "Running")
        assert machine.message("RuntimeActive").endswith(" runs with this configuration and serves the kubelet")


def test_a_containerd_that_does_not_answer(machine: Machine) -> None:
    """It may hang, or refuse the connection: nobody knows then, and the next run asks again."""
    restarted(machine)
    for answer, said in (
        (hang, "stopped after its time limit of 30 s"),
        (lambda argv: Completed(1, b"", b"ctr: failed to dial"), "failed to dial"),
        (lambda argv: Completed(-9, b"", b""), "killed by signal 9"),
        (lambda argv: Completed(0, b"\xff what?\n", b""), "printed no plugin: "),
    ):
        machine.program("ctr", answer)
        assert machine.verdict("RuntimeActive") == ("Unknown", "NoAnswer")
        assert said in machine.message("RuntimeActive")
    machine.program("ctr", SERVES_CRI)
    assert machine.verdict("RuntimeActive") == ("True", "Running")
    machine.program("systemctl", hang)
    assert machine.verdict("RuntimeActive") == ("Unknown", "NoAnswer")
    assert "cannot tell whether containerd runs: systemctl show" in machine.message("RuntimeActive")


def test_an_image_without_ctr(machine: Machine) -> None:
    """A node works without ctr."""
    machine.drop("/usr/bin/ctr")
    restarted(machine)
    assert machine.conditions()["RuntimeActive"] == ("True", "Running")
    assert "inferred" in machine.message("RuntimeActive")
    assert asked(machine) == []


@pytest.mark.parametrize(
    ("state", "load", "expected", "said"),
    [
        ("inactive", "loaded", ("Unknown", "NotStarted"), "run `systemctl start containerd.service` in the machine"),
        (
            "inactive",
            "masked",
            ("Unknown", "NotStarted"),
            "is masked: if the machine has booted, run `systemctl unmask ",
        ),
        ("activating", "loaded", ("Unknown", "NotStarted"), "is activating: the next run checks again"),
        ("deactivating", "loaded", ("Unknown", "NotStarted"), "is deactivating: the next run checks again"),
        ("failed", "loaded", ("False", "Failed"), "see `journalctl -u containerd` in the machine"),
        ("inactive", "not-found", ("False", "NoContainerd"), "install containerd in the image"),
        ("active", "loaded", ("Unknown", "RestartPending"), "is restarting, because its configuration changed"),
    ],
)
def test_only_a_containerd_that_runs_is_asked_or_restarted(
    machine: Machine, state: str, load: str, expected: tuple[str, str], said: str
) -> None:
    """At boot, this run comes before containerd, which waits for it, and whose own start then loads the settings."""
    machine.program("ctr", hang)
    machine.program("systemctl", systemctl(state, 0, "dead", load))
    assert machine.verdict("RuntimeActive") == expected
    assert said in machine.message("RuntimeActive")
    assert asked(machine) == []
    assert any("try-restart" in call for call in machine.calls) is (state == "active")


def test_a_containerd_that_was_stopped_is_no_containerd_that_is_about_to_start(machine: Machine) -> None:
    """It was Unknown, as at boot: no pod can start until somebody starts it."""
    restarted(machine)
    machine.program("systemctl", systemctl("inactive", 0, "dead", job=17))
    assert machine.verdict("RuntimeActive") == ("Unknown", "NotStarted"), "between the stop and the start"
    machine.program("systemctl", systemctl("inactive", 0, "dead"))
    assert machine.verdict("RuntimeActive") == ("False", "Stopped")
    assert "run `systemctl start containerd.service` in the machine" in machine.message("RuntimeActive")


@pytest.mark.parametrize(
    ("main", "command", "expected"),
    [
        (MAIN_2, "/usr/bin/containerd", ()),
        (f'{MAIN_2}[grpc]\naddress = "/run/a.sock"\n', "/usr/bin/containerd", ("--address", "/run/a.sock")),
        (
            f'{MAIN_2}[plugins."io.containerd.server.v1.grpc"]\naddress = "/run/a.sock"\n',
            "/usr/bin/containerd --log-level debug",
            ("--address", "/run/a.sock"),
        ),
        (
            f'{MAIN_2}[grpc]\naddress = "/run/a.sock"\n',
            f"containerd -a /run/b.sock -c {MAIN}",
            ("--address", "/run/b.sock"),
        ),
    ],
    ids=["default", "version 2", "version 4", "argument"],
)
def test_containerd_is_asked_at_its_own_socket(
    machine: Machine, main: str, command: str, expected: tuple[str, ...]
) -> None:
    machine.put(MAIN, main)
    machine.put("/proc/52/cmdline", command.replace(" ", "\0") + "\0")
    restarted(machine, main_process=52)
    (call,) = asked(machine)
    assert call[: len(expected) + 2] == ("ctr", *expected, "plugins")
