"""The nvidia-ctk command for a CDI specification. Pure and separate, because it is imported before anything heavier."""

from collections.abc import Iterable

NVIDIA_CTK = "/usr/bin/nvidia-ctk"
HOOK = "/usr/bin/nvidia-cdi-hook"


def output_file(directory: str) -> str:
    """Return where the specification is written; nvidia-ctk may put further files next to it (`.coherent.json`)."""
    return f"{directory}/nvidia.json"


def generate_command(driver_root: str, directory: str, hooks: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the command for a driver root, which must not be a symbolic link, an output directory, and more hooks."""
    return (
        NVIDIA_CTK,
        "cdi",
        "generate",
        "--mode=nvml",
        f"--driver-root={driver_root}",
        "--dev-root=/",
        f"--nvidia-cdi-hook-path={HOOK}",
        "--format=json",
        # Containers find no driver without these two. The others change how they use a GPU, and are configured:
        # enable-cuda-compat, disable-device-node-modification, and from 1.20 on update-application-profile and
        # apply-cuda-memory-limits. chmod is deprecated, and was for an old crun.
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        *(f"--enable-hook={hook}" for hook in hooks),
        "--device-name-strategy=index",
        "--device-name-strategy=uuid",
        f"--output={output_file(directory)}",
    )
