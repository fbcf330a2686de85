"""Try the newest releases of other people's parts, and say which of them break us.

Not in the gate: other people's releases do not fail our tests. Each part has a fixed short set of the bed's tests,
which take the version from the environment (`tools.chosen`).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import msgspec

from integration.bed import debian, ubuntu
from integration.bed.cache import REPOSITORY, cache_root, cached, locked, step
from integration.bed.cluster.kubernetes import kubernetes
from integration.bed.drivers.host_roots import host_root
from integration.bed.machine.containerds import debian_root, runc, upstream_root
from integration.bed.process import Argument, BedError, run
from integration.bed.releases import (
    NoAnswerError,
    Registries,
    Release,
    newest_debian,
    newest_go,
    newest_go_after,
    newest_python,
)
from integration.bed.toolkits import toolkit_of
from integration.bed.tools import (
    CDI_LIBRARY,
    DEVICE_PLUGIN,
    MODULE,
    PROMETHEUS,
    TOOLKIT,
    bed_tools,
    device_plugin,
    pinned,
    promtool,
)

BUDGET = 90 * 60.0
"""Seconds for all parts."""
LOOKING = 10 * 60.0
"""Seconds for all registries."""
LIMIT = 40 * 60.0
"""Seconds for one part: to build Kubernetes and to test it takes half of that on two cores that are busy."""
NOTHING, BROKEN_FOR_USERS, NOT_TRIED = 0, 1, 3
"""Exit codes. An unexpected error is NOT_TRIED, too."""
PAGE = REPOSITORY / "docs/compatibility.md"
BOUNDS = REPOSITORY / "containerfiles/upper-bounds"
BOUNDS_HEAD = """\
# Releases that do not work, written by `integration/canary --bound`: the half of the agent that has the package, the
# package, the first release that does not work, and the suite if it is only of one. Builds of images leave out the
# machine's, and later ones. Nothing acts on the host's: its administrator holds the package back (apt-mark hold).
"""
DRIVERS = "integration/tests/drivers"
CLUSTERS = "integration/tests/kubernetes"


class Verdict(StrEnum):
    """What became of the newest release of a part."""

    WORKS = "works"
    BROKEN = "broken"
    COULD_NOT_LOOK = "could not look"
    """Its registry did not answer."""
    COULD_NOT_TRY = "could not try"
    """It cannot be built or installed here, or no test ran."""
    NO_TIME = "no time"


class Part(NamedTuple):
    """Somebody else's part."""

    name: str
    look: Callable[[Registries], Release]
    prepare: Callable[[str], Mapping[str, str]]
    """Builds a version, and returns the environment with which the tests use it."""
    tests: tuple[str, ...]
    why: str
    """Why it reaches users unasked, or why not."""
    half: str = ""
    """Which half of the agent has it, if it reaches users unasked: `host` or `machine`."""
    package: str = ""
    """The pattern of its package's name there."""
    suite: str = ""
    """The only suite whose package this is, if there are others of the same name."""
    row: str = ""
    """Its name in the table of docs/compatibility.md, if that is another."""


class Row(NamedTuple):
    """What is known of a part."""

    part: Part
    release: Release
    last_tested: str
    verdict: Verdict
    message: str

    def document(self) -> dict[str, object]:
        """Return the row as `--json` has it."""
        return {
            "part": self.part.name,
            "newest": self.release.version,
            "released": self.release.date,
            "last_tested": self.last_tested,
            "verdict": str(self.verdict),
            "message": self.message,
            "reaches_users_unasked": bool(self.part.half),
            "why": self.part.why,
        }


def _go(module: str, line: str = "", *, pre: bool = False) -> Callable[[Registries], Release]:
    return lambda registries: newest_go(registries, module, line, pre=pre)


