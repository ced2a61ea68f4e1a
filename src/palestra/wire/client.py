"""A trainer that eats the wire: environments elsewhere sample from this model and post what they scored."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig, TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem, Sample
from palestra.envs.base import Episode, Split
from palestra.learner.local import LocalLearner
from palestra.train.loop import Harvest, Training
from palestra.wire.groups import Limits, read_group

_POLL_S = 0.2
_RETRY_S = 1.0
_GIVE_UP_S = 600.0


class WireGone(PalestraError):
    """The trajectory API cannot be reached, and was waited for."""


@dataclass(frozen=True, slots=True)
class WireClient:
    """HTTP to a trajectory API. One that is away or has no room for a while is waited for."""

    url: str
    token: str | None = None
    give_up_s: float = _GIVE_UP_S
    gone_s: float | None = None  # while it does not answer at all; give_up_s unless given

    async def register(self, config: RunConfig, starting_step: int, context_tokens: int, folder: Path) -> None:
        body = {
            "wandb_group": config.track.run_name or folder.name,
            "wandb_project": config.track.project,
            "batch_size": config.train.problems_per_step * config.rollout.group_size,
            "max_token_len": context_tokens,
            "checkpoint_dir": str(folder / "environments"),
            "save_checkpoint_interval": config.checkpoint.every,
            "starting_step": starting_step,
            "num_steps": config.train.max_steps,
        }
        await self.ask("/register", body)

    async def batch(self, after: int) -> tuple[int, list[dict[str, Any]]] | None:
        """The batch behind number `after`, with its own number; None while there is none."""
        answer = await self.ask(f"/batch?after={after}")
        groups = answer.get("batch")
        return (int(answer.get("number", after + 1)), groups) if groups else None

    async def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, key: str | None = None
    ) -> dict[str, Any]:
        """The answer; `key` lets a post that is repeated here count once there."""
        began = time.monotonic()
        request = self._request(path, body, method, key)
        while True:
            pause_s, limit_s = _RETRY_S, self.give_up_s
            try:
                return await asyncio.to_thread(_answer, request)
            except urllib.error.HTTPError as error:
                failure = PalestraError(f"{self.url}{path} answered {error.code}: {_text(error)}")
                if error.code != 429 and error.code < 500:
                    raise failure from None
                pause_s = _retry_after_s(error)
            except (OSError, ValueError, http.client.HTTPException) as error:
                start = "Start it with: palestra trajectory"
                failure = WireGone(f"{self.url}{path} cannot be asked: {error}. {start}")
                limit_s = self.give_up_s if self.gone_s is None else self.gone_s
            if time.monotonic() - began > limit_s:
                raise failure
            await asyncio.sleep(pause_s)

    def _request(
        self, path: str, body: Mapping[str, Any] | None, method: str | None, key: str | None
    ) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if key:
            headers["Idempotency-Key"] = key
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.url.rstrip('/')}{path}", data, headers, method=method)


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(response.read()))


def _text(error: urllib.error.HTTPError) -> str:
    return error.read(300).decode(errors="replace")


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    said = error.headers.get("Retry-After") or ""
    return min(float(said), 60.0) if said.isdecimal() else _RETRY_S


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The environment of a run whose environments are other people's processes."""

    reward_weights: Mapping[str, float] = field(default_factory=dict)

    def problems(self, split: Split) -> Sequence[Problem]:
        return ()

    def open(self, problem: Problem) -> Episode:
        raise PalestraError("the environments of this run are elsewhere; they hand out their own problems")


@dataclass(slots=True, kw_only=True)
class WireTraining(Training):
    """The loop, with groups that come over the wire instead of from rollouts of its own.

    The inference server lives in the runner's event loop, so it answers while groups are waited for and
    stands still during a step: nobody samples from half-changed weights.
    """

    wire: WireClient
    limits: Limits
    check: Callable[[], None] = lambda: None  # raises when waiting has become pointless
    given: list[list[float] | None] = field(default_factory=list)

    async def _collect(self) -> Harvest:
        began = time.perf_counter()
        cursor = self.state.cursor
        while True:
            delivery = await self.wire.batch(cursor)
            if delivery is None:
                self.check()
                await asyncio.sleep(_POLL_S)
                continue
            cursor, plain = delivery
            groups = self._read(plain, cursor)
            if groups:
                return Harvest(groups, cursor - self.state.cursor, time.perf_counter() - began)

    def _read(self, plain: Sequence[Mapping[str, Any]], number: int) -> list[Group]:
        """The groups that can be trained; a bad one is told of and left out."""
        groups: list[Group] = []
        self.given = []
        for i, one in enumerate(plain):
            name = f"batch-{number}/{i}"
            try:
                # which weights sampled is not on the wire: count as one version old, so that logprobs are used
                group, given = read_group(one, name, self.limits, self.state.policy_version - 1)
            except (PalestraError, KeyError, TypeError, ValueError, IndexError) as error:
                self.watcher.note(f"{name} from environment {one.get('env_id')} cannot be trained: {error}")
                continue
            groups.append(group)
            self.given.append(given)
        return groups

    def _advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        # the zero-argument super() does not work in a dataclass with slots
        computed = Training._advantages(self, groups)
        return [own if own is not None else row for own, row in zip(self.given, computed, strict=True)]


class WireLearner(LocalLearner):
    """A learner to whom logprobs may be missing (NaN): it then takes the samples as its own policy's."""

    def step(self, samples: Sequence[Sample], objective: TrainSection) -> dict[str, float]:
        if not any(math.isnan(value) for sample in samples for value in sample.logprobs):
            return super().step(samples, objective)
        own = [replace(s, logprobs=(0.0,) * len(s.logprobs), policy_version=self.version) for s in samples]
        trusting = objective.model_copy(update={"importance_correction": "none", "off_policy_mask_threshold": None})
        metrics = super().step(own, trusting)
        return {name: value for name, value in metrics.items() if name not in ("kl_sampler", "sampler_gap_max")}
