"""Upgrades the packages of a vendor's driver, reloads its modules, and goes back if the new driver does not load.

What is decided and how far it has got is recorded on disk. Each step looks first at what is left to do, so that after a
kill or a power cut, the same command goes on; nothing else does. Until the new packages are installed, a failure only
starts again what was stopped.
"""

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from agent.host.apply.driver_roots import MARGIN
from agent.host.detach import Ending, granted_to
from agent.host.observe.machine import observe_units
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.host.state.locks import detach_lock, locked, machine_locks
from agent.host.state.records import Record
from agent.host.vendors import HOST_VENDORS, host_vendor
from agent.model.device import DeviceKind
from agent.model.errors import AgentError, CommandError
from agent.model.facts import Absent, Broken, DeviceNode, Facts, Seen, Unseen, VendorFacts
from agent.model.paths import DRIVER_PACKAGES, DRIVER_UPGRADE, DRIVER_UPGRADE_LOCK, STATE
from agent.model.text import counted, first_of
from agent.system.files import System
from agent.system.modules import RELEASE, load_module, unload_module, unload_order
from agent.system.packages import (
    Change,
    Changes,
    Package,
    automatic,
    available,
    available_for,
    build_by_dkms,
    contents,
    dependencies,
    fetch,
    file_of,
    finish_installation,
    in_words,
    install,
    installed,
    is_made_for,
    mark_automatic,
    native_architecture,
    put_back,
    simulate,
    upstream,
    wait_for_lock,
)
from agent.system.processes import Holder, find_holders
from agent.vendors.host_vendor import DriverPackages

NEW, OLD, BUILD = f"{DRIVER_PACKAGES}/new", f"{DRIVER_PACKAGES}/old", f"{DRIVER_PACKAGES}/build"
COMMAND = "unbounded-agent driver upgrade"
UNIT = re.compile(r"/(?P<name>[^/]+\.service)(?:/|$)")
"""Matches the unit of a process in its control group's path."""
BRANCH = re.compile(r"-(?P<branch>[0-9]{3})(?=-|:|$)")
"""Matches the driver's branch in the name of a package, such as nvidia-utils-570-server."""
KERNEL = re.compile(r"-[0-9]+\.[0-9]+\.[0-9]+-")
"""Matches a kernel's version in the name of a package."""
BUILT = "linux-"
"""Beginning of the names of Ubuntu's packages with built modules."""
DKMS = re.compile("(?<!no-)dkms")
"""Matches in the names of packages that DKMS builds, but not in nvidia-headless-no-dkms-580."""
BUILD_COPIES, BUILD_OBJECTS = 5, 256 << 20
"""What a build by DKMS takes: copies of the sources, in links too, and bytes for what is compiled.
Measured with the 118 MiB of Ubuntu's nvidia-kernel-source-580-server: 815 MiB."""
MODULE_LIMIT = 120.0
"""Seconds to load or unload a module. A host with 16 GPUs probes them one after another."""
UNIT_LIMIT = 120.0
"""Seconds to start or stop a daemon. The Fabric Manager takes a minute to configure a fabric."""
QUERY_LIMIT = 30.0
RELEASE_LIMIT = 15.0
"""Seconds until what was stopped has released the GPUs."""


class Phase(StrEnum):
    """What is being done, from which the next run goes on."""

    STOPPING = "stop the machines and unload the old modules"
    """Nothing of the driver was changed."""
    INSTALLING = "install the new packages and load their modules"
    GOING_BACK = "go back to the old packages"
    STARTING = "start the machines again"
    ONLY_INSTALLING = "install the new packages: with --next-boot again, or without it, which stops the machines"
    NEXT_BOOT = "load the installed modules at the host's next boot"


class DriverUpgrade(Struct, frozen=True):
    """The record of an upgrade."""

    vendor: str
    old: str
    new: str
    """Versions of the driver."""
    changes: tuple[Change, ...]
    phase: Phase
    machines: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    """What was stopped, and is started again."""
    modules: tuple[str, ...] = ()
    """Modules that were loaded, in the order in which they are unloaded."""
    failed: str = ""
    """Why the new driver is not used."""

    @property
    def what(self) -> str:
        return f"driver upgrade {self.old} to {self.new}"


RECORD = Record(DriverUpgrade, 1)


class InUseError(AgentError):
    """Something that uses the driver could not be stopped."""


def recorded(system: System) -> Seen[DriverUpgrade]:
    """Return the upgrade that was not finished; Absent if there is none."""
    return RECORD.read_seen(DRIVER_UPGRADE, system)


