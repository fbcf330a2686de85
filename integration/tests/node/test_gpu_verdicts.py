"""Faults of GPUs of six kinds: how soon the node keeps new pods from such a GPU, and how soon it offers it again.

A pod computes on another GPU all the while. The GPUs and what is wrong with them are simulated; the agent, its service
and the machine are real.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.model.contract import parse_gpu_states
from agent.model.paths import REPORT_NAME, gpu_states_file, report_directory
from integration.bed.cache import REPOSITORY
from integration.bed.drivers import drm_gpus
from integration.bed.machine.node import MACHINE, Pod
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_hotplug import plug, uuid_of

pytestmark = pytest.mark.scenario("002")

Measured = Callable[[str, object], None]
GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in range(1, 9))
DOUBLE_BIT_ECC = 48
XID = "/sys/module/nvidia/parameters/simulated_xid"
HEALTH = "/proc/driver/nvidia/simulated_health"
DRM_FAULT = "/sys/module/simulated_drm/parameters/simulated_fault"
LIBCUDA = REPOSITORY / "integration/simulation/cuda/libcuda.c"
AMD_PORT = 8
BUSY_GPU, BAD_GPU = 7, 3
"""By their minors."""
COUNT = (
    "exec 3<>/dev/nvidia7; n=0; while :; do n=$((n + 1)); echo $n >/tmp/count.new; mv /tmp/count.new /tmp/count; done"
)
# Runs on the host, whose clock counts: runs a command, and prints the seconds until all named GPUs are in that state.
FOLLOW = """
import json, subprocess, sys, time
path, state, limit, command, *gpus = sys.argv[1:]
began = time.monotonic()
subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL)
while time.monotonic() < began + float(limit):
    with open(path) as file:
        found = {each["pci_address"]: each["state"] for each in json.load(file)["gpus"]}
    if all(found.get(gpu, "gone") == state for gpu in gpus):
        print(time.monotonic() - began)
        break
    time.sleep(0.02)
else:
    sys.exit(f"not {state} after {limit} s: {found}")
"""


class Site:
    """A machine that offers its GPUs by Dynamic Resource Allocation, with a pod that counts."""

    def __init__(self, bed: Bed, measured: Measured) -> None:
        self.bed, self._measured = bed, measured
        bed.guest.write("/root/follow.py", FOLLOW.encode())
        bed.guest.write("/etc/unbounded-agent/config.toml", f'{CONFIGURATION}allocation = "dra"\n'.encode())
        bed.run("systemctl", "reload", "unbounded-agent.service")
        exists = ("test", "-e", gpu_states_file(MACHINE))
        wait("states are published", lambda: bed.run(*exists, check=False).status == 0, 120, bed.evidence)
        self.pod = bed.node.start_pod(Pod(("sh", "-c", COUNT), cdi=(str(BUSY_GPU),)))
        self._counted = 0

    def follow(self, what: str, state: str, command: str, *gpus: str, limit: float = 240) -> None:
        """Run a command on the host, and measure how long it takes until the GPUs are in this state."""
        arguments = ("python3", "/root/follow.py", gpu_states_file(MACHINE), state, str(limit), command, *gpus)
        seconds = float(self.bed.run(*arguments, timeout=limit + 60).stdout)
        self._measured(f"seconds {what}", f"{seconds:.2f}")

    def fenced(self, what: str, command: str, *gpus: str, reason: str, limit: float = 240) -> None:
        """Let a fault come. Only these GPUs are fenced, the machine stays Ready, and the pod computes on."""
        self.follow(f"to the fence: {what}", "unhealthy", command, *gpus, limit=limit)
        states = parse_gpu_states(self.bed.guest.read(gpu_states_file(MACHINE)))
        assert {gpu for gpu, each in states.items() if each.effect} == {*gpus}
        assert {states[gpu].reason for gpu in gpus} == {reason}
        wait("a pass has seen it", lambda: self.condition("GPUsHealthy")[0] == "False", 60, self.bed.evidence)
        if len(gpus) < len(GPUS):
            # The machine may still have to answer that it has a new GPU.
            ready = ("True", "SomeGPUsUnusable")
            wait("the machine is Ready", lambda: self.condition("Ready") == ready, 120, self.bed.evidence)
        self.counts()

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition of the machine."""
        found = self.bed.last_conditions()[kind]
        return found["status"], found["reason"]

    def counts(self) -> None:
        """Assert that the pod's only container still counts."""

        def counted() -> int:
            return int(self.bed.node.in_container(self.pod, "cat", "/tmp/count").stdout)

        before = counted()
        assert before > self._counted
        wait("the pod computes", lambda: counted() > before, 60, self.bed.evidence)
        self._counted = before


