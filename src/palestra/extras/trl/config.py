"""The arguments of TRL's GRPOTrainer and GRPOConfig as an agent, a suite, reward functions and settings of ours.

TRL itself is not needed. Settings that TRL has keep TRL's defaults; those that it does not have keep ours.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from itertools import repeat
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import Agent
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, UnsupportedError, did_you_mean
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.evals.suite import EvalSuite
from palestra.rollout.rewards import RewardFunction, as_list

if TYPE_CHECKING:
    from palestra.models.loading import LoadedModel

_SPELLING = {"sum_then_normalize": "sum_then_normalise", "normalize_then_sum": "normalise_then_sum"}
# TRL's name -> TRL's default, the setting that it is here, and the values that have other names here.
_SETTINGS: dict[str, tuple[Any, str] | tuple[Any, str, dict[Any, Any]]] = {
    "output_dir": (None, "output_dir"),
    "seed": (42, "seed"),
    "learning_rate": (1e-6, "train.learning_rate"),
    "max_grad_norm": (1.0, "train.max_grad_norm"),
    "weight_decay": (0.0, "train.weight_decay"),
    "adam_beta1": (0.9, "train.adam_beta1"),
    "adam_beta2": (0.999, "train.adam_beta2"),
    "warmup_steps": (0, "train.warmup_steps"),
    "num_iterations": (1, "train.iterations"),
    "beta": (0.0, "train.beta"),
    "use_bias_correction_kl": (True, "train.kl_bias_correction"),
    "loss_type": ("dapo", "train.loss"),
    "importance_sampling_level": ("token", "train.ratio"),
    "epsilon": (0.2, "train.epsilon"),
    "delta": (None, "train.delta"),
    "sapo_temperature_pos": (1.0, "train.sapo_temperature_pos"),
    "sapo_temperature_neg": (1.05, "train.sapo_temperature_neg"),
    "scale_rewards": ("group", "train.advantage_scale", {True: "group", False: "none"}),
    "multi_objective_aggregation": ("sum_then_normalize", "train.combine", _SPELLING),
    "mask_truncated_completions": (False, "train.mask_truncated"),
    "off_policy_mask_threshold": (None, "train.off_policy_mask_threshold"),
    "entropy_coef": (0.0, "train.entropy_coefficient"),
    "num_generations": (8, "rollout.group_size"),
    "max_completion_length": (512, "rollout.max_new_tokens"),
    "temperature": (1.0, "rollout.temperature"),
    "top_p": (1.0, "rollout.top_p"),
    "top_k": (0, "rollout.top_k"),
    "min_p": (None, "rollout.min_p", {None: 0.0}),
    "repetition_penalty": (1.0, "rollout.repetition_penalty"),
    "max_tool_calling_iterations": (None, "rollout.max_tool_rounds", {None: 10_000}),  # TRL's only limit is the length
    "gradient_checkpointing": (False, "model.gradient_checkpointing"),  # TRL's default is True: less memory, more time
    "project": ("palestra", "track.project"),
    "run_name": (None, "track.run_name"),
}
# Read by settings_of, together with others or in other units -> TRL's default.
_DERIVED: dict[str, Any] = {
    "epsilon_high": None,
    "chat_template_kwargs": None,
    "logging_steps": 10,
    "report_to": "none",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "bf16": None,
    "fp16": False,
    "use_cpu": False,
    "model_init_kwargs": None,
    "reward_weights": None,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_server_base_url": None,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "optim": "adamw_torch_fused",
}
SUPPORTED = {name: default for name, (default, *_) in _SETTINGS.items()} | _DERIVED
DEFAULTS = SUPPORTED | {"push_to_hub": False}
# Arguments that change no result here: how TRL computes, loads data, prints and logs.
_WITHOUT_EFFECT = (
    "log_", "logging_", "dataloader_", "ddp_", "hub_", "trackio_", "torch_compile", "use_transformers_", "pad_to_",
    "ds3_", "num_completions_to_print", "remove_unused_columns", "shuffle_dataset", "disable_tqdm", "tf32",
    "use_liger_kernel", "gradient_checkpointing_kwargs", "do_train", "do_eval", "overwrite_output_dir",
    "torch_empty_cache_steps",
    "per_device_eval_batch_size", "num_generations_eval", "skip_memory_metrics", "include_", "label_names", "debug",
    "save_only_model", "save_safetensors", "use_cache", "cache_implementation", "accelerator_config", "local_rank",
    "average_tokens_across_devices", "eval_", "bf16_full_eval", "fp16_full_eval", "cast_lm_head_to_fp32",
    "disable_dropout", "vllm_group_port", "vllm_server_timeout", "ref_model_", "adam_epsilon",
    "prediction_loss_only", "batch_eval_metrics", "save_on_each_node", "enable_jit_checkpoint", "ignore_data_skip",
    "restore_callback_states_", "length_column_name", "do_predict", "transformers_continuous_", "fsdp_config",
)  # fmt: skip
_ELSEWHERE = {
    "push_to_hub": "trainer.model.push_to_hub(…) after the training",
    "callbacks": "watcher=…, a palestra.train.watcher.Watcher",
    "optimizers": "palestra.train.StepTrainer, which takes an optimizer and a scheduler",
    "reward_processing_classes": "a reward function that asks the reward model itself",
    "generation_batch_size": "per_device_train_batch_size, or the setting train.minibatches",
    "steps_per_generation": "num_iterations, or the setting train.minibatches",
    "generation_kwargs": "temperature, top_p, top_k, min_p, repetition_penalty",
    "warmup_ratio": "warmup_steps",
    "resume_from_checkpoint": "trainer.train(resume='runs/…')",
    "load_best_model_at_end": "the setting checkpoint.keep_best, on by default",
    "deepspeed": "torchrun, or palestra train --nproc N",
    "fsdp": "torchrun, or palestra train --nproc N",
    "use_adaptive_entropy": "the setting train.target_entropy",
    "vllm_enable_sleep_mode": "the setting model.sleep_mode",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_server_host": "vllm_server_base_url",
    "vllm_server_port": "vllm_server_base_url",
    "trust_remote_code": "a model whose code is part of transformers",
}
_NO_EQUIVALENT = (
    "sync_ref_model", "top_entropy_quantile", "vespo_", "vllm_structured_outputs_regex", "vllm_model_impl",
    "optim_args", "neftune_noise_alpha", "label_smoothing_factor", "router_aux_loss_coef", "auto_find_batch_size",
    "entropy_", "lr_scheduler_kwargs", "parallelism_config", "metric_for_best_model", "greater_is_better",
    "full_determinism", "data_seed", "train_sampling_strategy", "optim_target_modules", "liger_kernel_config",
)  # fmt: skip
_NO_CAP = 1e9  # of importance weights: settings are written as JSON, which has no infinity
# Set by TRL's config itself, from other arguments.
_COMPUTED = ("generation_batch_size", "steps_per_generation")
ARGUMENTS = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config", "tools",
    "quantization_config",
)  # fmt: skip


class GRPOConfig:
    """TRL's GRPOConfig by its names and defaults. The trainer rejects all arguments without an equivalent together.

    >>> GRPOConfig("out", num_generations=4).max_completion_length
    512
    """

    def __init__(self, output_dir: str | None = None, **values: Any) -> None:
        self.__dict__.update(DEFAULTS, output_dir=output_dir or "trainer_output")
        self.__dict__.update(values)

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != DEFAULTS.get(name)}
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOConfig has no argument {name!r}.{did_you_mean(name, DEFAULTS)}")


def values_of(args: Any) -> dict[str, Any]:
    """The values of a config in TRL's names; empty for a config of ours."""
    if args is None or isinstance(args, GRPOTrainingConfig | RunConfig | Mapping):
        return DEFAULTS | {"output_dir": "runs"} if args is None else {}
    if isinstance(args, GRPOConfig):
        return dict(vars(args))
    if not is_dataclass(args):
        raise InputError(f"args is of type {type(args).__name__}; expected a GRPOConfig, of TRL or of palestra.trl")
    found = dict(DEFAULTS)
    for f in fields(args):  # of TRL's own config
        value = getattr(args, f.name)
        value = getattr(value, "value", value)  # of an enum
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default and f.name not in _COMPUTED and (f.name, value) != ("bf16", True):
            found[f.name] = value
    return found


