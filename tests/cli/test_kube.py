"""`kube manifests`: lists, prints and writes the manifests, and names what it does not know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent.cli.main import main
from agent.cli.parser import find_command, make_parser
from tests.fakes.command import Capture

NAMES = ["device-plugin", "runtime-class"]


def test_without_a_name_it_lists_each_manifest_with_its_purpose(capsys: Capture) -> None:
    """Named manifests are one stream for kubectl."""
    assert main(["kube", "manifests"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"runtime-class", "device-plugin-values", "gpu-operator-values", "cuda-test", "intel-test"} <= lines.keys()
    assert lines["device-plugin"] == "NVIDIA's device plugin, without Helm."
    assert all(line.endswith(".") and "#" not in line for line in lines.values())
    assert main(["kube", "manifests", *NAMES]) == 0
    kinds = [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["DaemonSet", "RuntimeClass"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("encoding", "name", "shown"), [("utf-8", b"\xe9", r"\udce9"), ("latin-1", "日".encode(), r"\u65e5")]
)
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, encoding: str, name: bytes, shown: str) -> None:
    """A name that is not UTF-8, or a character that the terminal's encoding lacks."""
    command = ("kube", "manifests", "runtime-class", "--out", os.fsencode(tmp_path) + b"/" + name)
    argv = (sys.executable, "-B", "-m", "agent.cli.main", *command)
    environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
    finished = subprocess.run(argv, capture_output=True, env=environment, check=True)
    assert finished.stdout.decode() == f"{tmp_path}/{shown}/runtime-class.yaml\n"


def test_manifests_are_written_into_a_new_directory(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kube", "manifests", "--out", "new/files", *NAMES]) == 0
    written = sorted((tmp_path / "new/files").iterdir())
    assert [path.name for path in written] == [f"{name}.yaml" for name in NAMES]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert main(["kube", "manifests", "--out", str(tmp_path / "all")]) == 0
    assert len(list((tmp_path / "all").iterdir())) > len(NAMES)
    assert capsys.readouterr().err == ""


def test_an_edited_manifest_is_never_overwritten(tmp_path: Path, capsys: Capture) -> None:
    """The pages tell people to edit them, and to keep them in Git."""
    arguments = ["kube", "manifests", "--out", str(tmp_path), *NAMES]
    assert main(arguments) == 0
    first, second = (tmp_path / f"{name}.yaml" for name in NAMES)
    second.write_text(second.read_text() + "# edited\n")
    first.unlink()
    before = second.read_text()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert str(second) in error
    assert "diff -ru" in error
    assert second.read_text() == before
    assert not first.exists(), "all or nothing"
    assert main(["kube", "manifests", "--out", str(tmp_path), NAMES[0]]) == 0
    assert main(["kube", "manifests", "--out", str(tmp_path), NAMES[0]]) == 0, "again, with the same content"
    second.unlink()
    assert main(arguments) == 0


def test_an_unknown_name_is_bad_input(capsys: Capture, tmp_path: Path) -> None:
    assert main(["kube", "manifests", "runtime-class", "runtime"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("unbounded-agent: there is no manifest runtime: choose from claim-admin-access, ")
    assert main(["--config", str(tmp_path / "missing.toml"), "kube", "manifests", "cuda-test"]) == 0
    assert "gpu-cuda-test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "root"), [(("allocation", "dra"), True), (("manifests",), False)], ids=lambda each: str(each)
)
def test_only_allocation_is_for_root(arguments: tuple[str, ...], root: bool) -> None:
    assert find_command(make_parser().parse_args(["kube", *arguments]))[1].root == root
