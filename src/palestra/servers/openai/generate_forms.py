"""SGLang's and vLLM's `/generate`, recognised by their fields. Token ids in, token ids with logprobs out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import SettingError
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer, Completion, SamplingRequest
from palestra.servers.openai.sampling_fields import Prompts, SamplingFields, TokenIds, is_batch, known_fields

_SGLANG_NEW_TOKENS, _VLLM_NEW_TOKENS = 128, 16


class SglangBody(BaseModel):
    """`input_ids` or `text`, one or several; sampling in a field of its own."""

    model_config = ConfigDict(extra="forbid")

    input_ids: TokenIds | Prompts[TokenIds] | None = None
    text: str | Prompts[str] | None = None
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    logprob_start_len: int | None = Field(None, ge=-1, description="-1: no logprobs of the prompt")
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool = False

    @property
    def prompts(self) -> list[Any]:
        if not self._input:
            raise SettingError("/generate needs input_ids or text; got neither")
        return self._input if self.is_batch else [self._input]

    @property
    def prompt_from(self) -> int | None:
        """The first token of the prompt whose logprob is wanted."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    @property
    def is_batch(self) -> bool:
        return is_batch(self._input)

    @property
    def _input(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    def requests(self, model: Completer) -> list[SamplingRequest]:
        if not self.return_logprob and (self.top_logprobs_num or self.logprob_start_len not in (None, -1)):
            raise SettingError("logprob_start_len and top_logprobs_num need return_logprob=true")
        scoring = {"top_logprobs": self.top_logprobs_num or 0, "scores_prompt": self.prompt_from is not None}
        return model.requests(self.prompts, self.sampling_params, _SGLANG_NEW_TOKENS, **scoring)

    def response(
        self, requests: Sequence[SamplingRequest], rows: Sequence[Sequence[Completion]], model: Completer
    ) -> Any:
        """One object for one completion, a list for several."""
        results = [self._result(request, c, model) for request, row in zip(requests, rows, strict=True) for c in row]
        return results if self.is_batch or len(results) > 1 else results[0]

    def _result(self, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        ids = completion.token_ids
        finish = (
            {"type": "stop", "matched": completion.matched}
            if completion.finish == "stop"
            else {"type": "length", "length": len(ids)}
        )
        about: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(ids),
            "weight_version": str(completion.versions[-1] if completion.versions else model.policy.version),
            "weight_versions": completion.versions,
        }
        if self.return_logprob:
            about |= self._logprobs(request, completion, model)
        return {"text": completion.text, "output_ids": list(ids), "meta_info": about}

    def _logprobs(self, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        """[logprob, id, text] of each token; the prompt's first has none."""

        def row(logprob: float | None, token: int) -> list[Any]:
            return [logprob, token, model.tokenizer.decode([token]) if self.return_text_in_logprobs else None]

        def rows(logprobs: Sequence[float | None], tokens: Sequence[int]) -> list[list[Any]]:
            return [row(logprob, token) for logprob, token in zip(logprobs, tokens, strict=True)]

        def best(top: Sequence[Sequence[tuple[int, float]]]) -> list[Any]:
            return [[row(value, token) for token, value in pairs] for pairs in top]

        found: dict[str, Any] = {"output_token_logprobs": rows(completion.logprobs, completion.token_ids)}
        if self.top_logprobs_num:
            found["output_top_logprobs"] = best(completion.top)
        if completion.prompt is not None:
            start = self.prompt_from
            found["input_token_logprobs"] = rows([None, *completion.prompt.logprobs], request.prompt_ids)[start:]
            if self.top_logprobs_num:
                found["input_top_logprobs"] = [None, *best(completion.prompt.top)][start:]
        return found


class VllmPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: TokenIds


class VllmBody(SamplingFields):
    """`prompt` as text or token ids, and sampling fields at the top level."""

    prompt: str | VllmPrompt
    logprobs: int | None = Field(None, ge=0, le=0, description="of the sampled token; others are not given here")
    stream: bool = False

    def requests(self, model: Completer) -> list[SamplingRequest]:
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt.prompt_token_ids
        return model.requests([prompt], self, _VLLM_NEW_TOKENS)

    def response(
        self, requests: Sequence[SamplingRequest], rows: Sequence[Sequence[Completion]], model: Completer
    ) -> Any:
        (request,), (row,) = requests, rows
        prompt = self.prompt if isinstance(self.prompt, str) else model.tokenizer.decode(list(request.prompt_ids))
        finishes = [c.finish for c in row]
        result: dict[str, Any] = {"text": [c.text for c in row], "prompt": prompt, "finish_reasons": finishes}
        if self.logprobs is not None:
            result["logprobs"] = [[[{str(i): p}] for i, p in zip(c.token_ids, c.logprobs, strict=True)] for c in row]
            result["prompt_token_ids"] = list(request.prompt_ids)
            result["token_ids"] = [list(c.token_ids) for c in row]
        return result


def generate_body(raw: dict[str, Any]) -> SglangBody | VllmBody:
    """The request in its own form."""
    if any(name in raw for name in ("input_ids", "text", "sampling_params")):
        body = known_fields(SglangBody, raw)
        if isinstance(params := body.get("sampling_params"), dict):
            body["sampling_params"] = known_fields(SamplingFields, params)
        return SglangBody.model_validate(body)
    if "prompt" in raw:
        return VllmBody.model_validate(known_fields(VllmBody, raw))
    raise SettingError("/generate needs input_ids or text (SGLang's form) or prompt (vLLM's); got neither")
