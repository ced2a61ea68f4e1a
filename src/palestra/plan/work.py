"""The work of one step of a run: the method of training, the number of rollouts, and their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from palestra.core.errors import SettingError

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)  # each needs less memory than the one before
SHORTEST = 0.98  # of the mean: groups that end early may fit a micro-batch together where the mean does not
MICRO_BATCH = 16384  # tokens, where nothing says that more of them pay
MAX_RUNNING = 1024  # rows that the engine decodes at once on a GPU


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step: `problems` × `group_size` rollouts, each of a prompt, sampled tokens and tool results."""

    problems: int = 4
    group_size: int = 4
    prompt_tokens: int = 512
    new_tokens: int = 512  # that the model samples, in all turns of a rollout together
    tool_tokens: int = 0  # that tools and environment add to a rollout
    turns: int = 1
    tool_s: float = 0.0  # how long a tool takes
    signal: float = 1.0  # share of the groups whose rewards differ; others are drawn again
    method: Method = "full"
    lora_rank: int = 16
    gpus: int = 1
    tokens_per_micro_batch: int = MICRO_BATCH
    gradient_checkpointing: bool = False
    master_weights: bool = True
    sleep_mode: bool = False
    kv_memory_gib: float | None = None  # None: what all rollouts need, or what is left
    share_prefix: bool = True
    max_staleness: int = 0
    reference: bool = False  # train.beta > 0
    iterations: int = 1
    minibatches: int = 1
    weight_bytes: int = 2

    def __post_init__(self) -> None:
        least = {"problems": 1, "group_size": 1, "prompt_tokens": 1, "new_tokens": 1, "tool_tokens": 0, "turns": 1}
        least |= {"gpus": 1, "tokens_per_micro_batch": 1, "lora_rank": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise SettingError(f"{name}={getattr(self, name)}; use {smallest} or more")
        if self.method == "qlora" and self.gpus > 1:
            raise SettingError("weights of 4 bits are not divided among GPUs; use --gpus 1, or LoRA without 4 bits")
        if not 0 < self.signal <= 1:
            raise SettingError(f"signal={self.signal}; expected a share above 0 and up to 1")

    @property
    def completion(self) -> int:
        """Tokens of a rollout behind its prompt."""
        return self.new_tokens + self.tool_tokens

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.completion

    @property
    def trained(self) -> int:
        """Rollouts that one GPU learns from in a step."""
        return math.ceil(self.problems / self.gpus) * self.group_size

    @property
    def groups_sampled(self) -> int:
        """Groups that one GPU samples, with those that are drawn again."""
        return math.ceil(self.problems / self.signal / self.gpus)

    @property
    def sampled(self) -> int:
        return self.groups_sampled * self.group_size

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache when every rollout of one GPU has ended: the prompt once for a group."""
        return self.groups_sampled * (self.prompt_tokens + self.group_size * self.completion)

    @property
    def packed(self) -> PackedRollouts:
        """How the learner packs one GPU's rollouts."""
        groups, limit = math.ceil(self.problems / self.gpus), self.tokens_per_micro_batch
        prompt, rows, own = self.prompt_tokens, self.group_size, self.completion
        if not self.share_prefix:
            groups, rows = groups * rows, 1
        tree = prompt + rows * own
        if tree <= limit:
            micro_batches = math.ceil(groups / (limit // tree))
            fewest = math.ceil(groups / max(1, int(limit / (SHORTEST * tree))))
            most = math.ceil(groups / fewest)  # trees of the largest: the learner divides them evenly
            return PackedRollouts(groups * tree, micro_batches, min(limit, most * tree), most * rows)
        at_once = max(1, (limit - prompt) // own)  # siblings in a part of a group, each part with the prompt
        parts = math.ceil(rows / at_once)
        return PackedRollouts(groups * (parts * prompt + rows * own), groups * parts, prompt + at_once * own, at_once)

    @property
    def attention_pairs(self) -> float:
        """Pairs of tokens, one attending to the other, of one GPU's rollouts as they are packed; for one head."""
        packed = self.packed
        rows_of_a_prompt = (packed.tokens - self.trained * self.completion) / self.prompt_tokens
        own = self.trained * self.completion * (self.prompt_tokens + self.completion / 2)
        return rows_of_a_prompt * self.prompt_tokens**2 / 2 + own


@dataclass(frozen=True, slots=True)
class PackedRollouts:
    """Packed rollouts: all tokens, micro-batches, and the tokens and rows of the largest one."""

    tokens: int
    micro_batches: int
    largest: int
    largest_rows: int
