"""The settings `distill.*`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from palestra.core.config_sections import HintName, Section

TOP_K = 20
HINTS: tuple[HintName, ...] = ("sibling", "feedback", "answer")


class DistillSection(Section):
    """Distillation: also learn from a teacher's probabilities of the next token, along the model's own rollouts."""

    coefficient: float = Field(0.0, ge=0, le=1000, description="weight of the distillation loss; 0 is off")
    only: bool = Field(False, description="leave the policy loss out, so that rewards only choose what is distilled")
    teacher: str | None = None
    """a model with the same tokenizer (folder, .gguf file or hub id); none: the model itself, which reads a hint
    (self-distillation)"""
    teacher_url: str | None = None
    """a server of a model with the same tokenizer (palestra serve, vLLM), up to its /v1; it scores the sampled tokens
    only, at rollout.temperature = 1"""
    context: list[HintName] = Field(default_factory=lambda: list(HINTS), min_length=1, max_length=3)
    """hints of self-distillation, of which the first that a rollout has is used: another rollout of the group that
    passed, the reasons of failed measures, the expected answer"""
    teacher_weights: Literal["current", "initial"] = "current"
    """self-distillation: the teacher has the student's weights of now, or a copy of those that the run began with;
    with the copy the aim does not move"""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(student ‖ teacher), KL(teacher ‖ student), or Jensen-Shannon"""
    top_k: int = Field(TOP_K, ge=1, le=1000)
    """the model's most likely tokens that are compared one by one; the rest is one sum"""
    phase_out: bool = True
    """weigh self-distillation of a group by 1 − its pass rate: solved problems need no hint"""

    @model_validator(mode="after")
    def _takes_effect(self) -> DistillSection:
        if self.only and not self.coefficient:
            raise ValueError("distill.only leaves the policy loss out; set distill.coefficient above 0")
        if self.teacher is not None and self.teacher_url is not None:
            raise ValueError("distill.teacher and distill.teacher_url are two teachers; leave one of them out")
        others = self.teacher is not None or self.teacher_url is not None
        if others and (self.context != list(HINTS) or not self.phase_out or self.teacher_weights != "current"):
            raise ValueError(
                "distill.context, distill.phase_out and distill.teacher_weights are for self-distillation, without "
                "another teacher"
            )
        if self.teacher_url is not None and self.top_k != TOP_K:
            raise ValueError("distill.top_k has no effect with distill.teacher_url, which scores sampled tokens only")
        return self
