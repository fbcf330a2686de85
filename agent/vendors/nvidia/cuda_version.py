"""Which CUDA a driver offers, asked of its own libcuda: images for a newer major version do not run on it."""

import posixpath
import sys

from agent.errors import DocumentError
from agent.facts import VendorFacts
from agent.system.files import System

TIME_LIMIT = 15.0
"""Seconds."""
ASK = """\
import ctypes, sys
number = ctypes.c_int()
error = ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(number))
sys.exit(f"cuDriverGetVersion: error {error}") if error else print(number.value)
"""


def cuda_version(system: System, facts: VendorFacts) -> str:
    """Such as 12.4, and empty without a driver's files; raises AgentError. It needs neither GPU nor kernel module.

    In a process of its own: what a driver's library does when it is loaded is not ours to vouch for.
    """
    library = _libcuda(facts)
    if not library:
        return ""
    answer = system.run(sys.executable, "-I", "-c", ASK, library, timeout=TIME_LIMIT).strip()
    if not answer.isdecimal():
        raise DocumentError(f"{library}: cuDriverGetVersion gives {answer[:40]!r}")
    # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor.
    return f"{int(answer) // 1000}.{int(answer) % 1000 // 10}"


def _libcuda(facts: VendorFacts) -> str:
    """Where the host keeps the one of its own architecture; empty if it is not seen."""
    if facts.driver is None or not isinstance(facts.driver.files, tuple):
        return ""
    name = f"libcuda.so.{facts.driver.library_version}"
    return next(
        (
            file.source
            for file in facts.driver.files
            if file.source and posixpath.basename(file.target) == name and "i386" not in file.target
        ),
        "",
    )
