"""The sampling fields of OpenAI's, vLLM's and SGLang's requests, converted to SamplingParams."""

from __future__ import annotations

import random
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import SettingError, UnsupportedError, did_you_mean
from palestra.core.types import SamplingParams

T = TypeVar("T")

# Unsupported fields that would change the response, with the values that are accepted because they change nothing.
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((None, True), "add_generation_prompt detokenize parallel_tool_calls"),
    (
        (None,),
        "allowed_token_ids audio chat_template ebnf guided_grammar guided_json guided_regex json_schema "
        "lora_path prediction prompt_logprobs regex structural_tag token_ids_logprob truncate_prompt_tokens "
        "web_search_options",
    ),
    ((None, []), "bad_words documents functions"),
    ((None, 1), "best_of length_penalty"),
    (
        (None, False),
        "continue_final_message echo include_stop_str_in_output no_stop_trim return_hidden_states "
        "skip_special_tokens use_beam_search",
    ),
    ((None, 0), "frequency_penalty min_new_tokens min_tokens presence_penalty"),
    ((None, {}), "logit_bias"),
    ((None, ["text"]), "modalities"),
    ((None, {"type": "text"}), "response_format"),
    ((None, ""), "suffix"),
)
_NOT_BUILT = {name: values for values, names in _NEUTRAL_VALUES for name in names.split()}
# Fields about the caller, which change nothing in the response.
NO_EFFECT = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id rid "
    "priority log_metrics spaces_between_special_tokens betas cache_control inference_geo".split()
)
MAX_PROMPTS = 1024
_GREEDY_BELOW = 1e-5  # logits divided by less are no numbers any more
_QUOTED = 80  # characters of a refused value
MAX_STOPS, MAX_STOP_LENGTH, _MAX_GRAMMAR = 64, 256, 1 << 18

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(max_length=MAX_PROMPTS, fail_fast=True)]
StopId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stop = StopId | StopText | Annotated[list[StopId | StopText], Field(max_length=MAX_STOPS)]


class RequestForm(BaseModel):
    """The body of a request in one API's form."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    tool_kind: ClassVar[str] = "function"  # the type of the tools that an agent may offer; others are hosted ones

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Self:
        """Validate the known fields; an unsupported field that would change the response is rejected."""
        known = {}
        for name, value in raw.items():
            if name in cls.model_fields:
                known[name] = value
            elif changes_answer(name, value):
                raise UnsupportedError(f"{name}={short(value)} is not supported by this server; leave it out")
            elif name not in _NOT_BUILT and name not in NO_EFFECT:
                hint = did_you_mean(name[:100], cls.model_fields)
                raise SettingError(f"{short(name)} is no field that this server knows; leave it out.{hint}")
        return cls.model_validate(known)


class SamplingFields(RequestForm):
    """Sampling fields of all forms; a missing or null field has the form's default."""

    n: int | None = Field(None, ge=1, le=256)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop: Stop | None = None
    stop_token_ids: list[StopId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool = False
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    grammar: str | None = Field(None, max_length=_MAX_GRAMMAR)  # tools' schemas, as our own RemotePolicy sends them

    @property
    def choices(self) -> int:
        return self.n or 1

    def params(self, eos: tuple[int, ...], room: int, default_new_tokens: int) -> SamplingParams:
        """`room` is what the context has left; stops may be strings or token ids, and add to the model's own."""
        stops = self.stop if isinstance(self.stop, list) else [self.stop] if self.stop is not None else []
        limit = self.max_completion_tokens or self.max_tokens or self.max_new_tokens or default_new_tokens
        top_k = self.top_k or 0
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            max_new_tokens=min(limit, room),
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=self.top_p or 1.0,
            top_k=top_k if 0 < top_k < 1 << 30 else 0,  # -1 and 2**30 mean "all" to other servers
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop_token_ids=(
                *(() if self.ignore_eos else eos),
                *(s for s in stops if isinstance(s, int)),
                *(self.stop_token_ids or ()),
            ),
            stop=tuple(s for s in stops if isinstance(s, str) and s),
            grammar=self.grammar,
            seed=random.getrandbits(62) if self.seed is None else self.seed % (1 << 62),
        )


def is_batch(prompt: Any) -> bool:
    """Whether it is a list of prompts, rather than a text or token ids."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def changes_answer(name: str, value: Any) -> bool:
    """Whether a field is one that is not supported, with a value that would change the response."""
    return name in _NOT_BUILT and value not in _NOT_BUILT[name]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
