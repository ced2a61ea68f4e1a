"""The sections of the config: every setting of a run with its type, limits, default and one-line description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from palestra.core.files import absolute_spec

FULL_LEARNING_RATE = 1e-5  # all weights, 100 M to 200 M of them
LORA_LEARNING_RATE = 1e-4  # adapters of a model of up to 1 B; they want about ten times as much
LORA_RANK = 16  # where LoRA is implied, not given
TINKER_LORA_RANK = 32  # as the SDK has it
STEP_PROBLEMS, STEP_GROUP_SIZE = 4, 4  # of a step where neither model nor device is known
NEW_TOKENS = 1024  # of a rollout, unless the context of the model is small
STEPS = 100_000_000  # upper bound of all that is counted in steps
WEEK_S = 604_800.0  # upper bound of all timeouts
LossName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo", "gspo", "cross_entropy"]


if TYPE_CHECKING:
    Automatic = int  # a run chooses a number before anything reads it
else:
    Automatic = int | None
BY_RUN: Any = None  # the default of such a setting: the run chooses


class Section(BaseModel):
    """Some settings. The text below a setting is its description, like `description` where it fits on the line."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for info in cls.model_fields.values():
            info.description = info.description and " ".join(info.description.split())  # one line


class ModelSection(Section):
    """Which model, and how it is held in memory."""

    name: str = Field("palestra/tiny", description="palestra/tiny, a hub id, a local folder or a .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU"""
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, …")
    gpus: int | None = Field(None, ge=1, le=1024)
    """GPUs that a run in the background is given, and waits for; default one, if there is any"""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads; default: 1 for a small model, else the processors that are idle at the start"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """values for variables of the chat template, such as enable_thinking: false; the saved model's template has them,
    too"""
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    sleep_mode: bool = Field(False, description="give the KV cache's memory back while the learner works (slower)")
    master_weights: bool = True
    """full fine-tuning in bfloat16 keeps float32 master weights: small updates are not lost"""
    engine: Literal["auto", "paged", "plain"] = "auto"
    """the sampler: auto takes the paged engine where the model allows it"""
    exact: bool = False
    """sampler and learner compute the same log-probabilities to the bit, by kernels that do not depend on the batch;
    slower (a CUDA GPU, Llama-like models)"""
    kv_memory_gib: float | None = Field(None, gt=0, le=100_000)
    """memory of the sampler's cache; default: half of what a GPU has free, or up to 4"""

    @model_validator(mode="after")
    def _gpus_of_any_number(self) -> ModelSection:
        if self.gpus is not None and self.device not in ("auto", "cuda"):
            raise ValueError(
                f"model.gpus = {self.gpus} asks for any GPUs that are free, and model.device = {self.device} for "
                "another device; leave one of them out"
            )
        return self


class TrainSection(Section):
    """The objective and the optimizer."""

    learning_rate: float | None = Field(None, gt=0, lt=10, allow_inf_nan=False)
    """default by model size: all weights 1e-5 for 100-200 M, more below, down to 1e-6 from 2 B; LoRA 1e-4 up to 1 B,
    down to 2e-5 from 5 B"""
    epochs: int | None = Field(None, ge=1, le=1_000_000)
    """passes over the training cases; default: one, but at least 40 steps"""
    max_steps: int | None = Field(None, ge=1, le=100_000_000, description="stop after this many optimizer steps")
    max_sampled_tokens: int | None = Field(None, ge=1, le=1_000_000_000_000)
    """stop after the step in which all stages together have sampled this many tokens"""
    problems_per_step: Automatic = Field(BY_RUN, ge=1, le=65_536)
    """problems in one optimizer step, each with a group of rollouts; default 4 to 64, by model and GPU"""
    loss: LossName = "dapo"
    """gspo is grpo with the sequence ratio; cross_entropy (sft stages) is -advantage * logprob"""
    ratio: Literal["token", "sequence"] = "token"
    """importance ratio per token or per sequence (GSPO)"""
    epsilon: float = Field(0.2, ge=0, description="lower clip")
    epsilon_high: float | None = Field(None, ge=0)
    """upper clip, 0.28 unless given; for cispo the cap of the ratio itself, 5 unless given"""
    delta: float | None = Field(None, gt=0, description="dual clip: upper bound of the unclipped ratio")
    sapo_temperature_pos: float = Field(1.0, gt=0)
    sapo_temperature_neg: float = Field(1.05, gt=0)
    beta: float = Field(0.0, ge=0, allow_inf_nan=False, description="KL to the reference; 0 loads no reference at all")
    kl_bias_correction: bool = Field(False, description="weigh the KL term by the importance ratio")
    importance_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    """correct for sampler and learner disagreeing; auto: token_truncate where they may, with rollout.max_staleness or
    vLLM, else none"""
    importance_cap: float = Field(2.0, gt=0)
    importance_floor: float = Field(0.0, ge=0, le=1)
    """lower bound of the weights: token_mask and sequence_mask drop those below it, token_truncate and
    sequence_truncate raise them to it; IcePop is token_mask with a floor of 0.5 and a cap of 5"""
    expert_routing: Literal["own", "compare", "replay"] = "own"
    """mixtures of experts: the learner chooses the experts of each token itself; compare also records the sampler's
    and reports how many differ (routing_mismatch); replay uses the sampler's (docs/models.md)"""
    off_policy_mask_threshold: float | None = Field(None, gt=0, description="drop rows that drifted too far")
    advantage_scale: Literal["group", "batch", "mean", "none"] = "group"
    """divide by the deviation of the group or the batch, or by the mean of the group (MaxRL)"""
    leave_one_out: bool = Field(False, description="baseline of a rollout: its siblings without itself")
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """several measures: weigh and add, then normalise; or the reverse"""
    credit: Literal["rollout", "return_to_go", "gigpo"] = "rollout"
    """one advantage for the whole rollout; or one for each turn: by what it and the turns after it earned, or by
    GiGPO, which also compares turns that began in the same state"""
    discount: float = Field(1.0, ge=0, le=1)
    """return_to_go and gigpo: factor of a reward for each turn that it lies ahead"""
    step_weight: float = Field(1.0, ge=0, le=1000)
    """gigpo: weight of the comparison of turns, relative to that of whole rollouts"""
    custom_advantages: str | None = None
    """FILE.py:NAME of a function from a step's batch to advantages (docs/objectives.md)"""
    custom_loss: str | None = None
    """FILE.py:NAME of a function that gives each token's loss, instead of the formula of `loss`"""
    entropy_coefficient: float = Field(0.0, allow_inf_nan=False)
    """bonus on the entropy of sampled positions"""
    target_entropy: float | None = Field(None, allow_inf_nan=False)
    """steer the coefficient towards this entropy (nats a token)"""
    iterations: int = Field(1, ge=1, le=1000, description="optimizer passes over one batch of rollouts")
    minibatches: int = Field(1, ge=1, le=65_536, description="optimizer steps into which one pass is split")
    mask_truncated: bool = Field(True, description="rollouts cut off by length do not train, but stay in the baseline")
    filter_equal_groups: bool = True
    """groups whose rewards are all equal are left out; fresh ones are drawn where too few are left"""
    signal_share: float = Field(1 / 16, gt=0, le=1)
    """share of a step's groups whose rewards must differ; fresh problems are drawn while fewer do. 1 is DAPO's dynamic
    sampling: each step learns more and takes longer"""
    full_update_share: float = Field(1 / 4, ge=0, le=1)
    """share of a step's problems that must have signal, or be solved by every rollout, for a full update; with fewer,
    the learning rate of the step is lowered in proportion; 0 always makes full updates"""
    sampling: Literal["uniform", "learnable"] = "uniform"
    """problems in shuffled passes; or mostly those that the model solves sometimes, by the pass rate of each
    (docs/sampling.md)"""
    sampling_half_life: float = Field(30.0, gt=0, le=STEPS)
    """learnable: steps after which an attempt counts half in the pass rate of its problem; solved and hopeless
    problems are tested again sooner with fewer"""
    max_rollbacks: int = Field(3, ge=0, le=1000)
    """when the model collapses, go back to its best weights with 0.3 of the learning rate, this often before the run
    ends early; 0 turns the safety net off (docs/explain/safety_net.md)"""
    stop_when_solved: int = Field(0, ge=0, le=STEPS)
    """end the training after this many steps in a row in which every rollout passed; 0 turns this off"""
    refill_limit: int = Field(2, ge=0, le=1000)
    """how often a step may draw its number of problems again to reach `signal_share`"""
    max_grad_norm: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=STEPS)
    tokens_per_micro_batch: int | None = Field(None, ge=1, le=100_000_000)
    """token budget of one forward and backward; none suits it to the model: 16384, and up to 65536 on a GPU with room
    for it"""
    share_prefix: bool = True
    """compute the prompt of a group once for all its siblings, and the common beginning of all prompts once for each
    micro-batch"""
    deterministic: bool = False
    """the same seed gives the same run also with tools that take longer than 50 ms: sampling waits for them, so that
    who shares a batch does not depend on the time that they take"""

    @field_validator("custom_advantages", "custom_loss")
    @classmethod
    def _absolute(cls, spec: str | None) -> str | None:
        """Found from any folder, also when the run is resumed."""
        return None if spec is None else absolute_spec(spec)

    @model_validator(mode="after")
    def _fit_together(self) -> TrainSection:
        floor, correction = self.importance_floor, self.importance_correction
        half_life = self.sampling_half_life
        if self.sampling == "uniform" and half_life != type(self).model_fields["sampling_half_life"].default:
            raise ValueError(f"train.sampling_half_life = {half_life:g} is for train.sampling = learnable")
        if self.credit == "rollout" and self.discount != 1:
            raise ValueError(f"train.discount = {self.discount} is for train.credit = return_to_go or gigpo")
        if self.credit != "gigpo" and self.step_weight != 1:
            raise ValueError(f"train.step_weight = {self.step_weight} is for train.credit = gigpo")
        if self.credit == "return_to_go" and (self.leave_one_out or self.combine == "normalise_then_sum"):
            raise ValueError(
                "train.credit = return_to_go compares the returns of turns, of all measures together; leave "
                "train.leave_one_out and train.combine at their defaults"
            )
        if floor and correction in ("auto", "none"):
            raise ValueError(
                f"train.importance_floor = {floor} has no effect with train.importance_correction = {correction}; "
                "choose token_mask, token_truncate, sequence_mask or sequence_truncate"
            )
        if floor >= self.importance_cap:
            raise ValueError(f"train.importance_floor = {floor} must be less than importance_cap {self.importance_cap}")
        return self


