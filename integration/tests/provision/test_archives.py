"""crictl and the CNI plugins are taken from archives that GNU tar made, without a network."""

import hashlib
import json
import sys
from pathlib import Path

from msgspec import to_builtins

from integration.bed.cache import REPOSITORY
from integration.bed.process import run
from tests.fakes.node_settings import node_settings

FILL = """
import json
import sys
from agent.config.settings import NodeSettings
from agent.host.provision.plan import FetchBinaries, FillRoot
from agent.host.apply.steps import apply
from agent.host.provision.apply import performers
from agent.host.provision.binaries import wanted_binaries
from agent.system.files import System
from agent.system.network import HostNetwork
from agent.system.process import host_runner
from agent.system.tool_runner import tool_runner

programs = wanted_binaries(NodeSettings.validated(json.loads(sys.argv[1])), "amd64")
system = System(host_runner, sys.argv[2], tool_runner=tool_runner)
steps = (FetchBinaries(programs), FillRoot("/unpacked", "/staged", programs, ()))
apply(steps, system, print, performers(HostNetwork()))
"""


def test_programs_come_from_the_archives_of_releases(tmp_path: Path) -> None:
    """In a network namespace whose only interface is down; an archive has more than programs."""
    files, host = tmp_path / "files", tmp_path / "host"
    bundle = host / "srv"
    for each in (files, bundle, host / "staged"):
        each.mkdir(parents=True)
    for name, mode in {"bridge": 0o755, "host-local": 0o755, "crictl": 0o755, "LICENSE": 0o644}.items():
        (files / name).write_text(f"#!/bin/sh\necho {name}\n")
        (files / name).chmod(mode)
    (files / "elsewhere").symlink_to("/etc/passwd")
    tools, plugins = bundle / "crictl-v1.36.0-linux-amd64.tar.gz", bundle / "cni-plugins-linux-amd64-v1.9.1.tgz"
    run(["tar", "-czf", tools, "-C", files, "crictl"])
    run(["tar", "-czf", plugins, "--format=posix", "--owner=runner:1001", "-C", files, "."])
    sha256 = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in {"crictl": tools, "cni_plugins": plugins}.items()
    }
    versions = {"crictl_version": "1.36.0", "cni_plugins_version": "1.9.1"}
    settings = node_settings(binaries={**versions, "bundle": "/srv", "sha256": sha256})
    run(["unshare", "--net", sys.executable, "-c", FILL, json.dumps(to_builtins(settings)), host], cwd=REPOSITORY)
    assert run([host / "staged/usr/local/bin/crictl"]) == "crictl"
    assert sorted(each.name for each in (host / "staged/usr/lib/cni").iterdir()) == ["bridge", "crictl", "host-local"]
