"""Posted groups, parsed and checked; large bodies in a process of their own.

The parser holds the interpreter's lock and needs thirty times the body's memory: 100 MiB of numbers would stop
everybody for ten seconds. `python -m palestra.sources.wire.posts` reads a body and writes the checked groups.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from pydantic import TypeAdapter
from starlette.requests import Request

from palestra.core.secrets import clean_environment
from palestra.servers.body import MIB, parse, read_body
from palestra.servers.http_errors import refuse
from palestra.sources.wire.types import ScoredGroup

_LARGE = 4 * MIB
_LARGE_AT_ONCE = 4
_GROUPS = TypeAdapter(list[ScoredGroup])


@dataclass(frozen=True, slots=True)
class PostedGroup:
    """A checked group as JSON, and what the queue must know of it."""

    env_id: int | None
    sequences: int
    longest: int  # tokens of its longest sequence
    body: bytes

    @classmethod
    def of(cls, group: ScoredGroup) -> PostedGroup:
        longest = max(map(len, group.tokens))
        return cls(group.env_id, len(group.tokens), longest, group.model_dump_json().encode())


class PostReader:
    """Reads posts of one group or of a list; few large ones at once, so that their bodies do not add up."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._reading = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._parsing = asyncio.Semaphore(1)

    async def read(self, request: Request, *, is_list: bool = False) -> list[PostedGroup]:
        size = request.headers.get("content-length", "")
        is_small = size.isdecimal() and int(size[:12]) <= _LARGE and "content-encoding" not in request.headers
        if is_small:
            return _parse(await read_body(request, self._max_body), is_list)
        async with self._reading:
            body = await read_body(request, self._max_body)
            if len(body) <= _LARGE:
                return _parse(body, is_list)
            async with self._parsing:
                return await _parse_apart(body, is_list)


def _parse(body: bytes, is_list: bool) -> list[PostedGroup]:
    groups = parse(_GROUPS.validate_json, body) if is_list else [parse(ScoredGroup.model_validate_json, body)]
    return [PostedGroup.of(group) for group in groups]


async def _parse_apart(body: bytes, is_list: bool) -> list[PostedGroup]:
    command = [sys.executable, "-P", "-m", "palestra.sources.wire.posts", "list" if is_list else "one"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate(body)
    finally:
        if process.returncode is None:
            process.kill()
    head, _, rest = output.partition(b"\n")
    if process.returncode != 0 or not head:
        raise refuse(413, "the body could not be parsed in the memory that there is; send less at once")
    answer = json.loads(head)
    if "error" in answer:
        raise refuse(422, answer["error"])
    groups, start = [], 0
    for env_id, sequences, longest, length in answer["groups"]:
        groups.append(PostedGroup(env_id, sequences, longest, rest[start : start + length]))
        start += length
    return groups


def main() -> None:
    from starlette.exceptions import HTTPException

    try:
        groups = _parse(sys.stdin.buffer.read(), sys.argv[1] == "list")
    except HTTPException as error:
        print(json.dumps({"error": error.detail}))
        return
    rows = [(group.env_id, group.sequences, group.longest, len(group.body)) for group in groups]
    sys.stdout.buffer.write(json.dumps({"groups": rows}).encode() + b"\n" + b"".join(g.body for g in groups))


if __name__ == "__main__":
    main()
