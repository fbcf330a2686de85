"""The files of a node: formats that the kubelet, systemd and containerd read."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config.settings import DEFAULT_GRACE, GRACE_KEYS, MachineSettings, shutdown_grace
from agent.host.plan.nspawn import stop_limit
from agent.host.provision.node_files import (
    BOOTSTRAP_KUBECONFIG,
    CONFIGURATION,
    CREDENTIAL_PROVIDERS,
    LOGIND,
    POD_IMAGES_SERVICE,
    UNITS,
    NodeInputs,
    node_files,
)
from agent.host.provision.node_files import MAIN as CONTAINERD
from agent.machine.containerd_tables import CRI_2, Configuration, problems, render
from agent.model.node import NodeFile
from agent.model.paths import MACHINE_REPORT_DIRECTORY
from agent.vendors.machine_vendor import RuntimeHandler
from tests.fakes.golden import expect_golden
from tests.fakes.node_settings import CA, node_settings

INPUTS = NodeInputs("gpu-1", "10.0.0.7", CA, labels={"a": "the settings' value counts"})
COMMAND = f"{UNITS}/kubelet.service.d/99-unbounded-agent.conf"
OWN = NodeInputs("gpu-1", "", CA, own_network=True)


def made(inputs: NodeInputs = INPUTS, **settings: Any) -> Mapping[str, NodeFile]:  # noqa: ANN401
    return {file.path: file for file in node_files("gpu", node_settings(**settings), inputs)}


def kubelet_configuration(**settings: Any) -> dict[str, Any]:  # noqa: ANN401
    found: dict[str, Any] = json.loads(made(**settings)[CONFIGURATION].content)
    return found


def test_the_files_are_these() -> None:
    """What a node's kubelet and containerd may do is decided here.

    The kubelet does not ask for a server's certificate (serverTLSBootstrap): Kubernetes approves no such request by
    itself, and `kubectl logs` would fail until then.
    """
    settings = {
        "kubelet": {
            "labels": {"a": "b"},
            "taints": ["c=d:NoSchedule", "e:NoExecute"],
            "startup_taint": "readiness.k8s.io/gpu=:NoExecute",
        },
        "containerd": {"mirrors": {"docker.io": ["https://mirror.example.com"]}},
    }
    blocks = [
        f"==> {file.path} ({file.mode:04o})\n{file.content.decode().rstrip()}\n"
        for file in sorted(made(INPUTS, **settings).values(), key=lambda each: each.path)
    ]
    expect_golden("node-files.txt", "\n".join(blocks))


@pytest.mark.parametrize("argument", ["a b", "\U0001f3ae", "\\ud83c\\udfae", "\u65e5 \x7f \x85 \u2028 \ufeff \uffff"])
def test_a_program_gives_the_credential_and_the_kubelet_reads_its_files_as_yaml(argument: str) -> None:
    """YAML has neither JSON's pairs of escapes for characters above U+FFFF, nor all other characters as they are."""
    kubelet = {"configuration": {"x": argument}}
    files = made(exec_credential=["/usr/bin/login", argument], bootstrap_token="", kubelet=kubelet)
    (user,) = yaml.load(files[BOOTSTRAP_KUBECONFIG].content, yaml.CSafeLoader)["users"]
    assert (user["user"]["exec"]["command"], user["user"]["exec"]["args"]) == ("/usr/bin/login", [argument])
    assert yaml.load(files[CONFIGURATION].content, yaml.CSafeLoader)["x"] == argument
    assert json.loads(files[CONFIGURATION].content)["x"] == argument


@pytest.mark.processes
def test_the_unit_that_reports_the_join_has_limits_and_a_sandbox(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    unit = tmp_path / "unbounded-agent-joined.service"
    unit.write_bytes(made()[f"{UNITS}/{unit.name}"].content)
    argv = [analyze, "security", "--offline=yes", "--no-pager", "--threshold=37", str(unit)]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("kubectl", "joined"), [("kubectl", True), ("kubectl", False), ("absent", True)])
