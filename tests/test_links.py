"""Every link of README and docs inside the repository leads somewhere."""

import re

import pytest

from tests.command import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page):
    """Of the headings of a page, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page):
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            lost.append(target)
    assert lost == []


def test_a_heading_has_one_anchor_and_code_has_none(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# FrozenLake: 17 arms, `5` seeds\n\n```bash\n# no heading\n```\n## K\n")
    assert anchors(page) == {"frozenlake-17-arms-5-seeds", "k"}
