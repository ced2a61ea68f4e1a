"""`GRPOTrainingConfig`: the flat config of the short Python API, mapped to the one RunConfig."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from palestra.core.config import RunConfig, explain
from palestra.core.config_sections import FULL_LEARNING_RATE, LORA_LEARNING_RATE, NEW_TOKENS, STEP_GROUP_SIZE
from palestra.core.errors import SettingError, needs_extra

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl import GRPOConfig

log = logging.getLogger("palestra")

# Fields that carry over as they are: name here -> dotted name in RunConfig.
_SAME = {
    "num_train_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "learning_rate": "train.learning_rate",
    "max_grad_norm": "train.max_grad_norm",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "mask_truncated_completions": "train.mask_truncated",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "load_in_4bit": "lora.load_in_4bit",
    "max_tool_calling_iterations": "rollout.max_tool_rounds",
    "world_model_coeff": "echo.coefficient",
    "world_loss_normalization": "echo.normalization",
    "seed": "seed",
    "output_dir": "output_dir",
    "logging_steps": "track.log_every",
}


class GRPOTrainingConfig(BaseModel):
    """Settings of `train_grpo`, by the names that GRPO users know; all by keyword.

    It is a pydantic model: `config.model_copy(update={"seed": 1})` where a dataclass has `replace`, and
    `config.model_dump()` where it has `asdict`.

    >>> GRPOTrainingConfig(num_generations=8, learning_rate=2e-5).to_run_config().rollout.group_size
    8
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    num_train_epochs: int | None = None  # one, but at least 40 steps
    max_steps: int | None = None
    # Problems per optimizer step: the product of these two. If one is not set, it is 2; if neither is, model and GPU
    # decide. Memory use is limited by train.tokens_per_micro_batch (RunConfig), not by them.
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    learning_rate: float | None = None  # suited to the model
    max_grad_norm: float = 1.0
    num_generations: int | None = None  # by model and GPU
    max_completion_length: int | None = None  # all turns of a rollout together; by the model's context
    temperature: float = 0.8
    mask_truncated_completions: bool = True
    gradient_checkpointing: bool = False
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"  # on a CPU float32, unless given
    use_lora: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | None = None
    load_in_4bit: bool = False
    max_tool_calling_iterations: int = 5
    world_model_coeff: float = 0.0
    world_loss_normalization: Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"] = "selected_tokens"
    use_vllm: bool = False
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_server_base_url: str | None = None
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_len: int | None = None
    vllm_tensor_parallel_size: int = 1
    seed: int = 0
    output_dir: str = "runs"
    save_strategy: Literal["no", "epoch", "steps"] = "no"  # no checkpoint, unless by Ctrl-C
    save_steps: int = 50
    logging_steps: int = 5
    report_to: str | list[str] = "none"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingError(explain(error, list(type(self).model_fields))) from None

    def to_run_config(self, problems: int | None = None) -> RunConfig:
        """The whole config that this one stands for; `problems` is needed for save_strategy='epoch'."""
        sizes = (self.per_device_batch_size, self.gradient_accumulation_steps)
        batch = None if sizes == (None, None) else (sizes[0] or 2) * (sizes[1] or 2)
        settings = {key: getattr(self, name) for name, key in _SAME.items()}
        settings |= {
            "train.problems_per_step": batch,
            "lora.r": self._lora_rank(),
            # bfloat16 is the default for GPUs; a CPU gets it only when it was asked for by name.
            "model.dtype": self.torch_dtype if "torch_dtype" in self.model_fields_set else "auto",
            "checkpoint.every": self._save_every(batch, problems),
            "track.report_to": self._trackers(),
        }
        return RunConfig.build(settings | self.vllm_settings())

    def vllm_settings(self) -> dict[str, Any]:
        """The vllm section; settings that would have no effect are refused, here or by it."""
        changed = [n for n, f in type(self).model_fields.items() if "vllm" in n and getattr(self, n) != f.default]
        if not self.use_vllm:
            if changed:
                raise SettingError(f"{', '.join(changed)}: without effect, as use_vllm is False; set use_vllm=True")
            return {}
        names = {name: name.removeprefix("vllm_").replace("server_base_url", "url") for name in changed}
        options = {f"vllm.{key}": getattr(self, name) for name, key in names.items() if name != "use_vllm"}
        return {"vllm.mode": self.vllm_mode, **options}

    def to_trl_config(self) -> GRPOConfig:
        """The same training as TRL's GRPOConfig, with this trainer's objective where TRL's defaults differ."""
        with needs_extra("to_trl_config", "trl"):
            import torch
            from trl import GRPOConfig
        if self.world_model_coeff > 0:
            log.warning("TRL has no ECHO: world_model_coeff=%g is left out", self.world_model_coeff)
        if self.load_in_4bit:
            log.warning("TRL takes a 4-bit model, not a setting: load it so yourself and pass it to its trainer")
        cuda = torch.cuda.is_available()
        usual = "bfloat16" if cuda else "float32"
        dtype = self.torch_dtype if "torch_dtype" in self.model_fields_set and self.torch_dtype != "auto" else usual
        same = {name: value for name, value in self if name in GRPOConfig.__dataclass_fields__}
        group = self.num_generations or STEP_GROUP_SIZE
        different = {
            "learning_rate": self.learning_rate or (LORA_LEARNING_RATE if self._lora_rank() else FULL_LEARNING_RATE),
            "vllm_max_model_length": self.vllm_max_model_len,
            "num_generations": group,
            "per_device_train_batch_size": (self.per_device_batch_size or 2) * group,  # TRL counts completions
            "gradient_accumulation_steps": self.gradient_accumulation_steps or 2,
            "max_completion_length": self.max_completion_length or NEW_TOKENS,
            "num_train_epochs": self.num_train_epochs or 1,
            "max_steps": -1 if self.max_steps is None else self.max_steps,
            "bf16": cuda and dtype == "bfloat16",
            "fp16": cuda and dtype == "float16",
            "model_init_kwargs": {"dtype": dtype},
            "report_to": self._trackers() or "none",
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "lr_scheduler_type": "constant",
        }
        return GRPOConfig(**(same | different))

    def build_peft_config(self) -> LoraConfig | None:
        """peft's LoraConfig; None when LoRA is off."""
        if self._lora_rank() == 0:
            return None
        with needs_extra("build_peft_config", "lora"):
            from peft import LoraConfig
        return LoraConfig(**self.to_run_config().lora.peft_arguments())

    def _lora_rank(self) -> int:
        return self.lora_r if self.use_lora or self.load_in_4bit else 0

    def _save_every(self, batch: int | None, problems: int | None) -> int:
        match self.save_strategy:
            case "no":
                return 0
            case "steps":
                return self.save_steps
            case "epoch" if batch is None:
                raise SettingError(
                    "save_strategy='epoch' needs the problems of a step to know where an epoch ends; set "
                    "per_device_batch_size, or save_strategy='steps'"
                )
            case "epoch":
                return max(1, -(-(problems or batch) // batch))

    def _trackers(self) -> list[str]:
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to)
        return [n for n in names if n != "none"]
