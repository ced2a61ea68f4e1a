"""A text that notices whether a template looks into it, or only writes it."""

from __future__ import annotations

import re
from typing import Any

_CHARACTERS = r"[\w .,:;+*/=()%!?#@~^-]+"
PLAIN = re.compile(rf"(?!\s){_CHARACTERS}(?<!\s)", re.ASCII)  # the same in every form of a body
_CAN_BE_PLAIN = re.compile(_CHARACTERS, re.ASCII)
_LOOK_FOR = "__contains__ __eq__ __ne__ startswith endswith find rfind index rindex count replace partition rpartition"
_LOOK_AT = (
    "__len__ __getitem__ __iter__ __lt__ __le__ __gt__ __ge__ split rsplit splitlines lower upper title capitalize "
    "casefold swapcase isalpha isalnum isdigit isdecimal isnumeric islower isupper istitle isspace isidentifier"
)


class WatchedText(str):
    """Stands for a plain text (`PLAIN`) while a template is rendered. `was_read`: what is written around it may depend
    on what it says. A search for what no plain text holds, a tag for instance, does not count."""

    was_read = False

    def __bool__(self) -> bool:
        return True  # as every plain text

    __hash__ = str.__hash__


def _watch(name: str, only_plain: bool) -> None:
    method = getattr(str, name)

    def watched(self: WatchedText, *arguments: Any) -> Any:
        if not only_plain or any(_CAN_BE_PLAIN.fullmatch(str(each)) for each in arguments):
            self.was_read = True
        return method(self, *arguments)

    setattr(WatchedText, name, watched)


for _name in _LOOK_FOR.split():
    _watch(_name, only_plain=True)
for _name in _LOOK_AT.split():
    _watch(_name, only_plain=False)
