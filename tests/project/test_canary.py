"""What integration/canary looks up, how it judges the newest releases, and what it does with broken ones."""

import hashlib
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from integration.bed import canary, ubuntu
from integration.bed.canary import (
    BOUNDS,
    BOUNDS_HEAD,
    PARTS,
    Canary,
    Part,
    Row,
    Verdict,
    bounded,
    exit_code,
    judged,
    table,
)
from integration.bed.process import BedError, run
from integration.bed.releases import (
    NoAnswerError,
    Registries,
    Release,
    newest_debian,
    newest_go,
    newest_go_after,
    newest_python,
)
from tests.fakes.programs import program
from tests.fakes.web_server import serving

PLUGIN = "/github.com/!n!v!i!d!i!a/k8s-device-plugin/@v"
WHEEL = "sh_tools-{}-py3-none-any.whl"
ANSWERS: dict[str, str | bytes] = {
    "/example.org/part/@v/list": "v1.9.0\nv1.10.0\nv1.10.1-rc.1\nv1.11.0-beta.2\nv1.11.0-beta.10\nv2.0.0+incompatible",
    "/example.org/part/@v/v1.10.0.info": '{"Version": "v1.10.0", "Time": "2026-11-05T15:06:51Z"}',
    "/example.org/part/@v/v1.9.0.info": '{"Version": "v1.9.0", "Time": "2026-10-05T15:06:51Z"}',
    "/example.org/part/@v/v1.11.0-beta.10.info": '{"Time": "2026-11-06T00:00:00Z"}',
    "/keyring": "",
    **{f"/example.org/{each}/@v/list": "v1.0.0" for each in ("page", "cut")},
    "/example.org/page/@v/v1.0.0.info": "<html>Log in</html>",
    "/example.org/cut/@v/v1.0.0.info": "{}",
    "/simple/page/": "<html>Log in</html>",
    "/simple/list/": "[]",
    "/debian/page/main/binary-amd64/Packages.xz": "<html>Log in</html>",
    # No list, as where the proxy is a mirror; 0.19.2 and 0.20.0 are missing.
    **{f"{PLUGIN}/v0.{each}.info": '{"Time": "2026-03-17T06:49:47Z"}' for each in ("19.0", "19.1", "19.3", "20.1")},
    "/simple/sh-tools/": json.dumps(
        {
            "files": [
                *({"filename": WHEEL.format(each), "upload-time": "2026-11-20T00:00:00Z"} for each in ("2.9", "2.10")),
                {"filename": "sh-tools-2.8.tar.gz"},
                {"filename": WHEEL.format("2.11"), "yanked": "it is broken"},
                {"filename": WHEEL.format("3.0rc1")},
            ]
        }
    ),
    "/debian/dists/stable/main/binary-amd64/Packages.xz": lzma.compress(
        b"Package: libcuda1\nVersion: 550.9-1\n\nPackage: nvidia-580\nVersion: 5.2\n\nPackage: nvidia-99\nVersion: 99\n"
    ),
    "/debian/dists/stable-updates/main/binary-amd64/Packages.xz": lzma.compress(
        b"Package: libcuda1\nVersion: 550.10-1~deb13u1\n\nPackage: libcuda1-i386\nVersion: 600-1\n"
    ),
}


@pytest.fixture(scope="module")
def registries() -> Iterator[Registries]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = ANSWERS.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(found.encode() if isinstance(found, str) else found or b"")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as port:
        address = f"http://127.0.0.1:{port}"
        yield Registries(address, f"{address}/simple", address, address)


