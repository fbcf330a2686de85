"""Print agent/vendors/nvidia/xids.tsv, from files of NVIDIA: `make xids CATALOGUE=... NVERROR=... DATE=...`.

CATALOGUE is sheet "Catalog" of the spreadsheet on docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html as CSV,
DATE its day. NVERROR is src/common/sdk/nvidia/inc/nverror.h of github.com/NVIDIA/open-gpu-kernel-modules: it also names
errors that are newer than the catalogue.
"""

import csv
import re
import sys
from collections.abc import Iterable, Iterator

DEFINITION = re.compile(r"^#define (\w+)\s+\((\d+)\)", re.MULTILINE)
END = "#define ROBUST_CHANNEL_LAST_ERROR "
"""The end of the errors in nverror.h: it is the largest number, and what follows are no errors."""


def table(rows: Iterable[dict[str, str]], header: str, date: str) -> Iterator[str]:
    """Yield the lines. Raises KeyError if a column is missing, or the number of an error ValueError."""
    yield f"# NVIDIA's Xid errors: number, name, and the immediate action of NVIDIA's Xid catalogue as of {date}; an\n"
    yield "# error without an action has none there, or is only in nverror.h. `make xids` writes this file.\n"
    found = {int(number): (name, "") for name, number in DEFINITION.findall(header.partition(END)[0])}
    for row in rows:
        # Names of columns have line breaks, and some errors have two names.
        values = {" ".join(key.split()): value for key, value in row.items()}
        action = values["Resolution Bucket (Immediate Action)"].strip()
        found[int(values["Code"])] = values["Mnemonic"].split()[0], action
    for number, (name, action) in sorted(found.items()):
        yield f"{number}\t{name}\t{action}\n"


if __name__ == "__main__":
    _, catalogue, nverror, day = sys.argv
    with open(catalogue, newline="", encoding="utf-8") as sheet, open(nverror, encoding="utf-8") as source:
        sys.stdout.writelines(table(csv.DictReader(sheet), source.read(), day))
