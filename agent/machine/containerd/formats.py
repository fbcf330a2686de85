"""Reads containerd's files in the format versions that containerd takes them for. Pure.

A file names the version of its format. Format version 2 has one table for the CRI plugin; version 3 has two, of which
only that of the runtime is used here. Up to containerd 2.2, all files together have one version: containerd merges them
first, and the version of the last file that names one counts. If it is 3, tables of version 2 are ignored in all files.
If it is 2, the keys of their table are added to those of the newer table, unless it has them already. (Seen with 2.1.9;
LoadConfig in cmd/containerd/server/config, configMigration in plugins/cri/runtime.)
"""

from collections.abc import Mapping
from typing import NamedTuple

from agent.machine.containerd.nested import Table, at, merge
from agent.model.text import dotted

MAIN = "/etc/containerd/config.toml"
CRI_2 = "io.containerd.grpc.v1.cri"
CRI_3 = "io.containerd.cri.v1.runtime"
MERGES_DEEPLY = (2, 0, 0)
"""The first containerd that merges the files' tables. Before, a plugin has only the table of the last file with one."""
MIGRATES_EACH_FILE = (2, 3, 0)
"""The first containerd that migrates each file before it merges the files, so they may have different versions."""


class Configuration(NamedTuple):
    """containerd's configuration without the agent's drop-in."""

    main: Table
    imported: Mapping[str, Table]
    """The imported files by path, in the order of loading."""
    dump: Table
    """The output of `containerd config dump` for these files, with all defaults."""
    loaded_later: tuple[str, ...] = ()
    """The imported files that are loaded after the agent's drop-in."""
    drop_in: str = ""
    """The path of the agent's drop-in."""

    @property
    def documents(self) -> dict[str, Table]:
        """Return all files by path, in the order of loading."""
        return {MAIN: self.main, **self.imported}

    def version(self, containerd: tuple[int, ...]) -> int:
        """Return the format version of the drop-in, on which the names of its tables depend.

        It is the main file's version, or 1 if the main file has tables of plugins but no version. If the main file has
        neither, it is the highest version of the imported files. If these have none either, it is that of a new file
        for this version of containerd.

        For a containerd that takes all files for the version of the last one, it is that version: then the drop-in does
        not change how containerd reads the other files.
        """
        value = self.main.get("version", 1 if "plugins" in self.main else None)
        versions = self.versions()
        if value is not None and (not isinstance(value, int) or value < 2):
            return value if isinstance(value, int) else 1
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
        if containerd < MIGRATES_EACH_FILE or MAIN not in versions:
            return ""
        newer = [f"{path} has version {each}" for path, each in versions.items() if each > versions[MAIN]]
        return (
            f"; {', '.join(newer)}, and {MAIN} has version {versions[MAIN]}: write them in one version" if newer else ""
        )

    def mixture(self, containerd: tuple[int, ...]) -> str:
        """Return why files are not read as they are written, and what to do; empty if this containerd reads them so."""
        versions = self.versions()
        if not MERGES_DEEPLY <= containerd < MIGRATES_EACH_FILE or len(set(versions.values())) < 2:
            return ""
        *_, (last, version) = versions.items()
        others = ", ".join(f"{path} has version {each}" for path, each in versions.items() if each != version)
        return (
            f"containerd {dotted(containerd)} reads all its files as version {version}, that of {last}, but {others}: "
            f"write these files in one version, or install containerd {dotted(MIGRATES_EACH_FILE)} or newer"
        )


def new_version(containerd: tuple[int, ...]) -> int:
    """Return the format version for a new configuration file. Every containerd 2 reads version 3."""
    return 2 if containerd < (2, 0, 0) else 3


def cri_table(version: int) -> str:
    """Return the name of the CRI plugin's table in files with this format version."""
    return CRI_2 if version < 3 else CRI_3


def combined_cri_table(configuration: Configuration, containerd: tuple[int, ...], version: int) -> Table:
    """Return the CRI table that results from all files, which containerd takes for this format version.

    In containerd 1.x, this is the table of the last file that has one; otherwise the files' tables are merged.
    """
    documents, name = tuple(configuration.documents.values()), cri_table(version)
    if containerd < MERGES_DEEPLY:
        return next((table for each in reversed(documents) if (table := at(each, "plugins", name))), {})
    if containerd < MIGRATES_EACH_FILE:
        newer = _merged(documents, CRI_3)
        return newer if version > 2 else _merged(documents, CRI_2) | newer
    merged: Table = {}
    for document in documents:
        for each in _cri_tables(document):
            merge(merged, at(document, "plugins", each))
    return merged


def drop_in_tables(configuration: Configuration, containerd: tuple[int, ...], version: int, table: Table) -> Table:
    """Return the drop-in's tables of plugins, by name. `table` has its keys for the CRI plugin."""
    name = cri_table(version)
    if name == CRI_3 or not MERGES_DEEPLY <= containerd < MIGRATES_EACH_FILE:
        return {name: table}
    # In each table, a key of CRI_2 counts only if no file has this key in CRI_3.
    newer = _merged(tuple(configuration.documents.values()), CRI_3)
    parts: dict[str, Table] = {CRI_2: {}, CRI_3: {}}
    for key, value in table.items():
        parts[CRI_3 if key in newer else CRI_2][key] = value
    return {each: part for each, part in parts.items() if part}


def _merged(documents: tuple[Table, ...], name: str) -> Table:
    merged: Table = {}
    for document in documents:
        merge(merged, at(document, "plugins", name))
    return merged


def _cri_tables(document: Table) -> tuple[str, ...]:
    """Return the names of the CRI tables that count in one file, for a containerd that migrates each file."""
    value = document.get("version", 1)
    # In an older file, both tables count: migration to version 4 adds the keys of CRI_2 to those of CRI_3, and a key of
    # CRI_3 wins (configMigration in containerd's plugins/cri/runtime).
    return (CRI_3,) if isinstance(value, int) and value > 3 else (CRI_2, CRI_3)