def _released(component: str, package: str) -> Callable[[Registries], Release]:
    paths = ("debian/dists/{}", "debian/dists/{}-updates", "debian-security/dists/{}-security")
    suites = [path.format(debian.SUITE) for path in paths]
    return lambda registries: newest_debian([f"{registries.debian}/{each}" for each in suites], component, package)


def _unstable(component: str, package: str) -> Callable[[Registries], Release]:
    return lambda registries: newest_debian([f"{registries.debian}/debian/dists/sid"], component, package)


def _ubuntu(component: str, package: str) -> Callable[[Registries], Release]:
    suites = [f"ubuntu/dists/{ubuntu.UBUNTU}{pocket}" for pocket in ("", "-updates", "-security")]
    return lambda registries: newest_debian([f"{registries.ubuntu}/{each}" for each in suites], component, package)


def _built(environment: Mapping[str, str], build: Callable[[], object]) -> Mapping[str, str]:
    """Return the environment that chooses a version, after `build` has made what the tests find in the cache."""
    os.environ.update(environment)
    try:
        build()
    finally:
        for each in environment:
            del os.environ[each]
    return environment


def _building(variable: str, build: Callable[[str], object], version: str) -> Mapping[str, str]:
    return _built({f"BED_{variable}": version}, lambda: build(version))


def _installing(
    suite: str, package: str, build: Callable[[], object], environment: Mapping[str, str] | None = None
) -> Callable[[str], Mapping[str, str]]:
    """Return a function that builds a tree with a version of a suite's package, which fails if apt has another."""
    variable = f"BED_PACKAGE_{suite.upper()}"
    return lambda version: _built({variable: f"{package}={version}", **(environment or {})}, build)


