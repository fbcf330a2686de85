"""Reads containerd's files as containerd does, makes the tables by which pods get CDI devices, and checks them. Pure.

The tables are described in containerd's docs/cri/config.md. A file names the version of its format. Format version 2
has one table for the CRI plugin; version 3 has two, of which only that of the runtime is used here. Up to containerd
2.2, all files together have one version: containerd merges them first, and the version of the last file that names one
counts. If it is 3, tables of version 2 are ignored in all files. If it is 2, the keys of their table are added to those
of the newer table, unless it has them already. (Seen with 2.1.9; LoadConfig in cmd/containerd/server/config,
configMigration in plugins/cri/runtime.)
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from agent.model.errors import AgentError, DocumentError
from agent.model.paths import CDI_DIRECTORIES
from agent.model.text import dotted
from agent.vendors.machine_vendor import RuntimeHandler

Table = dict[str, Any]

MAIN = "/etc/containerd/config.toml"
CONF_D = "/etc/containerd/conf.d"
IMPORT = f"{CONF_D}/*.toml"
"""The import in containerd 2.2's default configuration. Unlike a plain path, a pattern may match no file."""
CRI_2 = "io.containerd.grpc.v1.cri"
CRI_3 = "io.containerd.cri.v1.runtime"
SHIM = "io.containerd.runc.v2"
OLDEST = (1, 7, 0)
"""The first version of containerd whose CRI plugin supports CDI."""
MERGES_DEEPLY = (2, 0, 0)
"""The first containerd that merges the files' tables. Before, a plugin has only the table of the last file with one."""
MIGRATES_EACH_FILE = (2, 3, 0)
"""The first containerd that migrates each file before it merges the files, so they may have different versions."""


def merge(into: Table, table: Table) -> Table:
    """Add a copy of `table` to `into`, and return that: tables are merged, and other values are replaced."""
    for key, value in table.items():
        if isinstance(value, dict):
            held = into.get(key)
            into[key] = merge(held if isinstance(held, dict) else {}, value)
        else:
            into[key] = value
    return into


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the path and the value of each key whose value is not a table, or is an empty table."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif path:
        yield path, value


