"""Makes docs/tested-with.md from the results of a test run: what passed, with which versions of the real parts.

Tests say what they ran with by pytest's `record_property(part, version)`, which puts it into the JUnit XML file.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

MEASURED = "measured: "
"""Begins the names of those properties that are no parts with their versions."""
HEADER = """# Tested with

Made from the results of tests (`integration/tested-with`); not to be edited. A row says: these tests
passed with this version of this part, as the part itself told it. GPUs, kernel modules and NVML are simulated in all of
them (see the README); everything that is listed here is real.

| part | version | tests that passed |
|---|---|---|
"""


def table(results: Path) -> str:
    """The document; raises ValueError when a test failed, was skipped, or none says what it ran with."""
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{results}: {name} failed: the table is of a run in which all passed")
        if case.find("skipped") is not None:
            raise ValueError(f"{results}: {name} was skipped: the table is of a run in which all ran")
        module = case.get("classname", "").rpartition(".")[2]
        for each in case.iter("property"):
            part = each.get("name", "")
            if not part.startswith(MEASURED):
                rows[part, each.get("value", "")][module] += 1
    if not rows:
        raise ValueError(f"{results}: no test says what it ran with; run integration/test first, in whole")
    return HEADER + "".join(
        f"| {part} | {version} | {', '.join(f'{module} ({count})' for module, count in sorted(modules.items()))} |\n"
        for (part, version), modules in sorted(rows.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="integration/tested-with", description=__doc__)
    parser.add_argument("results", type=Path, help="JUnit XML file of the run")
    parser.add_argument("document", type=Path, help="the file to write")
    options = parser.parse_args()
    try:
        options.document.write_text(table(options.results))
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
