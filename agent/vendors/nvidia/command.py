"""Returns the nvidia-ctk command that generates a CDI specification. Pure."""

from collections.abc import Iterable

NVIDIA_CTK = "/usr/bin/nvidia-ctk"
HOOK = "/usr/bin/nvidia-cdi-hook"


def output_file(directory: str) -> str:
    """Return the file that nvidia-ctk writes. It may write further files next to it (`.coherent.json`)."""
    return f"{directory}/nvidia.json"


def generate_command(
    driver_root: str, directory: str, hooks: Iterable[str] = (), mode: str = "nvml"
) -> tuple[str, ...]:
    """Return the command that writes the specification for a driver root to a directory.

    `driver_root` must not be a symbolic link. `hooks` are enabled in addition to the two hooks that every container
    needs. Only mode nvml has GPUs to name.
    """
    return (
        NVIDIA_CTK,
        "cdi",
        "generate",
        f"--mode={mode}",
        f"--driver-root={driver_root}",
        "--dev-root=/",
        f"--nvidia-cdi-hook-path={HOOK}",
        "--format=json",
        # Without create-symlinks and update-ldcache, containers cannot find the driver. The other hooks change how
        # containers use a GPU, so they are enabled only if the settings name them: enable-cuda-compat,
        # disable-device-node-modification, and from 1.20 on update-application-profile and apply-cuda-memory-limits.
        # The hook chmod is never enabled: it was for an old crun, and is deprecated.
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        *(f"--enable-hook={hook}" for hook in hooks),
        *(f"--device-name-strategy={each}" for each in ("index", "uuid") if mode == "nvml"),
        f"--output={output_file(directory)}",
    )
