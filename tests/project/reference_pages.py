"""Writes the reference parts of pages in docs/ from the code: `make docs`.

docs/commands.md has the parser's commands, and docs/metrics.md the metrics of a page that has every one with samples. A
path such as docs/json.md in a help text becomes a link.
"""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from agent.cli.parser import COMMANDS, JSON, make_parser
from agent.host.daemon.metrics import PREFIX, TEXT
from tests.fakes import eight_gpus
from tests.project import configuration_reference
from tests.project.configuration_reference import linked

IN_THE_USAGE = (argparse.SUPPRESS, JSON, "the machine's name")
"""Arguments with these texts need no words besides the usage."""


def _commands() -> Iterator[str]:
    yield from _overview()
    yield from _sections(make_parser())


def _overview() -> Iterator[str]:
    yield "\n| command | what it does | run as |\n|---|---|---|\n"
    for name, command in COMMANDS.items():
        # `kube` does nothing without a subcommand.
        if not command.hidden and name not in ("driver", "kube"):
            anchor = name.replace(" ", "-")
            yield f"| [`{name}`](#{anchor}) | {linked(command.summary)} | {command.user} |\n"


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a section for each command. Examples are only in the commands' own help, and code 2 once in the page."""
    for name, command in COMMANDS.items():
        its_parser = parser
        for word in name.split():
            its_parser = _children(its_parser)[word]
        # The table of all commands says who may run each.
        yield f"\n{'###' if ' ' in name else '##'} `{name}`\n\n{_filled(linked(command.text))}\n\n"
        yield f"```\n{_usage(its_parser)}\n```\n\n"
        yield from _arguments(its_parser)
        codes = "; ".join(f"{code}: {meaning}" for code, meaning in sorted(command.codes.items()))
        yield _filled(f"- exit code {codes}", "  ") + "\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {name: child for each in found for name, child in each.choices.items()}


def _usage(parser: argparse.ArgumentParser) -> str:
    # In one line: each Python wraps it in its own way.
    return " ".join(parser.format_usage().split()).removeprefix("usage: ").replace(" [-h]", "")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield an item for each argument. `--help`, which all commands have, `--json` and subcommands are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help in IN_THE_USAGE:
            continue
        name = ", ".join(action.option_strings)
        value = str(action.metavar or f"{{{','.join(action.choices or ())}}}") if action.nargs != 0 else ""
        value = f"[={value}]" if name and action.nargs == "?" else f" {value}" if name and value else value
        yield _filled(f"- `{name}{value}`: {linked(action.help or '')}", "  ") + "\n"


def _metrics() -> Iterator[str]:
    yield "\n| name | type | labels | meaning |\n|---|---|---|---|\n"
    for family in sorted(metrics(), key=lambda each: each.name):
        # A metric without samples in the example would lack its labels here.
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, f"tests.fakes.eight_gpus has no sample of {family.name}"
        names = ", ".join(f"`{label}`" for label in sorted(labels))
        yield f"| `{name(family)}` | {family.type} | {names} | {family.documentation} |\n"


def metrics() -> list[Metric]:
    """Return the agent's own metrics, without prometheus_client's process_*."""
    view = eight_gpus.view()
    body = eight_gpus.metrics(view).page(view, TEXT).body.decode()
    return [family for family in text_string_to_metric_families(body) if family.name.startswith(PREFIX)]


def name(family: Metric) -> str:
    """Return the name that queries use; a histogram's series count as the histogram."""
    return family.name + ("_total" if family.type == "counter" else "")


DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- Generated from {} by `make docs`. Do not edit below this line. -->\n"
PAGES: Mapping[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "commands.md": (BEGIN.format("the parser"), _commands),
    "configuration.md": (BEGIN.format("the settings' classes"), configuration_reference.generated),
    "metrics.md": (BEGIN.format("the service's metrics"), _metrics),
}
"""The line before each page's generated part, and a function that makes that part."""


def page(name: str, text: str) -> str:
    """Return a page with its generated part replaced. Raises ValueError if the line before that part is missing."""
    begin, generated = PAGES[name]
    written, mark, _ = text.partition(begin)
    if not mark:
        raise ValueError(f"{name} does not contain the line {begin!r}")
    return "".join((written, mark, *generated()))


if __name__ == "__main__":
    for each in PAGES:
        (DOCS / each).write_text(page(each, (DOCS / each).read_text()))
