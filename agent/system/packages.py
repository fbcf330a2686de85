"""Debian's packages: what a version needs, download, installation. The only module that runs apt and dpkg."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from msgspec import Struct

from agent.model.errors import AgentError, CommandError, DocumentError, ExitCodeError
from agent.model.text import first_of
from agent.system.files import System
from agent.system.trust import read_seen

LOCK = "/var/lib/dpkg/lock-frontend"
"""Whoever changes packages has this locked by fcntl(2)."""
LOCKS = "/proc/locks"
CACHE = "/var/cache/apt/archives"
"""Where apt keeps the packages that it downloaded."""
LOCK_WAIT = 600.0
"""Seconds to wait for the lock: unattended-upgrades may be at work."""
POLL = 1.0
QUERY_LIMIT = 60.0
FETCH_LIMIT = 1800.0
TAIL = 500
"""Characters of the end of what apt or dpkg prints that a message has."""
INSTALL_LIMIT = 3600.0
"""Seconds for the packages' scripts: DKMS builds a module for each installed kernel."""
FORMAT = "${Package}\t${Architecture}\t${Version}\t${source:Upstream-Version}\t${db:Status-Status}\t${db:Status-Want}\n"
STEP = re.compile(r"(?P<step>Inst|Remv|Purg) (?P<name>\S+) (?:\[(?P<old>\S+)\] ?)?(?:\((?P<new>\S+) .*)?")
"""A line of `apt-get --simulate`: `Inst libcuda1 [550.163.01-2] (555.42-1 Debian:13/stable [amd64]) []`.
With APT::Get::Purge, apt writes `Purg` in place of `Remv`."""
CONTENT = re.compile(
    r"\S{10} \S+ +(?:(?P<size>[0-9]{1,15})|[0-9]+,[0-9]+) \S+ \S+ \.(?P<path>/.*?)(?: -> .*| link to .*)?$"
)
"""A line of `dpkg-deb --contents`; a device has its number in place of a size."""
RELATION = re.compile(r"\(>?= (\S+)\)")
"""Matches a version that a dependency asks for, at least or exactly."""
OPTIONS = ("--yes", "--allow-downgrades", "--option=APT::Get::AutomaticRemove=false")
"""Options of apt-get for installations, and for what they would do."""
KEEP = ("--force-confdef", "--force-confold")
"""Options of dpkg: a changed configuration file stays, and nobody is asked."""
QUIET = ("--setenv=DEBIAN_FRONTEND=noninteractive", "--setenv=NEEDRESTART_SUSPEND=1", "--setenv=LC_ALL=C")
"""Without the second one, needrestart would restart services of the host after the installation."""


class Package(Struct, frozen=True):
    """An installed package."""

    version: str
    upstream: str
    """The version without what the distribution adds."""
    complete: bool
    """Whether it is configured, too."""
    held: bool
    """Whether `apt-mark hold` keeps its version."""


class Change(Struct, frozen=True):
    """A package that gets another version."""

    name: str
    """With the architecture, as in `libcuda1:i386`, if that is not the host's own."""
    old: str | None
    """None if the package is not installed."""
    new: str | None
    """None if the package is removed."""


class Changes(Struct, frozen=True):
    """What apt would do."""

    changes: tuple[Change, ...]
    removed: tuple[str, ...]


def upstream(version: str) -> str:
    """Return a package's version without its epoch and its revision (deb-version(7))."""
    plain = version.partition(":")[2] or version
    return plain.rpartition("-")[0] or plain


def native_architecture(system: System) -> str:
    """Return the host's own architecture, in Debian's words. Raises AgentError."""
    return system.run("dpkg", "--print-architecture", timeout=QUERY_LIMIT).strip()


def installed(system: System) -> Mapping[str, Package]:
    """Return the installed packages by name. Raises AgentError."""
    native = native_architecture(system)
    found = {}
    for line in system.run("dpkg-query", "--show", f"--showformat={FORMAT}", timeout=QUERY_LIMIT).splitlines():
        fields = line.split("\t")
        if len(fields) != 6:
            raise DocumentError(f"dpkg-query printed {line[:200]!a}, which is not {FORMAT.strip()!r}")
        name, architecture, version, own, status, want = fields
        if status not in ("not-installed", "config-files"):
            known = name if architecture in (native, "all") else f"{name}:{architecture}"
            found[known] = Package(version, own, status == "installed", want == "hold")
    return found


def available(names: Collection[str], version: str | None, system: System) -> dict[str, str]:
    """Return the newest package version of this, or of any, upstream version, for each name that has one.

    Raises AgentError.
    """
    found = dict[str, str]()
    # The output does not tell architectures apart.
    foreign = [name for name in names if ":" in name]
    for asked in filter(None, ([name for name in names if ":" not in name], *([name] for name in foreign))):
        for line in system.run("apt-cache", "madison", *asked, timeout=QUERY_LIMIT).splitlines():
            fields = [each.strip() for each in line.split("|")]
            # A package source may offer only the source code.
            fits = len(fields) == 3 and version in (None, upstream(fields[1]))
            if fits and not fields[2].endswith(" Sources"):
                found.setdefault(asked[0] if asked[0] in foreign else fields[0], fields[1])
    return found


