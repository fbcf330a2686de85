"""The manifests that come with the agent match docs/kubernetes.md, and work outside the test bed."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFESTS = REPOSITORY / "agent" / "manifests"
ROLE = REPOSITORY / "deploy/ansible/roles/unbounded_agent/tasks/main.yml"
VALUES = ("dcgm-exporter-values", "device-plugin-values", "gpu-operator-values")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text())
    return found


def tasks() -> list[dict[str, Any]]:
    """Return the tasks of the role, also those of blocks."""
    return [task for each in yaml.safe_load(ROLE.read_text()) for task in each.get("block", [each])]


def run_with(place: Path, script: str, *argv: str) -> int:
    """Return the exit code of a command that finds this stand-in for a program."""
    program(place, script)
    path = f"{place.parent}:{os.environ['PATH']}"
    return subprocess.run(argv, cwd=place.parent, env={"PATH": path}, check=False).returncode


@pytest.mark.parametrize("path", sorted(MANIFESTS.iterdir()), ids=lambda path: path.stem)
def test_a_manifest_says_what_it_is(path: Path) -> None:
    first, second = path.read_text().splitlines()[:2]
    assert re.fullmatch(r"# [A-Z].{10,90}\.", first), "`kube manifests` prints the first line as its purpose"
    assert second.startswith(("# ", "apiVersion: "))
    objects = yaml.safe_load_all(path.read_text())
    assert {"kind" in each for each in objects} == {path.stem not in VALUES}
    assert "registry.invalid" not in path.read_text(), "an image of the test bed"
    assert any(f"`{path.stem}`" in page.read_text() for page in (REPOSITORY / "docs").rglob("*.md"))


def test_the_device_plugin_has_the_documented_settings() -> None:
    """Those in the table of docs/kubernetes.md: by the DaemonSet's names, and by the chart's."""
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(chart: `([\w.]+)`\))? \| `([^`]+)` \|", text, re.MULTILINE)
    plugin, values = load("device-plugin")["spec"]["template"]["spec"], load("device-plugin-values")
    (container,) = plugin["containers"]
    settings = {each["name"]: each["value"] for each in container["env"]}
    settings["runtimeClassName"] = plugin["runtimeClassName"]
    documented = {name: value for name, _, value in rows}
    assert len(documented) == 4
    assert {name: settings[name] for name in documented} == documented
    assert {chart or name: value for name, chart, value in rows} == {
        "runtimeClassName": values["runtimeClassName"],
        "nvidiaDriverRoot": values["nvidiaDriverRoot"],
        "cdi.nvidiaHookPath": values["cdi"]["nvidiaHookPath"],
        "deviceListStrategy": values["deviceListStrategy"],
    }


def test_manifests_and_values_of_charts_agree() -> None:
    """Plugins run before a startup taint is gone, and the exporter has the same settings with Helm and without."""
    everything = [{"operator": "Exists"}]
    assert load("device-plugin")["spec"]["template"]["spec"]["tolerations"] == everything
    assert load("device-plugin-values")["tolerations"] == everything
    assert load("gpu-operator-values")["daemonsets"]["tolerations"] == everything
    pod, values = load("dcgm-exporter")["spec"]["template"]["spec"], load("dcgm-exporter-values")
    shared = ("runtimeClassName", "nodeSelector", "tolerations")
    assert {key: pod[key] for key in shared} == {key: values[key] for key in shared}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "calls", "status"),
    [
        ("false", ["install"], 0),
        ("test ! -e lists", ["install", "update", "install"], 0),
        ("true", ["install", "update", "install"], 100),
    ],
)
def test_the_role_fetches_lists_of_packages_if_it_must(
    tmp_path: Path, broken: str, calls: list[str], status: int
) -> None:
    """Images of Debian for clouds have no lists, so that apt finds nothing that the package depends on."""
    (script,) = [task["ansible.builtin.shell"] for task in tasks() if task["name"] == "Install the copy"]
    apt = f"echo $1 >>calls\nif [ $1 = update ]; then touch lists; elif {broken}; then exit 100; fi"
    assert run_with(tmp_path / "apt-get", apt, "sh", "-c", script) == status
    assert (tmp_path / "calls").read_text().split() == calls


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shown", "code", "accepted"), [("{}", 0, True), ("{}", 2, True), ("", 1, True), ("", 2, False)]
)
def test_the_role_refuses_only_an_invalid_configuration(tmp_path: Path, shown: str, code: int, accepted: bool) -> None:
    """`plan` has the same exit code if the machine does not exist yet, but then it prints the plan."""
    copies = [task.get("ansible.builtin.copy", {}) for task in tasks()]
    (command,) = [each["validate"] for each in copies if "validate" in each]
    plan = f"echo -n '{shown}'\nexit {code}"
    assert (run_with(tmp_path / "unbounded-agent", plan, *shlex.split(command % "new.toml")) == 0) is accepted


def test_the_role_removes_no_package() -> None:
    """With --yes, apt-get removes what a new package conflicts with; so does the module apt."""
    shells = [task["ansible.builtin.shell"] for task in tasks() if "apt-get install" in str(task)]
    modules = [task["ansible.builtin.apt"] for task in tasks() if "ansible.builtin.apt" in task]
    assert ["--no-remove" in each for each in shells] == [True]
    assert [each.get("fail_on_autoremove") for each in modules] == [True, True]
