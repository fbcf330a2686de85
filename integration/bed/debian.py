"""Debian's and Ubuntu's trees made by mmdebstrap, without documentation and without syncs to disk."""

import hashlib
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from integration.bed.process import BedError, run

SUITE = "trixie"
UNWANTED_FILES = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/javascript/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
    # Mesa's software renderer, a dependency of NVIDIA's OpenGL packages: 170 MB that nothing here runs.
    "/usr/lib/x86_64-linux-gnu/libLLVM*",
    "/usr/lib/x86_64-linux-gnu/libgallium*",
    "/usr/lib/x86_64-linux-gnu/libz3*",
)
UBUNTU = "noble"
"""Ubuntu 24.04."""
UBUNTU_ARCHIVE = "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
"""Of the package with the keys of Ubuntu's archive, which Debian 12 does not have."""


def debian_tree(
    target: Path, variant: str, packages: Sequence[str], components: str = "main", *, suite: str = SUITE
) -> None:
    """Make a Debian tree at `target`; `variant` as in mmdebstrap(1), `components` separated by spaces."""
    options = [f"--components={components.replace(' ', ',')}", *_small()]
    # No mirror is given: mmdebstrap chooses the suite's, with its updates and security fixes.
    mmdebstrap(target, variant, packages, options, suite)


def ubuntu_tree(target: Path, packages: Sequence[str]) -> None:
    """Make a minimal Ubuntu tree with apt(8) at `target`. Raises BedError if the package of its keys is another one."""
    package, keys = target.with_name("keyring.deb"), target.with_name("keys")
    with urllib.request.urlopen(f"{UBUNTU_ARCHIVE}/{UBUNTU_KEYRING}", timeout=60) as response:
        package.write_bytes(response.read())
    if (found := hashlib.sha256(package.read_bytes()).hexdigest()) != UBUNTU_KEYRING_SHA256:
        raise BedError(f"{UBUNTU_KEYRING} has the SHA-256 {found}")
    run(["dpkg-deb", "--extract", package, keys])
    options = [f"--keyring={keys}/usr/share/keyrings/ubuntu-archive-keyring.gpg", *_small()]
    suites = (UBUNTU, f"{UBUNTU}-updates", f"{UBUNTU}-security")
    sources = [f"deb {UBUNTU_ARCHIVE} {suite} main universe" for suite in suites]
    mmdebstrap(target, "minbase", packages, options, UBUNTU, *sources)


def _small() -> list[str]:
    return ["--dpkgopt=force-unsafe-io", *(f"--dpkgopt=path-exclude={pattern}" for pattern in UNWANTED_FILES)]


def mmdebstrap(
    target: Path, variant: str, packages: Sequence[str], options: Sequence[str], suite: str, *source: str
) -> None:
    """Run mmdebstrap(1) with the options that every tree needs; `source` is a line of sources.list(5)."""
    argv: list[str | Path] = ["mmdebstrap", "--mode=root", "--format=directory", f"--variant={variant}"]
    argv += [f"--include={','.join(packages)}", "--keyring=/usr/share/keyrings/debian-archive-keyring.gpg"]
    argv += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Sandbox::User "root"']
    argv += ['--aptopt=Acquire::Retries "3"', '--aptopt=APT::Install-Recommends "false"']
    # sid's index is valid for a week, and a mirror may be older than that; the signature is still checked.
    argv += ['--aptopt=Acquire::Check-Valid-Until "false"', *options]
    run([*argv, suite, target, *source])
