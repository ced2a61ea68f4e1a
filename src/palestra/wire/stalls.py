"""Why no groups arrive: logged after 30 s without one, and the reason that ends the run after a limit."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from palestra.core.errors import PalestraError
from palestra.core.files import read_from
from palestra.serve.web import Tally

WAIT_LIMIT_S = 60.0
_FIRST_NOTE_S = 30.0
_LOOK_EVERY_S = 2.0
_REFUSALS = 3  # posts or requests, after which the next ones will hardly fare better
_REPEATS = 8  # of the same message in the environment's log
# How many limits to wait. What a log repeats while the model answers may be said of each bad answer, and groups follow.
_NEVER, _SURE, _LIKELY, _IDLE = 0, 1, 2, 5
_DROPPED_GROUPS = 64  # sampled, more than any environment attempts at a time, and none of them posted
_MAX_LOG_BYTES, _LOG_TAIL_BYTES = 16 * 2**20, 2**20
_TROUBLE = re.compile(r"error|exception|fail|skipp|refus|invalid|too long|cannot|not support", re.IGNORECASE)
_FRAME = re.compile(r"File |raise |During handling|The above exception|Traceback")
_REMEDIES = {
    "Scores are the same": "--env.ensure_scores_are_not_same false posts groups with equal scores, too",
    "Token length is too long": "raise --env.max_token_length",
}


class CountsGroups(Protocol):
    groups: int  # requests for several completions of one prompt


@dataclass(slots=True)
class StallWatch:
    """Looked at while a batch is waited for. `status` asks the trajectory API, `inference` counts at our own server."""

    status: Callable[[], Awaitable[Mapping[str, Any]]]
    inference: Tally
    requests: CountsGroups
    log: Path  # of the environment; there is no such file where it runs on another machine
    note: Callable[[str], None]
    limit_s: float = WAIT_LIMIT_S  # 0: wait for ever
    clock: Callable[[], float] = time.monotonic
    _began: float = 0.0
    _looked: float = 0.0
    _next_note_s: float = _FIRST_NOTE_S
    _groups: int = -1
    _refused_posts: int = 0
    _before: Tally = field(default_factory=Tally)
    _groups_before: int = 0
    _log_start: int = 0

    def begin(self) -> None:
        """From now on a batch is waited for."""
        self._groups = -1
        shorten_log(self.log)

    async def check(self) -> None:
        """Say why nothing comes; raise when it has failed for longer than the limit."""
        now = self.clock()
        if self._groups >= 0 and now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        status = await self.status()
        shorten_log(self.log)
        groups = int(status.get("groups_accepted", status.get("queue_size", 0)))
        if groups != self._groups:
            self._restart(now, groups, int(status.get("posts_refused", 0)))
            return
        waited_s = now - self._began
        if waited_s < min(self._next_note_s, self.limit_s or _FIRST_NOTE_S):
            return
        reason, limits = self._reason(status)
        text = f"no group for {waited_s:.0f} s: {reason}"
        if limits and self.limit_s and waited_s >= limits * self.limit_s:
            raise PalestraError(f"{text}. Fix this, or wait longer with --wait-limit SECONDS (0: for ever)")
        if waited_s >= self._next_note_s:
            self._next_note_s = 2 * waited_s
            self.note(text)

    def _restart(self, now: float, groups: int, refused_posts: int) -> None:
        self._began, self._groups, self._refused_posts = now, groups, refused_posts
        self._before = Tally(self.inference.answered, self.inference.refused)
        self._groups_before = self.requests.groups
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0
        self._next_note_s = _FIRST_NOTE_S

    def _reason(self, status: Mapping[str, Any]) -> tuple[str, int]:
        """What is wrong, as far as can be seen from here, and after how many limits it is time to stop."""
        if status.get("environments") == 0:
            return "no environment has registered at the trajectory API; is one running?", _NEVER
        posts = int(status.get("posts_refused", 0)) - self._refused_posts
        refused = self.inference.refused - self._before.refused
        answered = self.inference.answered - self._before.answered
        repeats, line = repeated_trouble(_read_from(self.log, self._log_start))
        is_idle = not (answered or refused or posts or self.inference.running)
        parts = [f"{answered} requests to the model were answered"]
        if is_idle:
            parts.append("the environment asks for nothing; are its prompts longer than --env.max_token_length?")
        sampled = self.requests.groups - self._groups_before
        if sampled >= _DROPPED_GROUPS:
            parts.append(
                f"{sampled} whole groups were sampled and none was posted, so the environment drops them itself"
            )
        if posts:
            parts.append(f"{posts} posts were refused, the last because {status.get('last_refusal')}")
        if refused:
            parts.append(f"{refused} requests to the model were refused, the last because {self.inference.reason}")
        remedies = [remedy for text, remedy in _REMEDIES.items() if text in line]
        if repeats > 1:
            parts += [f"the environment's log says {repeats} times: {line}", *remedies]
        if self.log.is_file():
            parts.append(f"see {self.log}")
        is_refused = posts >= _REFUSALS or (refused >= _REFUSALS and refused > answered)
        is_repeated = repeats >= _REPEATS
        if is_refused or sampled >= _DROPPED_GROUPS or (is_repeated and (remedies or not answered)):
            return "; ".join(parts), _SURE
        return "; ".join(parts), _LIKELY if is_repeated else _IDLE if is_idle else _NEVER


def repeated_trouble(text: str) -> tuple[int, str]:
    """The message of trouble that a log repeats most, and how often; numbers and what stands around it may differ.

    >>> repeated_trouble("starting\\nKeyError: 3\\n  File x, line 2\\nKeyError: 4\\n")
    (2, 'KeyError: 4')
    >>> repeated_trouble("task: gcd | score 0.0 (all failed)\\ntask: lcm | score 0.1 (all failed)\\n")
    (2, 'task: lcm | score 0.1 (all failed)')
    """
    counts: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        if _TROUBLE.search(line) and not _FRAME.match(line):
            part = next((part for part in re.split(r"[:|] ", line) if _TROUBLE.search(part)), line)
            kind = re.sub(r"\d+", "0", part)[:200]
            counts[kind] += 1
            last[kind] = line[:300]
    if not counts:
        return 0, ""
    kind, count = counts.most_common(1)[0]
    return count, last[kind]


def shorten_log(path: Path) -> None:
    """Keep the end of a log that has grown too large. Its writer appends, and goes on after what is left."""
    if path.is_file() and (size := path.stat().st_size) > _MAX_LOG_BYTES:
        with path.open("rb+") as file:
            file.seek(size - _LOG_TAIL_BYTES)
            tail = file.read(_LOG_TAIL_BYTES)
            file.seek(0)
            file.write(b"(earlier lines were left out)\n" + tail)
            file.truncate()


def _read_from(path: Path, start: int) -> str:
    """The text since byte `start`, of a long one the end; all of it where the file was shortened since."""
    return read_from(path, start)[0][-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
