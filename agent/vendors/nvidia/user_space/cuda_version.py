"""Finds the CUDA version that the driver's libcuda supports. Images for a newer major version of CUDA do not run."""

import posixpath
import sys

from agent.model.digits import whole_number
from agent.model.driver_root import Library
from agent.model.errors import AgentError, DocumentError
from agent.model.facts import VendorFacts
from agent.system.files import System
from agent.system.path_trust import file_fault, untrusted_component
from agent.system.seen import classify_error
from agent.vendors.host_vendor import DriverForPods

TIME_LIMIT = 15.0
"""Seconds to load libcuda and read its version."""
READ_VERSION = """\
import ctypes, os, sys
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
number = ctypes.c_int()
error = ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(number))
sys.exit(f"cuDriverGetVersion: error {error}") if error else print(number.value)
"""
"""The program that reads the version. It runs as the user nobody, because it needs no root rights."""


def driver_for_pods(facts: VendorFacts, system: System) -> DriverForPods | None:
    """Return the driver that pods get; None if no driver is installed, or if the driver could not be observed.

    The driver's version is the loaded module's or, if that is unknown, the version of the host's libraries. The CUDA
    version is read from the host's libcuda, if libcuda has the driver's version.
    """
    driver = facts.driver
    if driver is None or not isinstance(driver.user_space.version, str):
        return None
    version = driver.module_version if isinstance(driver.module_version, str) else driver.user_space.version
    # Never load the copy in a driver root: root in a machine may have changed it, and loading a library runs its code.
    files = driver.user_space.files if isinstance(driver.user_space.files, tuple) else ()
    library = next((file.source for file in files if _is_libcuda(file, version)), "")
    if not library:
        return DriverForPods(facts.vendor, version, unknown=f"this host has no libcuda {version}: see LibrariesPresent")
    try:
        if why := untrusted_component(system, library) or file_fault(system, library, root_owned=True):
            return DriverForPods(facts.vendor, version, unknown=f"{library} was not loaded: {why}")
        answer = system.run(sys.executable, "-I", "-c", READ_VERSION, library, timeout=TIME_LIMIT)
        return DriverForPods(facts.vendor, version, {"CUDA": cuda_version(library, answer.strip())})
    except OSError as error:
        return DriverForPods(facts.vendor, version, unknown=classify_error(library, error).why)
    except AgentError as error:
        return DriverForPods(facts.vendor, version, unknown=str(error))


def _is_libcuda(file: Library, version: str) -> bool:
    """Return whether the file is libcuda of this version and of the host's own architecture, and not a link."""
    return not file.link and posixpath.basename(file.target) == f"libcuda.so.{version}" and "i386" not in file.target


def cuda_version(library: str, answer: str) -> str:
    """Return the version in the answer of cuDriverGetVersion, such as 12.4. Raises DocumentError."""
    number = whole_number(answer)
    if number is None:
        raise DocumentError(f"{library}: cuDriverGetVersion returned {answer[:40]!r}")
    # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor.
    return f"{number // 1000}.{number % 1000 // 10}"
