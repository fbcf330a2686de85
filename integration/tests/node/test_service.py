"""The service in its sandbox, and a machine that is ready: what users, Prometheus and pods see of them."""

import json
from http import HTTPStatus

import pytest

from integration.bed.measure import pages
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_prerequisites import expect_driver_seen

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
    wait("a pass of the service since its reload", lambda: passes(bed) > after, seconds, bed.evidence)


def test_all_conditions_are_true(shared: Bed) -> None:
    """Conditions that need a kubelet or a persistence daemon are not true, and give that as the reason."""
    conditions = shared.wait_ready()
    others = {kind: each["reason"] for kind, each in conditions.items() if each["status"] != "True"}
    assert others == {"GPUsAdvertised": "NoKubelet", "PersistenceMode": "DaemonNotRunning"}
    assert "gpu-node: ready, for " in shared.agent("status", "--check").stdout
    assert "Ready  True" in shared.agent("status", "--wide").stdout


def test_prometheus_scrapes_it(shared: Bed) -> None:
    """Debian's real Prometheus scrapes, and its own client queries it."""
    shared.wait_served()
    shared.guest.write("/etc/prometheus/prometheus.yml", PROMETHEUS.encode())
    shared.run("systemctl", "start", "prometheus.service")
    query = ["promtool", "query", "instant", "--format=json", "http://127.0.0.1:9090"]
    script = f"for _ in $(seq 200); do out=$({' '.join(query)} unbounded_agent_machine_ready 2>/dev/null); "
    script += 'case $out in *gpu-node*) echo "$out"; exit 0;; esac; sleep 1; done; exit 1'
    try:
        found = json.loads(shared.run("sh", "-c", script, timeout=120).stdout)
    finally:
        shared.run("systemctl", "stop", "prometheus.service")
    assert found[0]["metric"]["machine"] == "gpu-node"
    assert found[0]["value"][1] == "1"


def test_health_pages(shared: Bed) -> None:
    shared.wait_served()
    for path in ("/livez", "/readyz", "/readyz/machines/gpu-node"):
        assert pages.get(shared.guest, path).status == HTTPStatus.OK


def test_a_second_pass_writes_nothing_and_restarts_nothing(shared: Bed) -> None:
    watched = "stat -c '%n %i %z' /etc/systemd/nspawn/gpu-node.nspawn /var/lib/unbounded-agent/machines/*/handoff/*"
    inside = (
        "stat -c '%n %i %z' /etc/cdi/nvidia.yaml /etc/containerd/config.toml /etc/containerd/conf.d/*; "
        "systemctl show -P ExecMainStartTimestampMonotonic containerd.service"
    )
    before = shared.run("sh", "-c", watched).stdout, shared.node.shell(inside).stdout
    shared.agent("apply")
    made = passes(shared)
    shared.run("systemctl", "reload", "unbounded-agent.service")
    wait_for_a_pass(shared, made)
    shared.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    assert (shared.run("sh", "-c", watched).stdout, shared.node.shell(inside).stdout) == before


def test_the_users_containerd_settings_survive(shared: Bed) -> None:
    """containerd 1.7 replaces whole tables by imported files: registry, sandbox image and CNI paths must be kept."""
    # containerd 2 quotes with apostrophes, and has other names for some settings.
    effective = shared.node.run("containerd", "config", "dump").stdout.replace("'", '"')
    for setting in (
        '= "registry.invalid/pause:local"',
        '"/usr/lib/cni"',
        'config_path = "/etc/containerd/bed-certs.d"',
        "SystemdCgroup = true",
        "enable_cdi = true",
        'BinaryName = "/usr/bin/nvidia-container-runtime"',
    ):
        assert setting in effective


def test_the_published_spec_is_valid(shared: Bed) -> None:
    """The CDI project's own library says so."""
    shared.node.run("cdi-validate", "/etc/cdi/nvidia.yaml")
    hooks = shared.node.spec()["containerEdits"]["hooks"]
    assert {hook["args"][1] for hook in hooks} == {"create-symlinks", "update-ldcache"}


def test_the_limit_of_memory_has_room(shared: Bed) -> None:
    """A run that generates a specification succeeds with half of it, files that the kernel caches included."""
    # Not MemoryPeak=: systemd 255 forgets it when the unit has ended.
    unit = "unbounded-agent-gpu.service"
    limit = int(shared.node.run("systemctl", "show", "--property=MemoryMax", "--value", unit).stdout)
    shared.node.run("rm", "/etc/cdi/nvidia.yaml")
    shared.node.run("systemctl", "set-property", "--runtime", unit, f"MemoryMax={limit // 2}", "MemorySwapMax=0")
    shared.node.run("systemctl", "start", unit, timeout=120)
    assert shared.node.run("systemctl", "show", "--property=Result", "--value", unit).stdout.strip() == "success"
    assert shared.node.spec()
    shared.node.run("systemctl", "revert", unit)


def test_the_toolkits_own_generator_is_masked(shared: Bed) -> None:
    """The specification that nvidia-cdi-refresh writes to /var/run/cdi would take precedence over ours."""
    for unit in ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"):
        assert shared.node.run("systemctl", "is-enabled", unit, check=False).stdout.strip() == "masked"


def test_a_machine_with_the_hosts_network_sees_the_driver(shared: Bed) -> None:
    expect_driver_seen(shared)


def test_a_second_agent_says_so_and_exits(shared: Bed) -> None:
    finished = shared.agent("run", check=False, timeout=60)
    assert finished.status == 75
    assert "another" in finished.stderr


def test_status_as_json(shared: Bed) -> None:
    found = json.loads(shared.agent("status", "--json").stdout)
    assert found["version"] == 1
    conditions = found["machines"]["gpu-node"]["conditions"]
    assert {"type", "status", "reason", "message", "lastTransitionTime"} <= set(conditions[0])
