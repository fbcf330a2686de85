"""A simulated fleet: metrics pages of many hosts from one server, and a real Prometheus that scrapes them.

The pages are what the service exports; hosts, GPUs and faults are invented.
"""

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agent.host.daemon.metrics import TEXT
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.facts import Absent, Driver, Facts, Remembered, RememberedGpu, Seen, UserSpace
from agent.model.goal import Done
from tests.fakes import eight_gpus
from tests.fakes.reconciler import conditions

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S")
JOB = "unbounded-agent"


def _facts(host: int, now: float) -> Facts:
    """Return the facts of a host: one of ten has a newer driver, one of fifty a detached, a lost or a failed GPU."""
    facts = eight_gpus.facts(now, host, MODELS[host % len(MODELS)])
    (vendor,) = facts.vendors
    if host % 10 == 1:
        vendor = replace(vendor, driver=Driver("570.86.15", UserSpace("570.86.15", ())))
    if host % 50 == 2:
        vendor = replace(vendor, gpus=(*vendor.gpus[:7], replace(vendor.gpus[7], detached=True)))
    lost = RememberedGpu("0000:20:00.0", "nvidia", MODELS[0], f"GPU-{host}", (eight_gpus.MACHINE,), now)
    remembered: Seen[Remembered] = Remembered((lost,)) if host % 50 == 3 else Absent("no record")
    faults = facts.gpus if host % 50 == 4 else replace(facts.gpus, faults={})
    return replace(facts, vendors=(vendor,), remembered=remembered, gpus=faults)


def pages(host: int, now: float) -> tuple[bytes, ...]:
    """Return a host's page after its first passes, and after further ones."""
    view = eight_gpus.view(now, _facts(host, now), version="0.2.0" if host % 4 else "0.1.0")
    machine = replace(view.machines[0], agent_version="0.1.0")
    if host % 25 == 5:
        reason = (Reason.RESTART_PENDING, Reason.NO_CONTAINERD)[host // 25 % 2]
        machine = replace(
            machine, conditions=conditions(Condition(ConditionType.RUNTIME_ACTIVE, Status.FALSE, reason, ""), now=now)
        )
    if host % 50 == 2:
        machine = replace(machine, gpus=machine.gpus[:7], advertised=6)
    assert view.outcome
    view = replace(view, machines=(machine,), outcome=replace(view.outcome, machines=(machine,)))
    metrics, found = eight_gpus.metrics(view), []
    for _ in range(2):
        found.append(metrics.page(view, TEXT).body)
        assert view.outcome
        failures = ("a step",) * (host % 50 == 6)
        metrics.passed(replace(view.outcome, actions=(Done("write", "a file"),), failures=failures), 0.2)
        metrics.event(time.monotonic() - 1)
        metrics.converged()
        metrics.gpu_error(eight_gpus.ADDRESSES[0], 31, 1 + host % 3)
    return tuple(found)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        host = int(self.path.split("/")[1])
        versions = self.server.pages[host]
        body = versions[min(self.server.scraped.get(host, 0), len(versions) - 1)]
        self.server.scraped[host] = self.server.scraped.get(host, 0) + 1
        self.send_response(200)
        self.send_header("Content-Type", TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, hosts: int) -> None:
        self.scraped: dict[int, int] = {}
        now = time.time()
        self.pages = [pages(host, now) for host in range(hosts)]
        super().__init__(("127.0.0.1", 0), _Handler)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.process = port, process

    def query(self, expression: str) -> tuple[list[dict[str, Any]], float]:
        """Return the result of an instant query, and how long it took in seconds. Raises AssertionError on an error."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        started = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=600) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found, time.monotonic() - started

    def number(self, expression: str) -> float:
        """Return the value of a query with one result; 0 without any."""
        found, _ = self.query(expression)
        return float(found[0]["value"][1]) if found else 0.0

    def resident_bytes(self) -> int:
        """Return the memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


@contextmanager
def scraped_fleet(directory: Path, hosts: int, interval: int) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped each host three times, `interval` seconds apart, and evaluated the rules.

    One host more is in its list, and does not answer.
    """
    server = _Server(hosts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_address[1]}"
    targets = [
        {"targets": [address], "labels": {"__metrics_path__": f"/{host}", "instance": f"gpu-host-{host:03}:9788"}}
        for host in range(hosts)
    ]
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as silent:
        port = free.getsockname()[1]
        dead = {"targets": [f"127.0.0.1:{silent.getsockname()[1]}"], "labels": {"instance": "gpu-host-down:9788"}}
    (directory / "targets.json").write_text(json.dumps([*targets, dead]))
    rules = [str(REPOSITORY / "deploy/prometheus" / f"unbounded-agent.{each}.yml") for each in ("rules", "recording")]
    configuration = {
        "global": {"scrape_interval": f"{interval}s", "evaluation_interval": f"{interval}s"},
        "rule_files": rules,
        "scrape_configs": [{"job_name": JOB, "file_sd_configs": [{"files": ["targets.json"]}]}],
    }
    # JSON is YAML.
    (directory / "prometheus.yml").write_text(json.dumps(configuration))
    argv = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, env=dict(os.environ)
        )
    prometheus = Prometheus(port, process)
    try:
        _wait(prometheus, server, hosts, 120 + 10 * interval)
        yield prometheus
    finally:
        process.terminate()
        process.wait(60)
        server.shutdown()
        server.server_close()


def _wait(prometheus: Prometheus, server: _Server, hosts: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if prometheus.process.poll() is not None:
            raise AssertionError("Prometheus ended: see its log")
        if sum(server.scraped.get(host, 0) >= 3 for host in range(hosts)) == hosts:
            # The rules of the last scrape were evaluated when the number of hosts is recorded.
            name = "job_le:unbounded_agent_event_to_converged_seconds_bucket:rate1h"
            if (
                prometheus.number(f"count({name})")
                and prometheus.number("job:unbounded_agent_build_info:count") == hosts
            ):
                return
        time.sleep(0.2)
    raise AssertionError("the fleet was not scraped in time")
