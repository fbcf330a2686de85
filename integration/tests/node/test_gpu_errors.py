"""Errors of GPUs in the kernel log: those of the driver count, those that user space writes there do not."""

import json
import re
from collections.abc import Callable

import pytest

from integration.bed.measure.restarts import AGENT
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

FIRST, SECOND, THIRD = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
OFF_THE_BUS, PAGE_FAULT, DOUBLE_BIT_ECC = 79, 31, 48


def counted(bed: Bed) -> dict[tuple[str, int], float]:
    """Return the number of errors by PCI address and Xid."""
    series = r'^unbounded_agent_gpu_xid_errors_total\{gpu="([^"]+)",xid="(\d+)"\} (\S+)$'
    found = re.findall(series, bed.page("/metrics"), re.MULTILINE)
    return {(gpu, int(xid)): float(value) for gpu, xid, value in found}


def raise_xid(bed: Bed, minor: int, xid: int) -> None:
    """Simulation: let the stand-in module write what the real one would."""
    bed.run("sh", "-c", f"echo {minor} {xid} >/sys/module/nvidia/parameters/simulated_xid")


def pass_until(bed: Bed, done: Callable[[], bool], seconds: float = 240) -> None:
    bed.run("systemctl", "reload", "unbounded-agent.service")
    wait("a pass did it", done, seconds, lambda: bed.evidence() + bed.page("/readyz?verbose"))


def test_an_xid_of_the_driver_counts_and_one_of_user_space_does_not(ready: Bed) -> None:
    """The service reads the kernel log in its sandbox, with Debian's kernel.dmesg_restrict."""
    assert ready.run("sysctl", "--values", "kernel.dmesg_restrict").stdout.strip() == "1"
    for prefix in ("", "<0>", "<3>"):
        spoofed = f"{prefix}NVRM: Xid (PCI:{FIRST.removesuffix('.0')}): {DOUBLE_BIT_ECC}, pid=1, name=x"
        ready.run("sh", "-c", f"echo '{spoofed}' >/dev/kmsg")
        ready.node.shell(f"echo '{spoofed}' >/dev/kmsg")
    raise_xid(ready, 0, PAGE_FAULT)
    pass_until(ready, lambda: bool(counted(ready)))
    assert counted(ready) == {(FIRST, PAGE_FAULT): 1}
    assert f"[+]gpu {FIRST} Xid {PAGE_FAULT}: " in ready.page("/readyz?verbose")
    assert ready.wait_ready()["DevicesPresent"]["reason"] == "Present", "an application's fault is not the GPU's"
    raise_xid(ready, 1, OFF_THE_BUS)
    pass_until(ready, lambda: ready.last_conditions()["DevicesPresent"]["status"] == "False")
    lost = ready.conditions()["DevicesPresent"]
    assert ready.conditions()["Ready"]["reason"] == "SomeGPUsUnusable", "the other GPUs serve pods"
    assert lost["reason"] == "GPUFallenOffBus"
    assert SECOND in lost["message"]
    # As if a GPU had been repaired: the kernel binds its driver again.
    for step in ("unbind", "bind"):
        ready.run("sh", "-c", f"echo {SECOND} >/sys/bus/pci/drivers/nvidia/{step}")
    pass_until(ready, lambda: ready.last_conditions()["DevicesPresent"]["status"] == "True")
    # Nothing listens while the service is down, so it reads earlier messages when it starts.
    ready.run("systemctl", "stop", AGENT)
    raise_xid(ready, 2, OFF_THE_BUS)
    ready.run("systemctl", "start", AGENT, timeout=240)
    pass_until(ready, lambda: ready.last_conditions()["DevicesPresent"]["reason"] == "GPUFallenOffBus")
    assert counted(ready)[THIRD, OFF_THE_BUS] == 1
    assert THIRD in ready.conditions()["DevicesPresent"]["message"]


def say(bed: Bed, minor: int, words: str) -> None:
    """Simulation: let the GPU say something of its health (integration/simulation/nvml/health.c)."""
    bed.run("sh", "-c", f"echo {minor} {words} >/proc/driver/nvidia/simulated_health")


def test_a_gpu_that_asks_for_a_reset_is_reset(ready: Bed) -> None:
    """Its machine asks it, which is in persistence mode. The driver's own nvidia-smi resets the simulated GPU."""
    ready.run("sh", "-c", "printf '[gpu_health]\\ninterval = 60\\n' >/etc/unbounded-agent/config.d/60-health.toml")
    for minor in range(8):
        say(ready, minor, "persistence 1")
    # For a new handoff, the machine asks which GPUs are in persistence mode.
    for what in ("detach", "attach"):
        ready.agent("gpus", what, THIRD)
    say(ready, 1, "recovery_action 1")
    pass_until(ready, lambda: ready.last_conditions()["GPUsHealthy"]["status"] == "False", 900)
    found = ready.conditions()
    assert found["GPUsHealthy"]["reason"] == "GPUNeedsReset"
    assert f"{SECOND} needs a reset: " in found["GPUsHealthy"]["message"]
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("True", "SomeGPUsUnusable")
    listed = json.loads(ready.agent("gpus", "--json").stdout)["gpus"]
    assert {each["address"]: each["health"] for each in listed}[SECOND] == "needs-reset"
    printed = ready.agent("gpus", "reset", SECOND, "--yes", timeout=600).stdout
    assert f"{SECOND} was reset, works, and was given back to" in printed
    pass_until(ready, lambda: ready.last_conditions()["GPUsHealthy"]["status"] == "True")
    assert ready.wait_ready()["Ready"]["reason"] == "AllConditionsTrue"


def test_a_gpu_test_runs_in_the_machine_and_judges_nothing_that_it_could_not_try(ready: Bed) -> None:
    """The machine's service runs the driver's own libcuda, which finds that no real GPU is there."""
    done = ready.agent("gpus", "test", FIRST, "--json", timeout=600, check=False)
    (tried,) = json.loads(done.stdout)["gpus"]
    assert (done.status, tried["address"], tried["result"]) == (3, FIRST, "not-run")
    (result,) = tried["results"]
    assert (result["step"], result["uuid"][:4]) == ("driver", "GPU-")
    assert "cuInit: CUDA_ERROR_" in result["message"]
    assert ready.wait_ready()["GPUsHealthy"]["reason"] == "Healthy"
    assert "gpu-test" not in ready.node.shell("ls /run/unbounded-agent/handoff").stdout
