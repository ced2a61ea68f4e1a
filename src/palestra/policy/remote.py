"""A model behind an inference server, token by token: SGLang's `/generate` as a Policy."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from palestra.core.errors import PalestraError, RolloutError
from palestra.core.types import Finish, SamplingParams, Turn
from palestra.core.weights import Weights

_RETRY_S = 1.0


@dataclass(slots=True)
class RemoteSession:
    """The tokens of one conversation; the server keeps nothing between its turns."""

    token_ids: list[int]


class RemotePolicy:
    """Samples from a server in another process: ids, logprobs and versions are exactly the server's.

    The server may train its model itself, or take weights from us by files in `weights_folder`, which both can read.
    A server that is away or stands still (a trainer does during a step) is waited for; one that refuses a
    conversation fails that rollout. Whoever is cancelled hangs up, and the server stops sampling for it.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        give_up_s: float = 600.0,
        max_concurrent: int = 128,
        weights_folder: Path | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.version = 0  # as of the last answer
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._weights_folder = weights_folder
        self._pool = ThreadPoolExecutor(max_concurrent, "palestra-remote")

    async def model_name(self) -> str:
        """What the server calls its model."""
        answer = await self._ask("GET", "/v1/models")
        return str(answer["data"][0]["id"])

    def open(self, prompt_ids: Sequence[int]) -> RemoteSession:
        return RemoteSession([int(i) for i in prompt_ids])

    def fork(self, session: RemoteSession, n: int) -> list[RemoteSession]:
        return [RemoteSession(list(session.token_ids)) for _ in range(n)]

    async def sample(self, session: RemoteSession, params: SamplingParams) -> Turn:
        body = {"input_ids": session.token_ids, "sampling_params": _plain(params), "return_logprob": True}
        sampled = read_sampled(await self._ask("POST", "/generate", body))
        self.version = int(sampled.versions[-1])
        session.token_ids += sampled.token_ids.tolist()
        return sampled

    def append(self, session: RemoteSession, token_ids: Sequence[int]) -> None:
        session.token_ids += token_ids

    def close(self, session: RemoteSession) -> None:
        """Nothing is held for it anywhere."""

    def update(self, weights: Weights) -> None:
        if self._weights_folder is None:
            raise PalestraError("a remote model gets its weights from its own trainer, not from this program")
        self._weights_folder.mkdir(parents=True, exist_ok=True)
        path = weights.save(self._weights_folder.resolve() / f"version-{weights.version}.safetensors")
        body = json.dumps({"model_path": str(path)}).encode()
        call = _Call(self.url, "POST", "/update_weights_from_disk", body, self._headers, self._timeout_s)
        try:
            status, text = call.run()
        except (OSError, http.client.HTTPException) as error:
            raise PalestraError(f"{self.url} could not be given new weights: {error}") from error
        finally:
            path.unlink(missing_ok=True)
        if status != 200:
            raise PalestraError(f"{self.url} did not take new weights: {text[:300].decode(errors='replace')}")
        self.version = weights.version

    def sleep(self) -> None:
        """The server decides over its memory."""

    def wake(self) -> None: ...

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        until = time.monotonic() + self._give_up_s
        data = None if body is None else json.dumps(body).encode()
        while True:
            call = _Call(self.url, method, path, data, self._headers, self._timeout_s)
            try:
                status, text = await asyncio.get_running_loop().run_in_executor(self._pool, call.run)
                if status == 200:
                    return json.loads(text)
                reason = f"answered {status}: {text[:300].decode(errors='replace')}"
                if status != 429 and status < 500:
                    raise RolloutError(f"{self.url}{path} {reason}")
            except asyncio.CancelledError:
                call.hang_up()
                raise
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = f"could not be asked: {error}"
            if time.monotonic() > until:
                raise RolloutError(f"{self.url}{path} {reason}. The trainer serves its model there (--serve-port)")
            await asyncio.sleep(_RETRY_S)


@dataclass(slots=True)
class _Call:
    """One request that another thread may break off."""

    url: str
    method: str
    path: str
    data: bytes | None
    headers: Mapping[str, str]
    timeout_s: float
    _connection: http.client.HTTPConnection | None = field(default=None, init=False)

    def run(self) -> tuple[int, bytes]:
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(where.netloc, timeout=self.timeout_s)
        with contextlib.closing(self._connection) as connection:
            connection.request(self.method, f"{where.path}{self.path}", self.data, dict(self.headers))
            response = connection.getresponse()
            return response.status, response.read()

    def hang_up(self) -> None:
        if self._connection is not None and self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)


def read_sampled(answer: Any) -> Turn:
    """
    >>> about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]], "weight_version": "3"}
    >>> turn = read_sampled({"text": "x", "meta_info": about})
    >>> turn.token_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist(), turn.finish
    ([7], [-0.5], [3], 'stop')
    """
    try:
        about = answer["meta_info"]
        rows = about["output_token_logprobs"]
        finish = about["finish_reason"]["type"]
        ids, logprobs = [int(row[1]) for row in rows], [float(row[0]) for row in rows]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutError(f"/generate gave no tokens with logprobs: {type(error).__name__}: {error}") from None
    if finish not in ("stop", "length") or not ids:
        raise RolloutError(f"/generate ended with {finish!r} after {len(ids)} tokens; expected stop or length")
    last = str(about.get("weight_version", ""))
    versions = about.get("weight_versions") or (int(last) if last.isdecimal() else 0)
    return Turn("model", ids, logprobs, versions, cast(Finish, finish))  # type: ignore[arg-type]


def _plain(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,  # SGLang's word for "all"
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "seed": params.seed,
        "grammar": params.grammar,
    }