class RolloutSection(Section):
    """How attempts are made."""

    group_size: Automatic = Field(BY_RUN, ge=1, le=65_536)
    """rollouts per problem; default 4 to 16, by model and GPU"""
    temperature: float = Field(0.8, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=10_000_000)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    max_new_tokens: Automatic = Field(BY_RUN, ge=1, le=10_000_000)
    """all turns of a rollout together; default 1024, or an eighth of a context below 4096"""
    max_tool_rounds: int = Field(5, ge=0, le=10_000)
    tool_timeout_s: float = Field(30.0, gt=0, le=WEEK_S)
    max_tool_result_chars: int = Field(20_000, ge=100, le=100_000_000)
    """a longer tool result, or text of an environment, is cut, and says so, before the model reads it"""
    max_open_episodes: int = Field(1024, ge=1, le=65_536)
    """maximum number of open attempts; environments with a sandbox have their own limit"""
    policy_url: str | None = None
    """sample from `palestra serve MODEL --weights-from weights_folder` instead of in this process"""
    weights_folder: str = "weights"
    """where a server at policy_url or vllm.url finds each step's weights"""
    constrain_tool_calls: bool = False
    """sample tool calls by the tools' JSON schemas; the learner scores without (kl_sampler shows it,
    train.importance_correction weighs it); needs palestra[constrain]"""
    unexpected_call_format: Literal["execute", "error"] = "execute"
    """a call that names a tool but is not in the model's call format: execute it, or answer with an error that shows
    the format"""
    compact_at: int | None = Field(None, ge=64, le=100_000_000)
    """our own agent loop: tokens of a conversation from which the model summarises it and continues with the summary
    alone; none: until the context is full"""
    keep_reasoning: bool = True
    """our own agent loop: the model reads what it thought in earlier turns; false leaves it out, as many servers do"""
    workers: int | None = Field(None, ge=0, le=64)
    """our own agent loop: processes that run it (chat templates, tools, measures), forked from this one; default 3 to 8
    with a GPU for environments that are known to work in several processes, else 0 (in this process)"""
    max_staleness: int = Field(0, ge=0, le=1000)
    """policy versions that a rollout may lag behind when it is trained; above 0 sampling continues while tools run and
    the learner works"""

    @model_validator(mode="after")
    def _groups_need_siblings(self) -> RolloutSection:
        useless = "so nothing is learned; use"
        if self.group_size == 1:
            raise ValueError(f"group_size (num_generations) = 1 gives every advantage 0, {useless} 2 or more")
        if self.temperature == 0:
            raise ValueError(f"temperature = 0 (not eval.temperature) makes all rollouts equal, {useless} 0.7 to 1.0")
        return self


