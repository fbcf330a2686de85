"""What Cilium's agent needs of a machine: docs/kubernetes.md names two settings, which give the agent its system calls.

Cilium itself does not run here: a stand-in (integration/simulation/cilium) makes the agent's system calls.
"""

import pytest

from integration.bed.cache import REPOSITORY
from integration.conftest import Bed

PROGRAM = REPOSITORY / "integration/simulation/cilium/system_calls.py"
PAGE = REPOSITORY / "docs/kubernetes.md"


def settings() -> str:
    """Return the configuration of the page."""
    (block,) = (each for each in PAGE.read_text().split("```toml\n")[1:] if "perf_event_open" in each)
    return block.partition("```")[0]


def refused(bed: Bed) -> dict[str, str]:
    """Let the stand-in run in the machine as root, as in a privileged pod. Return what failed, with the error."""
    bed.node.shell(f"cat >/root/system_calls.py <<'END'\n{PROGRAM.read_text()}\nEND")
    lines = bed.node.run("python3", "/root/system_calls.py").stdout.splitlines()
    results = dict(line.rsplit(" ", 1) for line in lines)
    assert len(results) == len(lines) > 10
    return {name: result for name, result in results.items() if result != "ok"}


@pytest.mark.exhaustive
def test_the_settings_of_the_page_give_cilium_its_system_calls(installed: Bed) -> None:
    installed.guest.write("/etc/unbounded-agent/config.toml", b"[machines.gpu-node]\n")
    installed.agent("apply", timeout=600)
    # Without /sys/fs/bpf there is no directory to mount at, and so no bpffs to pin in.
    assert refused(installed) == {"perf_event_open": "EPERM", "bpffs": "EROFS", "pinned map": "ENOENT"}
    installed.guest.write("/etc/unbounded-agent/config.toml", settings().encode())
    installed.agent("apply", timeout=600, check=False)  # fails with MachineRestartNeeded
    installed.agent("restart", "gpu-node", timeout=600)
    assert refused(installed) == {}