def test_the_newest_release_is_found(registries: Registries) -> None:
    assert newest_go(registries, "example.org/part") == Release("1.10.0", "2026-11-05")
    assert newest_go(registries, "example.org/part", "1.9.") == Release("1.9.0", "2026-10-05")
    assert newest_go(registries, "example.org/part", pre=True).version == "1.11.0-beta.10"
    plugin = newest_go_after(registries, "github.com/NVIDIA/k8s-device-plugin", "0.19.0")
    assert plugin[:2] == ("0.20.1", "2026-03-17")
    assert re.fullmatch("there may be a newer one: .*/k8s-device-plugin/@v/list: .*404.*", plugin.doubt)
    assert newest_go_after(registries, "example.org/part", "1.9.0") == Release("1.10.0", "2026-11-05")
    assert newest_python(registries, "sh-tools") == Release("2.10", "2026-11-20")
    suites = [f"{registries.debian}/debian/dists/{each}" for each in ("stable", "stable-updates")]
    assert newest_debian(suites, "main", "libcuda1") == Release("550.10-1~deb13u1", package="libcuda1")
    assert newest_debian(suites[:1], "main", r"nvidia-\d+") == Release("5.2", package="nvidia-580")


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda each: newest_go(each, "example.org/none"), r"/example.org/none/@v/list: .*404"),
        (lambda each: newest_go(each, "example.org/part", "3."), r"/example.org/part/@v/list has no release 3\.$"),
        (lambda each: newest_go_after(each, "example.org/none", "1.0.0"), r"none/@v has neither v1\.0\.0 nor a later"),
        (lambda each: newest_python(each, "none"), r"/simple/none/: .*404"),
        (lambda each: newest_debian([f"{each.debian}/debian/dists/sid"], "main", "x"), r"/sid/main/.*404"),
        (lambda each: newest_debian([f"{each.debian}/debian/dists/stable"], "main", "x"), r"no package x in .*/stable"),
        # A proxy's page, or an answer that was cut off.
        (lambda each: newest_go(each, "example.org/page"), r"/example.org/page/@v/v1\.0\.0\.info: Expecting value"),
        (lambda each: newest_go(each, "example.org/cut"), r"/example.org/cut/@v/v1\.0\.0\.info: 'Time'"),
        (lambda each: newest_python(each, "page"), r"/simple/page/: Expecting value"),
        (lambda each: newest_python(each, "list"), r"/simple/list/: list indices"),
        (
            lambda each: newest_debian([f"{each.debian}/debian/page"], "main", "x"),
            r"/debian/page/main/.*: Input format",
        ),
        (lambda _: newest_go(Registries("http://127.0.0.1:1"), "x"), r"http://127\.0\.0\.1:1/x/@v/list: .*refused"),
    ],
)
def test_a_registry_without_an_answer_is_named(
    registries: Registries, look: Callable[[Registries], Release], said: str
) -> None:
    with pytest.raises(NoAnswerError, match=said):
        look(registries)


def no_answer(_: Registries) -> Release:
    raise NoAnswerError("http://registry.invalid: refused")


