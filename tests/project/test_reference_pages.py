"""The reference parts of pages in docs/ have what the code says."""

import pytest

from tests.project.reference_pages import DOCS, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text()
    assert text == page(name, text), f"docs/{name} differs from the code: run `make docs`"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_the_mark_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="does not contain the line"):
        page(name, (DOCS / name).read_text().replace("<!-- Generated", ""))
