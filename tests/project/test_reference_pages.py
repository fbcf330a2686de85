"""The reference parts of pages in docs/ have what the code says; what the pages say of it is true."""

import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import fields, replace
from prometheus_client.parser import text_string_to_metric_families

from agent.cli.parser import COMMANDS, make_parser
from agent.config.checks import Table
from agent.config.settings import Config
from agent.host.daemon.metrics import TEXT
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import DeviceNode
from tests.fakes import eight_gpus
from tests.project.configuration_reference import TABLES
from tests.project.reference_pages import DOCS, PAGES, metrics, name, page

SERIES_LIMIT = 160
"""Series of a host with eight GPUs and one machine. A fleet's Prometheus keeps each of them in memory."""


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text == page(name, text), f"docs/{name} differs from the code: run `make docs`"
    with pytest.raises(ValueError, match="does not contain the line"):
        page(name, text.replace("<!-- Generated", ""))


def is_valid(words: list[str]) -> bool:
    try:
        # A parser for one command is made in a fraction of the time, and is the same (tests/cli/test_main.py).
        return bool(make_parser(words[0]).parse_args(words).command)
    except SystemExit:
        return False


def commands_in(page: Path) -> set[str]:
    """Return the agent's commands in a page's code, without what follows that only a shell understands."""
    code = re.findall(r"`([^`\n]+)`|^(?:\$ )?(unbounded-agent .*)$", page.read_text(), re.MULTILINE)
    begun = ("".join(each).removeprefix("sudo ").removeprefix("$ ") for each in code)
    found = {re.split(r" *(?:[|#;>]|&&|  )", each)[0] for each in begun if each.startswith("unbounded-agent ")}
    # These are the usages of the reference.
    return {each for each in found if "[" not in each and "COMMAND ..." not in each}


def test_commands_in_the_documentation_and_in_examples_are_valid() -> None:
    # Prose names commands without their arguments.
    names = {*COMMANDS, "COMMAND --help"}
    pages = (*DOCS.rglob("*.md"), DOCS.parent / "README.md")
    written = {command for path in pages for command in commands_in(path)}
    examples = (each for name, command in COMMANDS.items() for each in command.examples_of(name))
    begun = {example.partition("|")[0].removeprefix("sudo ") for example in examples}
    found = [each for each in begun if each.startswith("unbounded-agent ")]
    assert len(written) > 50
    assert len(found) > 20
    words = [shlex.split(command)[1:] for command in (*written, *found)]
    assert [each for each in words if " ".join(each) not in names and not is_valid(each)] == []
    assert not is_valid(["status", "--no-such-option"])


def test_every_document_is_described() -> None:
    text = (DOCS / "json.md").read_text()
    commands = {name for name, each in COMMANDS.items() if "--json" in page_section(name) and not each.hidden}
    assert {each for each in commands if f"## `{each}" not in text} == set()
    assert commands >= {"status", "plan", "doctor", "gpus", "up", "preflight"}


def page_section(name: str) -> str:
    return (DOCS / "commands.md").read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]


def models(model: type[Table]) -> set[type[Table]]:
    """Return the classes that a class's fields consist of, including itself."""
    found = {model}
    pending: list[object] = [field.type for field in fields(model)]
    while pending:
        each = pending.pop()
        pending += getattr(each, "__args__", ())
        if isinstance(each, type) and issubclass(each, Table):
            found |= models(each)
    return found


def test_no_class_of_settings_is_left_out() -> None:
    assert set(TABLES.values()) == models(Config) - {Config}


def test_prose_names_only_metrics_that_exist() -> None:
    written = (DOCS / "metrics.md").read_text().partition(PAGES["metrics.md"][0])[0]
    named = set(re.findall(r"\bunbounded_agent_[a-z_]+\b", written))
    assert named - {name(each) for each in metrics()} == set()


def test_a_host_with_eight_gpus_has_few_series() -> None:
    """With a node of every kind, and an Xid error of every GPU."""
    facts = eight_gpus.facts()
    (vendor,) = facts.vendors
    assert isinstance(vendor.devices, tuple)
    others = [kind for kind in DeviceKind if kind is not DeviceKind.GPU]
    nodes = [DeviceNode(f"/dev/{kind}", kind, DeviceNumber(511, minor)) for minor, kind in enumerate(others)]
    nodes += (node for node in vendor.devices if node.kind is DeviceKind.GPU)
    view = eight_gpus.view(observed=replace(facts, vendors=(replace(vendor, devices=tuple(nodes)),)))
    body = eight_gpus.metrics(view).page(view, TEXT).body.decode()
    counts = {family.name: len(family.samples) for family in text_string_to_metric_families(body)}
    assert 100 < sum(counts.values()) <= SERIES_LIMIT, counts