class Bench:
    """Parts with tests of their own, which note that they ran, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.noted = directory, directory / "noted"
        self.parts = list[Part]()

    def add(
        self, name: str, body: str, date: str = "", *, half: str = "", version: str = "1.0", **more: object
    ) -> None:
        test = self.directory / f"test_{name}.py"
        note = f"    open({str(self.noted)!r}, 'a').write('{name} ')\n"
        test.write_text(f"import os, subprocess\ndef test_it(tmp_path):\n{note}    {body}\n")

        look = more.get("look", lambda _: Release(version, date, "package"))
        prepare = more.get("prepare", lambda version: {"CHOSEN": version})
        part = Part(name, look, prepare, (str(test),), "why", half, "package")  # type: ignore[arg-type]
        self.parts = [each for each in self.parts if each.name != name] + [part]

    def run(self, budget: float = 120) -> dict[str, Row]:
        self.noted.write_text("")
        rows = Canary(self.parts, Registries(), self.directory / "canary", budget).rows()
        return {row.part.name: row for row in rows}

    def order(self) -> list[str]:
        return self.noted.read_text().split()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    # tests.mutants sets it, but the canary's own pytest has plugins.
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    return Bench(tmp_path)


@pytest.mark.processes
def test_what_works_is_not_tried_again_and_everything_else_is(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    """New releases come first, of these what reaches users unasked, of these the newest. What had no time is last."""
    bench.add("old", "assert os.environ['CHOSEN'] == '1.0'", "2026-01-01")
    bench.add("new", "assert False, 'it is gone'", "2026-03-01")
    bench.add("unasked", "pass", half="machine")
    bench.add("driver", "assert False", half="host")
    bench.add("unlooked", "pass", look=no_answer)

    def refuse(_: str) -> Mapping[str, str]:
        raise BedError("go build\nexit code 1:\nundefined: x")

    def crash(_: str) -> Mapping[str, str]:
        raise KeyError("of the bed")

    def unserved(_: str) -> Mapping[str, str]:
        each = "/go/x.go:1:2: {0}@v1: reading https://proxy/{0}/@v/v1.zip: 403 Forbidden\n\tserver response: no\n"
        raise BedError("go list\nexit code 1:\n" + "".join(map(each.format, "aab")))

    bench.add("unserved", "pass", prepare=unserved)
    bench.add("unsure", "pass", look=lambda _: Release("1.0", doubt="no list"))
    bench.add("unbuilt", "pass", prepare=refuse)
    bench.add("crashed", "pass", prepare=crash)
    results = bench.directory / "canary/results.json"
    results.parent.mkdir()
    results.write_text('{"old": {"1.0":')
    found = bench.run()
    assert bench.order() == ["unasked", "driver", "new", "old", "unsure"]
    assert {name: str(row.verdict) for name, row in found.items()} == {
        **{"old": "works", "new": "broken", "unasked": "works", "driver": "broken"},
        **{"unlooked": "could not look", "unbuilt": "could not try", "crashed": "could not try"},
        **{"unserved": "could not try", "unsure": "works"},
    }
    assert found["old"].message == "1 tests passed"
    assert found["new"].message.startswith("test_it: AssertionError: it is gone; ")
    assert "it is gone" in Path(found["new"].message.rpartition("; ")[2]).read_text()
    assert found["driver"].message.endswith("; hosts keep an earlier one with apt-mark hold package")
    assert found["unlooked"].message == "http://registry.invalid: refused"
    assert found["unbuilt"].message == "undefined: x; go build"
    missing = ", ".join(f"https://proxy/{each}/@v/v1.zip: 403 Forbidden" for each in "ab")
    assert found["unserved"].message == f"not served: {missing}"
    assert found["unsure"].message == "1 tests passed; no list"
    assert found["crashed"].message == "KeyError: 'of the bed'"
    assert "/canary/results.json is damaged, and is begun again: " in capfd.readouterr().err
    assert {each.stem for each in (bench.directory / "canary").glob("*.xml")} == {"old", "unasked", "unsure"}

    earlier = json.loads(results.read_text())
    earlier["driver"]["1.0"]["verdict"] = "no time"
    results.write_text(json.dumps(earlier))
    bench.add("old", "pass", "2026-01-01", version="1.1")
    again = bench.run()
    assert again["unsure"].message == found["unsure"].message
    assert bench.order() == ["old", "new", "driver"]
    assert (again["unasked"].message, again["unasked"].last_tested) == (found["unasked"].message, "1.0")
    assert (again["old"].release.version, again["old"].last_tested) == ("1.1", "1.0")


@pytest.mark.parametrize(
    ("tests", "works"), [("test_part (1)", True), ("test_other (2), test_part (1)", True), ("test_other (9)", False)]
)
def test_what_the_document_lists_works_if_it_has_the_parts_tests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tests: str, works: bool
) -> None:
    monkeypatch.setattr(canary, "PAGE", bench.directory / "page.md")
    canary.PAGE.write_text(f"| part | 0.9 | test_part (1) |\n| part | 1.0 | {tests} |\n")
    bench.add("part", "pass")
    row = bench.run(budget=0)["part"]
    assert (row.last_tested, row.verdict) == ("1.0", Verdict.WORKS if works else Verdict.NO_TIME)
    assert row.message == ("the tests of page.md" if works else "")


@pytest.mark.processes
def test_a_tree_has_the_version_that_was_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: Registries
) -> None:
    """apt has it or refuses; no tree of another version is used. Programs and Ubuntu's archive are simulated."""
    make = "for each; do case $each in /*/root) mkdir --parents $each;; esac; done"
    program(tmp_path / "mmdebstrap", f"{make}\necho $@ >>{tmp_path}/calls")
    program(tmp_path / "dpkg-deb", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ubuntu, "UBUNTU_ARCHIVE", registries.ubuntu)
    monkeypatch.setattr(ubuntu, "UBUNTU_KEYRING", "keyring")
    monkeypatch.setattr(ubuntu, "UBUNTU_KEYRING_SHA256", hashlib.sha256(b"").hexdigest())
    parts = {
        **{"containerd of Ubuntu 24.04": "containerd", "containerd of Debian 13": "containerd", "crun": "crun"},
        **{"driver of Ubuntu 24.04": "libnvidia-compute-595", "driver of Debian 13": "libcuda1"},
        **{"driver of Debian unstable": "libcuda1", "systemd of Debian unstable": "systemd"},
    }
    for part in PARTS:
        if package := parts.get(part.name):
            for version in ("595.1-1~deb13u1", "595.1-1~deb13u1", "595.2-1"):
                assert f"{package}={version}" in part.prepare(version).values()
            calls = (tmp_path / "calls").read_text().splitlines()
            wanted = [re.findall(rf"[=,]{package}=([^ ,]+)", call) for call in calls]
            assert wanted == [["595.1-1~deb13u1"], ["595.2-1"]], part.name
            (tmp_path / "calls").unlink()
    assert not [each for each in os.environ if each.startswith("BED_")]


