"""The arguments of TRL's GRPOTrainer as an agent, a suite, reward functions and settings of ours."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import repeat
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import Agent
from palestra.core.config import RunConfig
from palestra.core.errors import UnsupportedError
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.evals.suite import EvalSuite
from palestra.extras.trl.config import ARGUMENTS, SUPPORTED, adapter_of, problem_of, settings_of, values_of
from palestra.rollout.rewards import RewardFunction, as_list

if TYPE_CHECKING:
    from palestra.models.loading import LoadedModel

log = logging.getLogger("palestra")


@dataclass(frozen=True)
class TrlArguments:
    """TRL's arguments as the parts of a training here."""

    agent: Agent
    train: EvalSuite
    held_out: EvalSuite | None
    config: GRPOTrainingConfig | RunConfig | Mapping[str, Any]
    reward_functions: tuple[RewardFunction, ...]
    model: Any = None  # a module, where no name was given
    tokenizer: Any = None

    def loaded(self, load: Callable[[], LoadedModel], variables: Mapping[str, Any]) -> LoadedModel:
        """The model and the tokenizer that were given as objects, else those of the model's name."""
        from palestra.models.loading import LoadedModel, load_tokenizer, set_template_variables, use_softcaps

        if self.model is None and self.tokenizer is None:
            return load()
        if self.model is None:
            base = load()
            model, name, path = base.model, base.name, base.path
        else:
            use_softcaps(self.model)
            model, name = self.model, self.agent.required_model
            path = name
        tokenizer = load_tokenizer(name) if self.tokenizer is None else self.tokenizer
        set_template_variables(tokenizer, variables)
        return LoadedModel(model, tokenizer, name, path)


def read_arguments(given: Mapping[str, Any], own: Iterable[str], *, has_environment: bool) -> TrlArguments:
    """The parts of a training; one error names every argument that has no equivalent here."""
    args, model, dataset = (given.get(name) for name in ("args", "model", "train_dataset"))
    values = values_of(args)
    reasons = [problem_of(name, value, own) for name, value in given.items() if name not in ARGUMENTS]
    reasons += [problem_of(name, value, ()) for name, value in values.items() if name not in SUPPORTED]
    if given.get("model") is None:
        reasons.append("model: give a name, a folder or a model")
    if given.get("train_dataset") is None:
        reasons.append("train_dataset: give a dataset with a column `prompt`")
    if isinstance(given.get("eval_dataset"), Mapping):
        reasons.append("eval_dataset: give one dataset, not several by name")
    if given.get("tools") and has_environment:
        reasons.append("tools: leave them out; the methods of the environment are the tools")
    problems = [problem for problem in reasons if problem]
    functions, weights = _reward_functions(given.get("reward_funcs"), values.get("reward_weights"), problems)
    adapter = adapter_of(given.get("peft_config"), given.get("quantization_config"), problems)
    train = None if dataset is None else _suite(dataset, "train")
    config: Any = args
    if values:
        config = settings_of(values, len(train or ()), problems) | adapter
    elif adapter:
        problems.append("peft_config, quantization_config: use the settings lora.… of the config in args")
    if problems or train is None or model is None:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise UnsupportedError(f"these arguments of TRL's GRPOTrainer are missing, or not supported here:\n{lines}")
    has_texts = isinstance(train.cases[0].input, str)
    if has_texts:
        log.warning("the prompts of train_dataset are texts; each is sent as a user message, by the chat template")
    if has_texts or weights:
        functions = tuple(_adapted(f, w, has_texts) for f, w in zip(functions, weights or repeat(1.0), strict=False))
    held_out = None if given.get("eval_dataset") is None else _suite(given["eval_dataset"], "eval")
    named = model if isinstance(model, str) else str(model.config._name_or_path or "model")
    agent = Agent(f"{named.rstrip('/').rpartition('/')[2]}-GRPO", named, tools=given.get("tools") or ())
    module = None if isinstance(model, str) else model
    return TrlArguments(agent, train, held_out, config, functions, module, given.get("processing_class"))


def _suite(dataset: Any, name: str) -> EvalSuite:
    return EvalSuite.from_records(dataset, lambda row: row["prompt"], name=name)


def _reward_functions(
    given: Any, weights: Sequence[float] | None, problems: list[str]
) -> tuple[tuple[RewardFunction, ...], list[float]]:
    """The reward functions and their weights, none where all count the same."""
    functions: tuple[Any, ...] = (given,) if isinstance(given, str) else as_list(given)
    for function in functions:
        if not callable(function) or hasattr(function, "config"):
            problems.append(f"reward_funcs: {function!r} is a model; give a function that asks it")
    if weights is not None and len(weights) != len(functions):
        problems.append(f"reward_weights: {len(weights)} values for {len(functions)} reward functions; give one each")
    return functions, [float(weight) for weight in weights or ()]


def _adapted(function: RewardFunction, weight: float, on_texts: bool) -> RewardFunction:
    """The function with its values times a weight; with prompts and completions as texts, as TRL gives them for
    datasets of texts."""

    def scale(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else weight * value for value in values]

    async def scale_later(values: Any) -> list[float | None]:
        return scale(await values)

    @wraps(function)
    def adapted(**columns: Any) -> Any:
        for name in {"prompts", "completions"} & columns.keys() if on_texts else ():
            columns[name] = [messages[-1]["content"] if messages else "" for messages in columns[name]]
        values = function(**columns)
        if weight == 1.0:
            return values
        return scale_later(values) if inspect.isawaitable(values) else scale(values)

    return adapted