@pytest.fixture
def site(ready: Bed, measured: Measured) -> Iterator[Site]:
    made, at_start = Site(ready, measured), ready.starts()
    yield made
    assert ready.restarted(at_start) == "nothing"


def bind_again(gpu: str, driver: str = "nvidia") -> str:
    path = f"/sys/bus/pci/drivers/{driver}"
    return f"echo {gpu} >{path}/unbind && echo {gpu} >{path}/bind"


def test_a_gpu_that_fails_is_fenced_and_comes_back(site: Site) -> None:
    """By a Xid, when it leaves the bus, and by lines and uevents of another vendor's driver."""
    site.fenced("a Xid that asks for a reset", f"echo 1 {DOUBLE_BIT_ECC} >{XID}", GPUS[1], reason="Xid48")
    site.follow("to schedulable: its driver is bound again", "healthy", bind_again(GPUS[1]), GPUS[1])

    site.bed.host.qemu.unplug(5)
    site.follow("to the fence: a GPU left the bus", "lost", "true", GPUS[5])
    site.counts()
    plug(site.bed, 5)
    site.follow("to schedulable: it is back", "healthy", "true", GPUS[5])
    site.counts()

    drm_gpus.load_drivers(site.bed.host)
    amd = drm_gpus.plug(site.bed.host, AMD_PORT, drm_gpus.AMD)
    site.follow("to schedulable: an AMD GPU with its node", "healthy", "true", amd)
    line = f"echo '{amd} amdgpu: GPU reset(1) failed' >{DRM_FAULT}"
    site.fenced("amdgpu could not reset a GPU", line, amd, reason="ResetFailed")
    recovered = f"echo '{amd} amdgpu: GPU reset(2) succeeded!' >{DRM_FAULT}"
    site.follow("to schedulable: amdgpu has reset it", "healthy", recovered, amd)
    site.fenced("a uevent WEDGED=rebind", f"echo '{amd} WEDGED=rebind' >{DRM_FAULT}", amd, reason="Wedged")
    site.follow("to schedulable: amdgpu is bound again", "healthy", bind_again(amd, "amdgpu"), amd)


@pytest.mark.exhaustive
def test_a_gpu_that_asks_for_a_reset_itself(site: Site) -> None:
    bed = site.bed
    bed.run("sh", "-c", "printf '[gpu_health]\\ninterval = 60\\n' >/etc/unbounded-agent/config.d/60-health.toml")
    bed.run("sh", "-c", f"for minor in 0 1 2 3 4 5 6 7; do echo $minor persistence 1 >{HEALTH}; done")
    # For a new handoff, the machine asks which GPUs are in persistence mode.
    for what in ("detach", "attach"):
        bed.agent("gpus", what, GPUS[2])
    links_count(bed)
    asks = f"echo 2 recovery_action 4 >{HEALTH}"
    site.fenced("the GPU asks for a reset itself", asks, GPUS[2], reason="RecoveryActionDrainAndReset", limit=900)
    reset = f"unbounded-agent gpus reset {GPUS[2]} --yes"
    site.follow("to schedulable: gpus reset", "healthy", reset, GPUS[2], limit=600)


def links_count(bed: Bed) -> None:
    """A GPU's NVLinks have counted errors, which says nothing; then they count one more."""
    gpu, count = GPUS[5], "5 link_replay"

    def said() -> str:
        report = json.loads(bed.guest.read(f"{report_directory(MACHINE)}/{REPORT_NAME}"))
        (word,) = (each["said"].get("nvlink_errors", "") for each in report["health"] if each["gpu"] == gpu)
        return str(word)

    bed.run("sh", "-c", f"echo 5 nvlinks 2 >{HEALTH}; echo {count} 3 >{HEALTH}")
    wait("its links were asked twice", lambda: said() == "None", 600, bed.evidence)
    bed.run("sh", "-c", f"echo {count} 4 >{HEALTH}")
    degraded = ("degraded", "NVLinkReplayErrors")
    wait("the GPU is degraded", lambda: verdict(bed, gpu) == degraded, 600, bed.evidence)
    assert not parse_gpu_states(bed.guest.read(gpu_states_file(MACHINE)))[gpu].effect, "it is not fenced"
    wait("the GPU is healthy again", lambda: verdict(bed, gpu)[0] == "healthy", 600, bed.evidence)


def verdict(bed: Bed, gpu: str) -> tuple[str, str]:
    """Return a GPU's verdict and its reason."""
    gpus = json.loads(bed.agent("gpus", "--json").stdout)["gpus"]
    return next((each["health"], each["healthReason"]) for each in gpus if each["address"] == gpu)