@pytest.mark.parametrize(
    ("cases", "verdict", "said"),
    [
        (["", "<skipped/>"], "works", "1 tests passed"),
        (["<skipped/>"], "could not try", "no test ran; "),
        ([], "could not try", "no test ran; "),
        (["<error message='no room'/>", ""], "could not try", "test_0: no room; "),
        (["<error message='no room'/>", "<failure message='E&#10;more'/>"], "broken", "test_1: E; "),
        # A command of the bed, such as one that needs a mirror.
        (["<failure message='BED apt'/>"], "could not try", "test_0: BED apt; "),
        (["<failure message='BED apt'/>", "<failure message='E'/>"], "broken", "test_1: E; "),
        (None, "could not try", "pytest could not run; "),
    ],
)
def test_only_a_test_that_fails_breaks_a_release(
    tmp_path: Path, cases: list[str] | None, verdict: str, said: str
) -> None:
    """Not one whose set-up failed; and what was skipped shows nothing."""
    error = "integration.bed.process.CommandError:"
    found = "".join(f"<testcase name='test_{number}'>{case}</testcase>" for number, case in enumerate(cases or ()))
    if cases is not None:
        found = f"<testsuites><testsuite>{found}</testsuite></testsuites>"
        (tmp_path / "xml").write_text(found.replace("BED", error))
    log = "" if verdict == "works" else str(tmp_path / "log")
    assert judged(tmp_path / "xml", tmp_path / "log") == (verdict, f"{said.replace('BED', error)}{log}")


# The time may be over while Popen still starts the command: what it started is killed, but nothing waits for it.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.processes
@pytest.mark.parametrize("where", ["build", "test"])
def test_what_is_out_of_time_ends_and_the_rest_is_not_tried(bench: Bench, where: str) -> None:
    child = bench.directory / "child"
    hang = ["sh", "-c", f"sleep 90 >/dev/null 2>&1 & echo $! >{child}; wait"]

    def prepare(_: str) -> Mapping[str, str]:
        if where == "build":
            run(hang)
        return {}

    bench.add("hangs", f"subprocess.run({hang!r})", prepare=prepare)

    def end() -> None:
        """Let the time be over as soon as the test hangs."""
        while time.monotonic() < ended:
            if child.exists() and child.read_text():
                os.kill(os.getpid(), signal.SIGALRM)
                return
            time.sleep(0.05)

    ended = time.monotonic() + 80
    clock = threading.Thread(target=end)
    clock.start()
    found = bench.run(budget=80)
    clock.join()
    assert (found["hangs"].verdict, found["hangs"].message) == (Verdict.NO_TIME, "stopped after 80 s")
    # Without a parent that asks for its result, it may stay as a zombie.
    left = Path(f"/proc/{child.read_text().strip()}/stat")
    while left.exists() and ") Z " not in left.read_text():
        assert time.monotonic() < ended
        time.sleep(0.05)

    rows = bench.run(budget=0)
    assert (rows["hangs"].verdict, bench.order()) == (Verdict.NO_TIME, [])
    assert '"no time"' in (bench.directory / "canary/results.json").read_text()


@pytest.mark.processes
def test_the_files_of_a_parts_tests_are_not_among_those_of_other_runs(bench: Bench) -> None:
    """pytest removes what earlier runs left there, which takes minutes if that is much: not the part's time."""
    place = bench.directory / "place"
    bench.add("part", f"open({str(place)!r}, 'w').write(str(tmp_path))")
    bench.run()
    used = Path(place.read_text())
    assert not used.exists()
    assert not [each for each in used.parents if each.name.startswith("pytest-of-")]


def test_lookups_end(bench: Bench) -> None:
    def hang(_: Registries) -> Release:
        signal.raise_signal(signal.SIGALRM)
        return Release("2.0")

    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    bench.add("hangs", "pass", look=hang)
    found = bench.run(budget=0)["hangs"]
    assert (found.verdict, found.message) == (Verdict.COULD_NOT_LOOK, "no answer in 600 s for all parts")


