"""Write a table into docs/compatibility.md from the results of a test run: what passed, with which versions.

Tests record what they ran with by pytest's `record_property(part, version)`, which writes it to the JUnit XML file.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

MEASURED = "measured: "
"""Prefix of properties that are measurements, not versions of parts."""
BEGIN = "<!-- Written by integration/tested-with from test results. Do not edit below this line. -->\n"
"""The line of the document below which the table is."""
HEADER = """
| part | version | tests that passed |
|---|---|---|
"""
FILES_LIMIT = 8
"""A row with more files than this has only their number: nobody reads a list of thirty."""


def table(*results: Path) -> str:
    """Return the table made from JUnit XML files.

    Raises ValueError if a test failed or was skipped, or if none recorded what it ran with.
    """
    # Names of tests: several runs may have the same one.
    rows: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    cases = ((each, case) for each in results for case in ElementTree.parse(each).getroot().iter("testcase"))
    for file, case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{file}: {name} failed: the table is of a run in which all passed")
        skipped = case.find("skipped")
        if skipped is not None and skipped.get("type") == "pytest.xfail":
            # The test of a host that may fail (xfail) has failed: the table leaves this host out.
            continue
        if skipped is not None:
            raise ValueError(f"{file}: {name} was skipped: the table is of a run in which all ran")
        module = case.get("classname", "").rpartition(".")[2]
        for each in case.iter("property"):
            part = each.get("name", "")
            if not part.startswith(MEASURED):
                rows[part, each.get("value", "")][module].add(name)
    if not rows:
        raise ValueError("no test says what it ran with; run integration/test --all first")
    return HEADER + "".join(
        f"| {part} | {version} | {_tests(modules)} |\n" for (part, version), modules in sorted(rows.items())
    )


def _tests(modules: Mapping[str, set[str]]) -> str:
    if len(modules) > FILES_LIMIT:
        return f"{sum(map(len, modules.values()))} tests in {len(modules)} files"
    return ", ".join(f"{module} ({len(names)})" for module, names in sorted(modules.items()))


def with_table(document: str, new: str) -> str:
    """Return the document with its table replaced. Raises ValueError if the line before the table is missing."""
    written, mark, _ = document.partition(BEGIN)
    if not mark:
        raise ValueError(f"the document does not contain the line {BEGIN!r}")
    return written + mark + new


def main() -> None:
    parser = argparse.ArgumentParser(prog="integration/tested-with", description=__doc__)
    parser.add_argument("document", type=Path, help="the file that has the table")
    parser.add_argument("results", type=Path, nargs="+", help="JUnit XML files of the run")
    options = parser.parse_args()
    try:
        options.document.write_text(with_table(options.document.read_text(), table(*options.results)))
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
