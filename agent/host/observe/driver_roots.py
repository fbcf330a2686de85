"""Observes which driver roots are complete, and which of them machines see. Opens no file in them."""

import contextlib
import stat

from msgspec.structs import replace

from agent.host.state.records import MANIFEST
from agent.model.errors import DocumentError
from agent.model.facts import StagedFacts, Unseen
from agent.model.paths import HOST_NVIDIA, MANIFESTS, REMOVED, STAGING, STATE, TREES, driver_root
from agent.system.files import NOT_FOUND, System, mounted
from agent.system.trust import classify_error, entries_if_present, read_seen

OVERLAY = "overlay"
STATE_IS_LINKED = f"systemd mounts nothing below {STATE}, because there is a symbolic link on its path"
"""Begins the message that names the link. systemd mounts nothing if the path in Where= contains a link
(unit_fail_if_noncanonical in its src/core/unit.c)."""
INDICES = 64
"""Number of mount points, one per index. The indices of removed driver roots are used again."""
STAGED_AGAIN = "the driver root will be staged again"
"""Ends the messages about driver roots whose manifest or files cannot be used."""
SPARE = 2
"""Number of free indices that a pass needs. Only NVIDIA's driver has driver roots, and a pass stages at most two roots:
one for the loaded kernel module, and one for newer files."""


def why_state_is_not_mounted(system: System) -> str:
    """Return why systemd mounts no driver root: a symbolic link on the path. Empty if there is none."""
    here = ""
    for part in STATE.strip("/").split("/"):
        here = f"{here}/{part}"
        if isinstance(read_seen(system.read_link, here), str):
            return f"{STATE_IS_LINKED}: replace the link {here} with a bind mount"
    return ""


def observe_staged(system: System) -> StagedFacts:
    """Return the driver roots on disk. An unusable manifest becomes a problem in the result, not an exception."""
    try:
        mounts = mounted(system, OVERLAY)
        is_mounted = HOST_NVIDIA in mounts
        trees, manifests = _indices(system, TREES, ending=""), _indices(system, MANIFESTS, ending=".json")
        leftovers: list[str] = []
        for directory in (STAGING, REMOVED):
            # A directory that this user may not read counts as empty: any user may run `plan`.
            with contextlib.suppress(PermissionError):
                leftovers += (f"{directory}/{name}" for name in entries_if_present(system, directory))
        plain = set() if is_mounted else {each for each in manifests - trees if _is_plain(each, system)}
    except OSError as error:
        return StagedFacts(staged_unseen=classify_error(error.filename or "driver roots", error).why)
    problems = [linked] if (linked := why_state_is_not_mounted(system)) else []
    roots, unseen = [], list[str]()
    for index in sorted(manifests):
        path = f"{MANIFESTS}/{index}.json"
        try:
            root = MANIFEST.parse(path, system.read(path))
            if root.index != index:
                raise DocumentError(f"{path}: index {root.index} does not match the file's name", STAGED_AGAIN)
            if index not in trees | plain:
                raise DocumentError(f"{path}: the files of driver root {index} are missing", STAGED_AGAIN)
            roots.append(replace(root, hidden=index in trees and driver_root(index) not in mounts))
        except DocumentError as error:
            problems.append(str(error))
        except OSError as error:
            failure = classify_error(path, error)
            # A failure other than Unseen means that the manifest is damaged: for example, a directory is in its place.
            (unseen if isinstance(failure, Unseen) else problems).append(failure.why)
    complete = {root.index for root in roots}
    return StagedFacts(
        staged=tuple(sorted(roots)),
        next_driver_root_index=_next_index(trees | manifests, system, protected=is_mounted),
        staged_problems=tuple(problems),
        roots_mounted=is_mounted,
        plain_roots=tuple(sorted(plain)),
        corrupt_roots=() if unseen else tuple(sorted((trees | manifests) - complete)),
        stale_staging=tuple(leftovers),
        staged_unseen="; ".join(unseen),
    )


def _indices(system: System, directory: str, *, ending: str) -> set[int]:
    """Return the index of each entry whose name is an index followed by `ending`. All other entries are ignored."""
    try:
        entries = system.entries(directory)
    except FileNotFoundError:
        return set()
    names = {name.removesuffix(ending) for name in entries if name.endswith(ending)}
    return {int(name) for name in names if name.isdecimal() and len(name) < 10 and name == str(int(name))}


def _is_plain(index: int, system: System) -> bool:
    """Return whether the driver root is a plain directory, not a link, which root in a machine may make."""
    try:
        return stat.S_ISDIR(system.owner(driver_root(index))[0])
    except OSError as error:
        if error.errno in NOT_FOUND:
            return False
        raise


def _next_index(taken: set[int], system: System, *, protected: bool) -> int:
    """Return the index for the next driver root.

    It is the index above all taken ones or, if too few mount points are left there, the lowest free index. The
    SPARE - 1 indices after the returned one are free too. `protected` means that HOST_NVIDIA is mounted. If HOST_NVIDIA
    is not mounted, machines can create directories in it, so an index is skipped if its directory exists already. If
    every index is taken or skipped, the index above all taken ones is returned: it may have no mount point, and its
    directory may exist.
    """
    above, end = max(taken, default=-1) + 1, INDICES - SPARE + 1
    unused = (each for each in (*range(above, end), *range(end)) if taken.isdisjoint(range(each, each + SPARE)))
    return next((each for each in unused if protected or not system.exists(driver_root(each))), above)
