"""SGLang's and vLLM's `/generate`, recognised by their fields. Token ids in, token ids with logprobs out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import PalestraError
from palestra.serve.completer import Completer, Completion, SamplingRequest
from palestra.serve.sampling_fields import SamplingFields, check_built

_SGLANG_NEW_TOKENS, _VLLM_NEW_TOKENS = 128, 16


class SglangBody(BaseModel):
    """`input_ids` or `text`, one or several; sampling in a field of its own."""

    model_config = ConfigDict(extra="ignore")

    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: bool = False

    @property
    def prompts(self) -> list[Any]:
        if not self._input:
            raise PalestraError("/generate needs input_ids or text; got neither")
        return self._input if self.is_batch else [self._input]

    @property
    def is_batch(self) -> bool:
        return isinstance(self._input, list) and bool(self._input) and not isinstance(self._input[0], int)

    @property
    def _input(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    def requests(self, model: Completer) -> list[SamplingRequest]:
        ids = [model.encode(p) if isinstance(p, str) else p for p in self.prompts]
        return [model.request(prompt, self.sampling_params, _SGLANG_NEW_TOKENS) for prompt in ids]

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
            texts = [model.tokenizer.decode([i]) if self.return_text_in_logprobs else None for i in ids]
            about["output_token_logprobs"] = [list(row) for row in zip(completion.logprobs, ids, texts, strict=True)]
        return {"text": completion.text, "output_ids": list(ids), "meta_info": about}


class VllmPrompt(BaseModel):
    prompt_token_ids: list[int]


class VllmBody(SamplingFields):
    """`prompt` as text or token ids; sampling fields beside it."""

    prompt: str | VllmPrompt
    logprobs: int | None = Field(None, ge=0, le=1)
    stream: bool = False

    def requests(self, model: Completer) -> list[SamplingRequest]:
        ids = model.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt.prompt_token_ids
        return [model.request(ids, self, _VLLM_NEW_TOKENS)]

    def response(
        self, requests: Sequence[SamplingRequest], rows: Sequence[Sequence[Completion]], model: Completer
    ) -> Any:
        (request,), (row,) = requests, rows
        prompt = self.prompt if isinstance(self.prompt, str) else model.tokenizer.decode(list(request.prompt_ids))
        result: dict[str, Any] = {
            "text": [c.text for c in row],
            "prompt": prompt,
            "finish_reasons": [c.finish for c in row],
        }
        if self.logprobs is not None:
            result["logprobs"] = [[[{str(i): p}] for i, p in zip(c.token_ids, c.logprobs, strict=True)] for c in row]
            result["prompt_token_ids"] = list(request.prompt_ids)
            result["token_ids"] = [list(c.token_ids) for c in row]
        return result


def generate_body(raw: dict[str, Any]) -> SglangBody | VllmBody:
    """The request in its own form."""
    if any(name in raw for name in ("input_ids", "text", "sampling_params")):
        body = SglangBody.model_validate(raw)
        check_built(raw.get("sampling_params", {}))
        return body
    if "prompt" in raw:
        check_built(raw)
        return VllmBody.model_validate(raw)
    raise PalestraError("/generate needs input_ids or text (SGLang's form) or prompt (vLLM's); got neither")
