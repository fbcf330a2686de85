"""The documentation is complete: every reason, links that work, a short README."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from agent.config.node import HostNodeSettings
from agent.model.conditions import ConditionType
from agent.model.reasons import Reason

README_LIMIT = 120
"""Lines: README leads to the pages in docs/, which have everything else."""
UNUSUAL = re.compile(
    r"\b(anew|any more|beside|broken off|for ever|half[- ]made|is asked|lacking|let(s|ting)? go|looked (at|into)|"
    r"mends?|nobody can|outrank(s|ing)?|plug-ins?|refused are|renew|so that no|spoiled|tells? how|told of|upon)\b"
)
"""Words that readers stumbled over; there is a plainer one for each (again, no longer, missing, plugin ...)."""
TOLD = re.compile(r"\b(looked at|take[ns]? back|told|upon|VM host|kernel's log)\b")
"""Further such words in docstrings and comments: observed, withdrawn, reported, on, the host, the kernel log."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "conditions.md"

ROW = re.compile(r"^\| `(?P<reason>\w+)` \| (?P<status>True|False|Unknown) \| (?P<meaning>.+) \| (?P<advice>.+) \|$")
GIVEN = re.compile(r"\b(?P<status>true|false|unknown)\(\s*[\w.]+,\s*Reason\.(?P<name>\w+)")
"""Most conditions are made like this: `false(KIND, Reason.NODES_MISSING, ...)`."""
SOURCES = "".join(path.read_text() for path in (REPOSITORY / "agent").rglob("*.py"))


def rows() -> list[re.Match[str]]:
    return [row for row in map(ROW.match, DOCUMENT.read_text().splitlines()) if row]


def test_every_reason_is_documented_and_no_other() -> None:
    assert {row["reason"] for row in rows()} == set(Reason)


def test_every_reason_is_given() -> None:
    assert set(re.findall(r"\bReason\.([A-Z_]+)", SOURCES)) == {each.name for each in Reason}


def test_every_reason_is_documented_with_its_status() -> None:
    given = {(Reason[each["name"]].value, each["status"].capitalize()) for each in GIVEN.finditer(SOURCES)}
    assert given - {(row["reason"], row["status"]) for row in rows()} == set()
    assert len(given) > len(Reason) / 2, "the expression does not find them"


def test_every_row_of_the_tables_is_read() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows())


def test_up_loads_the_modules_that_the_page_names() -> None:
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    modules = "\n".join(HostNodeSettings().kernel_modules)
    assert f"```\n{modules}\n```" in page


def test_every_condition_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert sections == [str(kind) for kind in ConditionType]


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


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.processes
def test_pages_that_the_code_names_exist() -> None:
    found = subprocess.run(
        ["git", "grep", "-hoE", r"\bdocs/[a-z/-]+\.md", "--", "agent", "deploy", "integration", "systemd"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    # containerd's own documentation.
    assert {page for page in found if not (REPOSITORY / page).exists()} == {"docs/cri/config.md"}


def test_readme_leads_to_every_page() -> None:
    index = REPOSITORY / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    assert set(index.parent.rglob("*.md")) - {index} <= named
    assert "(docs/README.md)" in (REPOSITORY / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= README_LIMIT


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_pages_are_in_plain_words(page: Path) -> None:
    if page.name != "CHANGELOG.md":
        assert UNUSUAL.search(page.read_text()) is None


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_no_line_of_a_paragraph_begins_like_a_list(page: Path) -> None:
    """Markdown then ends the paragraph: "the exit code is" would lose its "1."."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?![-+*] |\d+[.)] |#)\S.*\n(?:1[.)]|[-+*]) .*", text, re.MULTILINE) == []


def test_code_is_in_plain_words() -> None:
    """Check all text of the agent: messages, docstrings, comments, and the words in names."""
    sources = {path: path.read_text() for path in (REPOSITORY / "agent").rglob("*.py")}
    # Blanks replace line breaks, with the `#` of the next line of a comment, and the underscores in names.
    plain = {path: re.sub(r"\s+(# )?|_", " ", text) for path, text in sources.items()}
    assert {str(path): found[0] for path, text in plain.items() if (found := UNUSUAL.search(text))} == {}
    assert len(sources) > 100


def prose(source: str) -> str:
    """Return the docstrings and comments of a module."""
    nodes = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docstrings = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


@pytest.mark.parametrize("directory", ["integration", "tests"])
def test_docstrings_and_comments_have_no_unusual_words(directory: str) -> None:
    texts = {path: prose(path.read_text()) for path in (REPOSITORY / directory).rglob("*.py")}
    assert {path: found for path, text in texts.items() if (found := UNUSUAL.findall(text) + TOLD.findall(text))} == {}
    assert sum(map(len, texts.values())) > 20_000, "nothing was read"
