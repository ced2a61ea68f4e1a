"""Every picture in the docs is made by a script or a test, so that it can be made again."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = [p for p in (ROOT / "docs").rglob("*") if p.suffix in {".png", ".webp", ".svg", ".jpg", ".gif"}]
MAKERS = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests" / "browser").glob("test_*.py"))


def maker(picture: Path) -> str:
    """What makes it, or nothing."""
    if picture.parent == ROOT / "docs" / "results":  # scripts/results_page.py, whose text and curves have a test
        return "data" if (picture.parent / "data" / f"{picture.stem}-0.json").exists() else ""
    found = re.search(rf'"({re.escape(picture.stem)}|{re.escape(picture.name)})"', MAKERS)
    return found[0] if found else ""


def test_every_picture_has_a_script_or_test_that_makes_it() -> None:
    assert [str(p.relative_to(ROOT)) for p in PICTURES if not maker(p)] == []


def test_every_picture_is_shown_on_a_page() -> None:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [p.name for p in PICTURES if p.name not in pages] == []
