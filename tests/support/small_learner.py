"""A model of a few thousand weights and rows for it, for the learner's tests."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.learner.local import LocalLearner

VOCABULARY = 64


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=VOCABULARY,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def settings(**sections: dict[str, Any]) -> RunConfig:
    base = {"train": {"learning_rate": 1e-3}, "rollout": {"temperature": 1.0, "max_new_tokens": 16}}
    return RunConfig.build(base, sections)


def make_samples(
    version: int = 0,
    groups: int = 2,
    siblings: int = 3,
    seed: int = 0,
    *,
    prompt: int | None = None,
    lengths: Callable[[int], int] = lambda sibling: 7 + 2 * sibling,
    tool_result: tuple[int, ...] = (3, 4),
    beginning: int = 0,
) -> list[Sample]:
    """Groups whose rows have a tool result (tokens 3 and 4 of the completion) among the model's tokens.

    All prompts begin with the same `beginning` tokens.
    """
    rng = random.Random(seed)
    common = [rng.randrange(VOCABULARY) for _ in range(beginning)]
    samples = []
    for group in range(groups):
        ids = common + [rng.randrange(VOCABULARY) for _ in range(5 + group if prompt is None else prompt)]
        for sibling in range(siblings):
            n, p = lengths(sibling), len(ids)
            tokens = ids + [rng.randrange(VOCABULARY) for _ in range(n)]
            trained = [False] * p + [i not in tool_result for i in range(n)]
            observed = [False] * p + [i in tool_result for i in range(n)]
            logprobs = [-4.0 if t else 0.0 for t in trained]
            advantage = float(sibling - 1)
            samples.append(Sample(tokens, trained, observed, logprobs, advantage, group, p, version))  # type: ignore[arg-type]
    return samples


def loss_of(samples: Sequence[Sample], loss: str = "dapo", **options: Any) -> StepLoss:
    """The loss of an optimizer step on these rows."""
    objective = Objective(loss=loss)  # type: ignore[arg-type]
    return StepLoss.of(Batch.of(samples), objective, max_completion_length=16, **options)


def gradients(learner: LocalLearner) -> dict[str, torch.Tensor]:
    """Copies of the gradients at the model's weights."""
    return {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}


class KeepsGradients(LocalLearner):
    """Takes no steps, and keeps the gradient of each."""

    def __init__(self, model: Any, *, config: RunConfig) -> None:
        super().__init__(model, config=config)
        self.taken: list[torch.Tensor] = []

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Any = None) -> float:
        self.taken.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))
        self.discard_gradients()
        return 1.0
