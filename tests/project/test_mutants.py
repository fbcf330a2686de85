"""The list of changes that break a promise does not rot, and its runner tells killed from surviving."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.mutants.__main__ import Mutant, mutated, read, run, try_mutant

CHECKOUT = Path(__file__).parents[2]
PROGRAM = "def limit() -> int:\n    return 5\n"
CHECKS = {
    "tests/test_limit.py": "from agent.program import limit\n\n\ndef test_limit():\n    assert limit() == 5\n",
    "tests/test_else.py": "from agent.program import limit\n\n\ndef test_else():\n    assert limit() > 0\n",
}


def test_every_entry_fits_the_checkout() -> None:
    wrong = []
    for mutant in read():
        try:
            content = mutated(mutant, CHECKOUT)
            if mutant.file.endswith(".py"):
                ast.parse(content)
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.promise}: {error}")
        if mutant.new == mutant.old:
            wrong.append(f"{mutant.promise}: nothing changes")
        wrong += [f"{mutant.promise}: no test {each}" for each in mutant.tests if not names_a_test(each)]
    assert not wrong


def names_a_test(test: str) -> bool:
    file, _, name = test.partition("::")
    path = CHECKOUT / file
    return path.exists() and (not name or f"def {name.partition('[')[0]}(" in path.read_text())


def test_no_promise_is_there_twice() -> None:
    promises = [mutant.promise for mutant in read()]
    assert sorted(set(promises)) == sorted(promises)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "checkout"
    for name, content in {"agent/program.py": PROGRAM, **CHECKS}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return tree


def mutant(old: str, new: str, test: str = "tests/test_limit.py") -> Mutant:
    return Mutant(f"{old} is not {new}", "agent/program.py", old, new, (test,))


@pytest.mark.processes
def test_tests_that_cannot_run_do_not_kill_and_a_hang_does(tree: Path) -> None:
    # Tests that cannot be loaded say nothing about the promise.
    unloadable = try_mutant(mutant("def limit", "def limits"), tree)
    assert not unloadable.killed
    assert "ImportError" in unloadable.problem
    assert try_mutant(mutant("return 5", "__import__('time').sleep(60)"), tree, limit=3).killed
    assert (tree / "agent/program.py").read_text() == PROGRAM


@pytest.mark.parametrize("old", ["return 7", "i"])
def test_an_old_text_that_does_not_occur_once_is_named(tree: Path, old: str) -> None:
    result = try_mutant(mutant(old, "x"), tree)
    assert not result.killed
    assert f"agent/program.py has the old text {PROGRAM.count(old)} times, not once: {old!r}" in result.problem


@pytest.mark.processes
def test_only_copies_change_and_the_exit_code_tells_survivors(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(("git", "init", "-q", str(tree)), check=True)
    mutants = [mutant("return 5", "return 6"), mutant("return 5", "return 7", "tests/test_else.py")]
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*") if ".git" not in path.parts}
    assert run(mutants, tree, jobs=1) == 1
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*") if ".git" not in path.parts} == before
    printed = capsys.readouterr().out
    assert printed.endswith("1 of 2 killed\n")
    assert "SURVIVED return 5 is not return 7" in printed
    assert run(mutants[:1], tree, jobs=1) == 0
    (tree / "agent/program.py").write_text(PROGRAM.replace("5", "4"))
    assert run([mutant("return 4", "return 5")], tree, jobs=1) == 1
    assert "the tests fail without any change" in capsys.readouterr().out
