"""TRL's names: a script of TRL's trains here after `from trl import …` became `from palestra.trl import …`.

For those who continue with TRL: measures as its reward functions, suites as its datasets.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from palestra.core.config import load_yaml
from palestra.core.errors import InputError, SettingError, needs_extra
from palestra.core.messages import as_messages, to_dict
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Message, Problem
from palestra.evals.measures import Measure, MeasureContext, as_measure, run_group_measure
from palestra.evals.suite import EvalSuite
from palestra.extras.trl.config import GRPOConfig
from palestra.trainer import GRPOTrainer

__all__ = [
    "GRPOConfig", "GRPOTrainer", "ModelConfig", "ScriptArguments", "TrlParser", "combine_rewards",
    "eval_suite_to_hf_dataset", "get_peft_config", "measure_to_reward",
]  # fmt: skip
RewardFunction = Callable[..., list[float | None]]
_TIMEOUT_S = 300.0


@dataclass
class ScriptArguments:
    """Arguments that scripts of TRL's use themselves."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False


@dataclass
class ModelConfig:
    """The model of a script, and its adapter."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    load_in_4bit: bool = False


def get_peft_config(model_args: ModelConfig) -> Any:
    """peft's LoraConfig for a script's arguments; None without `--use_peft`."""
    if not model_args.use_peft:
        return None
    with needs_extra("get_peft_config", "lora"):
        from peft import LoraConfig
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        task_type="CAUSAL_LM",
    )


class TrlParser:
    """Reads `--name value` and `--config file.yaml` into the classes that have the names.

    A name that no class has goes to GRPOConfig, whose trainer rejects it with the others that it does not support.
    """

    def __init__(self, dataclass_types: Any) -> None:
        self._types: list[Any] = list(dataclass_types) if isinstance(dataclass_types, Sequence) else [dataclass_types]

    def parse_args_and_config(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """One object for each class."""
        words: dict[str, list[str]] = {}
        last: list[str] | None = None
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("--"):  # several words behind a name are a list
                name, equals, value = arg[2:].partition("=")
                last = words.setdefault(name.replace("-", "_"), [])
                last += [value] if equals else []
            elif last is None:
                raise SettingError(f"{arg!r} has no name; expected --name {arg}")
            else:
                last.append(arg)
        values = {name: _value(texts) for name, texts in words.items()}
        if (path := values.pop("config", None)) is not None:
            values = dict(load_yaml(Path(str(path)))) | values
        known = {f.name: kind for kind in self._types if kind is not GRPOConfig for f in fields(kind)}
        given: dict[Any, dict[str, Any]] = {kind: {} for kind in self._types}
        for name, value in values.items():
            kind = known.get(name, GRPOConfig)
            if kind not in given:
                raise SettingError(f"--{name} is no argument of this script; it takes --{', --'.join(known)}")
            given[kind][name] = value
        return tuple(kind(**given[kind]) for kind in self._types)


def _value(words: Sequence[str]) -> Any:
    import yaml

    if not words:
        return True
    if len(words) > 1:
        return [_value([word]) for word in words]
    try:
        value = yaml.safe_load(words[0])
        return float(value) if isinstance(value, str) and "e" in value else value  # YAML takes 1e-5 for a text
    except (ValueError, yaml.YAMLError):
        return words[0]


def measure_to_reward(measure: Any) -> RewardFunction:
    """A measure (or its name, or a reward model) as a reward function for TRL's trainer.

    `ctx.expect` and `ctx.case` come from the columns that `eval_suite_to_hf_dataset` writes. Where the measure raises,
    the reward is None, which TRL leaves out.
    """
    scored: Measure = as_measure(measure)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        names = [name for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)]
        rows = [{name: columns[name][i] for name in names} for i in range(len(prompts))]
        contexts = []
        for prompt, completion, row in zip(map(as_messages, prompts), completions, rows, strict=True):
            text = isinstance(completion, str)
            said = [Message("assistant", completion)] if text else as_messages(completion)
            case = Problem(str(row.get("case_id", "")), prompt, row.get("expect"), row)
            contexts.append(MeasureContext((*prompt, *said), (), case.expect, case))

        async def score() -> list[Any]:
            groups: dict[str, list[int]] = {}  # completions of one prompt, which a measure may compare
            for i, prompt in enumerate(prompts):
                groups.setdefault(repr(prompt), []).append(i)
            calls = (run_group_measure(scored, [contexts[i] for i in g], _TIMEOUT_S) for g in groups.values())
            found = dict(zip(chain(*groups.values()), chain(*await asyncio.gather(*calls)), strict=True))
            return [found[i] for i in range(len(contexts))]

        return [None if s.error else s.value for s in outside_event_loop(lambda: asyncio.run(score()))]

    reward.__name__ = scored.name
    return reward


def combine_rewards(functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> RewardFunction:
    """One reward function: the weighted sum of several; None where none of them applies."""
    factors = [1.0] * len(functions) if weights is None else list(weights)
    if len(factors) != len(functions):
        raise InputError(f"{len(factors)} weights for {len(functions)} reward functions; give one each")

    def combined(**columns: Any) -> list[float | None]:
        rows = zip(*(function(**columns) for function in functions), strict=True)
        kept = [[v * factor for v, factor in zip(row, factors, strict=True) if v is not None] for row in rows]
        return [sum(values) if values else None for values in kept]

    return combined


def eval_suite_to_hf_dataset(suite: EvalSuite, instructions: str | None = None) -> Any:
    """The cases as a dataset for TRL: `prompt` (messages), `expect`, `case_id`, and the records' columns."""
    with needs_extra("eval_suite_to_hf_dataset", "data"):
        from datasets import Dataset
    opening = [Message("system", instructions)] if instructions else []
    rows = [
        dict(case.row)
        | {
            "prompt": [to_dict(message) for message in (*opening, *as_messages(case.input))],
            "expect": case.expect,
            "case_id": case.id,
        }
        for case in suite
    ]
    return Dataset.from_list(rows)
