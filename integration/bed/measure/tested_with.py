"""Make docs/tested-with.md from the results of a test run: what passed, with which versions of the real parts.

Tests record what they ran with by pytest's `record_property(part, version)`, which writes it to the JUnit XML file.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

MEASURED = "measured: "
"""Prefix of properties that are measurements, not versions of parts."""
HEADER = """# Tested with

`integration/tested-with` writes this page from test results; do not edit it. A row says that tests passed with this
version of this part, as a rule as the part itself reported it; the number in parentheses is how many tests of that file
passed. **GPUs, kernel modules and NVML are simulated** in all of them
([integration/README.md](../integration/README.md)); everything in the table is real.

**Not in the table:** runs by hand on real GPUs, with Ubuntu 24.04 as the host
([hardware/real-gpus.md](hardware/real-gpus.md)).

**Not tested:** Ubuntu 24.04 as the base of a machine's image (the default base).

**Tested only up to the plan,** without a virtual machine, are arm64, drivers in 32 and 64 bits side by side, and other
locales. With the real `nvidia-ctk`, tests also check the staged copies of every file of Debian's driver packages, in 64
and 32 bits, and the same files moved to where Fedora, Talos and a driver container have them.

| part | version | tests that passed |
|---|---|---|
"""


def table(*results: Path) -> str:
    """Return the document made from JUnit XML files.

    Raises ValueError if a test failed or was skipped, or if none recorded what it ran with.
    """
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
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
                rows[part, each.get("value", "")][module] += 1
    if not rows:
        raise ValueError("no test says what it ran with; run integration/test --all first")
    return HEADER + "".join(
        f"| {part} | {version} | {', '.join(f'{module} ({count})' for module, count in sorted(modules.items()))} |\n"
        for (part, version), modules in sorted(rows.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="integration/tested-with", description=__doc__)
    parser.add_argument("document", type=Path, help="the file to write")
    parser.add_argument("results", type=Path, nargs="+", help="JUnit XML files of the run")
    options = parser.parse_args()
    try:
        options.document.write_text(table(*options.results))
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
