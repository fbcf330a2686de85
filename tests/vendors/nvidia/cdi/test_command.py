"""The command that generates a CDI specification. What it does not ask for, pods do not get."""

from agent.vendors.nvidia.nvidia_ctk import MODES, generate_command, mode_command
from tests.fakes.machine import LIBRARIES, REQUEST, ROOT


def test_the_whole_command() -> None:
    """All hooks are disabled, then the needed ones enabled: otherwise, a new toolkit's hooks would run for all pods."""
    assert generate_command(ROOT, "/run/x", ("enable-cuda-compat", "update-application-profile")) == (
        "/usr/bin/nvidia-ctk",
        "cdi",
        "generate",
        "--mode=nvml",
        "--driver-root=/run/host-nvidia/0",
        "--dev-root=/",
        "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook",
        "--format=json",
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        "--enable-hook=enable-cuda-compat",
        "--enable-hook=update-application-profile",
        "--device-name-strategy=index",
        "--device-name-strategy=uuid",
        "--output=/run/x/nvidia.json",
    )


def test_the_whole_command_of_a_mode() -> None:
    assert mode_command(MODES["management"], REQUEST, "/run/x") == (
        "/usr/bin/nvidia-ctk",
        "cdi",
        "generate",
        "--mode=management",
        "--driver-root=/run/host-nvidia/0",
        "--dev-root=/",
        "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook",
        "--format=json",
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        "--output=/run/x/nvidia.json",
        "--library-search-path=/run/x",
        f"--library-search-path={ROOT}/{LIBRARIES}",
        "--vendor=management.nvidia.com",
        "--class=gpu",
    )
