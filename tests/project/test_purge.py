"""What the Debian package removes when it is purged. integration/tests/packages has the rest."""

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/debian/unbounded-agent.postrm"
SETTINGS = "etc/systemd/nspawn/gpu-node.nspawn"
FILES = {
    SETTINGS: "# Written by unbounded-agent\n",
    "etc/systemd/system/systemd-nspawn@gpu-node.service.d/90-unbounded-agent.conf": "# Written by unbounded-agent\n",
    "run/systemd/system/unit": "",
}
SYSTEMCTL = (
    '#!/bin/sh\ncase "$*" in "show "*" systemd-nspawn@gpu-node.service") printf "{}";; *) [ "$1" != show ];; esac\n'
)


def purge(tree: Path, answer: str) -> str:
    """Run the script on files below `tree`, with this answer of `systemctl show`. Return what it prints."""
    files = {**FILES, "bin/systemctl": SYSTEMCTL.replace("{}", answer)}
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
    (tree / "bin/systemctl").chmod(0o755)
    script = re.sub(r"(?<!\w)/(etc|run|var)\b", rf"{tree}/\1", SCRIPT.read_text())
    done = subprocess.run(
        ["sh", "-c", script, "postrm", "purge"],
        env={"PATH": f"{tree}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    "answer", ["ActiveState=activating", r"ActiveState=inactive\nJob=4711", "ActiveState=active", ""]
)
def test_a_machine_that_starts_keeps_its_settings(tmp_path: Path, answer: str) -> None:
    """machined knows no machine that waits for prepare@, or for its next start."""
    assert "the machine gpu-node is running or starting" in purge(tmp_path, answer)
    assert (tmp_path / SETTINGS).exists()


@pytest.mark.parametrize("answer", ["ActiveState=inactive", r"ActiveState=failed\nJob=0", r"Job=\nActiveState=failed"])
def test_the_settings_of_a_stopped_machine_are_removed(tmp_path: Path, answer: str) -> None:
    assert purge(tmp_path, answer) == ""
    assert not (tmp_path / SETTINGS).exists()