def problem_of(name: str, value: Any, own: Iterable[str]) -> str:
    """The reason that an argument cannot be taken; empty if it can."""
    off = value is None or value is False or (isinstance(value, tuple) and not any(v is not None for v in value))
    if any(name == known or (known.endswith("_") and name.startswith(known)) for known in _NO_EQUIVALENT):
        return "" if off else f"{name}={value!r}: there is no equivalent; leave it out"
    if name in _ELSEWHERE:
        return "" if off else f"{name}: use {_ELSEWHERE[name]}"
    if any(name.startswith(prefix) for prefix in _WITHOUT_EFFECT):
        return ""
    return f"{name}: no argument of TRL's that is known here.{did_you_mean(name, [*ARGUMENTS, *SUPPORTED, *own])}"


def settings_of(given: Mapping[str, Any], problem_count: int, problems: list[str]) -> dict[str, Any]:
    """The settings of ours for a config of TRL's; what has no equivalent is added to `problems`."""
    values = DEFAULTS | dict(given)
    settings = {}
    for name, (_, key, *words) in _SETTINGS.items():
        settings[key] = words[0].get(values[name], values[name]) if words else values[name]
    completions = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    if completions % values["num_generations"]:
        problems.append(
            f"per_device_train_batch_size × gradient_accumulation_steps = {completions} completions: give a multiple "
            f"of num_generations = {values['num_generations']}"
        )
    batch = max(1, completions // values["num_generations"])
    epoch = max(1, -(-problem_count // batch))
    steps, epochs = values["max_steps"], values["num_train_epochs"]
    if steps <= 0 and epochs != int(epochs):
        problems.append(f"num_train_epochs={epochs}: use max_steps={max(1, round(epochs * epoch))}")
    schedulers = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    saves = {"no": 0, "steps": int(values["save_steps"]), "epoch": epoch}
    evals = {"no": 0, "steps": int(values["eval_steps"] or values["logging_steps"]), "epoch": epoch}
    for name, known in (("lr_scheduler_type", schedulers), ("save_strategy", saves)):
        if str(values[name]) not in known:
            problems.append(f"{name}={str(values[name])!r}: use one of {', '.join(known)}")
    loading = {name: value for name, value in (values["model_init_kwargs"] or {}).items() if value is not None}
    dtype = loading.pop("dtype", loading.pop("torch_dtype", None))
    if loading:
        problems.append(f"model_init_kwargs: only dtype is supported, got {', '.join(loading)}")
    exact = "float16" if values["fp16"] else "float32" if values["bf16"] is False else "auto"
    if not str(values["optim"]).startswith("adamw"):
        problems.append(f"optim={values['optim']!r}: the optimizer is AdamW")
    trackers, limit = values["report_to"] or (), values["save_total_limit"]
    trackers = [trackers] if isinstance(trackers, str) else trackers
    return settings | {
        "train.epsilon_high": values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"],
        "train.problems_per_step": batch,
        "train.epochs": max(1, int(epochs)),
        "train.max_steps": steps if steps > 0 else None,
        "train.scheduler": schedulers.get(str(values["lr_scheduler_type"]), "linear"),
        "checkpoint.every": saves.get(str(values["save_strategy"]), 0),
        **({} if limit is None else {"checkpoint.keep_last": max(1, int(limit))}),
        "eval.every": evals.get(str(values["eval_strategy"]), 0),
        "model.chat_template_kwargs": values["chat_template_kwargs"] or {},
        "model.dtype": exact if dtype is None else str(dtype).removeprefix("torch."),
        **({"model.device": "cpu"} if values["use_cpu"] else {}),
        "track.log_every": max(1, int(values["logging_steps"])),
        "track.report_to": [name for name in trackers if name not in ("none", "all")],
        **_vllm(values),
    }


def _vllm(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values["use_vllm"]:
        return {}
    names = ("vllm_mode", "vllm_server_base_url", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    config = GRPOTrainingConfig(
        use_vllm=True, vllm_max_model_len=values["vllm_max_model_length"], **{name: values[name] for name in names}
    )
    settings = config.vllm_settings()
    if not values["vllm_importance_sampling_correction"]:
        return settings | {"train.importance_correction": "none"}
    cap, floor = values["vllm_importance_sampling_clip_max"], values["vllm_importance_sampling_clip_min"]
    return settings | {
        "train.importance_correction": values["vllm_importance_sampling_mode"],
        "train.importance_cap": _NO_CAP if cap is None else cap,
        "train.importance_floor": floor or 0.0,
    }


def adapter_of(peft_config: Any, quantization: Any, problems: list[str]) -> dict[str, Any]:
    """The settings of a peft LoraConfig, and of a quantisation in 4 bits."""
    bits: dict[str, Any] = {} if quantization is None else {"lora.load_in_4bit": True}
    if bits and not getattr(quantization, "load_in_4bit", False):
        problems.append("quantization_config: only load_in_4bit is supported")
    if peft_config is None:
        return bits
    if type(peft_config).__name__ != "LoraConfig":
        problems.append(f"peft_config: only a LoraConfig is supported, got {type(peft_config).__name__}")
        return bits
    taken = ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "inference_mode")
    usual = vars(type(peft_config)())
    for name, value in vars(peft_config).items():
        if name not in taken and value != usual.get(name):
            problems.append(f"peft_config.{name}={value!r}: there is no equivalent; leave it out")
    modules = peft_config.target_modules
    names = None if modules is None or isinstance(modules, str) else sorted(modules)
    if isinstance(modules, str) and modules != "all-linear":
        problems.append(f"peft_config.target_modules={modules!r}: give a list of names")
    return bits | {
        "lora.r": peft_config.r,
        "lora.alpha": peft_config.lora_alpha,
        "lora.dropout": peft_config.lora_dropout,
        "lora.target_modules": names,
    }


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