def test_the_join_is_known_from_the_boot_and_not_from_a_clock(tmp_path: Path, kubectl: str, joined: bool) -> None:
    """It is reported as soon as the API server says it, while kubectl still watches."""
    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    boots = ["11111111-2222-3333-4444-555555555555", *([here] if joined else [])]
    nodes = [{"object": {"kind": "Node", "status": {"nodeInfo": {"bootID": boot}}}} for boot in boots]
    said = "\n".join(json.dumps(each, separators=(",", ":")) for each in nodes)
    for tool in ("cat", "grep", "mv", "sleep"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    reported = tmp_path / "report/joined"
    ends = "sleep 0.1" if not joined else f"until test -s {reported}; do sleep 0.1; done"
    (tmp_path / kubectl).write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n{ends}\n")
    (tmp_path / kubectl).chmod(0o755)
    reported.parent.mkdir()
    unit = made()[f"{UNITS}/unbounded-agent-joined.service"].content.decode()
    (script,) = [line.partition("=/bin/sh -c ")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert "\nType=exec\n" in unit, "a watch is no part of the machine's boot"
    script = script.strip("'").replace("$$", "$").replace("%%", "%")
    argv = ["/bin/sh", "-c", script.replace(MACHINE_REPORT_DIRECTORY, str(reported.parent))]
    finished = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (finished.returncode == 0) is joined, finished.stderr
    assert [path.read_text() for path in reported.parent.iterdir()] == ["gpu-1"] * joined


def test_only_a_network_of_its_own_needs_an_address_and_forwards() -> None:
    own, shared = made(OWN), made()
    for path, line in {
        f"{UNITS}/multi-user.target.d/50-network.conf": b"\nWants=systemd-networkd.service\n",
        "/etc/sysctl.d/90-unbounded-agent.conf": b"-net.ipv4.ip_forward = 1\n",
    }.items():
        assert line in own[path].content
        assert path not in shared


def test_fields_of_the_settings_are_laid_over_the_agents() -> None:
    authentication = {"webhook": {"cacheTTL": "1m"}, "anonymous": {"enabled": True}}
    overlay = {"maxPods": 42, "authentication": authentication, "evictionHard": {"memory.available": "1Gi"}}
    plain, found = kubelet_configuration(), kubelet_configuration(kubelet={"configuration": overlay})
    laid = {**plain["authentication"], **authentication, "webhook": {"enabled": True, "cacheTTL": "1m"}}
    assert found == {**plain, **overlay, "authentication": laid}


def test_mirrors_are_tried_before_the_registry() -> None:
    plain, proxy = "https://b.example.com", "https://harbor.example.com/v2/cache"
    mirrors = {
        "docker.io": [plain, proxy],
        "registry.example.com:5000": ["http://10.0.0.9"],
        "_default": ["https://a.example.com"],
    }
    files = made(containerd={"mirrors": mirrors, "sandbox_image": 'odd"name'})
    hosts = {
        path.split("/")[-2]: tomllib.loads(file.content.decode())
        for path, file in files.items()
        if path.endswith("/hosts.toml")
    }
    assert {name: each.get("server") for name, each in hosts.items()} == {
        "docker.io": "https://registry-1.docker.io",
        "registry.example.com:5000": "https://registry.example.com:5000",
        "_default": None,
    }
    found = hosts["docker.io"]["host"]
    assert list(found) == [plain, proxy]
    # Else containerd would ask for /v2/cache/v2/...
    assert [found[each].get("override_path") for each in found] == [None, True]
    main = tomllib.loads(files[CONTAINERD].content.decode())
    assert main["plugins"][CRI_2]["sandbox_image"] == 'odd"name'


def test_the_machine_half_keeps_every_setting_of_containerd() -> None:
    """Its drop-in repeats the whole table, because containerd 1.7 replaces the main file's by it."""
    files = made(containerd={"sandbox_image": "registry.example.com/pause:3", "cni_binaries": "/opt/cni/bin"})
    main = tomllib.loads(files[CONTAINERD].content.decode())
    handler = RuntimeHandler("gpu", "/usr/bin/gpu-runtime")
    dump = {"version": 2, "plugins": main["plugins"]}
    drop_in = render(Configuration({CONTAINERD: main}, dump), (1, 7, 24), handler, default=False)
    with_ours = {"version": 2, "plugins": {**dump["plugins"], **drop_in["plugins"]}}
    assert list(problems(dump, with_ours, drop_in, handler, default=False)) == []
    cri = drop_in["plugins"][CRI_2]
    assert cri["cni"]["bin_dir"] == "/opt/cni/bin"
    assert cri["containerd"]["runtimes"]["gpu"]["options"] == {"SystemdCgroup": True, "BinaryName": handler.binary}


PROVIDER = {
    "name": "ecr-credential-provider",
    "match_images": ["*.dkr.ecr.*.amazonaws.com", "registry.example.com:5000/a"],
}


def test_the_kubelet_asks_credential_providers() -> None:
    """By the format of kubelet.config.k8s.io/v1. Without providers, there are neither file nor arguments."""
    files = made(kubelet={"image_credential_providers": [{**PROVIDER, "args": ["get"], "env": {"B": "2", "A": "1"}}]})
    file = files[CREDENTIAL_PROVIDERS]
    (provider,) = (document := json.loads(file.content)).pop("providers")
    assert document == {"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig"}
    assert provider == {
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "name": PROVIDER["name"],
        "matchImages": PROVIDER["match_images"],
        "defaultCacheDuration": "12h",
        "args": ["get"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    }
    assert file.mode == 0o600
    command = files[COMMAND].content.decode()
    assert f" --image-credential-provider-config={CREDENTIAL_PROVIDERS} " in command
    assert command.endswith(" --image-credential-provider-bin-dir=/usr/local/bin\n")
    assert CREDENTIAL_PROVIDERS not in made()
    assert "credential" not in made()[COMMAND].content.decode()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../evil"},
        {"name": ".."},
        {"name": ""},
        {"match_images": []},
        {"match_images": ["https://registry.example.com"]},
        {"match_images": ["registry.example.com/*"]},
        {"match_images": [""]},
        {"cache_duration": "12"},
        {"cache_duration": "-1h"},
        {"env": {"A=B": "c"}},
        {"args": ["a\nb"]},
        {"api_version": "v1"},
    ],
)
def test_what_no_kubelet_would_accept_is_refused(wrong: dict[str, object]) -> None:
    """A kubelet with such a provider would not start."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        node_settings(kubelet={"image_credential_providers": [{**PROVIDER, **wrong}]})
    with pytest.raises(ValueError, match="ecr-credential-provider appears twice"):
        node_settings(kubelet={"image_credential_providers": [PROVIDER, PROVIDER]})
    with pytest.raises(ValueError, match="image_credential_provider_directory"):
        node_settings(kubelet={"image_credential_provider_directory": "/opt/a b"})


def test_pod_images_are_imported_before_the_kubelet_starts() -> None:
    """But the kubelet starts whatever happens to them. A node without any has no such unit."""
    binaries = {"bundle": "/srv", "sha256": {}, "pod_images": {"pause.tar": "0" * 64}}
    files = made(binaries=binaries)
    drop_in = files[f"{UNITS}/kubelet.service.d/50-pod-images.conf"].content.decode()
    assert "\nWants=unbounded-agent-pod-images.service\n" in drop_in
    assert "\nAfter=unbounded-agent-pod-images.service\n" in drop_in
    assert "\nTimeoutStartSec=1800\n" in files[POD_IMAGES_SERVICE].content.decode()
    assert POD_IMAGES_SERVICE not in made()
    with pytest.raises(ValueError, match="pod_images needs bundle"):
        node_settings(binaries={"sha256": {}, "pod_images": {"pause.tar": "0" * 64}})
    with pytest.raises(ValueError, match=r"pause\.img"):
        node_settings(binaries={**binaries, "pod_images": {"pause.img": "0" * 64}})


@pytest.mark.parametrize(
    ("configuration", "seconds"),
    [
        ({}, 40),
        ({"maxPods": 3}, 40),
        ({"shutdownGracePeriod": "1h1m1.5s"}, 3661.5),
        ({"shutdownGracePeriod": "500ms", "shutdownGracePeriodCriticalPods": "0s"}, 0.5),
        ({"shutdownGracePeriodCriticalPods": "10s"}, 0),
        ({"shutdownGracePeriod": "0"}, 0),
        ({"shutdownGracePeriod": 7}, 0),
        (
            {
                "shutdownGracePeriodByPodPriority": [
                    {"priority": 0, "shutdownGracePeriodSeconds": 600},
                    {"priority": 10000, "shutdownGracePeriodSeconds": 60},
                ]
            },
            660,
        ),
        ({"shutdownGracePeriodByPodPriority": ["x", {"shutdownGracePeriodSeconds": "x"}]}, 0),
    ],
)
def test_limits_of_a_shutdown_exceed_what_the_kubelet_gives_its_pods(
    configuration: dict[str, Any], seconds: float
) -> None:
    """Those of logind in the machine and of the machine's unit on the host. Own fields are not mixed with ours."""
    assert shutdown_grace(configuration) == seconds
    (line,) = made(kubelet={"configuration": configuration})[LOGIND].content.decode().splitlines()[-1:]
    assert int(line.removeprefix("InhibitDelayMaxSec=")) >= seconds + 5
    found = kubelet_configuration(kubelet={"configuration": configuration})
    ours = {} if {*GRACE_KEYS} & {*configuration} else DEFAULT_GRACE
    assert {key: found[key] for key in GRACE_KEYS if key in found} == {
        **ours,
        **{key: value for key, value in configuration.items() if key in GRACE_KEYS},
    }
    machine = MachineSettings(node=node_settings(kubelet={"configuration": configuration}))
    assert stop_limit(machine) >= seconds + 120
    # After logind's wait, systemd in the machine ends everything else within 90 s.
    assert stop_limit(machine) > int(line.removeprefix("InhibitDelayMaxSec=")) + 90