def simulated_libcuda(bed: Bed, faults: str, directory: Path) -> None:
    """Simulation: let the machine's libcuda compute in C, and with these faults for one of the GPUs."""
    library = directory / "libcuda.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, LIBCUDA, "-lm"], check=True, timeout=60)
    root = f"/var/lib/machines/{MACHINE}/root"
    bed.guest.write(f"{root}/libcuda.so", library.read_bytes(), 0o755)
    lines = (f"{uuid_of(bed, minor)} {faults * (minor == BAD_GPU)}\n" for minor in range(len(GPUS)))
    bed.guest.write(f"{root}/simulated-cuda", "".join(lines).encode())
    listed = "ldconfig -p | awk '/libcuda.so.1 .*x86-64/ { print $NF; exit }'"
    bed.node.shell(f"cp /root/simulated-cuda /run && mount --bind /root/libcuda.so $(readlink -f $({listed}))")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("faults", "result", "said"),
    [
        ("wrong=compute", "failed", "threads computed wrongly"),
        ("fail=cuCtxSynchronize:214", "failed", "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("hang=cuCtxSynchronize", "hung", "stopped after its time limit of 120 s"),
    ],
)
def test_a_gpu_that_computes_wrongly_is_fenced_until_a_test_passes(
    site: Site, tmp_path: Path, faults: str, result: str, said: str
) -> None:
    """The machine's own service tests it and another GPU, on a simulated libcuda. No line in any log says that."""
    bed, bad, sound = site.bed, GPUS[BAD_GPU], GPUS[BAD_GPU + 1]
    simulated_libcuda(bed, faults, tmp_path)
    test = f"unbounded-agent gpus test {bad} {sound} --json >/root/tested; test $? = 1"
    site.fenced(f"a test finds {faults}", test, bad, reason="TestFailed", limit=600)
    found = {each["address"]: each for each in json.loads(bed.guest.read("/root/tested"))["gpus"]}
    assert (found[bad]["result"], found[sound]["result"]) == (result, "passed")
    assert said in found[bad]["results"][0]["message"]
    bed.node.shell("! grep -l '[g]pu_test.py' /proc/[0-9]*/cmdline")
    bed.node.shell(f"sed -i 's/ {faults}//' /run/simulated-cuda")
    site.follow("to schedulable: a test passes", "healthy", f"unbounded-agent gpus test {bad}", bad, limit=600)
    site.counts()


@pytest.mark.exhaustive
def test_a_gpu_that_computes_slowly_is_degraded_and_keeps_its_pods(site: Site, tmp_path: Path) -> None:
    """On a simulated libcuda, whose times are simulated too."""
    bed, bad = site.bed, GPUS[BAD_GPU]
    simulated_libcuda(bed, "slow=0.1", tmp_path)
    tested = json.loads(bed.agent("gpus", "test", bad, "--json", timeout=600, check=False).stdout)["gpus"]
    assert [(each["result"], "memory_bandwidth" in each["results"][0]["slow"]) for each in tested] == [("failed", True)]
    assert verdict(bed, bad) == ("degraded", "TestSlow")
    assert not any(each.effect for each in parse_gpu_states(bed.guest.read(gpu_states_file(MACHINE))).values())
    assert site.condition("Ready")[0] == "True"
    site.counts()
    bed.node.shell("sed -i 's/ slow=0.1//' /run/simulated-cuda")
    bed.agent("gpus", "test", bad, timeout=600)
    assert verdict(bed, bad)[0] == "healthy"
    site.counts()


@pytest.mark.exhaustive
def test_a_switch_that_fails_costs_all_gpus_until_they_are_reset_together(site: Site) -> None:
    """An NVSwitch connects them. Their pods compute on; then all are reset by one command."""
    bed = site.bed
    drm_gpus.load_drivers(bed.host)
    switch = bed.run("sh", "-c", "ls /sys/bus/pci/devices").stdout.split()[0]
    line = f"- nvidia-nvswitch0: SXid (PCI:{switch}): 24007, Fatal, Link 28 sourcetrack timeout error"
    site.fenced("a fatal error of an NVSwitch", f"echo '{line}' >{DRM_FAULT}", *GPUS, reason="SXid24007")
    assert bed.last_conditions()["Ready"]["status"] == "False"
    bed.node.remove_pods()
    reset = f"unbounded-agent gpus reset {' '.join(GPUS)} --yes"
    site.follow("to schedulable: gpus reset of all", "healthy", reset, *GPUS, limit=900)
    bed.wait_ready()
