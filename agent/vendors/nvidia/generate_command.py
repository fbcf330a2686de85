"""How nvidia-ctk is asked for a CDI spec. Pure, and apart from all else: it is imported before anything heavier."""

NVIDIA_CTK = "/usr/bin/nvidia-ctk"
HOOK = "/usr/bin/nvidia-cdi-hook"


def output_file(directory: str) -> str:
    """Where the spec is written; nvidia-ctk may put further files beside it (`.coherent.json`)."""
    return f"{directory}/nvidia.json"


def generate_command(driver_root: str, directory: str) -> tuple[str, ...]:
    """The arguments for a driver root, which must not be a symbolic link, and an output directory."""
    return (
        NVIDIA_CTK,
        "cdi",
        "generate",
        "--mode=nvml",
        f"--driver-root={driver_root}",
        "--dev-root=/",
        f"--nvidia-cdi-hook-path={HOOK}",
        "--format=json",
        # chmod, enable-cuda-compat and disable-device-node-modification act on what this machine does not have.
        "--disable-hook=all",
        "--enable-hook=create-symlinks",
        "--enable-hook=update-ldcache",
        "--device-name-strategy=index",
        "--device-name-strategy=uuid",
        f"--output={output_file(directory)}",
    )
