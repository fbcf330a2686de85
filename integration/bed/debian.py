"""Debian trees made by mmdebstrap, without documentation and without syncs to disk."""

from collections.abc import Sequence
from pathlib import Path

from integration.bed.architecture import CHOSEN, Architecture
from integration.bed.process import run

SUITE = "trixie"
UNWANTED_FILES = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/javascript/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
    # Mesa's software renderer, a dependency of NVIDIA's OpenGL packages: 170 MB that nothing here runs.
    f"/{CHOSEN.libraries}/libLLVM*",
    f"/{CHOSEN.libraries}/libgallium*",
    f"/{CHOSEN.libraries}/libz3*",
)


def debian_tree(
    target: Path, variant: str, packages: Sequence[str], components: str = "main", *,
    suite: str = SUITE, architecture: Architecture = CHOSEN,
) -> None:  # fmt: skip
    """Make a Debian tree at `target`; `variant` as in mmdebstrap(1), `components` separated by spaces."""
    options = [f"--components={components.replace(' ', ',')}", "--dpkgopt=force-unsafe-io"]
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNWANTED_FILES]
    # No mirror is given: mmdebstrap chooses the suite's, with its updates and security fixes.
    mmdebstrap(target, variant, packages, options, suite, architecture=architecture)


def mmdebstrap(
    target: Path, variant: str, packages: Sequence[str], options: Sequence[str], suite: str, *source: str,
    architecture: Architecture = CHOSEN,
) -> None:  # fmt: skip
    """Run mmdebstrap(1) with the options that every tree needs; `source` is a line of sources.list(5)."""
    argv: list[str | Path] = ["mmdebstrap", "--mode=root", "--format=directory", f"--variant={variant}"]
    argv += [f"--include={','.join(packages)}", "--keyring=/usr/share/keyrings/debian-archive-keyring.gpg"]
    argv += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Sandbox::User "root"']
    argv += ['--aptopt=Acquire::Retries "3"', '--aptopt=APT::Install-Recommends "false"']
    if architecture.is_foreign:
        # mmdebstrap does not know by which emulator the kernel runs the packages' scripts.
        argv += [f"--architectures={architecture.debian}", "--skip=check/qemu"]
    # sid's index is valid for a week, and a mirror may be older than that; the signature is still checked.
    argv += ['--aptopt=Acquire::Check-Valid-Until "false"', *options]
    run([*argv, suite, target, *source])
