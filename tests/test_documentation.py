"""Every Python example of README.md and docs/ runs, top to bottom, and links between the pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> str:
    """The examples of a page as one program; blank lines keep the numbers of the lines in the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in EXAMPLE.finditer(text):
        start = text.count("\n", 0, match.start(1))
        code = match.group(1).splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("page", [page for page in PAGES if EXAMPLE.search(page.read_text(encoding="utf-8"))], ids=name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(examples(page), str(page), "exec"), {"__name__": "__example__"})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
