"""The manifests in deploy/kubernetes match docs/kubernetes.md, and work outside the test bed."""

import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFESTS = REPOSITORY / "deploy" / "kubernetes"


def test_every_manifest_is_named_in_the_documentation() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    named = set(re.findall(r"deploy/kubernetes/([a-z-]+\.yaml)", text))
    assert named == {path.name for path in MANIFESTS.iterdir()}


def test_no_manifest_needs_an_image_of_the_test_bed() -> None:
    for path in MANIFESTS.glob("*.yaml"):
        assert "registry.invalid" not in path.read_text(), path


def test_the_device_plugin_has_the_documented_settings() -> None:
    plugin = yaml.safe_load((MANIFESTS / "device-plugin.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = plugin["containers"]
    settings = {each["name"]: each["value"] for each in container["env"]}
    settings["runtimeClassName"] = plugin["runtimeClassName"]
    rows = re.findall(r"^\| `(\w+)`(?: \(chart: `[\w.]+`\))? \| `([^`]+)` \|", kubernetes(), re.MULTILINE)
    assert len(rows) == 4
    assert dict(rows).items() <= settings.items()


def kubernetes() -> str:
    return (REPOSITORY / "docs" / "kubernetes.md").read_text()