class AgentSection(Section):
    """Agents with a loop of their own: a command, a function, or external programs."""

    timeout_s: float = Field(300.0, gt=0, le=WEEK_S)
    """an attempt that takes longer is ended, and counts as failed"""
    max_at_once: int = Field(32, ge=1, le=4096, description="attempts that run at a time")
    max_output_bytes: int = Field(4_000_000, ge=1000, le=1_000_000_000)
    """a program that writes more is ended, and counts as failed"""
    sandbox: bool = False
    """isolate each attempt of a command: it reaches the model and nothing else of the network"""
    gateway_workers: int | None = Field(None, ge=0, le=64)
    """child processes that answer the agents' requests, so that only sampling takes time of the training process;
    none: by the number of processors where a GPU samples; 0: no process"""
    roles: dict[str, str] = Field(default_factory=dict, max_length=16)
    """further agents of a program by label, each at OPENAI_BASE_URL_<LABEL>: train, start (the model before the
    training), checkpoint (the run's newest), a model (folder, hub id, RUN@STEP), or URL#model of an endpoint; only
    train is trained"""

    @model_validator(mode="after")
    def _fit_together(self) -> AgentSection:
        variables = [label.upper() for label in self.roles]
        for label, model in self.roles.items():
            if not re.fullmatch(r"[A-Za-z]\w{0,31}", label, re.ASCII) or label == "main":
                raise ValueError(f"agent.roles has the label {label!r}; use up to 32 letters, digits and _, not main")
            if variables.count(label.upper()) > 1 or not model.strip():
                raise ValueError(f"agent.roles: give the label {label!r} once, with a model, start or train")
        return self


