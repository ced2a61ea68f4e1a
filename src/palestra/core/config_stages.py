"""The section of the config for the stages of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from palestra.core.config_sections import STEPS, Section

STAGE_NAMES = ("sft", "rft", "distill", "grpo")


class StagesSection(Section):
    """What a run does one after the other: warm starts for models that pass too rarely for GRPO to begin with."""

    plan: str = "grpo"
    """stages in order: sft (learn from demonstrations), rft (from its own best attempts), distill (from a teacher's
    probabilities), grpo; such as sft,rft,grpo. auto chooses (docs/warm_start.md)"""
    traces: str | None = None
    """sft: a file of conversations (JSON lines), or a run whose passed rollouts are learned from"""
    teacher: str | None = None
    """sft: base URL (up to /v1) of a stronger model that plays the agent on the training cases; what passes is
    learned. Its key is in PALESTRA_TEACHER_KEY"""
    teacher_model: str = Field("", description="the teacher's name at that address")
    teacher_attempts: int = Field(3, ge=1, le=1000, description="how often the teacher may try one case")
    teacher_cases: int = Field(64, ge=1, le=1_000_000, description="training cases that the teacher plays")
    sft_epochs: float = Field(3.0, gt=0, le=1000, description="passes over the demonstrations, of an rft round too")
    sft_batch: int = Field(16, ge=1, le=65_536, description="demonstrations in one optimizer step")
    sft_learning_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    """default: 5 times train.learning_rate, with LoRA 2 times"""
    rft_rounds: int = Field(12, ge=1, le=1000, description="rounds of sampling and learning from what passed, at most")
    rft_attempts: int | None = Field(None, ge=1, le=65_536)
    """attempts at one case in a pass, at most; a round begins with few. Default: 4 times rollout.group_size"""
    rft_pass: int | None = Field(None, ge=1, le=10_000_000)
    """attempts in one pass over the cases; default: those of 4 grpo steps"""
    rft_keep: int = Field(2, ge=1, le=1000, description="demonstrations that are kept of one case")
    rft_until: float = Field(0.8, gt=0, le=1)
    """the rft stage ends when this share of the cases passes in a few plain attempts"""
    distill_steps: int = Field(20, ge=1, le=STEPS, description="steps of a distill stage; distill.* says from whom")
    hints: bool = True
    """rft: cases that do not pass are attempted again with a hint in the prompt, which is not learned"""

    @model_validator(mode="after")
    def _known_stages(self) -> StagesSection:
        if self.plan == "auto":
            return self
        if bad := [name for name in self.names if name not in STAGE_NAMES]:
            raise ValueError(
                f"stages.plan = {self.plan!r} has an unknown stage {bad[0]!r}; use {', '.join(STAGE_NAMES)}, separated "
                "by commas, or auto alone"
            )
        for name in ("traces", "teacher"):
            if getattr(self, name) is not None and "sft" not in self.names:
                raise ValueError(f"stages.{name} is for an sft stage, and stages.plan = {self.plan!r} has none")
        if self.teacher is not None and not self.teacher_model:
            raise ValueError("stages.teacher needs stages.teacher_model, the model's name at that address")
        return self

    @property
    def names(self) -> list[str]:
        """The stages of the plan, in order."""
        return [name.strip() for name in self.plan.split(",")]


HintName = Literal["sibling", "feedback", "answer"]
