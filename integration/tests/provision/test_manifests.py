"""What `unbounded-agent kube manifests` writes is what a real API server accepts, as it is or through Helm's charts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cli.main import main
from integration.bed.cluster.control_plane import ControlPlane
from integration.bed.cluster.helm import device_plugin_chart, rendered
from integration.bed.process import CommandError

VALUES = ("dcgm-exporter-values", "device-plugin-values", "gpu-operator-values")
OTHER_API = "node-readiness-rule"
"""Its API belongs to a controller that the module proxy does not have."""
MONITORING = "claim-admin-access"
"""Its claim is only accepted in a namespace with the label ADMIN_ACCESS."""
ADMIN_ACCESS = "resource.kubernetes.io/admin-access"
DRY_RUN = ("apply", "--dry-run=server", "--validate=strict", "--filename=-")


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane((), controllers=False) as control_plane:
        # Without its controller, a namespace has no service account, and no pod is admitted.
        control_plane.kubectl("create", "serviceaccount", "default")
        yield control_plane


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("manifests")
    assert main(["kube", "manifests", "--out", str(directory)]) == 0
    return directory


def test_the_api_server_accepts_every_manifest(control_plane: ControlPlane, directory: Path) -> None:
    control_plane.kubectl("label", "namespace", "default", f"{ADMIN_ACCESS}=true")
    # For real: pods that name a runtime class are admitted only if it exists.
    control_plane.kubectl("apply", "--filename=-", stdin=(directory / "runtime-class.yaml").read_text())
    accepted = {
        path.stem: control_plane.kubectl(*DRY_RUN, stdin=path.read_text())
        for path in sorted(directory.iterdir())
        if path.stem not in (*VALUES, OTHER_API)
    }
    assert len(accepted) == len(list(directory.iterdir())) - len((*VALUES, OTHER_API))
    assert [name for name, answer in accepted.items() if "(server dry run)" not in answer] == []


def test_monitoring_all_gpus_needs_a_label_of_the_namespace(control_plane: ControlPlane, directory: Path) -> None:
    """Without the label, whoever may create a claim would get access to all pods' GPUs."""
    control_plane.kubectl("create", "namespace", "others")
    control_plane.kubectl("create", "serviceaccount", "default", "--namespace=others")
    with pytest.raises(CommandError, match=ADMIN_ACCESS):
        control_plane.kubectl(*DRY_RUN, "--namespace=others", stdin=(directory / f"{MONITORING}.yaml").read_text())


def test_the_plugin_s_chart_takes_our_values(control_plane: ControlPlane, directory: Path) -> None:
    """The real chart makes a DaemonSet of our values that has the same settings as our manifest without Helm."""
    objects = rendered(device_plugin_chart(), "kube-system", directory / "device-plugin-values.yaml")
    assert "(server dry run)" in control_plane.kubectl(*DRY_RUN, stdin=objects)
    with_helm = next(each for each in yaml.safe_load_all(objects) if each and each["kind"] == "DaemonSet")
    without = yaml.safe_load((directory / "device-plugin.yaml").read_text())
    for key in ("runtimeClassName", "tolerations", "priorityClassName"):
        assert pod(with_helm)[key] == pod(without)[key]
    settings = environment(without)
    # The chart leaves this one to the plugin's default, which is the same.
    settings.pop("DRIVER_ROOT_CTR_PATH")
    assert {name: value for name, value in environment(with_helm).items() if name in settings} == settings


def pod(daemon_set: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return found


def environment(daemon_set: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the plugin's own container that have a value."""
    (container,) = (each for each in pod(daemon_set)["containers"] if "device-plugin" in each["name"])
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}
