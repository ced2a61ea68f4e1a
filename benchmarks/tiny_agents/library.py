"""Two look-ups of one reader, and the difference."""

from palestra import Agent, EvalSuite, function_tool, measure

FIRST, LAST = (
    "Tessa Rufus Odile Magnus Linnea Casper Freya".split(),
    "Quill Parrish Thorne Winslow Yarrow Zeller".split(),
)
READERS = [f"{first} {last}" for first in FIRST for last in LAST]
ALLOWED = {reader: 20 + 3 * (i % 7) for i, reader in enumerate(READERS)}
BORROWED = {reader: 2 + 5 * i % 17 for i, reader in enumerate(READERS)}


@function_tool
def allowed_books(reader: str) -> int:
    """How many books a reader may have."""
    return ALLOWED[reader]


@function_tool
def borrowed_books(reader: str) -> int:
    """How many books a reader has."""
    return BORROWED[reader]


@function_tool
def take_away(minuend: int, subtrahend: int) -> int:
    """The difference of two numbers."""
    return minuend - subtrahend


@measure
def right_count(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent(
    "librarian", "palestra/tiny", "You work in a library. Use the tools.", [allowed_books, borrowed_books, take_away]
)
cases = [
    {"input": form.format(reader), "expect": ALLOWED[reader] - BORROWED[reader]}
    for reader in READERS
    for form in ("How many more books may {} borrow?", "How many books can {} still take home?")
]
suite = EvalSuite.from_records(cases, measures=[right_count])
