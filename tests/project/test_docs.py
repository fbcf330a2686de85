"""The documentation is complete: every reason, links that work, a short README."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from agent.config.settings import HostNodeSettings
from agent.model.conditions import ConditionType, Reason
from tests.fakes.conditions_page import DOCUMENT, REPOSITORY, rows

PAGES_LIMIT, WORDS_LIMIT = 24, 39_500
FIRST_POD_LIMIT = 2_500
README_LIMIT = 120
"""Lines: README leads to the pages in docs/, which have everything else."""
PLAINER = {
    "anew": "again",
    "any more": "no longer",
    "beside": "next to",
    "broken off": "interrupted",
    "for ever": "forever",
    "half[- ]made": "incomplete",
    "lacking": "missing",
    "let(?:s|ting)? go": "release",
    "mends?": "repair or correct",
    "outrank(?:s|ing)?": "take precedence over",
    "plug-ins?": "plugin",
    "spoiled": "damaged",
    "take[ns]? back": "withdraw",
    "upon": "on",
    "VM host": "host",
    "kernel's log": "kernel log",
}
"""Expressions that readers stumbled over, or that stand for another term, and what to write instead."""
NOT_PLAIN = re.compile(rf"\b({'|'.join(PLAINER)})\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")

RELIABILITY = REPOSITORY / "docs" / "reliability.md"

GIVEN = re.compile(r"\b(?P<status>true|false|unknown)\(\s*[\w.]+,\s*Reason\.(?P<name>\w+)")
"""Most conditions are made like this: `false(KIND, Reason.NODES_MISSING, ...)`."""
SOURCES = "".join(path.read_text() for path in (REPOSITORY / "agent").rglob("*.py"))


def test_every_reason_is_given_and_documented_with_its_status() -> None:
    assert {row["reason"] for row in rows()} == set(Reason)
    assert set(re.findall(r"\bReason\.([A-Z_]+)", SOURCES)) == {each.name for each in Reason}
    given = {(Reason[each["name"]].value, each["status"].capitalize()) for each in GIVEN.finditer(SOURCES)}
    assert given - {(row["reason"], row["status"]) for row in rows()} == set()
    assert len(given) > len(Reason) / 2, "the expression does not find them"
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows()), "not every row of the tables is read"
    sections = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert sections == [str(kind) for kind in ConditionType]


def test_up_loads_the_modules_that_the_page_names() -> None:
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    modules = "\n".join(HostNodeSettings().kernel_modules)
    assert f"```\n{modules}\n```" in page


def pages() -> list[Path]:
    return [
        *REPOSITORY.glob("*.md"),
        REPOSITORY / "integration" / "README.md",
        *sorted((REPOSITORY / "docs").rglob("*.md")),
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings as GitHub makes them: lower case, hyphens for spaces, no other punctuation.

    Headings with the same text are numbered from the second on.
    """
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        found[re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")] += 1
    return {f"{each}-{number}" if number else each for each, count in found.items() for number in range(count)}


def leads_nowhere(page: Path, target: str, anchor: str) -> bool:
    path = page.parent / target if target else page
    return "://" not in target and not (path.exists() and (not anchor or anchor in anchors(path)))


def test_links_lead_somewhere() -> None:
    links = [(page, target, anchor) for page in pages() for target, anchor in LINK.findall(page.read_text())]
    assert [f"{page}: {target}#{anchor}" for page, target, anchor in links if leads_nowhere(page, target, anchor)] == []
    assert len(links) > 200
    assert leads_nowhere(DOCUMENT, "", "no-such-heading")
    assert leads_nowhere(DOCUMENT, "no-such-page.md", "")


@pytest.mark.processes
def test_pages_that_the_code_names_exist() -> None:
    found = subprocess.run(
        ["git", "grep", "-hoE", r"\bdocs/[a-z/-]+\.md", "--", "agent", "deploy", "integration", "systemd"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    # containerd's own documentation.
    assert {page for page in found if not (REPOSITORY / page).exists()} == {"docs/cri/config.md"}


def test_the_tests_of_each_promise_exist() -> None:
    """Each promise names at least one, and a test that was moved takes its name in the page along."""
    table = RELIABILITY.read_text().partition("## How to reproduce")[0]
    rows = re.findall(r"^\| .* \| (.*) \|$", table, re.MULTILINE)[1:]
    named = [re.findall(r"`((?:tests|integration)/[\w/.]+)`", row) for row in rows]
    assert len(rows) > 20
    assert [row for row, paths in zip(rows, named, strict=True) if not paths and "same run" not in row] == []
    assert [path for paths in named for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_pages_are_few_and_short_and_the_readme_leads_to_them() -> None:
    """Whoever must read 65,000 words reads none. The way to a first pod is the README and the quick start."""
    index, readme = REPOSITORY / "docs" / "README.md", REPOSITORY / "README.md"
    named = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    documents = sorted(index.parent.rglob("*.md"))
    assert set(documents) - {index} <= named
    assert "(docs/README.md)" in readme.read_text()
    assert len(readme.read_text().splitlines()) <= README_LIMIT
    assert len(documents) <= PAGES_LIMIT
    assert sum(words(page) for page in documents) <= WORDS_LIMIT
    assert words(readme) + words(REPOSITORY / "docs/quick-start.md") <= FIRST_POD_LIMIT


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_pictures_have_words_for_those_who_do_not_see_them() -> None:
    found = [(page, text) for page in pages() for text in re.findall(r"!\[([^\]]*)\]\(", page.read_text())]
    assert len(found) > 3
    assert [page for page, text in found if len(text.split()) < 10] == []


def could_be_plainer(name: str, text: str) -> list[str]:
    """Return advice for each such expression in the text of a file."""
    # Blanks replace line breaks, with the `#` of the next line of a comment, and the underscores in names.
    flat = re.sub(r"\s+(# )?|_", " ", text)
    found = set(NOT_PLAIN.findall(flat))
    return [
        f"{name}: instead of {each!r} write {advice!r}"
        for each in sorted(found)
        for words, advice in PLAINER.items()
        if re.fullmatch(words, each)
    ]


def prose(source: str) -> str:
    """Return the docstrings and comments of a module; nothing, at once, if no word of it could be plainer."""
    if not could_be_plainer("", source):
        return ""
    nodes = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docstrings = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def test_everything_is_in_plain_words() -> None:
    """Pages, all text of the agent (messages, docstrings, comments, words in names), and the prose of other code."""
    texts = {page.name: page.read_text() for page in pages() if page.name != "CHANGELOG.md"}
    texts |= {str(path): path.read_text() for path in (REPOSITORY / "agent").rglob("*.py")}
    others = [path for name in ("integration", "tests") for path in (REPOSITORY / name).rglob("*.py")]
    assert len(others) > 300
    texts |= {str(path): prose(path.read_text()) for path in others}
    assert [advice for name, text in texts.items() for advice in could_be_plainer(name, text)] == []
    assert sum(map(len, texts.values())) > 2_000_000, "nothing was read"
    assert could_be_plainer("x.py", "starts\n    # anew") == ["x.py: instead of 'anew' write 'again'"]


def test_no_line_of_a_paragraph_begins_like_a_list() -> None:
    """Markdown then ends the paragraph: "the exit code is" would lose its "1."."""
    texts = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in pages()}
    begins = re.compile(r"^(?![-+*] |\d+[.)] |#)\S.*\n(?:1[.)]|[-+*]) .*", re.MULTILINE)
    assert {page: found for page, text in texts.items() if (found := begins.findall(text))} == {}
