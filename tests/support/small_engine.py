"""A model that is small and has sharp choices, and what an engine computes of it."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.engine.session import Job, Session

PAGE = 4  # tokens
SMALLEST_VOCABULARY = 64  # of the models that `play` is for
BYTES_PER_TOKEN = 2 * 2 * 8 * 2 * 4  # layers, heads, dim, key and value, float32


def small_model(vocabulary: int = 96, context: int = 128, seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of a few thousand random weights; `sizes` are those of its config."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocabulary, "max_position_embeddings": context,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**(config | sizes))).eval()


def sharp_model(vocabulary: int, context: int) -> Qwen3ForCausalLM:
    model = small_model(vocabulary, context)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def engine_of(model: Any, tokens: int = 10_000, **options: Any) -> Engine:
    """With room for the KV of so many tokens."""
    memory = tokens * BYTES_PER_TOKEN / (1 << 30)
    return Engine(model, page_size=PAGE, kv_memory_gib=memory, self_check=False, **options)


def computed_tokens(engine: Engine) -> list[int]:
    """How many tokens each step from here on computes."""
    counts: list[int] = []
    step = engine.runner.step  # type: ignore[attr-defined]

    def counted(chunks: Any) -> Any:
        counts.append(sum(chunk.count for chunk in chunks))
        return step(chunks)

    engine.runner.step = counted  # type: ignore[attr-defined]
    return counts


def own_logprobs(model: Any, ids: list[int], start: int) -> list[float]:
    """Of the tokens from `start` on, by the model's own forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
    return found


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("open fork branch branch append sample start start step close weights".split()),
        st.integers(0, 10**6),
    ),
    min_size=4,
    max_size=24,
)


def play(engine: Engine, model: Any, actions: list[tuple[str, int]]) -> None:
    """Do what the actions say, compare all logprobs with the model's own, and close everything."""
    sessions: list[Session] = []
    expected: dict[Session, list[int]] = {}
    jobs: list[Job] = []

    def run_to_end() -> None:
        while any(job.finish is None for job in jobs):
            engine.step()
        for job in jobs:
            ids = job.session.token_ids
            end = job.start + len(job.logprobs)
            assert job.logprobs == pytest.approx(own_logprobs(model, ids[:end], job.start), abs=2e-4)
            expected[job.session] += ids[job.start : end]
            assert ids[:end] == expected[job.session]  # a later turn of it may have ended, too
        jobs.clear()

    for action, number in actions:
        idle = [s for s in sessions if s.job is None]
        if action == "open" or not sessions:
            ids = [(number + 7 * i) % SMALLEST_VOCABULARY for i in range(1 + number % 13)]
            sessions.append(engine.open(ids))
            expected[sessions[-1]] = ids
        elif action == "branch":
            source = sessions[number % len(sessions)]
            sessions.append(engine.branch(source, 1 + number % len(source.token_ids)))
            expected[sessions[-1]] = source.token_ids[: 1 + number % len(source.token_ids)]
        elif action == "step":
            engine.step()
        elif action == "weights":
            engine.weights_changed(number)
        elif idle:
            session = idle[number % len(idle)]
            run_to_end() if action in ("fork", "sample", "close", "append") and jobs else None
            if action == "fork":
                sessions.remove(session)
                children = engine.fork(session, 1 + number % 3)
                sessions += children
                expected |= {child: list(expected[session]) for child in children}
            elif action == "append":
                ids = [number % SMALLEST_VOCABULARY] * (1 + number % 5)
                engine.append(session, ids)
                expected[session] += ids
            elif action in ("sample", "start") and len(session.token_ids) < 60:
                jobs.append(engine.submit(session, SamplingParams(1 + number % 6, seed=number)))
                if action == "sample":
                    run_to_end()
            elif action == "close":
                sessions.remove(session)
                engine.close(session)
    run_to_end()
    for session in sessions:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    assert not engine.busy
