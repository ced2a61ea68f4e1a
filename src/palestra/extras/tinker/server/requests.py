"""The JSON bodies that the SDK sends, checked. A field that is not known here is refused if it asks for something."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from palestra.core.types import SamplingParams
from palestra.extras.tinker.server.base_model import AdapterSpec
from palestra.extras.tinker.server.messages import Tensor, make_tensor

MAX_SAMPLES = 1024
MAX_TOPK = 1024
MAX_STOPS = 256  # every step compares with all of them
Id = Annotated[str, Field(max_length=200)]
SeqId = Annotated[int, Field(ge=1, lt=1 << 53)]
TokenId = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
StopTexts = Annotated[list[str], Field(max_length=MAX_STOPS)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOPS)]
Ttl = Annotated[int, Field(ge=1, le=1 << 31)]


def _only_adamw(kind: str | None) -> str | None:
    if kind not in ("adamw", "adam", None):
        raise ValueError(f"the optimizer {kind!r} is not supported by this server; use adamw")
    return kind


AdamW = Annotated[str | None, AfterValidator(_only_adamw)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_what_is_not_heeded(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if value and name != "type":
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = Field(None, max_length=200)


class SessionRequest(Body):
    session_id: Id


class ModelRequest(Body):
    model_id: Id


class LoraConfig(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def spec(self) -> AdapterSpec:
        return AdapterSpec(self.rank, self.train_attn, self.train_mlp, self.train_unembed)


class OptimizerConfig(BaseModel):
    type: AdamW = "adamw"


class NewModel(SessionRequest):
    model_seq_id: int = Field(ge=0)
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.model_seq_id}"


class CreateModel(NewModel):
    base_model: str
    lora_config: LoraConfig | None = None


class Adam(Body):
    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, allow_inf_nan=False)  # 0 or less: no clipping
    type: AdamW = "adamw"


class OptimStep(ModelRequest):
    seq_id: SeqId
    adam: Adam = Field(validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params"))


class SavedWeights(ModelRequest):
    seq_id: SeqId
    path: str | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeights(SavedWeights):
    overwrite: bool = False


class SaveWeightsForSampler(SavedWeights):
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"

    @model_validator(mode="after")
    def _inflight_is_not_kept(self) -> SaveWeightsForSampler:
        if self.kind == "inflight" and (self.path is not None or self.ttl_seconds is not None):
            raise ValueError("inflight weights are replaced by the next save; leave path and ttl_seconds out")
        return self


class SaveWeightsExternal(SavedWeights):
    path: str


class LoadWeights(ModelRequest):
    seq_id: SeqId
    path: str
    optimizer: bool = False


class CreateFromWeights(NewModel):
    """The form of load_weights that makes a model; it is the model's first request."""

    path: str
    optimizer: bool = False
    base_model: str | None = None


def _loaded_into(raw: Any) -> str:
    is_new = isinstance(raw, dict) and raw.get("session_id") is not None and raw.get("model_id") is None
    return "session" if is_new else "model"


LoadBody = Annotated[
    Annotated[CreateFromWeights, Tag("session")] | Annotated[LoadWeights, Tag("model")], Discriminator(_loaded_into)
]


class WeightsInfo(Body):
    tinker_path: str


class CreateSamplingSession(SessionRequest):
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(BaseModel):
    type: str = "encoded_text"
    tokens: list[TokenId] | None = None

    @model_validator(mode="after")
    def _text_only(self) -> PromptChunk:
        if self.type != "encoded_text" or self.tokens is None:
            raise ValueError(f"the prompt holds a chunk of type {self.type!r}; this server takes text tokens alone")
        return self


class Prompt(Body):
    chunks: list[PromptChunk]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens or ()]


class Sampling(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: str | StopTexts | StopIds | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class TargetTokens(Body):
    """The SDK's TensorData as JSON."""

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    @property
    def tensor(self) -> Tensor:
        csr = [np.array(x, np.int64) for x in (self.sparse_crow_indices, self.sparse_col_indices) if x is not None]
        csr = csr if len(csr) == 2 else []
        return make_tensor("target_prompt_logprobs", np.array(self.data, np.int64), self.shape or (), csr)


class Sample(Body):
    sampling_session_id: Id | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    prompt: Prompt
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOPK)
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOPK)
    target_prompt_logprobs: TargetTokens | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)

    def turns(self, room: int, eos: Sequence[int]) -> list[SamplingParams]:
        """How each sample is drawn; `room` is how many tokens the model's context leaves.

        A client's stops add to `eos`, the model's own: with others alone, a sample would go on behind its end, which
        no renderer can read. An empty list switches all of them off.
        """
        params = self.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        ids = () if stop == [] else (*eos, *(s for s in stop or () if isinstance(s, int)))
        words = tuple(s for s in stop or () if isinstance(s, str))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        each = SamplingParams(
            max_new_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            stop_token_ids=ids,
            stop=words,
        )
        return [replace(each, seed=seed + i) for i in range(self.num_samples)]


class RetrieveFuture(Body):
    request_id: Id
    allow_metadata_only: bool = False  # results are sent whole, whatever their size


class SetTtl(Body):
    ttl_seconds: Ttl | None = None
