"""Print a configuration in which every key is a comment: `python -m deploy.generate.sample_configuration`.

A line that begins with `#` and no blank is a setting, with its default.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

from msgspec.structs import fields

from agent.config.checks import Table
from agent.model.paths import CONFIG_FILE
from tests.project.configuration_reference import OPTIONAL, TABLES, default_of, docstrings, toml, values

LISTS = ("extra_devices", "extra_mounts")
"""Tables of which there may be several."""
INTRODUCTION = f"""\
# All settings of unbounded-agent with their defaults, as in unbounded-agent.toml(5).
# The agent does not read this file: write what differs to {CONFIG_FILE}, or to files that end in
# .toml in config.d next to it. One line is enough to begin with, such as [machines.gpu-node].
"""


def sample() -> str:
    """Return the file's text."""
    return INTRODUCTION + "".join(_table(table, model) for table, model in TABLES.items())


def _table(table: str, model: type[Table]) -> str:
    header = f"[[{table}]]" if table.endswith(LISTS) else f"[{table}]"
    texts = dict(docstrings(model))
    lines = ["", *_comment(inspect.getdoc(model) or ""), f"#{header}"]
    for field in fields(model):
        name = f"{table}.{field.name}"
        if name in TABLES or name in OPTIONAL:
            continue
        default = '""  # required' if field.required else _default(default_of(field))
        lines += ["", *_comment(texts[field.name]), *_comment(f"Values: {_plain(values(field.type))}.")]
        lines.append(f"#{field.name} = {default}")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    # TOML has no value for a key that is not set.
    return "true  # not set by default" if value is None else toml(value)


def _plain(text: str) -> str:
    return re.sub(r"`", "", text)


def _comment(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield "#"
        wrapped = textwrap.wrap(_plain(paragraph), 96, break_on_hyphens=False, break_long_words=False)
        yield from (f"# {line}" for line in wrapped)


if __name__ == "__main__":
    sys.stdout.write(sample())
