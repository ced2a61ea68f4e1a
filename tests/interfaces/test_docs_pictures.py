"""Every picture in the docs is made by a script or a test, so that it can be made again."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
PICTURES = [p for p in (ROOT / "docs").rglob("*") if p.suffix in {".png", ".webp", ".svg", ".jpg", ".gif"}]
MAKERS = "\n".join(
    p.read_text(encoding="utf-8")
    for p in [*(ROOT / "tests" / "browser").glob("test_*.py"), ROOT / "scripts" / "record_terminal.py"]
)
MAX_BYTES = 300_000


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


def test_pictures_are_small_and_load_nothing() -> None:
    assert [p.name for p in PICTURES if p.stat().st_size > MAX_BYTES] == []
    drawn = {p.name: p.read_text(encoding="utf-8") for p in PICTURES if p.suffix == ".svg"}
    assert [name for name, text in drawn.items() if re.search(r"<script|<image|url\(|href=\"(?!#)", text)] == []


def test_the_recording_of_a_terminal_shows_its_frames_one_after_the_other() -> None:
    from record_terminal import Frame, thin, to_svg

    frames = [Frame(("<text>$ ls</text>", f"<text>{i}</text>"), float(i)) for i in range(100)]
    kept = thin(frames)
    assert (len(kept), kept[0], kept[-1]) == (40, frames[0], frames[-1])
    picture = to_svg(kept, "ls")
    assert picture.count('<g class="f"') == 40
    assert picture.count("$ ls") == 1, "a line that frames share is stored once"