@pytest.mark.processes
def test_an_unexpected_error_is_not_the_exit_code_of_a_broken_release(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    argv = [sys.executable, "-m", "integration.bed.canary", "runc"]
    done = subprocess.run(argv, cwd=BOUNDS.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1].partition(":")[0]) == (3, "NotADirectoryError")


def row(
    verdict: Verdict, half: str = "machine", version: str = "1.2", suite: str = "", package: str = "toolkit"
) -> Row:
    part = Part("part", no_answer, lambda _: {}, (), "why", half, r"toolkit|driver-\d+", suite)
    return Row(part, Release(version, "2026-11-05", package), "1.1", verdict, "test_it: no")


WORKS, BROKEN, NO_TIME = Verdict.WORKS, Verdict.BROKEN, Verdict.NO_TIME


def test_the_exit_code_says_whether_users_get_something_broken() -> None:
    assert exit_code([row(WORKS)]) == exit_code([row(WORKS), row(BROKEN, half="")]) == 0
    assert exit_code([row(BROKEN), row(Verdict.COULD_NOT_LOOK)]) == 1
    assert exit_code([row(BROKEN, half=""), row(Verdict.COULD_NOT_LOOK)]) == 3
    assert exit_code([row(WORKS)._replace(release=Release("1.2", doubt="no list"))]) == 3
    assert exit_code([row(Verdict.COULD_NOT_TRY)]) == exit_code([row(NO_TIME)]) == 3


@pytest.mark.parametrize(
    ("before", "rows", "after"),
    [
        ("", [row(BROKEN)], "machine toolkit 1.2~\n"),
        ("", [row(BROKEN, suite="noble")], "machine toolkit 1.2~ noble\n"),
        ("", [row(BROKEN, half="")], ""),
        # The first broken release stays the bound while later ones are broken, too, or are not known.
        ("machine toolkit 1.1~\n", [row(BROKEN)], "machine toolkit 1.1~\n"),
        ("machine toolkit 1.1~\n", [row(NO_TIME)], "machine toolkit 1.1~\n"),
        ("machine toolkit 1.1~\n", [row(WORKS)], ""),
        ("host driver-595 5~\n", [row(WORKS, half="host", package="driver-595")], ""),
        # Of the driver, each branch is a package of its own.
        ("host driver-590 5~\n", [row(WORKS, half="host", package="driver-595")], "host driver-590 5~\n"),
        (
            "host driver-590 5~\n",
            [row(BROKEN, half="host", package="driver-595")],
            "host driver-590 5~\nhost driver-595 1.2~\n",
        ),
        # Another suite's, another half's and other packages' bounds stay.
        ("machine toolkit 1.1~ trixie\n", [row(WORKS), row(WORKS, suite="noble")], "machine toolkit 1.1~ trixie\n"),
        ("host toolkit 2~\nmachine other 1~\n", [row(WORKS)], "host toolkit 2~\nmachine other 1~\n"),
    ],
)
def test_bounds_are_written_and_lifted(before: str, rows: list[Row], after: str) -> None:
    assert bounded(BOUNDS_HEAD + before, rows) == BOUNDS_HEAD + after


def test_the_table_and_the_document_have_every_part() -> None:
    rows = [row(BROKEN), row(WORKS, half="", version="10.0")]
    head, *lines = table(rows).splitlines()
    assert head.split() == ["part", "newest", "last", "tested", "unasked", "verdict", "message"]
    assert [line.split() for line in lines] == [
        ["part", "1.2", "1.1", "yes", "broken", "test_it:", "no"],
        ["part", "10.0", "1.1", "no", "works", "test_it:", "no"],
    ]
    assert rows[0].document() == {
        **{"part": "part", "newest": "1.2", "released": "2026-11-05", "last_tested": "1.1", "verdict": "broken"},
        **{"message": "test_it: no", "reaches_users_unasked": True, "why": "why"},
    }


def test_the_parts_tests_exist_and_the_bounds_are_of_parts() -> None:
    repository = BOUNDS.parents[1]
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        files = [each for each in part.tests if each.startswith(("tests", "integration"))]
        assert files
        assert all((repository / each).exists() for each in files), part.name
        assert bool(part.half) == bool(part.package) != part.why.startswith("no:"), part.name
    text = BOUNDS.read_text()
    assert text.startswith(BOUNDS_HEAD)
    assert text == bounded(text, [])
