"""Checks that each promise has a test that fails without it: `python -m tests.mutants [WORD]`.

Each entry of promises.toml changes one text of one file so that a promise is broken, and names the tests that must
notice. The changes are made in copies of the checkout. With a word, only the entries run that have it in their promise,
file or tests.
"""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
PROMISES = Path(__file__).with_name("promises.toml")
LIMIT = 180
"""Seconds for one run of tests. A mutant that makes them hang is noticed, too."""
FAILED_TESTS = 1
"""pytest's exit code if all tests could be loaded, and some failed."""


class Mutant(NamedTuple):
    """A change that breaks a promise."""

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """What pytest runs: files, or `file::test`."""


class Result(NamedTuple):
    """What the tests said about a mutant."""

    mutant: Mutant
    killed: bool
    problem: str = ""
    """Why the tests could say nothing."""
    seconds: float = 0.0


def read(promises: Path = PROMISES) -> list[Mutant]:
    """Return the entries of the file in their order."""
    entries = tomllib.loads(promises.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def mutated(mutant: Mutant, tree: Path) -> str:
    """Return the file's content with the change. Raises ValueError if the old text does not occur exactly once."""
    content = (tree / mutant.file).read_text()
    if (count := content.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.promise!r}: {mutant.file} has the old text {count} times, not once: {mutant.old!r}")
    return content.replace(mutant.old, mutant.new)


def copy_checkout(checkout: Path, tree: Path) -> None:
    """Copy the files that git knows or would add, and compile them, so that not each run has to."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (checkout / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, tree / name, follow_symlinks=False)
    # A change may leave a file's size and time as they were, so only the content says whether compiled code fits.
    compiling = ("-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "agent", "tests")
    subprocess.run((sys.executable, *compiling), cwd=tree, check=False, capture_output=True)


def run_tests(tree: Path, tests: Sequence[str], limit: float = LIMIT) -> tuple[int | None, str]:
    """Return pytest's exit code, None after the limit, and the end of its output."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp", *tests)
    with subprocess.Popen(
        command,
        cwd=tree,
        # Plugins take longer to load than most of these tests to run.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, f"no end after {limit:.0f} s"
        finally:
            # What a test started and left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output[-2000:]


def try_mutant(mutant: Mutant, tree: Path, limit: float = LIMIT) -> Result:
    """Run the mutant's tests in a tree with its change, and restore the tree."""
    path = tree / mutant.file
    original = path.read_bytes()
    began = time.monotonic()
    try:
        path.write_text(mutated(mutant, tree))
        code, output = run_tests(tree, mutant.tests, limit)
    except ValueError as error:
        return Result(mutant, killed=False, problem=str(error))
    finally:
        path.write_bytes(original)
    seconds = time.monotonic() - began
    killed = code in (FAILED_TESTS, None)
    problem = "" if killed or code == 0 else f"pytest ended with {code}:\n{output}"
    return Result(mutant, killed, problem, seconds)


def run(mutants: Sequence[Mutant], checkout: Path, jobs: int) -> int:
    """Try all mutants, print what survived, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(jobs) as pool:
        trees = [Path(directory, str(number)) for number in range(jobs)]
        copy_checkout(checkout, trees[0])
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree, symlinks=True)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        code, output = run_tests(trees[0], tests, LIMIT * 5)
        if code != 0:
            print(f"the tests fail without any change, so they prove nothing:\n{output}")
            return 1
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def attempt(mutant: Mutant) -> Result:
            tree = free.get()
            try:
                return try_mutant(mutant, tree)
            finally:
                free.put(tree)

        results = []
        for result in pool.map(attempt, mutants):
            results.append(result)
            word = "killed" if result.killed else "ERROR" if result.problem else "SURVIVED"
            print(f"{word} {result.mutant.promise} ({result.mutant.file}, {result.seconds:.1f} s)", flush=True)
    for result in results:
        if result.problem:
            print(f"\n{result.mutant.promise}: {result.problem}")
        elif not result.killed:
            print(f"\n{result.mutant.promise}: no test of {', '.join(result.mutant.tests)} fails if")
            print(f"  {result.mutant.file} has {result.mutant.new!r}\n  instead of {result.mutant.old!r}")
    killed = sum(result.killed for result in results)
    print(f"{killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


def main(words: Sequence[str]) -> int:
    """Return the exit code."""
    chosen = [
        each for each in read() if all(word in " ".join((each.promise, each.file, *each.tests)) for word in words)
    ]
    if not chosen:
        print(f"no entry of {PROMISES} has {' '.join(words)}")
        return 2
    return run(chosen, CHECKOUT, jobs=min(os.cpu_count() or 1, len(chosen)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