def available_for(names: Collection[str], version: str, system: System) -> dict[str, str]:
    """Return the newest package version that is made for this version of the driver, for each name that has one.

    Raises AgentError.
    """
    found = dict[str, str]()
    if known := available(names, None, system):
        # One record for each version, the newest first.
        for record in system.run("apt-cache", "show", *known, timeout=QUERY_LIMIT).split("\n\n"):
            fields = dict(line.split(": ", 1) for line in record.splitlines() if re.match(r"\S+: ", line))
            if is_made_for(version, fields.get("Depends", "")):
                found.setdefault(fields["Package"], fields["Version"])
    return found


def is_made_for(version: str, depends: str) -> bool:
    """Return whether a package with these dependencies has modules of this version of the driver.

    Ubuntu's packages of built modules have the kernel's version, but need `nvidia-kernel-common-580-server
    (>= 580.178.04)`, for example. Those of the closed modules do not forbid a newer one, although it does not work.
    """
    return any(upstream(each) == version for each in RELATION.findall(depends))


def dependencies(path: str, system: System) -> str:
    """Return what a package's file says in Depends. Raises AgentError."""
    return system.run("dpkg-deb", "--field", path, "Depends", timeout=QUERY_LIMIT)


def simulate(words: Iterable[str], system: System) -> Changes:
    """Return what `apt-get install` would do with these words. Changes nothing. Raises AgentError."""
    changes, removed = [], []
    for line in system.run("apt-get", "--simulate", *OPTIONS, *words, timeout=QUERY_LIMIT).splitlines():
        if not line.startswith(("Inst ", "Remv ", "Purg ")):
            continue
        match = STEP.match(line)
        if not match or (match["step"] == "Inst" and not match["new"]):
            raise DocumentError(f"`apt-get --simulate` printed {line[:200]!a}, which is not understood")
        if match["step"] == "Inst":
            changes.append(Change(match["name"], match["old"], match["new"]))
        else:
            removed.append(match["name"])
    return Changes(tuple(sorted(changes, key=lambda each: each.name)), tuple(removed))


def fetch(wanted: Mapping[str, str], directory: str, system: System) -> None:
    """Download these versions of packages to a directory, by name. Raises AgentError if one cannot be had.

    apt checks them against its signed lists. What apt's cache has is copied from there: no list names old versions.
    """
    system.make_directory(directory)
    kept, partial = read_seen(system.entries, CACHE), f"{directory}/partial"
    native = native_architecture(system)
    try:
        for name, version in wanted.items():
            if file_of(name, version, system.entries(directory), native):
                continue
            # Whatever kills this, only complete files get to `directory`.
            system.remove_tree(partial)
            system.make_directory(partial)
            if isinstance(kept, tuple) and (cached := file_of(name, version, kept, native)):
                system.run("cp", "--", f"{CACHE}/{cached}", f"{partial}/{cached}", timeout=QUERY_LIMIT)
            else:
                # apt-get downloads into its working directory.
                download = ("env", f"--chdir={partial}", "apt-get", "download", f"{name}={version}")
                system.run_tool(*download, timeout=FETCH_LIMIT)
            file = file_of(name, version, system.entries(partial), native)
            if not file:
                raise AgentError(f"`apt-get download {name}={version}` left no package in {partial}")
            system.sync(f"{partial}/{file}")
            system.rename(f"{partial}/{file}", f"{directory}/{file}")
    finally:
        # Half a file of a failed download, perhaps on a disk that it has filled: kubelets evict pods then.
        system.remove_tree(partial)


def file_of(name: str, version: str, files: Iterable[str], native: str) -> str:
    """Return the file of a package's version among these names; empty if there is none.

    A name without an architecture is one of the `native` architecture, or of all.
    """
    own, _, architecture = name.partition(":")
    # apt escapes the colon after an epoch.
    start = f"{own}_{version.replace(':', '%3a')}_"
    wanted = {f"{start}{each}.deb" for each in ((architecture,) if architecture else (native, "all"))}
    return next((each for each in files if each in wanted), "")


def contents(path: str, system: System) -> dict[str, int]:
    """Return the sizes of the files in a package's file, by path. Raises AgentError."""
    found = {}
    for line in system.run("dpkg-deb", "--contents", path, timeout=QUERY_LIMIT).splitlines():
        # `-rw-r--r-- root/root      9 2025-01-01 00:00 ./usr/lib/libcuda.so.550.163.01`
        match = CONTENT.match(line)
        if not match:
            raise DocumentError(f"`dpkg-deb --contents {path}` printed {line[:200]!a}, which is not understood")
        found[match["path"]] = int(match["size"] or 0)
    return found


