"""Builds the stand-in NVML library (a simulation) with the exported names of NVIDIA's own library of that version."""

import re
import shutil
from pathlib import Path

from integration.bed.cache import REPOSITORY, cached
from integration.bed.process import run
from integration.bed.vm.kernel_modules import toolchain

SOURCES = REPOSITORY / "integration/simulation/nvml"
NOT_SUPPORTED = '__attribute__((visibility("default"))) int {name}(void);\nint {name}(void) {{ return 3; }}\n'


def library_name(version: str) -> str:
    return f"libnvidia-ml.so.{version}"


def nvml(original: Path, version: str) -> Path:
    """Return the stand-in library. `original` is NVIDIA's, from which only the list of function names is taken."""

    def build(target: Path) -> None:
        root = toolchain()
        work = root / "build" / f"nvml-{version}"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(SOURCES, work)
        sources = "\n".join(path.read_text() for path in work.glob("*.c"))
        missing = [name for name in exported_functions(original) if not re.search(rf"\b{name}\b", sources)]
        # Go programs bind NVML's functions lazily: a call of a missing one would kill the process.
        (work / "not_supported.c").write_text("".join(NOT_SUPPORTED.format(name=name) for name in missing))
        flags = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O1", "-Wall", "-Wextra", "-Wno-missing-prototypes"]
        flags += ["-Werror", "-fPIC", "-shared", "-fvisibility=hidden", f'-DNVIDIA_VERSION="{version}"']
        flags += ["-Wl,-soname,libnvidia-ml.so.1", "-s", "-o", f"/build/{work.name}/{library_name(version)}"]
        inside = [f"/build/{work.name}/{path.name}" for path in sorted(work.glob("*.c"))]
        run(["chroot", root, "gcc-14", *flags, *inside])
        shutil.copy2(work / library_name(version), target)
        shutil.rmtree(work)

    inputs: list[Path | str] = [str(toolchain()), version, SOURCES, Path(__file__), original]
    return cached(f"nvml-{version}", inputs, build) / library_name(version)


def exported_functions(library: Path) -> list[str]:
    """Return the nvml* functions in the dynamic symbol table of a library."""
    table = run(["readelf", "--dyn-syms", "--wide", library])
    functions = re.findall(r"\bFUNC\s+GLOBAL\s+DEFAULT\s+\d+\s+(nvml\w+)", table)
    if not functions:
        raise ValueError(f"{library} exports no NVML function: is it NVIDIA's library?")
    return sorted(set(functions))