def _first(directory: Path) -> Mapping[str, str]:
    """Return the environment in which this directory's programs are found first, then those of this Python's."""
    return {"PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _ubuntu_driver(version: str) -> Mapping[str, str]:
    branch, root = version.partition(".")[0], partial(host_root, "flat", ubuntu.UBUNTU)
    package = f"libnvidia-compute-{branch}"
    return _installing(ubuntu.UBUNTU, package, root, {"BED_UBUNTU_DRIVER": branch})(version)


def _toolkit(version: str) -> None:
    """Build the toolkit and what else its tests would build in their bodies, where nothing may fail but the toolkit."""
    toolkit_of(version)
    host_root("split", debian.SUITE)
    bed_tools()


def _our_packages() -> list[str]:
    """Return the names of the Python packages that the agent depends on."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]]


def _newest_packages(registries: Registries) -> Release:
    """Return as one version what is newer than in requirements.lock: `msgspec==0.23.0 sh==2.5.0`."""
    lock = (REPOSITORY / "requirements.lock").read_text()
    found = {f"{name}=={each.version}": each for name in _our_packages() for each in [newest_python(registries, name)]}
    newer = {text: each for text, each in found.items() if f"{text} " not in lock}
    return Release(" ".join(newer) or "as locked", max((each.date for each in newer.values()), default=""))


def _python_environment(version: str) -> Mapping[str, str]:
    locked = REPOSITORY / "requirements-dev.lock"

    def build(output: Path) -> None:
        run([sys.executable, "-m", "venv", output])
        pip: list[Argument] = [output / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--require-hashes", "--requirement", locked])
        if version != "as locked":
            run([*pip, *version.split()])

    # A virtual environment has its own path in its programs, but not in `python`, which is all that the tests use.
    return _first(cached("canary-python", [locked, version], build) / "bin")


PARTS = (
    Part(
        "NVIDIA Container Toolkit",
        _go(TOOLKIT),
        partial(_building, "TOOLKIT", _toolkit),
        (f"{DRIVERS}/test_toolkit_versions.py", "integration/tests/node/test_toolkit_pods.py"),
        "each build of an image installs NVIDIA's newest package",
        "machine",
        "nvidia-container-toolkit-base",
    ),
    Part(
        "containerd of Ubuntu 24.04",
        _ubuntu("main", "containerd"),
        _installing(ubuntu.UBUNTU, "containerd", lambda: debian_root(ubuntu.UBUNTU)),
        (f"{CLUSTERS}/test_containerd_settings.py", "-k", ubuntu.UBUNTU),
        "each build of an image installs the distribution's newest package",
        "machine",
        "containerd",
        ubuntu.UBUNTU,
    ),
    Part(
        "containerd of Debian 13",
        _released("main", "containerd"),
        _installing(debian.SUITE, "containerd", lambda: debian_root(debian.SUITE)),
        (f"{CLUSTERS}/test_containerd_settings.py", "-k", debian.SUITE),
        "each build of an image on Debian's base installs the distribution's newest package",
        "machine",
        "containerd",
        debian.SUITE,
    ),
    Part(
        "driver of Ubuntu 24.04",
        _ubuntu("restricted", r"libnvidia-compute-\d+"),
        _ubuntu_driver,
        (f"{DRIVERS}/test_cdi_documents.py", "-k", "own"),
        "ubuntu-drivers installs the newest branch, and apt upgrades it",
        "host",
        r"libnvidia-compute-\d+",
    ),
    Part(
        "driver of Debian 13",
        _released("non-free", "libcuda1"),
        _installing(debian.SUITE, "libcuda1", lambda: host_root("split", debian.SUITE)),
        (f"{DRIVERS}/test_cdi_documents.py", "-k", "13"),
        "apt upgrades it",
        "host",
        "libcuda1",
    ),
    Part(
        "driver of Debian unstable",
        _unstable("non-free", "libcuda1"),
        _installing("sid", "libcuda1", lambda: host_root("split", "sid")),
        (f"{DRIVERS}/test_cdi_documents.py", "-k", "unstable"),
        "no: the next release of Debian will have it, or a later one",
    ),
    Part(
        "CDI library",
        _go(CDI_LIBRARY),
        partial(_building, "CDI_LIBRARY", lambda _: bed_tools()),
        (f"{DRIVERS}/test_cdi_documents.py",),
        "no: it is in containerd, whose packages have versions of their own",
    ),
    *(
        Part(
            name,
            _go("github.com/containerd/containerd/v2", line),
            partial(_building, "CONTAINERD", lambda _: upstream_root()),
            (
                f"{CLUSTERS}/test_containerd_settings.py",
                f"{CLUSTERS}/test_runtimes.py",
                "-k",
                "upstream or containerd_2",
            ),
            "no: who wants upstream's containerd installs it",
            row="containerd",
        )
        for name, line in {"containerd": "", "containerd 2.3, with long support": "2.3."}.items()
    ),
    Part(
        "runc",
        _go("github.com/opencontainers/runc"),
        partial(_building, "RUNC", runc),
        (f"{CLUSTERS}/test_runtimes.py", "-k", "containerd_2"),
        "no: who wants upstream's runc installs it",
    ),
    Part(
        "crun",
        _unstable("main", "crun"),
        _installing("sid", "crun", lambda: debian_root("sid"), {"BED_CRUN": "sid"}),
        (f"{CLUSTERS}/test_runtimes.py", "-k", "crun"),
        "no: images have none, and this one is Debian unstable's",
    ),
    Part(
        "NVIDIA device plugin",
        lambda registries: newest_go_after(registries, DEVICE_PLUGIN, pinned(MODULE, DEVICE_PLUGIN)),
        partial(_building, "DEVICE_PLUGIN", lambda _: device_plugin()),
        (f"{CLUSTERS}/test_cluster.py", "-k", "offers_every_gpu or pods_get_all_gpus or device_list"),
        "no: a cluster's manifest names its version",
    ),
    *(
        Part(
            name,
            _go("k8s.io/kubernetes", pre=pre),
            partial(_building, "KUBERNETES", kubernetes),
            (f"{CLUSTERS}/test_claims.py", f"{CLUSTERS}/test_slices.py"),
            why,
            row="Kubernetes",
        )
        for name, pre, why in (
            ("Kubernetes", False, "no: who runs the cluster chooses it"),
            ("Kubernetes' next release", True, "no: it is a pre-release"),
        )
    ),
    Part(
        "Prometheus",
        # Version 3.16 is v0.316 as a Go module; v1 and v2 are older.
        _go(PROMETHEUS, "0."),
        lambda version: _first(promtool(version)),
        ("tests/project/test_alerts.py", "tests/host/daemon/http/test_metrics.py", "-k", "promtool or package_writes"),
        "no: who runs Prometheus chooses it",
    ),
    Part(
        "our Python packages",
        _newest_packages,
        _python_environment,
        ("tests", "--ignore=tests/project", "--numprocesses=2"),
        "no: requirements.lock pins them, also in the packages",
    ),
    Part(
        "systemd of Debian unstable",
        _unstable("main", "systemd"),
        _installing("sid", "systemd", lambda: host_root("split", "sid"), {"BED_TESTING": "sid"}),
        (f"{DRIVERS}/test_hosts.py", "-k", "debian-testing"),
        "no: the next release of Debian will have it, or a later one",
        row="host's systemd",
    ),
)


class Result(TypedDict):
    """What a run found of a release."""

    verdict: str
    message: str
    seconds: int
    date: str


Results = dict[str, dict[str, Result]]
"""By part and version."""


class Canary:
    """The parts, and what earlier runs found, which is in a directory."""

    def __init__(self, parts: Sequence[Part], registries: Registries, directory: Path, budget: float = BUDGET) -> None:
        """Read what earlier runs found."""
        self.parts, self.registries, self.directory = parts, registries, directory
        self.end = time.monotonic() + budget
        self.file = directory / "results.json"
        directory.mkdir(exist_ok=True)
        self.results = self._earlier()

    def _earlier(self) -> Results:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Results)
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            print(f"{self.file} is damaged, and is begun again: {error}", file=sys.stderr)
            return {}

    def rows(self) -> list[Row]:
        """Look up all parts, and try those whose newest release has never worked. In the order of the parts.

        Those that were never tried come first, then those that reach users unasked, then the newest, and those whose
        time was over last.
        """
        found, waiting = dict[str, Row](), list[Row]()
        self.looking_end = time.monotonic() + LOOKING
        with step("look up the newest releases"):
            for row in map(self._looked_up, self.parts):
                found[row.part.name] = row
                if row.verdict is Verdict.NO_TIME:
                    waiting.append(row)
        waiting.sort(key=lambda row: row.release.date, reverse=True)
        waiting.sort(key=lambda row: (self._turn(row), not row.part.half))
        for row in waiting:
            found[row.part.name] = self._tried(row)
        return [_doubted(found[part.name]) for part in self.parts]

    def _turn(self, row: Row) -> int:
        result = self.results.get(row.part.name, {}).get(row.release.version)
        return 0 if result is None else 2 if result["verdict"] == Verdict.NO_TIME else 1

    def _looked_up(self, part: Part) -> Row:
        known, listed = self.results.get(part.name, {}), _listed(part)
        works = [version for version, result in known.items() if result["verdict"] == Verdict.WORKS]
        last = max(
            [*listed, *works], key=lambda each: [int(number) for number in re.findall(r"\d{1,9}", each)], default=""
        )
        try:
            with _limited(max(self.looking_end - time.monotonic(), 1)):
                release = part.look(self.registries)
        except OutOfTimeError:
            return Row(part, Release(""), last, Verdict.COULD_NOT_LOOK, f"no answer in {LOOKING:.0f} s for all parts")
        except NoAnswerError as error:
            return Row(part, Release(""), last, Verdict.COULD_NOT_LOOK, str(error))
        if release.version in works:
            return Row(part, release, last, Verdict.WORKS, known[release.version]["message"])
        if listed.get(release.version):
            return Row(part, release, last, Verdict.WORKS, f"the tests of {PAGE.name}")
        return Row(part, release, last, Verdict.NO_TIME, "")

    def _tried(self, row: Row) -> Row:
        part, version, started = row.part, row.release.version, time.monotonic()
        left = min(LIMIT, self.end - started)
        if left <= 0:
            return row
        stem = self.directory / re.sub(r"\W+", "-", part.name)
        xml, log = stem.with_suffix(".partial"), stem.with_suffix(".log")
        xml.unlink(missing_ok=True)
        try:
            with (
                step(f"try {part.name} {version}"),
                tempfile.TemporaryDirectory(prefix="canary-", ignore_cleanup_errors=True) as scratch,
            ):
                with _limited(left, _kill_children):
                    environment = part.prepare(version)
                with _limited(max(started + left - time.monotonic(), 1)):
                    _run_tests((f"--basetemp={scratch}/tests", *part.tests), environment, xml, log)
            verdict, message = judged(xml, log)
        except OutOfTimeError:
            verdict, message = Verdict.NO_TIME, f"stopped after {left:.0f} s"
        except BedError as error:
            verdict, message = Verdict.COULD_NOT_TRY, _reason(str(error).strip())
        except Exception as error:
            # The other parts are still tried, and the table is printed.
            verdict, message = Verdict.COULD_NOT_TRY, f"{type(error).__name__}: {error}"
        if verdict is Verdict.BROKEN and part.half == "host":
            message += f"; hosts keep an earlier one with apt-mark hold {row.release.package or part.package}"
        if verdict is Verdict.WORKS and ElementTree.parse(xml).find(".//skipped") is None:
            # docs/compatibility.md is made from it.
            xml.replace(stem.with_suffix(".xml"))
        seconds = round(time.monotonic() - started)
        result = Result(verdict=verdict, message=message, seconds=seconds, date=time.strftime("%F", time.gmtime()))
        self.results.setdefault(part.name, {})[version] = result
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        new.replace(self.file)
        return row._replace(verdict=verdict, message=message)


def _listed(part: Part) -> dict[str, bool]:
    """Return the versions in docs/compatibility.md, and whether all files of the part's tests passed with each."""
    files = {Path(each).stem for each in part.tests if each.endswith(".py")}
    rows = re.findall(rf"^\| {re.escape(part.row or part.name)} \| (\S+) \|(.*)", PAGE.read_text(), re.MULTILINE)
    return {version: files <= set(re.findall(r"(\w+) \(", tests)) for version, tests in rows}


def _doubted(row: Row) -> Row:
    return row._replace(message="; ".join(filter(None, (row.message, row.release.doubt))))


def _reason(error: str) -> str:
    """Return what Go's proxy does not serve; else what a command said last, and the command."""
    if unserved := dict.fromkeys(re.findall(r": reading (https?://\S+: \d{3} .*)", error)):
        return f"not served: {', '.join(unserved)}"
    lines = error.splitlines()
    return "; ".join([lines[-1], *(each[:100] for each in lines[:-1][:1])])


class OutOfTimeError(Exception):
    """The time of a part is over."""


@contextmanager
def _limited(seconds: float, first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """After so many seconds, call `first` and raise OutOfTimeError inside."""

    def end(*_: object) -> None:
        first()
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _kill_children() -> None:
    """Kill all that a build has started: `run` kills only its command, whose own children would go on."""
    found = [os.getpid()]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    for each in found[1:]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _run_tests(tests: Sequence[str], environment: Mapping[str, str], xml: Path, log: Path) -> None:
    """Run the tests in a child; none of its processes is left if the time ends."""
    reruns = ("--reruns=1", "--only-rerun=Oops: int3", "--only-rerun=rcu_preempt kthread starved")
    # --runxfail: what may fail in the gate's run is what this run wants to know.
    argv = ["python", "-m", "pytest", "--verbose", "-s", "--runxfail", *reruns, f"--junit-xml={xml}", *tests]
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, env={**os.environ, **_first(Path(sys.executable).parent), **environment},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait()
        except BaseException:
            # pytest's fixtures end what they have started; then comes what has none.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def judged(xml: Path, log: Path) -> tuple[Verdict, str]:
    """Return what a run found. Tests whose set-up failed, or a command of the bed, say nothing about the release."""
    if not xml.exists():
        return Verdict.COULD_NOT_TRY, f"pytest could not run; {log}"
    passed, errors = 0, list[str]()
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        failure, error = case.find("failure"), case.find("error")
        if failure is not None and _first_line(failure).startswith(f"{BedError.__module__}."):
            failure, error = None, failure
        if failure is not None:
            return Verdict.BROKEN, f"{case.get('name')}: {_first_line(failure)}; {log}"
        if error is not None:
            errors.append(f"{case.get('name')}: {_first_line(error)}; {log}")
        passed += error is None and case.find("skipped") is None
    if errors or not passed:
        return Verdict.COULD_NOT_TRY, [*errors, f"no test ran; {log}"][0]
    return Verdict.WORKS, f"{passed} tests passed"


def _first_line(element: ElementTree.Element) -> str:
    return (element.get("message") or "no message").strip().splitlines()[0][:200]


def bounded(text: str, rows: Sequence[Row]) -> str:
    """Return the file of upper bounds after a run: one for each broken release, and none for parts that work again."""
    bounds = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            half, package, version, *suite = line.split()
            bounds[half, package, *suite] = version
    for part, release, _, verdict, _ in rows:
        key = (part.half, release.package or part.package, *([part.suite] if part.suite else []))
        if part.half and verdict is Verdict.WORKS:
            bounds.pop(key, None)
        elif part.half and verdict is Verdict.BROKEN:
            # The tilde: with all packagings of this version.
            bounds.setdefault(key, f"{release.version}~")
    lines = [" ".join((*key[:2], version, *key[2:])) for key, version in sorted(bounds.items())]
    return BOUNDS_HEAD + "".join(f"{line}\n" for line in lines)


def exit_code(rows: Sequence[Row]) -> int:
    """Return BROKEN_FOR_USERS if a release that reaches users unasked is broken, NOT_TRIED if one was not tried."""
    if any(row.verdict is Verdict.BROKEN and row.part.half for row in rows):
        return BROKEN_FOR_USERS
    tried = all(row.verdict in (Verdict.WORKS, Verdict.BROKEN) and not row.release.doubt for row in rows)
    return NOTHING if tried else NOT_TRIED


def table(rows: Sequence[Row]) -> str:
    """Return what people read."""
    head = ("part", "newest", "last tested", "unasked", "verdict", "message")
    lines = [head]
    for part, release, last, verdict, message in rows:
        lines.append((part.name, release.version, last, "yes" if part.half else "no", verdict, message))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(word.ljust(width) for word, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="integration/canary", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only parts whose names have one of these words")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bound", action="store_true", help=f"write {BOUNDS.relative_to(REPOSITORY)}")
    options = parser.parse_args()
    parts = [
        part for part in PARTS if not options.words or any(each.lower() in part.name.lower() for each in options.words)
    ]
    if not parts:
        parser.error(f"no part has such a name; there are: {', '.join(part.name for part in PARTS)}")
    # A new release may need a newer Go.
    os.environ.setdefault("BED_GOTOOLCHAIN", "auto")
    try:
        with locked("canary"):
            rows = Canary(parts, Registries(), cache_root() / "canary").rows()
        print(json.dumps({"parts": [row.document() for row in rows]}, indent=1) if options.json else table(rows))
        if options.bound:
            BOUNDS.write_text(bounded(BOUNDS.read_text(), rows))
        return exit_code(rows)
    except Exception:
        # Python's own exit code would be that of a broken release.
        traceback.print_exc()
        return NOT_TRIED


if __name__ == "__main__":
    sys.exit(main())