def at(document: object, *names: str) -> Table:
    """Return the table at a path; an empty one if there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


class Configuration(NamedTuple):
    """containerd's configuration without the agent's drop-in."""

    documents: dict[str, Table]
    """The main file, and the files that it imports, by path, in the order of loading."""
    dump: Table
    """The output of `containerd config dump` for these files, with all defaults."""
    loaded_later: tuple[str, ...] = ()
    """The files that are loaded after the agent's drop-in."""
    drop_in: str = ""

    def version(self, containerd: tuple[int, ...]) -> int:
        """Return the format version of the drop-in, on which the names of its tables depend.

        It is the main file's version, or 1 if the main file has tables of plugins but no version. If the main file has
        neither, it is the highest version of the imported files. If these have none either, it is that of a new file
        for this version of containerd.

        For a containerd that takes all files for the version of the last one, it is that version: then the drop-in does
        not change how containerd reads the other files.
        """
        main = self.documents[MAIN]
        value = main.get("version", 1 if "plugins" in main else None)
        if value is not None and (not isinstance(value, int) or value < 2):
            return value if isinstance(value, int) else 1
        versions = self.versions()
        if MERGES_DEEPLY <= containerd < MIGRATES_EACH_FILE:
            return next(reversed(versions.values()), new_version(containerd))
        return value or max(versions.values(), default=new_version(containerd))

    def versions(self) -> dict[str, int]:
        """Return the versions of the files that name one, by path. Version 1 is left out: such files are migrated."""
        named = ((path, document.get("version")) for path, document in self.documents.items())
        return {path: value for path, value in named if isinstance(value, int) and value > 1}

    def newer_files(self, containerd: tuple[int, ...]) -> str:
        """Return which imported files have a newer version than the main file; empty if this containerd accepts them.

        containerd 2.3 refuses such files, but does not name them.
        """
        versions = self.versions()
        own = versions.get(MAIN)
        if containerd < MIGRATES_EACH_FILE or own is None:
            return ""
        newer = [f"{path} has version {each}" for path, each in versions.items() if each > own]
        return f"; {', '.join(newer)}, and {MAIN} has version {own}: write them in one version" if newer else ""

    def mixture(self, containerd: tuple[int, ...]) -> str:
        """Return why files are not read as they are written, and what to do; empty if this containerd reads them so."""
        versions = self.versions()
        if not MERGES_DEEPLY <= containerd < MIGRATES_EACH_FILE or len(set(versions.values())) < 2:
            return ""
        *_, (last, version) = versions.items()
        others = ", ".join(f"{path} has version {each}" for path, each in versions.items() if each != version)
        return (
            f"; containerd {dotted(containerd)} reads all its files as version {version}, that of {last}, but "
            f"{others}: write these files in one version, or install containerd {dotted(MIGRATES_EACH_FILE)} or newer"
        )

    def merged(self, *names: str) -> Table:
        """Return the merged tables of plugins from all files."""
        merged: Table = {}
        for document in self.documents.values():
            for name in names:
                merge(merged, at(document, "plugins", name))
        return merged

    def cri(self, containerd: tuple[int, ...], version: int) -> Table:
        """Return the CRI table that results from all files, which containerd takes for this format version."""
        if containerd < MERGES_DEEPLY:
            tables = (at(each, "plugins", cri_table(version)) for each in reversed(self.documents.values()))
            return next((each for each in tables if each), {})
        if containerd < MIGRATES_EACH_FILE:
            newer = self.merged(CRI_3)
            return newer if version > 2 else self.merged(CRI_2) | newer
        merged: Table = {}
        for document in self.documents.values():
            # In a file older than version 4, both tables count: migration to version 4 adds the keys of CRI_2 to those
            # of CRI_3, and a key of CRI_3 wins (configMigration in containerd's plugins/cri/runtime).
            value = document.get("version", 1)
            for name in (CRI_3,) if isinstance(value, int) and value > 3 else (CRI_2, CRI_3):
                merge(merged, at(document, "plugins", name))
        return merged


def new_version(containerd: tuple[int, ...]) -> int:
    """Return the format version for a new configuration file. Every containerd 2 reads version 3."""
    return 2 if containerd < (2, 0, 0) else 3


def cri_table(version: int) -> str:
    """Return the name of the CRI plugin's table in files with this format version."""
    return CRI_2 if version < 3 else CRI_3


def cri_of(dump: Table) -> Table:
    """Return the CRI table of a dump. containerd 2 prints version 3, whatever version the files have."""
    return at(dump, "plugins", CRI_3) or at(dump, "plugins", CRI_2)


def drop_in_path(handler: RuntimeHandler | None) -> str:
    """Return the default path of the drop-in for a handler, or for CDI alone.

    containerd loads drop-ins in alphabetical order. Because the name begins with 99, few others are loaded later.
    """
    return f"{CONF_D}/99-{handler.name if handler else 'cdi'}.toml"


def parse_version(text: str) -> tuple[int, ...]:
    """Parse the output of `containerd --version`: "containerd github.com/containerd/containerd/v2 v2.1.9 <commit>"."""
    # At most nine digits: int() raises ValueError for thousands of them.
    match = re.search(r"\sv?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", text)
    if match is None:
        raise DocumentError(f"containerd --version: no version in {text.strip()[:200]!r}")
    return tuple(int(number) for number in match.groups())


def imports(path: str, document: Table) -> tuple[str, ...]:
    """Return a file's imports as absolute patterns; in the file, they may be relative to its directory."""
    listed = document.get("imports", [])
    if not isinstance(listed, list):
        raise DocumentError(f"{path}: key imports is not a list", "repair it: containerd cannot start with it either")
    directory = posixpath.dirname(path)
    return tuple(posixpath.normpath(posixpath.join(directory, str(pattern))) for pattern in listed)


