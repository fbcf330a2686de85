"""The driver's libraries on a fake host."""

import struct
from typing import Any

from agent.config.settings import DriverSettings
from agent.host.observe.host import list_loader_cache
from agent.model.conditions import Condition, ConditionType
from agent.model.facts import Library, UserSpace, VendorFacts
from agent.model.goal import Grant
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.driver import observe_driver
from agent.vendors.nvidia.user_space import observe_user_space
from tests.fakes.host import Host

X86 = "usr/lib/x86_64-linux-gnu"
MAIN = ("libcuda", "libnvidia-ml")


def sources(host: Host, **driver: Any) -> Sources:  # noqa: ANN401
    settings = DriverSettings.validated(driver)
    return Sources(
        host, host.architecture(), host.pci, host.drm, lambda root: list_loader_cache(host, root), {}, driver=settings
    )


def user_space(host: Host, module: str = "", **driver: Any) -> UserSpace:  # noqa: ANN401
    return observe_user_space(sources(host, **driver), module)


def by_target(found: UserSpace) -> dict[str, Library]:
    assert isinstance(found.files, tuple), found.files
    assert len({each.target for each in found.files}) == len(found.files)
    return {each.target: each for each in found.files}


def cache_of(*paths: str, tags: str = "libc6,x86-64") -> str:
    lines = "".join(f"\t{path.rpartition('/')[2]} ({tags}) => {path}\n" for path in paths)
    return f"{len(paths)} libs found in cache `/etc/ld.so.cache'\n{lines}"


def libraries(host: Host, directory: str, version: str, *names: str) -> None:
    """Add real files of a version, without links."""
    for name in names:
        host.file(f"{directory}/{name}.so.{version}", size=1000)


VERSION, OLDER = "570.211.01", "535.261.03"
I386 = "usr/lib/i386-linux-gnu"
DRIVER_CONTAINER = "/run/nvidia/driver"


def elf(bits: int, machine: int) -> bytes:
    return b"\x7fELF" + bytes((bits, 1, 1)) + bytes(9) + struct.pack("<HH", 3, machine) + bytes(44)


X86_64, X32, I686, AARCH64 = elf(2, 62), elf(1, 62), elf(1, 3), elf(2, 183)


def put(host: Host, directory: str, version: str = VERSION, *names: str, header: bytes = X86_64) -> None:
    """Add real files of a version with their soname links."""
    for name in names or (*MAIN, "libnvidia-glcore", "libGLX_nvidia"):
        host.file(f"{directory}/{name}.so.{version}", header, size=1000)
        host.symlink(f"{directory}/{name}.so.{'0' if 'GLX' in name else '1'}", f"{name}.so.{version}")


LISTED = "/usr/lib/x86_64-linux-gnu"


def listed(host: Host, version: str = VERSION, directory: str = LISTED) -> Host:
    """Add a driver that the host's loader cache lists, and return the host."""
    put(host, directory, version)
    host.loader_cache(cache_of(*(f"{directory}/{name}.so.1" for name in MAIN)))
    return host


def other_root(host: Host, root: str = DRIVER_CONTAINER, directory: str = "/usr/lib/x86_64-linux-gnu") -> None:
    """Add a complete system with a driver and a loader cache, as the host's ldconfig prints it."""
    put(host, f"{root}{directory}")
    host.file(f"{root}/etc/ld.so.cache", "not read by us")
    listing = cache_of(*(f"{directory}/{name}.so.1" for name in MAIN))
    cache = host.below(root).full_path("/etc/ld.so.cache")
    for program in ("ldconfig", "/sbin/ldconfig"):
        host.command(program, "-p", "-C", cache, stdout=listing)


def bare(host: Host) -> Host:
    """Give the host a loader cache without a driver, and return the host."""
    host.loader_cache(cache_of("/usr/lib/x86_64-linux-gnu/libc.so.6"))
    return host


def condition(host: Host, module: str = VERSION, **driver: Any) -> Condition:  # noqa: ANN401
    """Return the condition LibrariesPresent."""
    found = user_space(host, module, **driver)
    facts = VendorFacts("nvidia", driver=observe_driver(sources(host), module, found, ()))
    (libraries,) = (
        each for each in nvidia_conditions(facts, Grant("nvidia")) if each.type is ConditionType.LIBRARIES_PRESENT
    )
    return libraries
