"""apt, dpkg, kernel modules and daemons of a host whose driver is in packages, simulated.

The lines that apt-get and dpkg-query print are as apt 3.0.3 and dpkg 1.22.22 printed them for made-up packages.
"""

import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.system.process import Completed
from tests.fakes.driver_generations import NEWER, upgrade
from tests.fakes.facts import VERSION
from tests.fakes.node_host import NodeHost
from tests.fakes.processes import process

OLD, NEW = VERSION, NEWER
LIBRARIES, MODULES, DAEMON = "libcuda1", "nvidia-kernel-support", "nvidia-fabricmanager-550"
UNITS = ("nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvidia-imex.service", "nvidia-dcgm.service")
OTHERS = "zlib1g\tamd64\t1:1.3.dfsg-1\t1.3.dfsg\tinstalled\tinstall\nold\tall\t1\t1\tconfig-files\tdeinstall\n"
WANT = {True: "hold", False: "install"}
HOLDERS = {"nvidia": ("nvidia_modeset", "nvidia_uvm"), "nvidia_modeset": ("nvidia_drm",)}
PID = 900


class DriverHost:
    """Stands between a host and its other programs."""

    def __init__(self, host: NodeHost) -> None:
        self.host, self.tree = host, Path(host.root)
        self.calls: list[str] = []
        self.changes: list[str] = []
        """Those calls that change the host, in short."""
        self.have = {name: (OLD, "installed") for name in (LIBRARIES, MODULES, DAEMON)}
        self.sources = {OLD: {LIBRARIES, MODULES, DAEMON}, NEW: {LIBRARIES, MODULES, DAEMON}}
        """Which packages the package sources have, by version."""
        self.added = ""
        """A package that only the new driver needs, and that breaks the old one."""
        self.added_by_itself = NEW
        """The version of it that apt takes if nobody asks for one, where names have the branch."""
        self.branched = False
        """Whether the names of packages have the driver's branch, as Ubuntu's: two branches are in conflict."""
        self.drops_branch = False
        """Whether the names of the new packages have no branch, as NVIDIA's from 590 on."""
        self.ends_branch = False
        """Whether the new packages of a branch only need those of the next branch, of which they have the version."""
        self.built: dict[str, dict[str, str]] = {}
        """The versions of Ubuntu's packages of built modules, and the driver's version that each needs, by name."""
        self.have_built: dict[str, str] = {}
        """Which of them are installed, in which version; and other packages."""
        self.size = 9
        """The size of each file in packages."""
        self.automatic: list[str] = []
        """What apt installed because other packages need it."""
        self.held: set[str] = set()
        self.removes: list[str] = []
        """Packages that apt would remove."""
        self.contents = {version: ["libcuda.so.{}", "libnvidia-ml.so.{}"] for version in (OLD, NEW)}
        self.module_files = [f"lib/modules/{host.read_text('/proc/sys/kernel/osrelease').strip()}/nvidia.ko"]
        """What the modules' package has in /usr, with `{}` for the version."""
        self.files, self.on_disk = OLD, OLD
        """The versions of the libraries and of the module on disk."""
        self.other_module = ""
        """The version of a module that hides the packages' own from modinfo and modprobe."""
        self.unloadable = ""
        """The version whose module does not load."""
        self.fails: dict[str, str] = {}
        """What programs print before they fail, by a part of the call."""
        self.before: Callable[[int], None] = lambda call: None
        self.after: Callable[[int], None] = lambda call: None
        """Called with the number of the call that changes something."""
        self.drained = True
        for module in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"):
            self._loaded(module, OLD)
        for unit, state in zip(UNITS, ("active", "active", "inactive", "inactive"), strict=True):
            host.bus.unit(unit, state)
        self._hold()
        host.file("/var/lib/dpkg/lock-frontend")
        host.file("/proc/locks")
        host.program_runner = self.run

    def run(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[0] == "systemd-run":
            argv = argv[argv.index("--") + 1 :]
        line = " ".join(argv)
        self.calls.append(line)
        short = self._short(argv)
        number = len(self.changes) + 1
        if short:
            self.changes.append(short)
            self.before(number)
        for part, printed in self.fails.items():
            if part in line:
                return Completed(1, b"", printed.encode())
        done = self._run(argv, timeout)
        if short:
            self.after(number)
        return done

    def _short(self, argv: tuple[str, ...]) -> str:  # noqa: C901
        match argv:
            case ("rmmod", module):
                return f"unload {module}"
            case ("modprobe", "--", module):
                return f"load {module}"
            case ("systemctl", "stop", unit):
                return f"stop {unit}"
            case ("systemctl", "start", *_, unit):
                return f"start {unit}"
            case ("env", directory, "apt-get", "download", package):
                return f"download {package} to {directory.split('/')[-2]}"
            case ("nice", "dkms", "build", *_, "-m", module, "-v", version, "-k", kernel):
                return f"build {module} {version} for {kernel}"
            case ("apt-get", "--yes", *_):
                return f"install {self._versions(argv)}"
            case ("dpkg", *_, "--install", _, _, _):
                return f"install {self._versions(argv)} by dpkg"
            case ("dpkg", *_, "--pending"):
                return "configure"
            case ("dpkg", *_, "--remove", _, _, _):
                return "remove what is new"
            case ("dpkg", *_, "--remove", package):
                return f"remove {package}"
            case ("kubectl", _, "drain" | "uncordon" | "cordon" as verb, *_):
                return verb
            case _:
                return ""

    def _versions(self, argv: Sequence[str]) -> str:
        names = [posixpath.basename(each) for each in argv if each.endswith(".deb")]
        (version,) = {each.split("_")[1].removesuffix("-1") for each in names if not each.startswith("linux-")}
        return version

    def _run(self, argv: tuple[str, ...], timeout: float) -> Completed:  # noqa: C901
        printed: str | None = None
        match argv:
            case ("dpkg", "--print-architecture"):
                printed = "amd64\n"
            case ("dpkg-query", "--show", _):
                lines = (
                    (self._called(name, version), "amd64", f"{version}-1", version, status, WANT[name in self.held])
                    for name, (version, status) in self.have.items()
                )
                printed = OTHERS + "".join("\t".join(each) + "\n" for each in lines)
                for name, version in self.have_built.items():
                    printed += f"{name}\tamd64\t{version}\t{version}\tinstalled\t{WANT[name in self.held]}\n"
            case ("apt-cache", "madison", *names):
                printed = "".join(
                    f"{name} | {version}-1 | http://deb.debian.org/debian trixie/non-free amd64 Packages\n"
                    for name in names
                    for version in sorted(self.sources, reverse=True)
                    if name in {self._called(each, version) for each in self.sources[version]}
                    or (self.ends_branch and version == NEW and name.endswith("-550"))
                )
                for name, versions in self._asked(names):
                    printed += "".join(f"{name} | {each} | http://x noble/restricted Packages\n" for each in versions)
            case ("apt-cache", "show", *names):
                printed = "\n".join(
                    f"Package: {name}\nVersion: {version}\nDepends: linux-image-x, nvidia-kernel-common (>= {driver})\n"
                    for name, versions in self._asked(names)
                    for version, driver in versions.items()
                )
            case ("apt-mark", "showauto"):
                printed = "".join(f"{name}\n" for name in self.automatic)
            case ("apt-mark", "auto", *names):
                self.automatic = names
            case ("apt-get", "--simulate", _, _, _, "install", *words):
                own = [word for word in words if not posixpath.basename(word).startswith("linux-")]
                printed = self._simulate(own) + self._simulate_built(words)
            case ("env", directory, "apt-get", "download", package):
                name, _, version = package.partition("=")
                plain = version.removesuffix("-1")
                known = {self._called(each, plain) for each in self.sources.get(plain, ())}
                if name not in known and version not in {*self.built.get(name, ()), self.have_built.get(name)}:
                    return Completed(100, b"", f"E: Version '{version}' for '{name}' was not found\n".encode())
                self.host.file(
                    f"{directory.removeprefix('--chdir=').removeprefix(self.host.root)}/{name}_{version}_amd64.deb"
                )
            case ("dpkg-deb", "--contents", path):
                name, version = posixpath.basename(path).split("_")[:2]
                version = version.removesuffix("-1")
                files = [f"lib/{each}" for each in self.contents[version]] if LIBRARIES in path else ["x"]
                files = self.module_files if MODULES in path else files
                kernel = self.host.read_text("/proc/sys/kernel/osrelease").strip()
                files = [f"lib/modules/{kernel}/nvidia.ko"] if name.endswith(f"-{kernel}") else files
                printed = "".join(
                    f"-rw-r--r-- root/root {self.size} 2025-01-01 00:00 ./usr/{each.format(version)}\n"
                    for each in files
                )
            case ("dpkg-deb", "--field", path, "Depends"):
                name, version = posixpath.basename(path).split("_")[:2]
                printed = f"linux-image-x, nvidia-kernel-common (>= {self.built[name][version]})\n"
            case ("dpkg", *_, "--install", _, _, _) if self.added in self.have:
                return Completed(1, b"", f"dpkg: {self.added} breaks {LIBRARIES} and is installed\n".encode())
            case ("apt-get", "--yes", *_) | ("dpkg", *_, "--install", _, _, _):
                self._install(self._versions(argv))
            case ("dpkg", *_, "--remove", _, _, _):
                self.have.clear()
            case ("dpkg", *_, "--remove", package):
                self.have.pop(package, None)
            case ("dpkg", *_, "--pending"):
                self.have = {name: (version, "installed") for name, (version, _) in self.have.items()}
            case ("modinfo", "--field=version", "nvidia"):
                printed = f"{self.other_module or self.on_disk}\n"
            case ("rmmod", module):
                return self._rmmod(module)
            case ("modprobe", "--", _) if self.on_disk == self.unloadable:
                return Completed(1, b"", b"modprobe: ERROR: could not insert 'nvidia': Invalid argument\n")
            case ("modprobe", "--", module):
                self._loaded(module, self.on_disk)
            case ("systemctl", verb, unit) if unit in UNITS:
                self.host.bus.unit(unit, "active" if verb == "start" else "inactive")
                self._hold()
            case ("kubectl", _, "get", *_):
                printed = "" if self.drained else "true"
            case ("kubectl" | "nice", *_) | ("dpkg-deb", "--extract", *_):
                pass
            case _:
                return self._on_host(argv, timeout)
        return Completed(0, (printed or "").encode(), b"")

    def _on_host(self, argv: tuple[str, ...], timeout: float) -> Completed:
        daemons = {unit: self.is_active(unit) for unit in UNITS}
        done = self.host.runner(argv, timeout)
        # A machine that starts or stops changes no daemon here.
        for unit, active in daemons.items():
            self.host.bus.unit(unit, "active" if active else "inactive")
        return done

    def _called(self, name: str, version: str) -> str:
        if not self.branched:
            return name
        plain = name.removesuffix("-550")
        return plain if self.drops_branch and version == NEW else f"{plain}-{version.partition('.')[0]}"

    def _asked(self, names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
        return [(name, self.built[name]) for name in names if name in self.built]

    def _simulate_built(self, words: Sequence[str]) -> str:
        """Return what apt prints for packages of built modules by name, by version or by file."""
        asked = [posixpath.basename(word).replace("=", "_").split("_")[:2] for word in words]
        printed = ""
        for name, *version in (each for each in asked if each[0] in self.built):
            new = version[0] if version else next(iter(self.built[name]))
            old = f" [{self.have_built[name]}]" if name in self.have_built else ""
            printed += f"Inst {name}{old} ({new} Ubuntu:24.04/noble [amd64])\n"
        gone = [each for each in self.have_built if "-550" in each] if "-580" in printed else []
        return printed + "".join(f"Remv {name} [1]\n" for name in gone)

    def _simulate_other_branch(self, words: Sequence[str]) -> str:
        """Return what apt prints for packages by version or file: those of the other branch go."""
        old = {self._called(name, version): version for name, (version, _) in self.have.items()}
        names = {posixpath.basename(word).replace("=", "_").split("_")[0] for word in words}
        new = next((version for version in self.sources if any(version in word for word in words)), OLD)
        if self.drops_branch and "--only-upgrade" in words:
            names, new = {self._called(name, NEW) for name in self.have}, NEW
        gone = [f"Remv {name} [{version}-1]\n" for name, version in old.items() if name not in names]
        if self.ends_branch and not any("-580" in word for word in words):
            added = [f"Inst {name} [{OLD}-1] ({NEW}-1 localhost [amd64])\n" for name in old]
            return "".join([*added, f"Inst libcuda1-580 ({NEW}-1 localhost [amd64])\n"])
        added = [f"Inst {name} ({new}-1 localhost [amd64])\n" for name in names if name not in old]
        needed = self._called(self.added, new) if self.added else ""
        if added and needed not in ("", *names):
            added.append(f"Inst {needed} ({self.added_by_itself}-1 localhost [amd64])\n")
        return "".join((gone if added else []) + added + [f"Remv {name} [1]\n" for name in self.removes])

    def _simulate(self, words: Sequence[str]) -> str:
        if self.branched:
            return self._simulate_other_branch(words)
        exact = {word.partition("=")[0]: word.partition("=")[2].removesuffix("-1") for word in words if "=" in word}
        if any(word.endswith(".deb") for word in words):
            exact = {posixpath.basename(word).split("_")[0]: self._versions([word]) for word in words}
        if not exact:
            newest = {
                name: max(each for each, names in self.sources.items() if name in names)
                for name in words
                if name in self.have
            }
            exact = {name: version for name, version in newest.items() if version > self.have[name][0]}
        lines = [
            f"Inst {name} [{self.have[name][0]}-1] ({version}-1 localhost [amd64])\n"
            for name, version in exact.items()
            if name != self.added and version != self.have[name][0]
        ]
        if self.added and self.added not in self.have:
            lines.append(f"Inst {self.added} ({NEW}-1 localhost [amd64])\n")
        return "Reading package lists...\n" + "".join(lines + [f"Remv {name} [1]\n" for name in self.removes])

    def _install(self, version: str) -> None:
        if self.added and version == NEW:
            self.have[self.added] = (NEW, "installed")
        for name in self.have or (LIBRARIES, MODULES, DAEMON):
            if name in self.sources.get(version, ()):
                self.have[name] = (version, "installed")
        if self.files != version:
            upgrade(self.host, self.files, version)
        self.files = self.on_disk = version

    def _rmmod(self, module: str) -> Completed:
        directory = self.tree / "sys/module"
        users = [each.name for each in (directory / module / "holders").iterdir()]
        held = [unit for unit in UNITS[:2] if self.is_active(unit)] or self.machine_runs()
        if users or held:
            return Completed(1, b"", f"rmmod: ERROR: Module {module} is in use by: {users or held}\n".encode())
        for holder in directory.glob(f"*/holders/{module}"):
            holder.rmdir()
        self.host.remove_tree(f"/sys/module/{module}")
        if module == "nvidia":
            self._bind("")
        return Completed(0, b"", b"")

    def _loaded(self, module: str, version: str) -> None:
        self.host.file(f"/sys/module/{module}/version", f"{version}\n")
        self.host.make_directory(f"/sys/module/{module}/holders")
        for used, users in HOLDERS.items():
            if module in users:
                self.host.make_directory(f"/sys/module/{used}/holders/{module}")
        if module == "nvidia":
            self._bind("nvidia")

    def _bind(self, driver: str) -> None:
        for bus in ("01", "02"):
            self.host.rebind(f"0000:{bus}:00.0", driver)

    def _hold(self) -> None:
        """While it runs, the persistence daemon has the GPUs open."""
        if self.is_active(UNITS[0]) == (self.tree / f"proc/{PID}").exists():
            return
        if self.is_active(UNITS[0]):
            group = f"/system.slice/{UNITS[0]}"
            process(self.tree, PID, opened=("/dev/nvidia0",), command=b"nvidia-persiste", group=group)
        else:
            self.host.remove_tree(f"/proc/{PID}")

    def is_active(self, unit: str) -> bool:
        path = self.host.bus.units[unit]
        return self.host.bus.properties[path, "org.freedesktop.systemd1.Unit", "ActiveState"][1] == "active"

    def machine_runs(self) -> bool:
        return self.is_active("systemd-nspawn@gpu-node.service")

    def version(self) -> str:
        """Return the loaded module's version."""
        return self.host.read_text("/sys/module/nvidia/version").strip()

    def state(self) -> tuple[object, ...]:
        """Return what runs."""
        path = "/sys/module/nvidia/version"
        loaded = self.version() if self.host.exists(path) else ""
        modules = sorted(each.name for each in (self.tree / "sys/module").glob("nvidia*"))
        return (
            loaded,
            self.files,
            {version for version, _ in self.have.values()},
            modules,
            [each for each in UNITS if self.is_active(each)],
            self.machine_runs(),
        )