def covers(pattern: str, path: str) -> bool:
    """Return whether an import makes containerd load a file. Only imports with an asterisk are patterns."""
    if "*" not in pattern:
        return pattern == path
    # Like Go's filepath.Glob: no wildcard matches a slash.
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def render(
    configuration: Configuration, containerd: tuple[int, ...], handler: RuntimeHandler | None, *, default: bool
) -> Table:
    """Return the drop-in's content. Raises AgentError if it cannot work with this containerd or its other files.

    `containerd` is the program's version. `default` says whether the handler becomes the default runtime.
    """
    if containerd < OLDEST:
        raise AgentError(
            f"containerd {dotted(containerd)} is too old: {dotted(OLDEST)} is the first with CDI",
            "install a newer containerd in the image",
        )
    version = configuration.version(containerd)
    if version < 2:
        # Up to containerd 2.2, some settings of version 1 get lost, such as sandbox_image.
        prints = "dump` prints it in version 2" if containerd < (2, 0, 0) else "migrate` prints it in a newer version"
        raise AgentError(
            f"{MAIN} has version {version}, whose tables containerd no longer documents",
            f"in the machine, `containerd config {prints}: add the settings that are missing, and write it to {MAIN}",
        )
    for path, document in configuration.documents.items():
        disabled = document.get("disabled_plugins", [])
        if isinstance(disabled, list) and {"cri", CRI_2, CRI_3} & {str(each) for each in disabled}:
            raise AgentError(
                f"{path} disables containerd's CRI plugin, so no kubelet can use it",
                "remove cri from disabled_plugins",
            )
    name, table = cri_table(version), Table()
    effective = configuration.cri(containerd, version)
    if containerd < MERGES_DEEPLY:
        # For each plugin, containerd 1.x uses only the table of the last file that has one.
        later = [path for path in configuration.loaded_later if at(configuration.documents[path], "plugins", name)]
        if later:
            raise AgentError(
                f"{configuration.drop_in} is loaded before {', '.join(later)}, which would replace its table",
                "import that file earlier, under a name that sorts before the drop-in's, or move its settings into the "
                "main file",
            )
        # A table with any runtime also replaces containerd's default runtimes, so these are copied into it.
        runtimes = at(cri_of(configuration.dump), "containerd", "runtimes")
        if runtimes:
            merge(table, {"containerd": {"runtimes": runtimes | at(effective, "containerd", "runtimes")}})
        effective = merge(merge({}, effective), table)
        table = merge({}, effective)
    _add_settings(table, effective, version, handler, default=default)
    tables = {name: table}
    if name == CRI_2 and MERGES_DEEPLY <= containerd < MIGRATES_EACH_FILE:
        # In each table, a key of CRI_2 counts only if no file has this key in CRI_3.
        newer = configuration.merged(CRI_3)
        parts = {CRI_2: table.keys() - newer.keys(), CRI_3: table.keys() & newer.keys()}
        tables = {each: {key: table[key] for key in table if key in keys} for each, keys in parts.items() if keys}
    return {"version": version, "plugins": tables}


def _add_settings(
    table: Table, effective: Table, version: int, handler: RuntimeHandler | None, *, default: bool
) -> None:
    """Add to the drop-in's `table` what CDI and the handler need.

    `effective` is the CRI table that containerd uses without these additions.
    """
    if version < 3 or effective.get("enable_cdi") is False:
        # `enable_cdi` is true by default since containerd 2.0, and deprecated since 2.2.
        table["enable_cdi"] = True
    listed = [str(each) for each in effective.get("cdi_spec_dirs", [])]
    table["cdi_spec_dirs"] = [*listed, *(each for each in CDI_DIRECTORIES if each not in listed)]
    if handler is None:
        return
    containerd = table.setdefault("containerd", {})
    if default:
        containerd["default_runtime_name"] = handler.name
    runtime = merge({}, _base_runtime(effective, handler)) | {"runtime_type": SHIM}
    runtime["options"] = at(runtime, "options") | {"BinaryName": handler.binary}
    containerd.setdefault("runtimes", {})[handler.name] = runtime


