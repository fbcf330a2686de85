"""The command that generates a CDI specification. What it does not ask for, pods do not get."""

import pytest

from agent.model.errors import AgentError
from agent.model.handoff import GrantedFile
from agent.vendors.nvidia.nvidia_ctk import MODES, generate_command, mode_command
from tests.fakes.cdi_modes import WANTED
from tests.fakes.machine import LIBRARIES, REQUEST, ROOT

COMMAND = (
    "/usr/bin/nvidia-ctk cdi generate --mode={} --driver-root=/run/host-nvidia/0 --dev-root=/ "
    "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook --format=json "
    "--disable-hook=all --enable-hook=create-symlinks --enable-hook=update-ldcache"
)


def test_the_whole_command() -> None:
    """All hooks are disabled, then the needed ones enabled: otherwise, a new toolkit's hooks would run for all pods."""
    assert generate_command(ROOT, "/run/x", ("enable-cuda-compat", "update-application-profile")) == (
        *COMMAND.format("nvml").split(),
        *("--enable-hook=enable-cuda-compat", "--enable-hook=update-application-profile"),
        *("--device-name-strategy=index", "--device-name-strategy=uuid", "--output=/run/x/nvidia.json"),
    )


def test_the_whole_command_of_a_mode() -> None:
    """The driver root is searched: libcuda.so's name gives the version, as NVML does not; the 32-bit one has it too."""
    library_32 = GrantedFile(f"usr/lib/i386-linux-gnu/libcuda.so.{REQUEST.driver_version}")
    assert mode_command(MODES["management"], REQUEST._replace(files=(library_32, *REQUEST.files)), "/run/x") == (
        *COMMAND.format("management").split(),
        *("--output=/run/x/nvidia.json", "--library-search-path=/run/x", f"--library-search-path={ROOT}/{LIBRARIES}"),
        *("--vendor=management.nvidia.com", "--class=gpu"),
    )
    for mode in set(MODES) - {"management"}:
        command = mode_command(MODES[mode], MODES[mode].request(WANTED, ()), "/run/x")
        # 1.18 looks for the nodes of mofed below the driver root.
        assert "--driver-root=/" in command
        places = [each for each in command if each.startswith("--library-search-path=")]
        assert places == ["--library-search-path=/run/x"]
    with pytest.raises(AgentError, match="needs the driver's files"):
        mode_command(MODES["management"], REQUEST._replace(driver_root=""), "/run/x")
