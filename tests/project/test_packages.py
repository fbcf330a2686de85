"""What the Debian packages are made from agrees with the code; integration/tests/packages builds and installs them."""

import re
import tomllib
from pathlib import Path

from agent.config.settings import Config
from deploy.generate.manual_pages import commands, configuration
from deploy.generate.sample_configuration import sample
from tests.project.configuration_reference import OPTIONAL, TABLES, keys

REPOSITORY = Path(__file__).resolve().parents[2]
DEBIAN = REPOSITORY / "deploy" / "debian"
UNSET = re.compile(r"^#(\w+) = .*  # (required|not set by default)$", re.MULTILINE)


def test_the_sample_has_every_key_with_its_default() -> None:
    """Without the comments' marks it is a valid file, except for values that only the user knows."""
    packaged = sample()
    assert tomllib.loads(packaged) == {}, "as it is, it sets nothing"
    text = UNSET.sub("", packaged)
    for prefix in ("extra_devices", "extra_mounts", "node"):
        # Optional tables: some of their keys are required.
        text = re.sub(rf"^#\[+machines\.NAME\.{prefix}.*?(?=^#\[|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace("NAME", "gpu-node")
    found = Config.validated(tomllib.loads(re.sub(r"^#(?=[a-z\[])", "", text, flags=re.MULTILINE)))
    assert found == Config.validated({"machines": {"gpu-node": {}}})
    tables = {name for table in TABLES for name in (table, table.rpartition(".")[2])}
    all_keys = {f"{table}.{key}" for table, model in TABLES.items() for key in keys(model)}
    shown = {key for key in all_keys if f"\n#{key.rpartition('.')[2]} = " in packaged}
    assert {key.rpartition(".")[2] for key in all_keys - shown - set(OPTIONAL)} <= tables


def test_the_manual_pages_have_every_command_and_key() -> None:
    page = commands()
    for words in ("gpus detach PCI-ADDRESS", "kube manifests [--out DIR]", "up ["):
        assert f"\n## {words}" in page
    assert "prepare" not in re.findall(r"^## (\w+)", page, re.MULTILINE), "only units run it"
    assert "](" not in configuration(), "links lead nowhere in a terminal"
    assert {f"## {key}" for model in TABLES.values() for key in keys(model)} <= set(configuration().splitlines())


def test_every_unit_and_rule_of_the_host_is_installed() -> None:
    installed = (DEBIAN / "unbounded-agent.install").read_text()
    found = {path.name for path in (REPOSITORY / "systemd").iterdir() if path.is_file()} - {"install"}
    # Renamed to what tmpfiles.d(5) wants.
    assert {name for name in found if f"systemd/{name} " not in installed} == {"unbounded-agent.tmpfiles.conf"}


def test_the_same_pythons_are_named_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    supported = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    assert f"\npythons=({' '.join(supported)})\n" in (REPOSITORY / "deploy" / "build-packages").read_text()
    first, last = supported[0], int(supported[-1].partition(".")[2])
    assert f" python3 (>= {first}),\n python3 (<< 3.{last + 1}~),\n" in (DEBIAN / "control").read_text()


def test_no_package_breaks_a_driver() -> None:
    """apt removes what a package breaks, unasked with --yes."""
    assert "\nBreaks:" not in (DEBIAN / "control").read_text()
