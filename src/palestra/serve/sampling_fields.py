"""How a request is to be sampled: the fields of OpenAI's, vLLM's and SGLang's forms -> SamplingParams."""

from __future__ import annotations

import random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams

# What would change the response but is not supported: refused, unless it has the value that it has here anyway.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "json_schema": (None,),
    "logit_bias": (None, {}),
    "min_new_tokens": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None, 0),
    "regex": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}

Stop = int | str | list[int | str]


class SamplingFields(BaseModel):
    """Every form's names at once; a field that is missing or null has the form's default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    n: int | None = Field(None, ge=1, le=256)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    grammar: str | None = None  # the JSON of tools' schemas, as our own RemotePolicy sends it

    @property
    def choices(self) -> int:
        return self.n or 1

    def params(self, eos: tuple[int, ...], room: int, default_new_tokens: int) -> SamplingParams:
        """`room` is what the context has left; stops may be strings or token ids, and add to the model's own."""
        stops = self.stop if isinstance(self.stop, list) else [self.stop] if self.stop is not None else []
        limit = self.max_completion_tokens or self.max_tokens or self.max_new_tokens or default_new_tokens
        top_k = self.top_k or 0
        return SamplingParams(
            max_new_tokens=min(limit, room),
            temperature=1.0 if self.temperature is None else self.temperature,
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


def check_built(body: dict[str, Any]) -> None:
    """Refuse fields that would be ignored but matter."""
    for name, harmless in _NOT_BUILT.items():
        if body.get(name) not in harmless:
            raise PalestraError(f"{name}={body[name]!r} is not supported by this server; leave it out")
