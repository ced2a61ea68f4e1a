"""A whole agent step: ours, and transformers' `generate` with the plain update of learner.py (parts of gpu_decode.py).

64 rollouts (8 prompts x 8) with 3 tool turns, 4 x 48 sampled tokens, 64 tokens a tool result, prompts of 350; then
loss, backward and optimizer. With `ragged`, prompts have 175 to 524 tokens and results 32 to 95.
"""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from learner import learner_for, plain_step, step_of
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from palestra.core.types import Sample, SamplingParams
from palestra.engine.engine import Engine

Row = dict[str, Any]
ROWS_AT_ONCE = 8  # of the plain update, which holds all logits
COMPILE_LIMIT_S = 300.0
WARM_UP_TOKENS = 6  # decode steps: one compiles, the next ones record CUDA graphs and replay them


@dataclass(frozen=True)
class Rollouts:
    """The sizes and random tokens of a step's rollouts."""

    siblings: int  # also the number of prompts
    new: int
    rounds: int
    result: int
    vocabulary: int
    prompt: int = 350
    ragged: bool = False  # prompts and results have half to one and a half times these lengths

    @property
    def count(self) -> int:
        return self.siblings**2

    @property
    def trained(self) -> tuple[bool, ...]:
        return self._trained(self.prompt, self.result)

    def _trained(self, prompt: int, result: int) -> tuple[bool, ...]:
        turn = (True,) * self.new + (False,) * result
        return (False,) * prompt + (turn * self.rounds)[:-result]

    def tokens(self, rows: int, length: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(rows)
        return torch.randint(0, self.vocabulary, (rows, length), generator=generator).tolist()

    def many(self, rows: int, length: int) -> list[list[int]]:
        """Prompts or results of `length` tokens on average."""
        if not self.ragged:
            return self.tokens(rows, length)
        lengths = [length // 2 + 7919 * row % length for row in range(rows)]
        return [ids[:n] for ids, n in zip(self.tokens(rows, 2 * length), lengths, strict=True)]

    def samples(self, rows: list[list[int]]) -> list[Sample]:
        siblings, samples = self.siblings, []
        lengths = [len(ids) for ids in self.many(siblings, self.prompt)]
        for i, row in enumerate(rows):
            prompt = lengths[i // siblings]
            result = (len(row) - prompt - self.rounds * self.new) // (self.rounds - 1)
            trained = self._trained(prompt, result)
            logprobs, none = tuple(-8.0 * t for t in trained), (False,) * len(trained)
            advantage = i % siblings - siblings / 2 + 0.5
            samples.append(Sample(tuple(row), trained, none, logprobs, advantage, i // siblings, prompt))
        return samples


def rollouts(vocabulary: int, tiny: bool, ragged: bool = False) -> Rollouts:
    sizes = (8 if ragged else 2, 3, 2, 64) if tiny else (8, 48, 4, 64)
    return Rollouts(*sizes, vocabulary, ragged=ragged)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def our_step(model: Any, engine: Engine, plan: Rollouts) -> Row:
    """Our engine and learner; the first steps warm up."""
    learner, config = learner_for(model, None)
    groups, tool = plan.many(plan.siblings, plan.prompt), plan.many(plan.count, plan.result)
    samples: list[Sample] = []

    def sample() -> None:
        sessions = [s for p in groups for s in engine.fork(engine.open(p), plan.siblings)]
        for r in range(plan.rounds):
            engine.sample(sessions, [SamplingParams(plan.new, seed=i) for i in range(plan.count)])
            if r + 1 < plan.rounds:
                for session, answer in zip(sessions, tool, strict=True):
                    engine.append(session, answer)
        samples[:] = plan.samples([list(session.token_ids) for session in sessions])
        for session in sessions:
            engine.close(session)

    def learn() -> None:
        step_of(learner, samples, config)
        engine.weights_changed(engine.version + 1)

    times = [(seconds(sample), seconds(learn)) for _ in range(4)]
    sample_s, learn_s = min(s for s, _ in times[1:]), min(s for _, s in times[2:])
    return {
        "what": "agent step", "sample_s": sample_s, "learn_s": learn_s, "step_s": sample_s + learn_s,
        "ms_per_token": 1000 * sample_s / plan.rounds / plan.new,
    }  # fmt: skip


def plain_update_s(plain: Any, plan: Rollouts) -> float:
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-9, fused=True)
    samples = plan.samples(plan.tokens(plan.count, len(plan.trained)))
    plain.train()
    plain_step(plain, optimizer, samples[:ROWS_AT_ONCE], ROWS_AT_ONCE)
    elapsed = seconds(lambda: plain_step(plain, optimizer, samples, ROWS_AT_ONCE))
    plain.eval()
    return elapsed


def generate(plain: Any, ids: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(ids)
    out: torch.Tensor = plain.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **lengths, **options
    )
    return out


def generate_s(plain: Any, plan: Rollouts, **options: Any) -> float:
    """The seconds that `generate` takes for all turns; each of them computes the conversation from its start."""
    prompts = [p for p in plan.tokens(plan.siblings, plan.prompt) for _ in range(plan.siblings)]
    results = torch.tensor(plan.tokens(plan.count, plan.result), device=plain.device)

    def turns() -> None:
        ids = torch.tensor(prompts, device=plain.device)
        for r in range(plan.rounds):
            ids = generate(plain, ids, plan.new, **options)
            if r + 1 < plan.rounds:
                ids = torch.cat([ids, results], dim=1)

    return seconds(turns)


def versus(ours: Row, name: str, sample_s: float, learn_s: float) -> Row:
    step_s = sample_s + learn_s
    return {
        "what": f"agent step, {name} and plain update", "sample_s": sample_s, "learn_s": learn_s, "step_s": step_s,
        "ratio": step_s / ours["step_s"], "learn_ratio": learn_s / ours["learn_s"],
    }  # fmt: skip


def agent(model: Any, engine: Engine, plan: Rollouts) -> Iterator[Row]:
    """Our step against `generate` as it is."""
    plain = copy.deepcopy(model)
    ours = our_step(model, engine, plan)
    yield ours
    yield versus(ours, "generate", generate_s(plain, plan), plain_update_s(plain, plan))


def ragged(model: Any, engine: Engine, plan: Rollouts) -> Row:
    """Our step where prompts and results have many lengths."""
    return our_step(model, engine, plan) | {"what": "agent step, many lengths"}


def agent_compiled(model: Any, engine: Engine, plan: Rollouts) -> Iterator[Row]:
    """Our step against `generate` with a static cache, which transformers compiles; compilation is not timed."""
    plain = copy.deepcopy(model)
    options = {"cache_implementation": "static", "compile_config": compile_config(plain)}
    ready = compile_decode(plain, plan, options)
    yield ready
    if "error" in ready:
        return
    graphs = counters["stats"]["unique_graphs"]
    times = [generate_s(plain, plan, **options) for _ in range(2)]
    yield {
        "what": "compiled generate", "runs_s": [round(t, 4) for t in times],
        "compiled_again": counters["stats"]["unique_graphs"] - graphs, "compilation": "not counted",
    }  # fmt: skip
    learn_s = plain_update_s(plain, plan)
    ours = our_step(model, engine, plan)
    yield ours
    yield versus(ours, "compiled generate", min(times), learn_s)


def compile_only(model: Any, plan: Rollouts) -> Row:
    """Fill the compile caches for `agent_compiled` in another process."""
    return compile_decode(model, plan, {"cache_implementation": "static", "compile_config": compile_config(model)})


def compile_config(plain: Any) -> CompileConfig:
    """transformers' own settings; on a CPU, where it would not compile, without CUDA graphs."""
    if plain.device.type == "cuda":
        return CompileConfig()
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def compile_decode(plain: Any, plan: Rollouts, options: dict[str, Any]) -> Row:
    """Compile decode steps by a short turn, whose cache is as long as that of the last turn of a rollout.

    transformers keeps the longest cache length of a model, so that later calls have the same shapes.
    """
    row = {"what": "compile the decode steps of generate"}
    layers = StaticCache(config=plain.config, max_cache_len=8).layers
    if refused := sorted({type(layer).__name__ for layer in layers if not layer.is_compileable}):
        return row | {"error": f"not compiled by transformers: {', '.join(refused)} cannot be compiled"}
    length = len(plan.trained) - WARM_UP_TOKENS
    ids = torch.tensor(plan.tokens(plan.count, length), device=plain.device)
    before = counters["stats"]["unique_graphs"]
    try:
        with time_limit(COMPILE_LIMIT_S):
            elapsed = seconds(lambda: generate(plain, ids, WARM_UP_TOKENS, **options))
    except OutOfTime:
        return row | {"error": f"not ready within {COMPILE_LIMIT_S:g} s"}
    except Exception as error:
        return row | {"error": f"not compiled by transformers: {error!s:.200}"}
    graphs = counters["stats"]["unique_graphs"] - before
    if not graphs:
        return row | {"error": "generate ran uncompiled", "seconds": elapsed}
    return row | {
        "seconds": elapsed, "graphs": graphs, "graph_breaks": sum(counters["graph_break"].values()),
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }  # fmt: skip


class OutOfTime(BaseException):
    """Not an Exception, which compilers catch."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
