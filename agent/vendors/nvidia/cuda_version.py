"""Which CUDA a driver offers, asked of its own libcuda: images for a newer major version do not run on it."""

import posixpath
import sys
from collections.abc import Sequence

from agent.errors import AgentError, DocumentError
from agent.facts import Library, StagedRoot, VendorFacts
from agent.paths import HOST_NVIDIA
from agent.system.files import System
from agent.vendors.protocols import DriverForPods

TIME_LIMIT = 15.0
"""Seconds."""
ASK = """\
import ctypes, os, sys
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
number = ctypes.c_int()
error = ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(number))
sys.exit(f"cuDriverGetVersion: error {error}") if error else print(number.value)
"""
"""As nobody, since to load a library is to run it, and a configured place may be another's to write."""


def driver_for_pods(facts: VendorFacts, staged: Sequence[StagedRoot], system: System) -> DriverForPods | None:
    """Of the loaded module's version, which machines keep while the host's packages are upgraded already."""
    driver = facts.driver
    if driver is None or not isinstance(driver.library_version, str):
        return None
    version = driver.module_version if isinstance(driver.module_version, str) else driver.library_version
    library = _copied(staged, facts.vendor, version)
    if not library and version == driver.library_version and isinstance(driver.files, tuple):
        library = next((file.source for file in driver.files if _is_libcuda(file, version)), "")
    if not library:
        return DriverForPods(
            facts.vendor, version, unknown=f"this host has no libcuda of {version}: see LibrariesPresent"
        )
    try:
        return DriverForPods(facts.vendor, version, {"CUDA": _cuda_version(system, library)})
    except AgentError as error:
        return DriverForPods(facts.vendor, version, unknown=str(error))


def _copied(staged: Sequence[StagedRoot], vendor: str, version: str) -> str:
    """Path of the newest copy; empty where there is none."""
    copies = [
        f"{HOST_NVIDIA}/{root.index}/{file.target}"
        for root in staged
        if (root.vendor, root.version) == (vendor, version)
        for file in root.files
        if _is_libcuda(file, version)
    ]
    return copies[-1] if copies else ""


def _is_libcuda(file: Library, version: str) -> bool:
    """Of the host's own architecture, and no link."""
    return not file.link and posixpath.basename(file.target) == f"libcuda.so.{version}" and "i386" not in file.target


def _cuda_version(system: System, library: str) -> str:
    """Such as 12.4; it needs neither GPU nor kernel module. Raises AgentError."""
    answer = system.run(sys.executable, "-I", "-c", ASK, library, timeout=TIME_LIMIT).strip()
    if not answer.isdecimal():
        raise DocumentError(f"{library}: cuDriverGetVersion gives {answer[:40]!r}")
    # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor.
    return f"{int(answer) // 1000}.{int(answer) % 1000 // 10}"
