"""docs/compatibility.md has what a complete run showed, and nothing from a run that failed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from integration.bed.measure.tested_with import BEGIN, FILES_LIMIT, HEADER, table, with_table
from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/compatibility.md"


PYTHON = """\
case "$*" in
    *--collect-only*) echo integration/tests/node/test_a.py::test_one ;;
    *tested_with*) echo "$@" ;;
    *) for each; do case $each in --junit-xml=*) touch "${each#*=}" ;; esac; done ;;
esac"""
"""Stands in for the Python of pytest, whose tests all pass."""


def results(tmp_path: Path, *cases: str) -> Path:
    path = tmp_path / "results.xml"
    path.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    return path


def case(module: str, name: str, *versions: tuple[str, str], outcome: str = "") -> str:
    properties = "".join(f'<property name="{part}" value="{version}"/>' for part, version in versions)
    return (
        f'<testcase classname="integration.{module}" name="{name}"><properties>{properties}</properties>'
        f"{outcome}</testcase>"
    )


def test_rows_are_parts_with_their_versions(tmp_path: Path) -> None:
    path = results(
        tmp_path,
        case("test_pods", "a", ("runc", "1.1"), ("containerd", "1.7")),
        case("test_pods", "b", ("containerd", "1.7"), ("measured: restarted", "nothing")),
        case("test_runtimes", "c", ("containerd", "2.1")),
    )
    rows = table(path).splitlines()[-3:]
    assert rows == [
        "| containerd | 1.7 | test_pods (2) |",
        "| containerd | 2.1 | test_runtimes (1) |",
        "| runc | 1.1 | test_pods (1) |",
    ]
    cases = [case(f"test_{number}", "a", ("runc", "1.1")) for number in range(FILES_LIMIT + 1)]
    path = results(tmp_path, *cases, case("test_0", "b", ("runc", "1.1")))
    assert table(path).splitlines()[-1] == "| runc | 1.1 | 10 tests in 9 files |"


def test_only_the_table_of_the_page_is_replaced() -> None:
    page = PAGE.read_text()
    written, _, rows = page.partition(BEGIN)
    assert rows.startswith(HEADER)
    assert with_table(page, "\nnew\n") == f"{written}{BEGIN}\nnew\n"
    with pytest.raises(ValueError, match="does not contain the line"):
        with_table(written, "new")


def test_a_run_may_have_several_files(tmp_path: Path) -> None:
    for shard in ("node", "drivers"):
        (tmp_path / shard).mkdir()
    files = (results(tmp_path / each, case(f"test_{each}", "a", ("runc", "1.1"))) for each in ("node", "drivers"))
    assert table(*files).splitlines()[-1] == "| runc | 1.1 | test_drivers (1), test_node (1) |"


def test_a_test_that_several_runs_have_counts_once(tmp_path: Path) -> None:
    """integration/canary runs some of the tests of integration/test --all again, with other versions or the same."""
    for run, version in {"all": "1.1", "canary": "1.1", "newer": "1.5"}.items():
        (tmp_path / run).mkdir()
        results(tmp_path / run, case("test_pods", "a", ("runc", version)))
    rows = table(*(tmp_path / each / "results.xml" for each in ("all", "canary", "newer"))).splitlines()[-2:]
    assert rows == ["| runc | 1.1 | test_pods (1) |", "| runc | 1.5 | test_pods (1) |"]


def test_an_incomplete_run_makes_no_table(tmp_path: Path) -> None:
    for outcome, said in (("failure", "failed"), ("error", "failed"), ("skipped", "was skipped")):
        bad = case("test_pods", "b", outcome=f'<{outcome} message="x"/>')
        path = results(tmp_path, case("test_pods", "a", ("runc", "1.1")), bad)
        with pytest.raises(ValueError, match=rf"integration\.test_pods\.b {said}"):
            table(path)
    with pytest.raises(ValueError, match="no test says"):
        table(results(tmp_path, case("test_pods", "a")))


def test_a_host_that_may_fail_is_in_the_table_only_if_it_passed(tmp_path: Path) -> None:
    failed = case("test_hosts", "b", ("host", "testing"), outcome='<skipped type="pytest.xfail" message="x"/>')
    assert "testing" not in table(results(tmp_path, case("test_pods", "a", ("runc", "1.1")), failed))


def test_the_table_names_tests_that_exist() -> None:
    """If a module was renamed, nobody has seen the renamed module's result."""
    named = set(re.findall(r"\b(test_\w+) \(\d+\)", PAGE.read_text()))
    assert named
    assert named <= {path.stem for path in (REPOSITORY / "integration").rglob("test_*.py")}


@pytest.mark.processes
def test_the_table_is_made_from_all_that_a_complete_run_has_passed(tmp_path: Path) -> None:
    """The gate's results are kept by commit, those of the other files by what they test."""
    checkout, cache = tmp_path / "checkout", tmp_path / "cache/unbounded-agent"
    (checkout / "integration/tests/node").mkdir(parents=True)
    for name in ("test_a.py", "test_bench.py"):
        (checkout / "integration/tests/node" / name).touch()
    for name in ("test", "tested-with"):
        shutil.copy(REPOSITORY / "integration" / name, checkout / "integration")
    program(checkout / "integration/setup", "true")
    program(cache / "python/bin/python", PYTHON)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache.parent)}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("git", "init", "--quiet")
    run("git", "add", "--all")
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=c")
    run("integration/test", "--all")
    # A second run finds that all has passed.
    run("integration/test", "--all")
    read = [Path(word).name for word in run("integration/tested-with").split() if word.endswith(".xml")]
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in sorted(read)] == [
        "gate-host.xml", "gate-without-host.xml", "test_a.xml", "test_bench.xml"
    ]  # fmt: skip
