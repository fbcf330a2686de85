"""Makes the tables of containerd's configuration by which pods get CDI devices, and checks the result. Pure.

The tables are described in containerd's docs/cri/config.md.
"""

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from agent.machine.containerd.formats import (
    CRI_2,
    CRI_3,
    MAIN,
    Configuration,
    combined_cri_table,
    cri_table,
    drop_in_tables,
)
from agent.machine.containerd.nested import Table, at, copy_of, leaves
from agent.model.errors import DocumentError, UnsupportedError
from agent.model.paths import CDI_DIRECTORIES
from agent.model.text import dotted
from agent.vendors.machine_vendor import RuntimeHandler

CONF_D = "/etc/containerd/conf.d"
IMPORT = f"{CONF_D}/*.toml"
"""The import in containerd 2.2's default configuration. Unlike a plain path, a pattern may match no file."""
SUFFIXES = (".toml", ".part")
"""Suffixes that the agent's drop-in may have. Talos merges files whose names end in `.part`."""

SHIM = "io.containerd.runc.v2"
OLDEST = (1, 7, 0)
"""The first version of containerd whose CRI plugin supports CDI."""


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
    """Return a file's imports as absolute patterns; in the file, they may be relative to its directory.

    Raises DocumentError.
    """
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
    """Return the drop-in's content. Raises UnsupportedError if it cannot work with this containerd or its other files.

    `containerd` is the program's version. `default` says whether the handler becomes the default runtime.
    """
    if containerd < OLDEST:
        raise UnsupportedError(
            f"containerd {dotted(containerd)} is too old: {dotted(OLDEST)} is the first with CDI",
            "install a newer containerd in the image",
        )
    version = configuration.version(containerd)
    if version < 2:
        # Up to containerd 2.2, some settings of version 1 get lost, such as sandbox_image.
        prints = "dump` prints it in version 2" if containerd < (2, 0, 0) else "migrate` prints it in a newer version"
        raise UnsupportedError(
            f"{MAIN} has version {version}, whose tables containerd no longer documents",
            f"in the machine, `containerd config {prints}: add the settings that are missing, and write it to {MAIN}",
        )
    for path, document in configuration.documents.items():
        disabled = document.get("disabled_plugins", [])
        if isinstance(disabled, list) and {"cri", CRI_2, CRI_3} & {str(each) for each in disabled}:
            raise UnsupportedError(
                f"{path} disables containerd's CRI plugin, so no kubelet can use it",
                "remove cri from disabled_plugins",
            )
    # For each plugin, containerd 1.x uses only the table of the last file that has one; 2.0 merges the tables deeply.
    last_file_wins = containerd < (2, 0, 0)
    later = [
        path for path in configuration.loaded_later if at(configuration.imported[path], "plugins", cri_table(version))
    ]
    if last_file_wins and later:
        raise UnsupportedError(
            f"{configuration.drop_in} is loaded before {', '.join(later)}, which would replace its table",
            "import that file earlier, under a name that sorts before the drop-in's, or move its settings into the "
            "main file",
        )
    effective = combined_cri_table(configuration, containerd, version)
    table = copy_of(effective) if last_file_wins else {}
    if last_file_wins:
        # A table with any runtime also replaces containerd's default runtimes, so these are copied into it.
        for name, runtime in at(cri_of(configuration.dump), "containerd", "runtimes").items():
            table.setdefault("containerd", {}).setdefault("runtimes", {}).setdefault(name, copy_of(runtime))
        effective = copy_of(table)
    _add_settings(table, effective, version, handler, default=default)
    return {"version": version, "plugins": drop_in_tables(configuration, containerd, version, table)}


def problems(
    before: Table, after: Table, drop_in: Table, handler: RuntimeHandler | None, *, default: bool
) -> Iterator[str]:
    """Yield what is wrong with the drop-in.

    `before` is containerd's dump without the drop-in, and `after` is the dump with it.
    """
    settings = dict(leaves(after.get("plugins", {})))
    for path, value in leaves(before.get("plugins", {})):
        if _is_set_by_drop_in(path, handler):
            continue
        if path not in settings:
            yield f"setting {'.'.join(path)} is lost"
        elif settings[path] != value:
            # Without the values: they may be passwords of registries, and this message is shown on the Node.
            yield f"setting {'.'.join(path)} is changed"
    if handler:
        yield from _handler_problems(before, after, drop_in, handler)
    kept = cri_of(after).get("cdi_spec_dirs", ())
    if lost := [str(each) for each in cri_of(before).get("cdi_spec_dirs", ()) if each not in kept]:
        yield f"cdi_spec_dirs no longer contains {', '.join(lost)}"
    yield from cdi_problems(after)
    if handler and default and at(cri_of(after), "containerd").get("default_runtime_name") != handler.name:
        yield f"default_runtime_name is not {handler.name}"


def _handler_problems(before: Table, after: Table, drop_in: Table, handler: RuntimeHandler) -> Iterator[str]:
    runtime = at(cri_of(after), "containerd", "runtimes", handler.name)
    if at(runtime, "options").get("BinaryName") != handler.binary:
        yield f"runtime {handler.name} does not run {handler.binary}"
    # The result is compared with the base runtime in `before`. It is not compared with the drop-in, because that may
    # have keys that containerd does not know, and so does not print.
    actual, base = dict(leaves(runtime)), dict(leaves(_base_runtime(cri_of(before), handler)))
    added = at(drop_in, "plugins", CRI_2) | at(drop_in, "plugins", CRI_3)
    for path, _ in leaves(at(added, "containerd", "runtimes", handler.name)):
        ours = _is_set_by_drop_in((handler.name, *path), handler)
        if path in base and not ours and actual.get(path) != base[path]:
            yield f"runtime {handler.name} does not have {'.'.join(path)} as configured"


def _is_set_by_drop_in(path: tuple[str, ...], handler: RuntimeHandler | None) -> bool:
    """Return whether the drop-in may set this key, whatever its value was before."""
    if path[-1] in {"enable_cdi", "cdi_spec_dirs", "default_runtime_name"}:
        return True
    return handler is not None and (
        path[-2:] == (handler.name, "runtime_type") or path[-3:] == (handler.name, "options", "BinaryName")
    )


def cdi_problems(dump: Table) -> Iterator[str]:
    """Yield what keeps pods from getting CDI devices, according to `containerd config dump`."""
    cri = cri_of(dump)
    if not cri.get("enable_cdi", dump.get("version", 0) >= 3):
        yield "enable_cdi is not true"
    missing = [each for each in CDI_DIRECTORIES if each not in cri.get("cdi_spec_dirs", ())]
    if missing:
        yield f"cdi_spec_dirs does not contain {', '.join(missing)}"


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
    runtime = copy_of(_base_runtime(effective, handler))
    runtime["runtime_type"] = SHIM
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


def cri_of(dump: Table) -> Table:
    """Return the CRI table of a dump. containerd 2 prints version 3, whatever version the files have."""
    plugins = dump.get("plugins", {})
    return at(plugins, CRI_3) or at(plugins, CRI_2)
