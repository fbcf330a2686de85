"""The architecture of the simulated host and of its machine."""

import os
from typing import NamedTuple


class Architecture(NamedTuple):
    """An architecture that users have."""

    debian: str
    """Debian's name of it, which is also Go's."""
    processor: str
    """As `uname -m` prints it."""

    @property
    def libraries(self) -> str:
        """Return the directory of its libraries, relative to a root (Debian Policy 9.1.1)."""
        return f"usr/lib/{self.processor}-linux-gnu"

    @property
    def compiler(self) -> str:
        """Return the name of this computer's C compiler for it (package gcc-aarch64-linux-gnu)."""
        return f"{self.processor}-linux-gnu-gcc"

    @property
    def is_foreign(self) -> bool:
        """Return whether its programs run only by the emulator that integration/arm64 has registered."""
        return self is not AMD64


AMD64, ARM64 = Architecture("amd64", "x86_64"), Architecture("arm64", "aarch64")
CHOSEN = {each.debian: each for each in (AMD64, ARM64)}[os.environ.get("BED_ARCHITECTURE", AMD64.debian)]
