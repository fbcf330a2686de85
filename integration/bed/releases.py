"""The newest releases of other people's parts, as their registries list them."""

import functools
import json
import lzma
import re
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import NamedTuple, TypeVar

TIMEOUT = 60.0
"""Seconds for one answer of a registry."""
SUCCESSORS = 3
"""If a module has no list, so many releases after the last known one are asked for: single ones may be missing."""
T = TypeVar("T")
VERSION = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-([0-9A-Za-z.-]+))?")


class NoAnswerError(Exception):
    """A registry did not say what it has, or not in its format; the text names the address."""


class Release(NamedTuple):
    """A version, the day of its release (`2026-11-29`) if the registry says it, and its package in a distribution."""

    version: str
    date: str = ""
    package: str = ""
    doubt: str = ""
    """Why there may be a newer one."""


class Registries(NamedTuple):
    """The base addresses."""

    go: str = "https://proxy.golang.org"
    python: str = "https://pypi.org/simple"
    debian: str = "http://deb.debian.org"
    ubuntu: str = "http://archive.ubuntu.com"


def order(version: str) -> tuple[tuple[int, ...], bool, tuple[tuple[int, str], ...]]:
    """Return a key that sorts semantic versions: a pre-release is before its release. Raises ValueError."""
    found = VERSION.fullmatch(version)
    if found is None:
        raise ValueError(f"{version} is no semantic version")
    parts = re.split(r"[.-]", found[4] or "")
    pre = tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
    return tuple(map(int, found.group(1, 2, 3))), found[4] is None, pre


def newest_go(registries: Registries, module: str, line: str = "", *, pre: bool = False) -> Release:
    """Return the newest release of a Go module, of those whose version begins with `line`; with `pre`, pre-release.

    Raises NoAnswerError.
    """
    base = _versions(registries, module)
    words = _fetch(f"{base}/list", lambda answer: answer.decode().split())
    listed = [each.removeprefix("v") for each in words if VERSION.fullmatch(each)]
    found = [each for each in listed if each.startswith(line) and ("-" in each) is pre]
    if not found:
        raise NoAnswerError(f"{base}/list has no {'pre-release' if pre else 'release'} {line}".rstrip())
    version = max(found, key=order)
    return Release(version, _fetch(f"{base}/v{version}.info", _day))


def newest_go_after(registries: Registries, module: str, known: str) -> Release:
    """Return the newest release of a Go module; if the proxy has no list, the last one that it has from `known` on.

    Raises NoAnswerError.
    """
    try:
        return newest_go(registries, module)
    except NoAnswerError as error:
        doubt = f"there may be a newer one: {error}"

    def released(version: str) -> str:
        try:
            return _fetch(f"{_versions(registries, module)}/v{version}.info", _day)
        except NoAnswerError:
            return ""

    major, minor, patch = order(known)[0]
    newest = Release("")
    for line in range(minor, minor + SUCCESSORS):
        misses = 0
        while misses < SUCCESSORS:
            version = f"{major}.{line}.{patch}"
            date = released(version)
            newest, misses = (Release(version, date, doubt=doubt), 0) if date else (newest, misses + 1)
            patch += 1
        patch = 0
    if not newest.version:
        raise NoAnswerError(f"{_versions(registries, module)} has neither v{known} nor a later release")
    return newest


def _day(answer: bytes) -> str:
    return str(json.loads(answer)["Time"])[:10]


def _versions(registries: Registries, module: str) -> str:
    return f"{registries.go}/{re.sub('[A-Z]', lambda found: '!' + found[0].lower(), module)}/@v"


def newest_python(registries: Registries, package: str) -> Release:
    """Return the newest release of a Python package that is not withdrawn. Raises NoAnswerError."""
    name = rf"{'[-_.]'.join(map(re.escape, package.split('-')))}-(\d[\d.]*)(?:-.*\.whl|\.tar\.gz)"

    def releases(answer: bytes) -> list[tuple[tuple[int, ...], Release]]:
        return [
            (tuple(map(int, version[1].split("."))), Release(version[1], each.get("upload-time", "")[:10]))
            for each in json.loads(answer)["files"]
            if not each.get("yanked") and (version := re.fullmatch(name, each["filename"], re.IGNORECASE))
        ]

    found = _fetch(f"{registries.python}/{package}/", releases, "application/vnd.pypi.simple.v1+json")
    if not found:
        raise NoAnswerError(f"{registries.python}/{package}/ has no release")
    return max(found)[1]


def newest_debian(suites: Sequence[str], component: str, package: str) -> Release:
    """Return a package's newest release in suites of Debian or Ubuntu, by dpkg(1)'s order.

    `suites` are addresses, such as http://deb.debian.org/debian/dists/sid. `package` is a pattern: of several packages,
    the one with the highest number is meant. Raises NoAnswerError.
    """
    found = dict[str, str]()
    for suite in suites:
        for name, version in _packages(f"{suite}/{component}/binary-amd64/Packages.xz").items():
            if re.fullmatch(package, name) and (name not in found or _newer(version, found[name])):
                found[name] = version
    if not found:
        raise NoAnswerError(f"no package {package} in {' '.join(suites)} ({component})")
    name = max(found, key=lambda each: [int(part) for part in re.findall(r"\d{1,9}", each)])
    return Release(found[name], package=name)


def _newer(version: str, than: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", than]).returncode == 0


@functools.cache
def _packages(address: str) -> dict[str, str]:
    """Return the versions of an index's packages."""
    found, name = dict[str, str](), ""
    for line in _fetch(address, lambda answer: lzma.decompress(answer).decode().splitlines()):
        if line.startswith("Package: "):
            name = line.removeprefix("Package: ")
        elif line.startswith("Version: "):
            found[name] = line.removeprefix("Version: ")
    return found


def _fetch(address: str, parse: Callable[[bytes], T], accept: str = "*/*") -> T:
    """Return what `parse` makes of an answer. A proxy may answer with a page of its own."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers={"Accept": accept}), None, TIMEOUT
        ) as answer:
            return parse(answer.read())
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise NoAnswerError(f"{address}: {str(error) or type(error).__name__}") from error