def _base_runtime(effective: Table, handler: RuntimeHandler) -> Table:
    """Return the runtime whose settings the handler takes over: that of its name, else the default one, else runc.

    A default runtime with another shim, such as Kata's, is not used: it may lack runc's options, such as SystemdCgroup.
    But a runtime with the handler's name is used whatever its shim is: none of its settings may be lost (`problems`),
    and containerd 2 merges its settings with those of the drop-in anyway. Options that SHIM does not have do no harm,
    because containerd ignores them.
    """
    containerd = at(effective, "containerd")
    runtimes = at(containerd, "runtimes")
    default = at(runtimes, str(containerd.get("default_runtime_name")))
    usable = default if default.get("runtime_type", SHIM) == SHIM else {}
    return at(runtimes, handler.name) or usable or at(runtimes, "runc")


def problems(
    before: Table, after: Table, drop_in: Table, handler: RuntimeHandler | None, *, default: bool
) -> Iterable[str]:
    """Yield what is wrong with the drop-in.

    `before` is containerd's dump without the drop-in, and `after` is the dump with it.
    """
    settings = dict(leaves(after.get("plugins", {})))
    for path, value in leaves(before.get("plugins", {})):
        # Without the values: they may be passwords of registries, and this message is shown on the Node.
        if not _is_set_by_drop_in(path, handler) and (path not in settings or settings[path] != value):
            yield f"setting {'.'.join(path)} is {'changed' if path in settings else 'lost'}"
    if handler:
        runtime = at(cri_of(after), "containerd", "runtimes", handler.name)
        if at(runtime, "options").get("BinaryName") != handler.binary:
            yield f"runtime {handler.name} does not run {handler.binary}"
        # The result is compared with the base runtime in `before`. It is not compared with the drop-in, because that
        # may have keys that containerd does not know, and so does not print.
        actual, base = dict(leaves(runtime)), dict(leaves(_base_runtime(cri_of(before), handler)))
        added = at(drop_in, "plugins", CRI_2) | at(drop_in, "plugins", CRI_3)
        for path, _ in leaves(at(added, "containerd", "runtimes", handler.name)):
            ours = _is_set_by_drop_in((handler.name, *path), handler)
            if path in base and not ours and actual.get(path) != base[path]:
                yield f"runtime {handler.name} does not have {'.'.join(path)} as configured"
    kept = cri_of(after).get("cdi_spec_dirs", ())
    if lost := [str(each) for each in cri_of(before).get("cdi_spec_dirs", ()) if each not in kept]:
        yield f"cdi_spec_dirs no longer contains {', '.join(lost)}"
    yield from cdi_problems(after)
    if handler and default and at(cri_of(after), "containerd").get("default_runtime_name") != handler.name:
        yield f"default_runtime_name is not {handler.name}"


def _is_set_by_drop_in(path: tuple[str, ...], handler: RuntimeHandler | None) -> bool:
    if path[-1] in {"enable_cdi", "cdi_spec_dirs", "default_runtime_name"}:
        return True
    return handler is not None and (
        path[-2:] == (handler.name, "runtime_type") or path[-3:] == (handler.name, "options", "BinaryName")
    )


def cdi_problems(dump: Table) -> Iterable[str]:
    """Yield what keeps pods from getting CDI devices, according to `containerd config dump`."""
    cri = cri_of(dump)
    if not cri.get("enable_cdi", dump.get("version", 0) >= 3):
        yield "enable_cdi is not true"
    missing = [each for each in CDI_DIRECTORIES if each not in cri.get("cdi_spec_dirs", ())]
    if missing:
        yield f"cdi_spec_dirs does not contain {', '.join(missing)}"