def left_to_do(system: System) -> str:
    """Return what is left of an unfinished upgrade, in words; empty if there is none."""
    found = recorded(system)
    if isinstance(found, Absent | Unseen):
        return ""
    if isinstance(found, Broken):
        return found.why
    packages = _packages(found.vendor)
    if found.phase is Phase.NEXT_BOOT and packages and packages.loaded(system) == found.new:
        return ""
    return f"{found.what} is not finished; left to do: {found.phase}" + (f" ({found.failed})" if found.failed else "")


def _packages(vendor: str) -> DriverPackages | None:
    return next((each.packages for each in HOST_VENDORS if each.name == vendor), None)


class Upgrade(Struct):
    """An upgrade that is planned, or goes on."""

    record: DriverUpgrade
    resumed: bool
    reconciler: Reconciler
    packages: DriverPackages
    machines: tuple[str, ...]
    """Machines that run and have the vendor's GPUs."""
    stays: tuple[str, ...]
    """Packages of the driver that no package source has in the new version."""
    stop: Callable[[str], None]
    """Drains a machine's node if that is possible, and stops the machine. Raises AgentError."""
    start: Callable[[str], int]
    """Starts a machine, waits until it is ready and its GPUs are tested, and uncordons its node. Returns 0 then."""
    remarks: list[str] = field(default_factory=list)

    # ---- what would be done

    def sentences(self, *, next_boot: bool) -> tuple[str, ...]:
        """Return what is known, and each step."""
        record, system = self.record, self.reconciler.system
        first = f"driver {record.old} -> {record.new}: {counted(len(record.changes), 'package')}"
        lines = [f"{first}: {in_words(record.changes)}"]
        if self.resumed:
            lines.append(f"this upgrade was interrupted, and goes on; left to do: {record.phase}")
            lines += [f"because {record.failed}"] if record.failed else []
        if self.stays:
            lines.append(
                f"stay as they are, because no package source has them in {record.new}: {first_of(self.stays)}"
            )
        lines += [f"ends it: {each}" for each in self.foreign_holders()]
        if not self.resumed:
            lines.append(f"would download the packages of both versions to {DRIVER_PACKAGES}")
            if not next_boot and self._builds():
                lines.append(f"would build the module in {BUILD}, to see whether it can be built")
        if next_boot:
            return (
                *lines,
                f"would install {record.new}, and unload nothing",
                f"until the host's next boot, machines keep their copy of {record.old}; programs of {record.old}'s "
                f"packages on the host itself do not work, because module and libraries differ",
            )
        capabilities = (each.pci_address for each in self._nodes() if each.kind is DeviceKind.CAPABILITY)
        if parted := sorted(filter(None, {*capabilities})):
            lines.append(f"the partitions of {', '.join(parted)} are lost; make them again afterwards")
        units = self._running(self.packages.daemons)
        order = unload_order(self.packages.module, system)
        return (
            *lines,
            *(f"would drain and stop machine {name}" for name in self.machines),
            *([f"would stop {', '.join(reversed(units))}"] if units else ()),
            *([f"would unload {', '.join(order)}"] if order else ()),
            f"would install {record.new}, and load {', '.join(reversed(record.modules))}",
            f"would go back to {record.old} if that fails",
            f"would start again {', '.join((*units, *self.machines)) or 'nothing'}",
        )

    def _builds(self) -> bool:
        """Return whether DKMS will build the module."""
        return any(each.new and DKMS.search(each.name) for each in self.record.changes)

    def foreign_holders(self) -> tuple[str, ...]:
        """Return the processes on the host that hold GPUs, and that the agent does not stop, in words."""
        return tuple(each.describe() for each in self._holders() if not self._is_stopped(each))

    def _is_stopped(self, holder: Holder) -> bool:
        unit = UNIT.search(holder.cgroup)
        return holder.machine in self.machines or bool(unit and unit["name"] in self.packages.daemons)

    def _holders(self) -> tuple[Holder, ...]:
        wanted = {(node.number.major, node.number.minor): node.path for node in self._nodes()}
        return find_holders(self.reconciler.system, wanted).holders

    def _facts(self) -> VendorFacts:
        facts = self.reconciler.preview()[0]
        return next(each for each in facts.vendors if each.vendor == self.record.vendor)

    def _nodes(self) -> tuple[DeviceNode, ...]:
        devices = self._facts().devices
        return devices if isinstance(devices, tuple) else ()

    def _running(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the units that run. Raises AgentError if that is unknown."""
        wanted = tuple(names)
        units = observe_units(wanted, self.reconciler.system)
        for name, unit in units.items():
            if isinstance(unit.unit_state, Unseen):
                raise AgentError(f"whether {name} runs is unknown: {unit.unit_state.why}")
        return tuple(name for name in wanted if units[name].unit_state in ("active", "activating", "reloading"))

    # ---- what is done

    def run(self, *, next_boot: bool) -> Ending:
        """Upgrade, or go on with an upgrade that was interrupted. Raises AgentError."""
        with self._alone():
            if not self.resumed:
                self._prepare(next_boot=next_boot)
            elif next_boot and self.record.phase is not Phase.ONLY_INSTALLING:
                what = f"{self.record.what} is not finished; left to do: {self.record.phase}"
                raise AgentError(what, f"leave out --next-boot: `{COMMAND}` goes on")
            try:
                if next_boot:
                    return self._install_for_next_boot()
                return self._run()
            except KeyboardInterrupt:
                again = f"{COMMAND} --next-boot" if next_boot else COMMAND
                self.reconciler.progress(f"interrupted; left to do: {self.record.phase}: `{again}` goes on")
                raise
            except (AgentError, OSError):
                # Such as a full disk, on which nothing can be recorded.
                self._start_again()
                for each in self.remarks:
                    self.reconciler.progress(each)
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        system, names = self.reconciler.system, {*self.machines, *self.record.machines}
        with ExitStack() as locks:
            locks.enter_context(locked(system, DRIVER_UPGRADE_LOCK, 0, f"another `{COMMAND}` is still running"))
            locks.enter_context(machine_locks(system, names, "driver upgrade"))
            yield

    def _prepare(self, *, next_boot: bool) -> None:
        """Download and check everything. Changes nothing of the driver. Raises AgentError."""
        record, system, progress = self.record, self.reconciler.system, self.reconciler.progress
        # A build that was killed has left it; kubelets may evict pods for its room.
        system.remove_tree(BUILD)
        strict = self._running(self.packages.strict) if next_boot else ()
        if strict and any(each.name.startswith(self.packages.strict_packages) for each in record.changes):
            why = f"{strict[0]} runs, and its new version ends with the old module: then no GPU computes until the boot"
            raise AgentError(why, "leave out --next-boot")
        if not next_boot and (held := self.foreign_holders()):
            raise AgentError(f"the driver is in use: {'; '.join(held)}", "end this first; nothing was changed")
        progress(f"download the packages of driver {record.old}, for the way back")
        try:
            fetch({each.name: each.old for each in record.changes if each.old}, OLD, system)
        except AgentError as error:
            what = f"the packages of driver {record.old} cannot be had, so there would be no way back: {error}"
            raise AgentError(what, f"put them into {OLD}; nothing was changed") from error
        progress(f"download the packages of driver {record.new}")
        fetch({each.name: each.new for each in record.changes if each.new}, NEW, system)
        files = {file: contents(file, system) for file in self._files(NEW)}
        found = {posixpath.basename(path) for paths in files.values() for path in paths}
        for name in (each.format(record.new) for each in self.packages.files):
            if name not in found:
                raise AgentError(f"the packages of driver {record.new} do not have {name}", "nothing was changed")
        size = sum(sum(paths.values()) for paths in files.values())
        # dpkg writes them next to the old ones, for which apt does not look for room. Then, not more than that is
        # copied to the driver root.
        for path in ("/usr", STATE):
            _need_room(path, size, f"for driver {record.new}", system)
        if not next_boot:
            self._prove_module(files)
        # While machines are stopped, nobody should wait for it.
        wait_for_lock(system, progress)
        self._record(phase=Phase.ONLY_INSTALLING if next_boot else Phase.STOPPING)

    def _prove_module(self, files: Mapping[str, Mapping[str, int]]) -> None:
        """See to it that the packages' files, given with their contents, have a module for the running kernel.

        Raises AgentError. What DKMS will build is built once before: otherwise, pods would wait for a build that fails.
        """
        system, new = self.reconciler.system, self.record.new
        kernel, end = system.read_text(RELEASE).strip(), f"-{new}/dkms.conf"
        paths = [path for each in files.values() for path in each]
        source = next((each for each in paths if each.startswith("/usr/src/") and each.endswith(end)), "")
        if any(self._has_module(file, kernel, each) for file, each in files.items()):
            return
        if not source:
            what = f"the packages of driver {new} have no module for the running kernel {kernel}"
            raise AgentError(what, "boot a kernel for which they have one, or use --next-boot; nothing was changed")
        if not system.exists(f"/lib/modules/{kernel}/build/include"):
            what = f"DKMS cannot build the module of driver {new}: the running kernel's headers are missing"
            raise AgentError(what, f"install the package linux-headers-{kernel}; nothing was changed")
        # DKMS itself may come with the packages.
        if system.find_program("dkms"):
            directory, name = posixpath.dirname(source), source.removeprefix("/usr/src/").removesuffix(end)
            sources = [file for file, each in files.items() if any(path.startswith(f"{directory}/") for path in each)]
            size = sum(sum(files[each].values()) for each in sources)
            _need_room(
                DRIVER_PACKAGES, BUILD_COPIES * size + BUILD_OBJECTS, f"to build the module of driver {new}", system
            )
            self.reconciler.progress(f"build module {name} {new} in {BUILD} to prove that DKMS can; pods run on")
            try:
                build_by_dkms(name, new, kernel, sources, BUILD, system)
            except AgentError as error:
                what = f"the module of driver {new} cannot be built: {error}"
                raise AgentError(what, f"see {BUILD}.log; nothing was changed") from error

    def _has_module(self, file: str, kernel: str, paths: Collection[str]) -> bool:
        """Return whether a package's file has the new version's module for a kernel, or links it when it is installed.

        That of another version may be in files for the same kernel, and so are signatures that say no version.
        """
        name, version, _ = posixpath.basename(file).split("_")
        if not (name.endswith(f"-{kernel}") or any(f"/lib/modules/{kernel}/" in each for each in paths)):
            return False
        new = self.record.new
        # apt escapes the colon after an epoch.
        return upstream(version.replace("%3a", ":")) == new or is_made_for(
            new, dependencies(file, self.reconciler.system)
        )

    def _files(self, directory: str) -> list[str]:
        """Return the files of the new or the old packages."""
        system, new = self.reconciler.system, directory == NEW
        names, native = system.entries(directory), native_architecture(system)
        wanted = ((each.name, each.new if new else each.old) for each in self.record.changes)
        return [f"{directory}/{file_of(name, version, names, native)}" for name, version in wanted if version]

    def _record(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)
        RECORD.write(DRIVER_UPGRADE, self.record, self.reconciler.system)

    def _run(self) -> Ending:
        if self.record.phase in (Phase.ONLY_INSTALLING, Phase.NEXT_BOOT):
            # Somebody does not want to wait for the boot, or the boot has not loaded the module.
            self._record(phase=Phase.INSTALLING)
        if self.record.phase is Phase.STOPPING:
            try:
                self._free()
                self._record(phase=Phase.INSTALLING)
            except InUseError as error:
                self._record(phase=Phase.STARTING, failed=f"nothing of the driver was changed: {error}")
        if self.record.phase is Phase.INSTALLING:
            try:
                self._switch(self.record.new)
                self._record(phase=Phase.STARTING)
            except InUseError:
                raise
            except (AgentError, OSError) as error:
                self.reconciler.progress(f"driver {self.record.new} is not usable: {error}")
                self._record(phase=Phase.GOING_BACK, failed=f"driver {self.record.new} is not usable: {error}")
        if self.record.phase is Phase.GOING_BACK:
            try:
                self._switch(self.record.old)
                self._record(phase=Phase.STARTING)
            except InUseError:
                raise
            except (AgentError, OSError) as error:
                return self._stuck(error)
        return self._finish()

    def _stuck(self, error: Exception) -> Ending:
        """End with a driver that may not work. Machines run all the same, perhaps without GPUs."""
        self._start_again()
        record = self.record
        back = f"driver {record.old} could not be put back: {error}"
        advice = f"correct this, then `{COMMAND}` goes on; or install either version with apt, then reboot the host"
        return Ending(False, (record.failed, back, *self.remarks, advice))

    def _finish(self) -> Ending:
        ready = self._start_again()
        record, system = self.record, self.reconciler.system
        runs = self.packages.loaded(system)
        if isinstance(runs, str):
            forget(self.reconciler.system)
        version = f"driver {runs} runs" if isinstance(runs, str) else runs.why
        told = (f"{version}: {record.failed}",) if record.failed else (f"{version} in place of {record.old}",)
        return Ending(ready and not record.failed and runs == record.new, (*told, *self.remarks))

    def _install_for_next_boot(self) -> Ending:
        record = self.record
        try:
            self._install()
        except (AgentError, OSError) as error:
            self._put_back_after(error)
            forget(self.reconciler.system)
            what = f"driver {record.new} could not be installed, {record.old} is installed again: {error}"
            return Ending(False, (what,))
        self._record(phase=Phase.NEXT_BOOT)
        return Ending(True, (f"driver {record.new} is installed; `{COMMAND}` after the host's next boot checks it",))

    def _put_back_after(self, error: Exception) -> None:
        """Install the old packages again. Raises AgentError, which also says why, if that fails."""
        try:
            self._put_back()
        except (AgentError, OSError) as further:
            record = self.record
            what = f"driver {record.new} could not be installed: {error}; {record.old} could not be put back: {further}"
            raise AgentError(what, f"correct this, then `{COMMAND} --next-boot` goes on") from further

    # ---- steps

    def _switch(self, version: str) -> None:
        """Install the packages of this version, the new or the old one, and load its modules. Raises AgentError."""
        record, system = self.record, self.reconciler.system
        goes_on = version == record.new
        if not (self._are_installed(new=goes_on) and self.packages.loaded(system) == version):
            self._free()
            if goes_on:
                self._install()
            else:
                self._put_back()
            self._load(version)
        driver = self._facts().driver
        found = driver.user_space.version if driver else Absent("no driver was found")
        if found != version:
            has = f"libraries of {found}" if isinstance(found, str) else found.why
            raise AgentError(f"the module is of version {version}, but the host has {has}", "see `ldconfig -p`")

    def _are_installed(self, *, new: bool) -> bool:
        have = installed(self.reconciler.system)
        versions = {each.name: each.new if new else each.old for each in self.record.changes}
        wanted = {name: version for name, version in versions.items() if version}
        if any(name in have for name in versions.keys() - wanted.keys()):
            return False
        return all(name in have and have[name].complete and have[name].version == wanted[name] for name in wanted)

    def _added(self) -> tuple[str, ...]:
        """Return the packages that only the new driver needs."""
        return tuple(each.name for each in self.record.changes if each.old is None)

    def _put_back(self) -> None:
        system, progress = self.reconciler.system, self.reconciler.progress
        progress(f"go back to driver {self.record.old}")
        put_back(self._files(OLD), self._added(), system, progress)

    def _install(self) -> None:
        system, progress, record = self.reconciler.system, self.reconciler.progress, self.record
        if self._are_installed(new=True):
            return
        if any(not each.complete for each in installed(system).values()):
            progress("finish what dpkg was interrupted in")
            finish_installation(system, progress)
        files = self._files(NEW)
        would = simulate(("install", *files), system)
        gone = {each.name for each in record.changes if each.new is None}
        further = {each.name for each in would.changes}.difference(each.name for each in record.changes)
        if further := further | {*would.removed} - gone:
            raise AgentError(f"apt would now change further packages: {', '.join(sorted(further))}", "try again")
        dkms = ", for which DKMS builds the module again" if self._builds() else ""
        progress(f"install driver {record.new}{dkms}")
        marked = automatic(system)
        install(files, system, progress, removes=bool(gone))
        mark_automatic(self._not_asked_for(marked), system)

    def _not_asked_for(self, marked: Collection[str]) -> list[str]:
        """Return which of the new packages nobody asked for, given those that apt had installed by itself.

        apt takes each file for a wish, also of a kernel that only the module's package needs, and would keep it forever
        (seen with 2.8.4). A package with another branch in its name has the mark of the one that it follows.
        """
        changes = self.record.changes
        asked = {BRANCH.sub("", each.name) for each in changes if each.old and each.name not in marked}
        return [
            each.name
            for each in changes
            if each.new and (each.name in marked if each.old else BRANCH.sub("", each.name) not in asked)
        ]

    def _free(self) -> None:
        """Stop what uses the driver, and unload its modules. Raises InUseError."""
        try:
            with ExitStack() as locks:
                # A reset or a test of a GPU may have no node open at the moment.
                for address in sorted(gpu.pci_address for gpu in self._facts().gpus):
                    locks.enter_context(detach_lock(self.reconciler.system, address))
                if held := self.foreign_holders():
                    raise AgentError("; ".join(held), "end this first")
                self._stop()
                self._unload()
        except (AgentError, OSError) as error:
            raise InUseError(f"the driver is in use: {error}", f"then `{COMMAND}` again") from error

    def _stop(self) -> None:
        system, progress, packages = self.reconciler.system, self.reconciler.progress, self.packages
        for name in self._running_machines():
            self._record(machines=tuple(dict.fromkeys((*self.record.machines, name))))
            self.stop(name)
        for unit in reversed(self._running(packages.daemons)):
            self._record(units=tuple(dict.fromkeys((*self.record.units, unit))))
            progress(f"stop {unit}")
            system.run("systemctl", "stop", unit, timeout=UNIT_LIMIT)

        def held() -> tuple[tuple[Holder, ...], str]:
            found = self._holders()
            return found, f"waiting for {'; '.join(each.describe() for each in found)}" if found else ""

        if holders := self.reconciler.wait(held, RELEASE_LIMIT):
            raise AgentError("; ".join(each.describe() for each in holders))

    def _unload(self) -> None:
        system = self.reconciler.system
        order = unload_order(self.packages.module, system)
        # A module that somebody loaded meanwhile is loaded again too, as the last one.
        further = (each for each in order if each not in self.record.modules)
        self._record(modules=(*further, *self.record.modules))
        for module in order:
            self.reconciler.progress(f"unload {module}")
            unload_module(module, MODULE_LIMIT, system)

    def _running_machines(self) -> tuple[str, ...]:
        facts, planned, _ = self.reconciler.preview()
        return having_gpus(self.record.vendor, facts, planned, self.reconciler)

    def _load(self, version: str) -> None:
        """Load the modules, which must be of this version. Raises AgentError."""
        system, module = self.reconciler.system, self.packages.module
        if self.packages.loaded(system) != version:
            # Scripts of packages may have started daemons, which load what is there.
            try:
                self._free()
            except InUseError as error:
                raise AgentError(error.message) from error
            # Debian names the file nvidia-current, and only modprobe follows that: then, what it loads is looked at.
            with suppress(CommandError):
                on_disk = system.run("modinfo", "--field=version", module, timeout=QUERY_LIMIT).strip()
                if on_disk != version:
                    what = f"for this kernel, there is {module} {on_disk or 'without a version'}, not {version}"
                    raise AgentError(what, "see `dkms status`")
        self._load_modules()
        found = self.packages.loaded(system)
        if found != version:
            raise AgentError(f"{module} {found} is loaded, not {version}" if isinstance(found, str) else found.why)

    def _load_modules(self) -> None:
        system, progress = self.reconciler.system, self.reconciler.progress
        for module in reversed(self.record.modules):
            if not system.exists(f"/sys/module/{module}"):
                progress(f"load {module}")
                load_module(module, MODULE_LIMIT, system, again=True)
        try:
            self.packages.make_nodes(system, self.reconciler.devices.pci_devices, progress)
        except (AgentError, OSError) as error:
            self.remarks.append(f"device nodes are missing: {error}")

    def _start_again(self) -> bool:
        """Start what was stopped. Return whether all of it works; what does not is in the remarks."""
        system, progress, ready = self.reconciler.system, self.reconciler.progress, True
        try:
            self._load_modules()
        except (AgentError, OSError) as error:
            self.remarks.append(str(error))
            ready = False
        for unit in (each for each in self.packages.daemons if each in self.record.units):
            progress(f"start {unit}")
            try:
                system.run("systemctl", "start", unit, timeout=UNIT_LIMIT)
            except (AgentError, OSError) as error:
                self.remarks.append(str(error))
                ready = False
        for name in self.record.machines:
            progress(f"start machine {name}")
            try:
                code = self.start(name)
            except (AgentError, OSError) as error:
                self.remarks.append(str(error))
                code = 1
            ready = ready and code == 0
        return ready


def _need_room(path: str, size: int, what: str, system: System) -> None:
    """Raise AgentError if the file system of a path has no room for that many bytes."""
    needed, free = size + MARGIN, system.free_bytes(path)
    if free < needed:
        text = f"{path}: {needed >> 20} MiB may be needed {what}, but only {free >> 20} MiB are free"
        raise AgentError(text, "free up space on that file system; nothing was changed")


def forget(system: System) -> None:
    """Remove the record of an upgrade, and its packages."""
    system.remove(DRIVER_UPGRADE)
    system.remove_tree(DRIVER_PACKAGES)


def having_gpus(vendor: str, facts: Facts, planned: Plan, reconciler: Reconciler) -> tuple[str, ...]:
    """Return the machines that may run, and have the vendor's GPUs. Raises AgentError."""
    addresses = [gpu.pci_address for each in facts.vendors if each.vendor == vendor for gpu in each.gpus]
    configured = reconciler.config.machines
    have = {name for each in addresses for name in granted_to(each, facts, planned, configured)}
    return tuple(each.name for each in facts.machines if each.name in have and not each.ended)


def plan_upgrade(
    to: str, reconciler: Reconciler, stop: Callable[[str], None], start: Callable[[str], int], *, dry_run: bool
) -> Upgrade | str:
    """Return the upgrade to a version, or to the newest one, or what was not finished. Changes nothing of the driver.

    If there is nothing to do, return a sentence that says so. Raises AgentError if there is no such upgrade.
    """
    system, found = reconciler.system, recorded(reconciler.system)
    if isinstance(found, Broken | Unseen):
        raise AgentError(found.why, f"see `dpkg --list` for what is installed, then remove {DRIVER_UPGRADE}")
    facts, planned, _ = reconciler.preview()
    unfinished = isinstance(found, DriverUpgrade) and bool(left_to_do(system))
    if isinstance(found, DriverUpgrade) and not unfinished and not dry_run:
        forget(system)
    if isinstance(found, DriverUpgrade) and unfinished:
        if to not in ("", found.new):
            raise AgentError(f"{found.what} is not finished", f"leave out --to: `{COMMAND}` goes on")
        record, stays = found, tuple[str, ...]()
    else:
        made = _planned(to, facts, system)
        if isinstance(made, str):
            return made
        record, stays = made
    packages = _packages(record.vendor)
    if packages is None:
        raise AgentError(f"{DRIVER_UPGRADE}: vendor {record.vendor} has no packages", "remove the file")
    machines = having_gpus(record.vendor, facts, planned, reconciler)
    return Upgrade(record, unfinished, reconciler, packages, machines, stays, stop, start)


def _planned(to: str, facts: Facts, system: System) -> tuple[DriverUpgrade, tuple[str, ...]] | str:
    """Return the upgrade, and the driver's packages that stay; or a sentence if there is nothing to do."""
    vendor, packages, old = _driver(facts)
    have = installed(system)
    if broken := [name for name, each in have.items() if not each.complete]:
        raise AgentError(f"not completely installed: {first_of(broken)}", "run `dpkg --configure --pending` first")
    own = {name: each for name, each in have.items() if each.upstream == old}
    if not own:
        what = f"no package has the version {old} of the loaded driver"
        raise AgentError(what, "`driver upgrade` only upgrades a driver that comes in packages for apt")
    # Built modules have the kernel's version, but also the branch in their names.
    branch = old.partition(".")[0]
    branched = [name for name in have if (name in own or vendor.vendor in name) and _has_branch(name, branch)]
    if held := [name for name, each in have.items() if each.held and (name in own or name in branched)]:
        # apt simulates their change, but does not make it.
        names = " ".join(held)
        hint = f"run `apt-mark unhold {names}`, and hold them afterwards"
        raise AgentError(f"apt keeps the versions of {names}", hint)
    _refuse_pins(have, to, packages)
    replaced = dict[str, str]()
    if to and to.partition(".")[0] != branch and any(name in own for name in branched):
        # What has the old branch in its name is not asked for: where that has ended, those packages are empty.
        replaced = _other_names(branched, to, system)
    words = ["install", *_wanted(own, [name for name in branched if name.startswith(BUILT)], replaced, to, system)]
    would = _simulated(words, to, system)
    new = to if replaced else _new_version(own, old, would)
    # What has the whole version in its name has no successor of the same name.
    goes = {*replaced, *(name for name in own if replaced and old in name)}
    if removed := [name for name in would.removed if name not in goes]:
        raise AgentError(f"apt would remove {first_of(removed)}", f"see `apt-get --simulate {' '.join(words)}`")
    gone = tuple(Change(name, have[name].version, None) for name in would.removed)
    if not new:
        return f"driver {old}: there is nothing to upgrade (`apt update` reads the package sources again)"
    changes = tuple(sorted((*would.changes, *gone), key=lambda each: each.name))
    stays = tuple(sorted(own.keys() - {each.name for each in changes}))
    if strict := [each for each in stays if each.startswith(packages.strict_packages)]:
        raise AgentError(f"no package source has {strict[0]} in {new}, and it only works with a module of its version")
    modules = unload_order(packages.module, system)
    return DriverUpgrade(vendor.vendor, old, new, changes, Phase.STOPPING, modules=modules), stays


def _new_version(own: Mapping[str, Package], old: str, would: Changes) -> str:
    """Return the driver's version after these changes; empty if none changes it. Raises AgentError if it is unclear."""
    names = {BRANCH.sub("", name) for name in own}
    # Ubuntu ends a branch by packages that are empty, and need those of the next branch.
    successors = {
        upstream(each.new) for each in would.changes if each.new and not each.old and BRANCH.sub("", each.name) in names
    }
    if successors:
        (first, *_) = sorted(successors)
        raise AgentError(f"apt would replace the packages of driver {old} by those of {first}", f"use --to {first}")
    versions = {upstream(each.new) for each in would.changes if each.new and each.name in own} - {old}
    if len(versions) > 1:
        raise AgentError(f"apt would mix driver {' and '.join(sorted(versions))}", "choose one with --to")
    return next(iter(versions), "")


def _wanted(
    own: Collection[str], built: Collection[str], replaced: Mapping[str, str], to: str, system: System
) -> Iterable[str]:
    """Return what apt is to install: the driver's own packages, and built modules. Raises AgentError if it cannot."""
    if not to:
        # apt itself would keep Ubuntu's closed modules. What needs those of each new kernel stays if it can.
        return ("--only-upgrade", *own, *(name for name in built if KERNEL.search(name)))
    versions = available(sorted({*own, *replaced.values()} - replaced.keys()), to, system)
    if not versions:
        raise AgentError(f"no package source has the driver's packages in {to}", "run `apt update`, or correct --to")
    versions |= available_for([replaced.get(name, name) for name in built], to, system)
    # Of another branch, those of other kernels than the running one may go, but not all.
    all_go = not any(name.startswith(BUILT) or DKMS.search(name) for name in versions)
    missing = {name for name in replaced.values() if name not in versions and (all_go or not KERNEL.search(name))}
    if missing:
        raise AgentError(f"no package source has {first_of(sorted(missing))} in {to}", "install that version with apt")
    return (f"{name}={version}" for name, version in versions.items())


def _simulated(words: Sequence[str], to: str, system: System) -> Changes:
    """Return what apt would do. Raises AgentError if it can do nothing."""
    try:
        would = simulate(words, system)
        others = [each.name for each in would.changes if to and each.new and upstream(each.new) != to]
        # For a package that must be of `to` at least, apt takes the newest: that would mix versions of the driver.
        if chosen := available(others, to, system):
            would = simulate([*words, *(f"{name}={version}" for name, version in chosen.items())], system)
    except CommandError as error:
        raise AgentError(str(error), "run it to see why, or choose another version with --to") from error
    return would


def _has_branch(name: str, branch: str) -> bool:
    """Return whether a package has the branch in its name, but no whole version, as nvidia-firmware-570-570.86.15."""
    found = BRANCH.search(name)
    return found is not None and found["branch"] == branch and f"-{branch}." not in name


def _refuse_pins(have: Iterable[str], to: str, packages: DriverPackages) -> None:
    """Raise AgentError if an installed package makes apt prefer another branch or version than that, if it is given."""
    for name in have if to else ():
        kept = name.removeprefix(packages.pins)
        if kept not in (name, to) and not to.startswith(f"{kept}."):
            other = packages.pins + to.partition(".")[0]
            raise AgentError(f"{name} keeps apt to driver {kept}", f"install {other} with apt first, or correct --to")


def _other_names(names: Iterable[str], to: str, system: System) -> dict[str, str]:
    """Return what packages with a branch in their names are called in the branch of `to`.

    Ubuntu's names have the new branch. NVIDIA's package source for Ubuntu has no branch in names from 590 on:
    libnvidia-compute-580 became libnvidia-compute, nvidia-dkms-580-open nvidia-dkms-open ("Recent updates" in NVIDIA's
    Driver Installation Guide r590). Built modules are only Ubuntu's.
    """
    with_branch = {name: BRANCH.sub(f"-{to.partition('.')[0]}", name, count=1) for name in names}
    if available([each for each in with_branch.values() if not each.startswith(BUILT)], to, system):
        return with_branch
    return {name: each if each.startswith(BUILT) else BRANCH.sub("", name, 1) for name, each in with_branch.items()}


def _driver(facts: Facts) -> tuple[VendorFacts, DriverPackages, str]:
    """Return the vendor whose driver can be upgraded, and the driver's version. Raises AgentError."""
    for vendor in facts.vendors:
        packages = host_vendor(vendor.vendor).packages
        if packages is None or vendor.driver is None:
            continue
        module, libraries = vendor.driver.module_version, vendor.driver.user_space.version
        if not isinstance(module, str):
            raise AgentError(module.why, "upgrade the packages with apt, then load the module or reboot the host")
        if libraries != module:
            has = f"libraries of {libraries}" if isinstance(libraries, str) else libraries.why
            raise AgentError(f"module {module} is loaded, but the host has {has}", "see `unbounded-agent doctor`")
        return vendor, packages, module
    names = " or ".join(each.name for each in HOST_VENDORS if each.packages)
    raise AgentError(f"this host has no driver of {names}")