def build_by_dkms(module: str, version: str, kernel: str, files: Iterable[str], directory: str, system: System) -> None:
    """Build a module of packages' files in this directory, as their scripts will. Raises AgentError.

    The directory is removed afterwards: kubelets evict pods from a full disk. Of a build that fails, the log stays as
    DIRECTORY.log.
    """
    built = f"{directory}/built"
    system.remove_tree(directory)
    system.make_directory(built)
    try:
        for file in files:
            system.run_tool("dpkg-deb", "--extract", file, directory, timeout=FETCH_LIMIT)
        trees = ("--sourcetree", f"{directory}/usr/src", "--dkmstree", built)
        # Pods run meanwhile.
        dkms = ("nice", "dkms", "build", *trees, "-m", module, "-v", version, "-k", kernel)
        system.run_tool(*dkms, timeout=INSTALL_LIMIT)
    finally:
        # dkms itself moves that of a module that it has built.
        if system.exists(log := f"{built}/{module}/{version}/build/make.log"):
            system.rename(log, f"{directory}.log")
        system.remove_tree(directory)


def install(words: Iterable[str], system: System, progress: Callable[[str], None], *, removes: bool) -> None:
    """Install packages by `apt-get install`, which may remove others only if `removes` is set. Raises AgentError."""
    wait_for_lock(system, progress)
    options = [f"--option=Dpkg::Options::={each}" for each in KEEP]
    options += [f"--option=DPkg::Lock::Timeout={LOCK_WAIT:.0f}", *(() if removes else ("--no-remove",))]
    _run("apt-get", *OPTIONS, "--quiet", *options, "install", *words, system=system)


def automatic(system: System) -> frozenset[str]:
    """Return the packages that apt installed only because others need them; none if that is unknown."""
    with suppress(AgentError):
        return frozenset(system.run("apt-mark", "showauto", timeout=QUERY_LIMIT).split())
    return frozenset()


def mark_automatic(names: Collection[str], system: System) -> None:
    """Let apt remove these packages when nothing needs them any longer. If that fails, they only stay."""
    if names:
        with suppress(AgentError):
            system.run("apt-mark", "auto", *names, timeout=QUERY_LIMIT)


def put_back(paths: Iterable[str], added: Collection[str], system: System, progress: Callable[[str], None]) -> None:
    """Install older packages from files, also over an interrupted installation. Raises AgentError.

    What the newer ones `added` is removed first: it may break the older packages, which dpkg then does not configure.
    """
    wait_for_lock(system, progress)
    if added:
        _run("dpkg", "--force-depends", "--force-remove-reinstreq", "--remove", *added, system=system)
    _run("dpkg", *KEEP, "--install", *paths, system=system)


def finish_installation(system: System, progress: Callable[[str], None]) -> None:
    """Let dpkg finish what was interrupted: until then, apt refuses to work. Raises AgentError."""
    wait_for_lock(system, progress)
    _run("dpkg", *KEEP, "--configure", "--pending", system=system)


def _run(*argv: str, system: System) -> None:
    # As a unit of its own, it goes on if this process is killed: an interrupted dpkg would leave half a driver.
    unit = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *QUIET, "--")
    try:
        system.run(*unit, *argv, timeout=INSTALL_LIMIT)
    except ExitCodeError as error:
        # What packages' scripts say of their errors goes to apt's standard output, before dpkg's own line. Other
        # packages' lines may follow.
        lines = error.stdout.splitlines()
        failed = next((at for at, line in enumerate(lines) if line.startswith("dpkg: error ")), len(lines))
        before = "\n".join(lines[max(0, failed - 3) : failed + 2])
        said = f"{before[-TAIL:]}\n{error.stderr[-TAIL:]}"
        raise CommandError(argv, error.ended, said, "see /var/log/apt/term.log and /var/log/dpkg.log") from error


def wait_for_lock(system: System, progress: Callable[[str], None], limit: float = LOCK_WAIT) -> None:
    """Wait until nobody changes packages. Raises AgentError, which names the process, if that lasts too long."""
    deadline, said = time.monotonic() + limit, ""
    while holder := lock_holder(system):
        if time.monotonic() >= deadline:
            raise AgentError(f"{holder} still has the lock of apt and dpkg ({LOCK})", "let it end, then try again")
        if holder != said:
            progress(f"waiting up to {limit:.0f} s for the lock of apt and dpkg, which {holder} has")
            said = holder
        time.sleep(POLL)


def lock_holder(system: System) -> str:
    """Return who has the lock of apt and dpkg, in words; empty if nobody has it, or if that is unknown."""
    inode, locks = system.link_inode(LOCK), read_seen(system.read_text, LOCKS)
    for line in locks.splitlines() if isinstance(locks, str) and inode is not None else ():
        # `8: POSIX  ADVISORY  WRITE 4906 fe:00:9980619 0 EOF`; a process that waits for a lock has `->` before POSIX.
        fields = line.split()
        if len(fields) > 5 and fields[1] == "POSIX" and fields[5].rpartition(":")[2] == str(inode):
            name = read_seen(system.read_text, f"/proc/{fields[4]}/comm")
            return f"PID {fields[4]} ({name.strip()})" if isinstance(name, str) else f"PID {fields[4]}"
    return ""


def in_words(changes: Collection[Change]) -> str:
    """Return the packages with their versions, or the first of them."""
    each = [f"{change.name} {change.old or '(new)'} -> {change.new or '(removed)'}" for change in changes]
    return first_of(each, 40)
