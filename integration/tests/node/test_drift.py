"""Changes that somebody makes in the machine are repaired, counted and logged; pods and containerd keep running."""

import json
import re
from collections.abc import Callable

import pytest

from agent.machine.containerd_tables import MAIN
from integration.bed.machine.node import Pod
from integration.bed.measure.journal import messages
from integration.bed.measure.restarts import CONTAINERD
from integration.bed.measure.watching import uptime
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = pytest.mark.scenario("002")

SPEC = "/etc/cdi/nvidia.yaml"
LINK = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
RUNTIME = "/etc/nvidia-container-runtime/config.toml"
COUNTED = re.compile(r'^unbounded_agent_machine_repairs_total{machine="gpu-node",what="(\w+)"} (\S+)$', re.MULTILINE)
ALL_AT_ONCE = f"""
sed -i 's#/dev/nvidia1"#/dev/nvidia2"#' {SPEC}
rm {LINK} {DROP_IN}
sed -i 's/"cdi"/"auto"/' {RUNTIME}
"""
ONE_BY_ONE = (
    ("spec", f"rm {SPEC}"),
    ("links", f"rm {LINK} /usr/bin/nvidia-smi"),
    ("runtime", f"rm {RUNTIME}"),
    ("containerd", f"sed -i 's/enable_cdi = true/enable_cdi = false/' {DROP_IN}"),
    ("containerd", f"sed -i '/^imports/d' {MAIN}"),
)
# Acts like a configuration management tool that does not know of imports.
ANOTHER_MAIN = f"""
sed -e '/^imports/d' -e 's/sandbox_image = /max_container_log_line_size = 8192\\n&/' {MAIN} > {MAIN}.new
mv {MAIN}.new {MAIN}
systemctl restart containerd.service
"""
OTHER = "/etc/containerd/other.toml"
OVERRIDE = "/run/systemd/system/containerd.service.d/60-other.conf"
Measured = Callable[[str, object], None]


def repairs(bed: Bed) -> dict[str, int]:
    """Return the number of repairs by what was repaired, from the host's metrics."""
    return {what: int(float(count)) for what, count in COUNTED.findall(bed.page("/metrics"))}


def wait_for_repairs(bed: Bed, wanted: dict[str, int], seconds: float = 180) -> None:
    wait(f"repairs are {wanted}", lambda: repairs(bed) == wanted, seconds, lambda: f"{repairs(bed)}\n{logged(bed)}")


def logged(bed: Bed) -> str:
    """Return the machine half's lines in the machine's journal."""
    return messages(bed.node.run, "unbounded-agent-gpu")


def last_trigger(bed: Bed) -> str:
    """Return when the machine half's timer last started it, once that run is over: it could see a later change."""
    show = "systemctl show --value --property"
    script = f"""
        {show}=LastTriggerUSecMonotonic unbounded-agent-gpu.timer
        while [ "$({show}=ActiveState unbounded-agent-gpu.service)" = activating ]; do sleep 0.2; done
    """
    return bed.node.shell(script).stdout.strip()


def settle(bed: Bed) -> None:
    """Run the machine half now, without waiting for its timer."""
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service", timeout=120)


def expect_new_pods(bed: Bed) -> None:
    expect_gpus(probe(bed.node, cdi=("1",)), {1})
    expect_gpus(probe(bed.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "1"}), {1})


def test_the_timer_finds_what_somebody_changed(ready: Bed, measured: Measured) -> None:
    """All changes at once, without starting the machine half. containerd never loaded them, so it keeps running."""
    ready.wait_served()
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("0",)))
    before, none, triggered = ready.starts(), repairs(ready), last_trigger(ready)
    assert set(none.values()) == {0}
    ready.node.shell(ALL_AT_ONCE)
    changed = uptime(ready.guest)
    wait_for_repairs(ready, dict.fromkeys(none, 1))
    measured("seconds to the metrics", f"{uptime(ready.guest) - changed:.1f}")
    assert last_trigger(ready) != triggered
    lines = logged(ready)
    for sentence in (f"changed {SPEC}", f"changed {LINK}", f"removed {DROP_IN}", f"changed {RUNTIME}"):
        assert f"repaired: somebody {sentence}" in lines
    ready.wait_served()
    found = json.loads(ready.node.in_container(pod, "gpu-probe", "/dev/nvidia0").stdout)
    assert found["open"]["/dev/nvidia0"] == "OK"
    measured("restarted", ready.restarted(before))
    assert ready.restarted(before) == "nothing"
    expect_new_pods(ready)


@pytest.mark.exhaustive
def test_each_change_alone_is_repaired(ready: Bed, measured: Measured) -> None:
    before, counts = ready.starts(), dict(repairs(ready))
    for what, script in ONE_BY_ONE:
        ready.node.shell(script)
        settle(ready)
        counts[what] += 1
        wait_for_repairs(ready, counts)
    ready.wait_served()
    measured("restarted", ready.restarted(before))
    assert ready.restarted(before) == "nothing"
    expect_new_pods(ready)


@pytest.mark.exhaustive
def test_containerd_restarted_with_a_rewritten_main_file(ready: Bed, measured: Measured) -> None:
    """In the end, containerd runs with the administrator's settings and the agent's, after one more restart at most."""
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("0",)))
    before, counts = ready.starts(), dict(repairs(ready))
    starts = "journalctl --output=cat --unit=containerd --no-pager _PID=1 | grep -c ^Started"
    earlier = int(ready.node.shell(starts).stdout)
    ready.node.shell(ANOTHER_MAIN, timeout=120)
    counts["containerd"] += 1
    wait_for_repairs(ready, counts)
    ready.wait_served()
    dump = ready.node.run("containerd", "config", "dump").stdout
    assert "max_container_log_line_size = 8192" in dump
    assert 'BinaryName = "/usr/bin/nvidia-container-runtime"' in dump
    again = int(ready.node.shell(starts).stdout) - earlier
    measured("starts of containerd", again)
    assert again in (1, 2), "the administrator's, and at most one of the agent's"
    found = json.loads(ready.node.in_container(pod, "gpu-probe", "/dev/nvidia0").stdout)
    assert found["open"]["/dev/nvidia0"] == "OK"
    assert ready.restarted(before) == CONTAINERD
    expect_new_pods(ready)


@pytest.mark.exhaustive
def test_containerd_restarted_with_a_different_main_file(ready: Bed) -> None:
    """Another file is not ours to follow: it is named, and Ready is not True."""
    override = f"[Service]\nExecStart=\nExecStart=/usr/bin/containerd --config {OTHER}\n"
    ready.node.shell(f"cp {MAIN} {OTHER}; mkdir -p {OVERRIDE.rpartition('/')[0]}; printf %s '{override}' > {OVERRIDE}")
    ready.node.shell("systemctl daemon-reload; systemctl restart containerd.service", timeout=120)
    settle(ready)
    found = ready.conditions()["RuntimeActive"]
    assert (found["status"], found["reason"]) == ("False", "OtherConfiguration")
    assert OTHER in found["message"]
    ready.node.shell(f"rm {OVERRIDE}; systemctl daemon-reload; systemctl restart containerd.service", timeout=120)
    settle(ready)
    ready.wait_ready()
