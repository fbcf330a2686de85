"""A Kubernetes node in a machine, as frozen data: what it is made from, and what its host needs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent.model.typed_json import Base64

Archive: TypeAlias = Literal["", "program", "programs"]


@dataclass(frozen=True, slots=True)
class NodeImage:
    """The image of a root file system, as its registry or archive has it now."""

    name: str
    """The name with its transport (containers-transports(5)). A name in a registry is pinned: it ends in
    `@sha256:...`."""
    digest: str
    """The digest of the manifest for this host's architecture: `sha256:` and 64 hexadecimal digits."""
    architecture: str
    """The architecture's name in Go: amd64, arm64."""
    size: int
    """Bytes of the layers, compressed."""


@dataclass(frozen=True, slots=True)
class NodeBinary:
    """A program, or an archive of some, that is put into the root file system before the machine's first start."""

    name: str
    source: str
    """A URL, or an absolute path in an offline bundle."""
    sha256: str
    path: str
    """The program's path in the machine. For an archive of several programs, their directory."""
    archive: Archive = ""
    """Empty if the file is the program itself. Otherwise, the file is a tar archive compressed by gzip: with `program`,
    it has the program `name`; with `programs`, it has several programs."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file that is put into the root file system before the machine's first start. Parents get mode 0755."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a node needs on its host."""

    sysctls: Mapping[str, str]
    modules: tuple[str, ...]
    swap_off: bool
    files: tuple[NodeFile, ...]
    """Files on the host that make the settings above survive a reboot, and one that configures needrestart."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the host as it was observed."""

    content: Base64
    """In base64, because records are JSON and the content need not be text."""
    mode: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A file or device that is in use as swap."""

    path: str
    priority: int
    """swapon(8); -1 if the kernel chose it."""


@dataclass(frozen=True, slots=True)
class HostState:
    """The values of what HostSettings would change: the current ones or, in AsFound, those before the first change."""

    sysctls: Mapping[str, str | None]
    """None for a parameter that the kernel does not have, perhaps because its module is not loaded."""
    modules: Mapping[str, bool] = field(compare=False)
    """Whether a module is loaded, or built in, by its name. `==` ignores modules, because `reset` cannot unload a
    module that somebody else uses."""
    swaps: tuple[Swap, ...]
    files: Mapping[str, FoundFile | None]
    """None for a file that does not exist."""
    absent_directories: tuple[str, ...] = ()
    """Missing directories that the files need, parents first."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a node from being made."""

    check: str
    """What was checked, such as "registry"."""
    message: str
    advice: str
    """What to do next."""
