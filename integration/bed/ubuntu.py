"""Ubuntu trees made by mmdebstrap, like those of `debian`."""

import hashlib
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from integration.bed.architecture import CHOSEN
from integration.bed.debian import UNWANTED_FILES, mmdebstrap
from integration.bed.process import BedError, run

UBUNTU = "noble"
"""Ubuntu 24.04."""
UBUNTU_ARCHIVE = "http://ports.ubuntu.com/ubuntu-ports" if CHOSEN.is_foreign else "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
"""The checksum of UBUNTU_KEYRING, the package with the keys of Ubuntu's archive. Debian 12 does not have it."""


class NoArchiveError(BedError):
    """Ubuntu's archive does not answer."""


def ubuntu_tree(
    target: Path, packages: Sequence[str], variant: str = "minbase", components: str = "main universe"
) -> None:
    """Make an Ubuntu tree at `target`; `variant` as in mmdebstrap(1), `components` separated by spaces.

    Raises NoArchiveError if Ubuntu's archive does not answer, and BedError if the keyring has another checksum.
    """
    package, keys = target.with_name("keyring.deb"), target.with_name("keys")
    try:
        with urllib.request.urlopen(f"{UBUNTU_ARCHIVE}/{UBUNTU_KEYRING}", timeout=60) as response:
            package.write_bytes(response.read())
    except OSError as error:
        raise NoArchiveError(f"{UBUNTU_ARCHIVE} does not answer: {error}") from error
    if (found := hashlib.sha256(package.read_bytes()).hexdigest()) != UBUNTU_KEYRING_SHA256:
        raise BedError(f"{UBUNTU_KEYRING} has the SHA-256 {found}")
    run(["dpkg-deb", "--extract", package, keys])
    options = [f"--keyring={keys}/usr/share/keyrings/ubuntu-archive-keyring.gpg", "--dpkgopt=force-unsafe-io"]
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in UNWANTED_FILES]
    suites = (UBUNTU, f"{UBUNTU}-updates", f"{UBUNTU}-security")
    sources = [f"deb {UBUNTU_ARCHIVE} {suite} {components}" for suite in suites]
    mmdebstrap(target, variant, packages, options, UBUNTU, *sources)
