"""Compare the engine with naive batched sampling and transformers' `generate`: same model, prompts and lengths.

No turn stops early and tool results are fixed token ids, so every side samples as many tokens as the others.

>>> bench = Bench("palestra/tiny", Workload())     # doctest: +SKIP
>>> bench.measure("engine", tool_rounds=3).tokens_per_s
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from palestra.core.errors import ResourceError, SettingError
from palestra.core.types import SamplingParams
from palestra.engine.supported import text_config
from palestra.extras.bench.workload import TOOL_RESULT_TOKENS, Measurement, Side, Workload
from palestra.models.loading import load_model
from palestra.policy.base import Policy
from palestra.policy.local import LocalPolicy
from palestra.policy.naive import NaivePolicy

WARM_UP_TOKENS = 4


class _Tokens(NamedTuple):
    """The token ids of a scenario: a prompt for each group, tool results for each rollout and round."""

    prompts: list[list[int]]
    tool_results: list[list[list[int]]]  # [rollout][round]


def _draw_tokens(work: Workload, vocabulary: int, tool_rounds: int) -> _Tokens:
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return rng.choices(range(vocabulary), k=count)

    prompts = [draw(work.prompt_tokens) for _ in range(work.prompts)]
    return _Tokens(prompts, [[draw(TOOL_RESULT_TOKENS) for _ in range(tool_rounds)] for _ in range(work.rollouts)])


class Bench:
    """Measure one model, one side after the other, each after a short warm-up."""

    def __init__(self, model_name: str, workload: Workload, threads: int | None = None) -> None:
        model = load_model(model_name).model
        config = text_config(model)
        context = getattr(config, "max_position_embeddings", None)
        if context and workload.longest_rollout > context:
            raise SettingError(
                f"a rollout of {workload.prompt_tokens} prompt tokens, {workload.tool_rounds + 1} turns of "
                f"{workload.new_tokens} and {workload.tool_rounds} tool results of {TOOL_RESULT_TOKENS} has "
                f"{workload.longest_rollout} tokens; the model's context holds {context}; "
                "lower prompt_tokens, new_tokens or tool_rounds"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = model.eval()
        self._work = workload
        self._vocabulary: int = config.vocab_size
        self._local = LocalPolicy(model)
        self._naive = NaivePolicy(model)

    @property
    def device(self) -> str:
        device = next(self._model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def measure(self, side: Side, tool_rounds: int) -> Measurement:
        """Run one side through all rollouts of a scenario."""
        self._run(side, replace(self._work, new_tokens=min(WARM_UP_TOKENS, self._work.new_tokens)), 0)
        with self._counting(side) as computed:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            sampled = self._run(side, self._work, tool_rounds)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        expected = self._work.rollouts * self._work.new_tokens * (tool_rounds + 1)
        if sampled != expected:
            raise ResourceError(
                f"{side} sampled {sampled} tokens, expected {expected}: memory does not hold one rollout; "
                "lower prompt_tokens, new_tokens or tool_rounds"
            )
        return Measurement(side, wall_s, cpu_s, sampled, computed())

    def _run(self, side: Side, work: Workload, tool_rounds: int) -> int:
        """All rollouts of one side; how many tokens it sampled."""
        tokens = _draw_tokens(work, self._vocabulary, tool_rounds)
        match side:
            case "engine":
                return asyncio.run(_sample(self._local, work, tokens))
            case "plain":
                return asyncio.run(_sample(self._naive, work, tokens))
            case "generate":
                return _generate(self._model, work, tokens)

    @contextmanager
    def _counting(self, side: Side) -> Iterator[Callable[[], int]]:
        """Count the tokens that go through the model; the engine's runner does not always call the whole module."""
        total = 0

        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal total
            total += (args[0] if args else kwargs["input_ids"]).numel()

        def counted_launch(chunks: Any) -> Any:
            collect, planned = launch(chunks), sum(chunk.count for chunk in chunks)

            def counted_collect(until_one_ends: bool) -> Any:
                nonlocal total
                emitted = collect(until_one_ends)
                total += planned + sum(len(e.token_ids) - 1 for e in emitted)  # several decode steps compute their own
                return emitted

            return counted_collect

        runner: Any = self._local.engine.runner
        launch = runner.launch
        with ExitStack() as stack:
            if side == "engine":
                runner.launch = counted_launch
                stack.callback(delattr, runner, "launch")  # the method of the class again
            else:
                stack.callback(self._model.register_forward_pre_hook(count, with_kwargs=True).remove)
            yield lambda: total


async def _sample(policy: Policy[Any], work: Workload, tokens: _Tokens) -> int:
    """All rollouts at once through a policy."""
    sessions = [s for prompt in tokens.prompts for s in policy.fork(policy.open(prompt), work.group_size)]

    async def rollout(index: int, session: Any) -> int:
        params = SamplingParams(work.new_tokens, seed=index)
        sampled = len((await policy.sample(session, params)).token_ids)
        for result in tokens.tool_results[index]:
            policy.append(session, result)
            sampled += len((await policy.sample(session, params)).token_ids)
        policy.close(session)
        return sampled

    return sum(await asyncio.gather(*(rollout(i, s) for i, s in enumerate(sessions))))


def _generate(model: Any, work: Workload, tokens: _Tokens) -> int:
    """All rollouts in one batch through transformers' `generate`, each turn from its first token on."""
    from transformers import GenerationConfig

    # The model's own would fill in an end token and top-k, hence replaced and not overridden by arguments.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, max_new_tokens=work.new_tokens)
    torch.manual_seed(0)
    device = next(model.parameters()).device
    rows = [prompt for prompt in tokens.prompts for _ in range(work.group_size)]
    sampled = 0
    for turn in range(len(tokens.tool_results[0]) + 1):
        if turn:
            rows = [row + results[turn - 1] for row, results in zip(rows, tokens.tool_results, strict=True)]
        ids = torch.tensor(rows, device=device)
        grown = model.generate(ids, attention_mask=torch.ones_like(ids))
        sampled += grown.numel() - ids.numel()
        rows = grown.tolist()
    return sampled