class LoraSection(Section):
    """Low-rank adapters: off while r is 0."""

    r: int = Field(0, ge=0, le=8192)
    """rank; 0 trains all weights, or is 16 where load_in_4bit asks for adapters"""
    alpha: int = Field(32, ge=1, le=1_000_000)
    dropout: float = Field(0.0, ge=0, lt=1, description="in the learner only, so that sampler and learner differ")
    target_modules: list[str] | None = None
    """default: all linear layers (`all-linear`); `experts` adds those of a mixture of experts"""
    load_in_4bit: bool = Field(False, description="QLoRA: nf4 with double quantisation; needs CUDA and bitsandbytes")

    @model_validator(mode="after")
    def _four_bits_imply_lora(self) -> LoraSection:
        if self.load_in_4bit and not self.r:
            self.r = LORA_RANK
        return self

    def peft_arguments(self) -> dict[str, Any]:
        """This section as the arguments of peft's LoraConfig."""
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.target_modules or "all-linear",
            "task_type": "CAUSAL_LM",
        }


class RanksSection(Section):
    """Several processes that train together: `--nproc` or torchrun (docs/scaling.md)."""

    timeout_s: float = Field(1800.0, gt=0, le=WEEK_S)
    """how long a rank waits for the others, for their rollouts above all, until the run ends"""


class EchoSection(Section):
    """ECHO: also learn to predict what the tools answer."""

    coefficient: float = Field(0.0, ge=0, description="weight of the world-model loss; 0 is off")
    normalization: Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"] = "selected_tokens"
    schedule: Literal["constant", "linear", "step"] = "constant"
    final_coefficient: float = Field(0.0, ge=0, description="where linear and step schedules end")
    step_every: int = Field(10, ge=1, le=STEPS, description="step schedule: halve after this many steps")


class EvalSection(Section):
    """Scoring on held-out cases, before and after."""

    cases: int | None = Field(None, ge=1, le=10_000_000, description="how many held-out cases; default all")
    samples_per_case: int = Field(1, ge=1, le=10_000)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 takes the most likely token")
    every: int = Field(0, ge=0, le=STEPS, description="also evaluate every this many steps; 0 only before and after")


class CheckpointSection(Section):
    """What is kept on disk while training."""

    every: int = Field(50, ge=0, le=STEPS)
    """steps between checkpoints, the last one besides; 0: none, unless by Ctrl-C"""
    keep_last: int = Field(2, ge=1, le=100_000)
    keep_best: bool = True
    """also keep the best: by its held-out reward if eval.every is set, else by its training reward"""


class TrackSection(Section):
    """Where metrics go besides metrics.jsonl."""

    report_to: list[Literal["wandb", "tensorboard", "mlflow", "trackio"]] = Field(default_factory=list)
    project: str = "palestra"
    run_name: str | None = None
    entity: str | None = None
    log_every: int = Field(1, ge=1, le=STEPS, description="steps between lines for people")
    rollouts_every: int = Field(1, ge=0, le=STEPS)
    """steps between those whose rollouts are written to rollouts.jsonl; 0 writes none"""
    tokens_every: int = Field(1, ge=0, le=STEPS)
    """of these, steps between those whose tokens' ratios and entropies are written; 0: none"""

    transcripts_every: int = Field(10, ge=0, le=STEPS)
    """steps between tables of transcripts in W&B and Trackio; 0: none"""

    def shows_transcripts(self, step: int) -> bool:
        """The first step has a table, too: it shows early what the agent does."""
        return self.transcripts_every > 0 and (step == 1 or step % self.transcripts_every == 0)


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
