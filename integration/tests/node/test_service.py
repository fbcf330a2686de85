"""The service in its sandbox: metrics, a steady state that costs nothing, and a foreign file that survives."""

import json
import time
from http import HTTPStatus

import pytest

from integration.bed.measure import pages
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

PROMETHEUS = """
scrape_configs:
  - job_name: unbounded-agent
    scrape_interval: 1s
    static_configs: [{targets: ["127.0.0.1:9788"]}]
"""


def passes(bed: Bed) -> float:
    """Return how many passes the service has made, whatever their result, from its metrics page."""
    text = bed.page("/metrics")
    counters = [line for line in text.splitlines() if line.startswith("unbounded_agent_reconcile_total{")]
    assert counters, text
    return sum(float(line.rsplit(" ", 1)[1]) for line in counters)


def wait_for_a_pass(bed: Bed, after: float, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while passes(bed) <= after:
        assert time.monotonic() < deadline, f"no pass of the service within {seconds} s of its reload"
        time.sleep(1)


def test_all_conditions_are_true(ready: Bed) -> None:
    """Conditions that need a kubelet or a persistence daemon are not true, and give that as the reason."""
    conditions = ready.wait_ready()
    others = {kind: each["reason"] for kind, each in conditions.items() if each["status"] != "True"}
    assert others == {"GPUsAdvertised": "NoKubelet", "PersistenceMode": "DaemonNotRunning"}
    assert "gpu-node: ready, for " in ready.agent("status", "--check").stdout
    assert "Ready  True" in ready.agent("status", "--wide").stdout


def test_prometheus_scrapes_it(ready: Bed) -> None:
    """Debian's real Prometheus scrapes, and its own client queries it."""
    ready.wait_served()
    ready.guest.write("/etc/prometheus/prometheus.yml", PROMETHEUS.encode())
    ready.run("systemctl", "start", "prometheus.service")
    query = ["promtool", "query", "instant", "--format=json", "http://127.0.0.1:9090"]
    script = f"for _ in $(seq 200); do out=$({' '.join(query)} unbounded_agent_machine_ready 2>/dev/null); "
    script += 'case $out in *gpu-node*) echo "$out"; exit 0;; esac; sleep 1; done; exit 1'
    found = json.loads(ready.run("sh", "-c", script, timeout=120).stdout)
    assert found[0]["metric"]["machine"] == "gpu-node"
    assert found[0]["value"][1] == "1"


def test_health_pages(ready: Bed) -> None:
    ready.wait_served()
    for path in ("/livez", "/readyz", "/readyz/machines/gpu-node"):
        assert pages.get(ready.guest, path).status == HTTPStatus.OK


def test_a_second_pass_writes_nothing_and_restarts_nothing(ready: Bed) -> None:
    watched = "stat -c '%n %i %z' /etc/systemd/nspawn/gpu-node.nspawn /var/lib/unbounded-agent/machines/*/handoff/*"
    inside = (
        "stat -c '%n %i %z' /etc/cdi/nvidia.yaml /etc/containerd/config.toml /etc/containerd/conf.d/*; "
        "systemctl show -P ExecMainStartTimestampMonotonic containerd.service"
    )
    before = ready.run("sh", "-c", watched).stdout, ready.node.shell(inside).stdout
    ready.agent("apply")
    made = passes(ready)
    ready.run("systemctl", "reload", "unbounded-agent.service")
    wait_for_a_pass(ready, made)
    ready.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    assert (ready.run("sh", "-c", watched).stdout, ready.node.shell(inside).stdout) == before


def test_the_users_containerd_settings_survive(ready: Bed) -> None:
    """containerd 1.7 replaces whole tables by imported files: registry, sandbox image and CNI paths must be kept."""
    effective = ready.node.run("containerd", "config", "dump").stdout
    for setting in (
        'sandbox_image = "registry.invalid/pause:local"',
        'bin_dir = "/usr/lib/cni"',
        "https://mirror.invalid",
        "SystemdCgroup = true",
        "enable_cdi = true",
        'BinaryName = "/usr/bin/nvidia-container-runtime"',
    ):
        assert setting in effective


def test_the_published_spec_is_valid(ready: Bed) -> None:
    """The CDI project's own library says so."""
    ready.node.run("cdi-validate", "/etc/cdi/nvidia.yaml")
    hooks = ready.node.spec()["containerEdits"]["hooks"]
    assert {hook["args"][1] for hook in hooks} == {"create-symlinks", "update-ldcache"}


def test_the_toolkits_own_generator_is_masked(ready: Bed) -> None:
    """The specification that nvidia-cdi-refresh writes to /var/run/cdi would take precedence over ours."""
    for unit in ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"):
        assert ready.node.run("systemctl", "is-enabled", unit, check=False).stdout.strip() == "masked"


def test_a_foreign_settings_file_is_left_alone(installed: Bed) -> None:
    foreign = b"[Exec]\nBoot=yes\n"
    installed.guest.write("/etc/systemd/nspawn/gpu-node.nspawn", foreign)
    finished = installed.agent("apply", check=False)
    assert finished.status == 1
    assert "machines.gpu-node.nspawn" in finished.stdout
    assert installed.guest.read("/etc/systemd/nspawn/gpu-node.nspawn") == foreign


def test_a_second_agent_says_so_and_exits(ready: Bed) -> None:
    finished = ready.agent("run", check=False, timeout=60)
    assert finished.status == 1
    assert "another" in finished.stderr
