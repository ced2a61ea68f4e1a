"""Record a command in a terminal as an animated SVG, for the README.

pip install pyte
python scripts/record_terminal.py                          # docs/images/demo.svg: `palestra train`, in ./runs
python scripts/record_terminal.py out.svg palestra plan

The picture has no script and loads nothing: frames are groups that CSS shows one after the other. Pauses are shortened,
and the real duration is in the title bar.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

DEMO = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
COLUMNS, ROWS = 96, 30
MAX_FRAMES = 40
FRAME_S, LAST_S = 0.3, 6.0
SAMPLE_S = 0.4  # time between two looks at the screen
CHAR, LINE, LEFT, TOP = 8.0, 18, 16, 46
COLOURS = {
    "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "yellow": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#e6edf3", "black": "#6e7681",
}  # fmt: skip
STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}
.f{visibility:hidden}.b{font-weight:700}.d{fill:#8b949e}.t{font:13px system-ui,sans-serif;fill:#8b949e}
"""


@dataclass(frozen=True)
class Frame:
    lines: tuple[str, ...]  # SVG
    seconds: float  # since the start


def record(command: list[str]) -> list[Frame]:
    """The screens of a command, one for each change that is seen."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {' '.join(command)}\r\n".encode())
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "COLORTERM": ""}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, frames, looked = time.monotonic(), [Frame(draw(screen), 0.0)], 0.0
    while True:
        ready, _, _ = select.select([terminal], [], [], SAMPLE_S)
        try:
            data = os.read(terminal, 1 << 16) if ready else b""
        except OSError:  # the command has ended
            data, ready = b"", [terminal]
        if data:
            stream.feed(data)
        now = time.monotonic() - began
        ended = bool(ready) and not data
        if ended or now - looked >= SAMPLE_S:
            looked, lines = now, draw(screen)
            if lines != frames[-1].lines:
                frames.append(Frame(lines, now))
        if ended:
            break
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return frames


def draw(screen: object) -> tuple[str, ...]:
    """The lines of a screen as SVG text."""
    buffer = screen.buffer  # type: ignore[attr-defined]
    lines = []
    for y in range(ROWS):
        cells = [buffer[y][x] for x in range(COLUMNS)]
        spans = []
        x = 0
        for style, run in groupby(cells, key=lambda cell: (cell.fg, cell.bold, cell.reverse)):
            text = "".join(cell.data for cell in run)
            if text.strip():
                spans.append(span(text, x, *style))
            x += len(text)
        lines.append("".join(spans))
    return tuple(lines)


def span(text: str, x: int, colour: str, bold: bool, reverse: bool) -> str:
    fill = COLOURS.get(colour.removeprefix("bright"), f"#{colour}" if len(colour) == 6 and colour != "default" else "")
    kept = text.rstrip()
    start = len(kept) - len(kept.lstrip())
    marks = (' class="b"' if bold else "") + (f' fill="{fill}" style="fill:{fill}"' if fill else "")
    # textLength keeps columns aligned in every font
    width = CHAR * (len(kept) - start)
    place = f'x="{LEFT + CHAR * (x + start):g}" textLength="{width:g}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}{marks}>{escape(kept[start:])}</text>"


def thin(frames: list[Frame]) -> list[Frame]:
    """At most MAX_FRAMES of them, the first and the last among them."""
    if len(frames) <= MAX_FRAMES:
        return frames
    step = (len(frames) - 1) / (MAX_FRAMES - 1)
    return [frames[round(i * step)] for i in range(MAX_FRAMES)]


def to_svg(frames: list[Frame], title: str) -> str:
    """Frames one after the other; a line that several frames share is stored once."""
    width, height = LEFT * 2 + CHAR * COLUMNS, TOP + LINE * ROWS
    total = FRAME_S * (len(frames) - 1) + LAST_S
    rules, groups = [], []
    defined: dict[tuple[int, str], str] = {}
    shared: list[str] = []
    for number, frame in enumerate(frames):
        begin, end = (
            100 * FRAME_S * number / total,
            100 if number == len(frames) - 1 else 100 * FRAME_S * (number + 1) / total,
        )
        # visible within its share of the time; without animations the last frame alone is shown
        before = f"0%,{begin:.3f}%{{visibility:hidden}}" if number else ""
        after = f"{end:.3f}%,100%{{visibility:hidden}}" if end < 100 else ""
        rules.append(
            f"@keyframes k{number}{{{before}{begin + 0.001:.3f}%,{end - 0.001:.3f}%{{visibility:visible}}{after}}}"
        )
        rules.append(f"#f{number}{{animation:k{number} {total:g}s step-end infinite}}")
        uses = []
        for y, line in enumerate(frame.lines):
            if line:
                if (y, line) not in defined:
                    defined[(y, line)] = f"l{len(defined)}"
                    shared.append(f'<g id="{defined[(y, line)]}" transform="translate(0 {TOP + LINE * y})">{line}</g>')
                uses.append(f'<use href="#{defined[(y, line)]}"/>')
        clock = f'<text class="t" x="{width - LEFT}" y="21" text-anchor="end">{frame.seconds:.0f} s</text>'
        last = ' style="visibility:visible"' if number == len(frames) - 1 else ""
        groups.append(f'<g class="f" id="f{number}"{last}>{clock}{"".join(uses)}</g>')
    dots = "".join(
        f'<circle cx="{LEFT + 4 + 18 * i}" cy="16" r="5" fill="{c}"/>'
        for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    size = f'viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}{''.join(rules)}</style><defs>{''.join(shared)}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}{"".join(groups)}</svg>\n'
    )


def main() -> None:
    out, *command = sys.argv[1:] or [str(DEMO), "palestra", "train"]
    frames = thin(record(command))
    Path(out).write_text(to_svg(frames, " ".join(command)), encoding="utf-8")
    print(f"{out}: {len(frames)} frames, {Path(out).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
