"""`GRPOTrainingConfig`: the flat config of the short Python API, mapped to the one RunConfig."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from palestra.core.config import RunConfig, explain
from palestra.core.config_sections import FULL_LEARNING_RATE, LORA_LEARNING_RATE, NEW_TOKENS, STEP_GROUP_SIZE
from palestra.core.errors import SettingError, needs_extra

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl import GRPOConfig

log = logging.getLogger("palestra")
EchoNormalization = Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"]


class GRPOTrainingConfig(BaseModel):
    """Settings of `train_grpo`, by the names that GRPO users know; all by keyword.

    It is a pydantic model: `config.model_copy(update={"seed": 1})` where a dataclass has `replace`, and
    `config.model_dump()` where it has `asdict`. The text in an annotation is the setting that the field is.

    >>> GRPOTrainingConfig(num_generations=8, learning_rate=2e-5).to_run_config().rollout.group_size
    8
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    num_train_epochs: Annotated[int | None, "train.epochs"] = None  # one, but at least 40 steps
    max_steps: Annotated[int | None, "train.max_steps"] = None
    # Problems per optimizer step: the product of these two. If one is not set, it is 2; if neither is, model and GPU
    # decide. Memory use is limited by train.tokens_per_micro_batch (RunConfig), not by them.
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    learning_rate: Annotated[float | None, "train.learning_rate"] = None  # suited to the model
    max_grad_norm: Annotated[float, "train.max_grad_norm"] = 1.0
    num_generations: Annotated[int | None, "rollout.group_size"] = None  # by model and GPU
    max_completion_length: Annotated[int | None, "rollout.max_new_tokens"] = None  # of all turns; by the context
    temperature: Annotated[float, "rollout.temperature"] = 0.8
    mask_truncated_completions: Annotated[bool, "train.mask_truncated"] = True
    gradient_checkpointing: Annotated[bool, "model.gradient_checkpointing"] = False
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"  # on a CPU float32, unless given
    use_lora: bool = False
    lora_r: int = 16
    lora_alpha: Annotated[int, "lora.alpha"] = 32
    lora_dropout: Annotated[float, "lora.dropout"] = 0.0
    lora_target_modules: Annotated[list[str] | None, "lora.target_modules"] = None
    load_in_4bit: Annotated[bool, "lora.load_in_4bit"] = False
    max_tool_calling_iterations: Annotated[int, "rollout.max_tool_rounds"] = 5
    world_model_coeff: Annotated[float, "echo.coefficient"] = 0.0
    world_loss_normalization: Annotated[EchoNormalization, "echo.normalization"] = "selected_tokens"
    use_vllm: bool = False
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_server_base_url: str | None = None
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_len: int | None = None
    vllm_tensor_parallel_size: int = 1
    seed: Annotated[int, "seed"] = 0
    output_dir: Annotated[str, "output_dir"] = "runs"
    save_strategy: Literal["no", "epoch", "steps"] = "no"  # no checkpoint, unless by Ctrl-C
    save_steps: int = 50
    logging_steps: Annotated[int, "track.log_every"] = 5
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
        fields = type(self).model_fields.items()
        settings = {m: getattr(self, n) for n, info in fields for m in info.metadata if isinstance(m, str)}
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
        return [n for n in ([self.report_to] if isinstance(self.report_to, str) else self.report_to) if n != "none"]
