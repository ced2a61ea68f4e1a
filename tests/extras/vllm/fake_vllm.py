"""A small server that answers as `vllm serve` does, over our own engine: enough of vLLM for its policy, in a thread."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftModel
from small_engine import small_model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.types import SamplingParams
from palestra.core.weights import Weights
from palestra.policy.local import LocalPolicy

_RENAMED = {"max_tokens": "max_new_tokens"}
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def random_model(seed: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    # a wide range, so that two of them differ
    wide = {"initializer_range": 0.5, "tie_word_embeddings": False}
    return small_model(1288, 256, seed, num_hidden_layers=1, **sizes, **wide)


@dataclass
class FakeVllm:
    """`calls` are the paths that change it, in their order; `forgets` lets it answer and keep its old weights.

    `adapters` are those that are loaded, by name, as the policy of a module that has them; None: it was started
    without --enable-lora.
    """

    policy: LocalPolicy
    tokenizer: Any
    context: int
    extension: bool = True
    forgets: bool = False
    calls: list[str] = field(default_factory=list)
    adapters: dict[str, LocalPolicy] | None = None
    max_lora_rank: int = 16
    runtime_updating: bool = True

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/collective_rpc", self.rpc, methods=["POST"]),
        ]
        if self.runtime_updating:
            routes += [
                Route(f"/v1/{name}_lora_adapter", getattr(self, name), methods=["POST"]) for name in ("load", "unload")
            ]
        paths = ("pause", "resume", "reset_prefix_cache", "sleep", "wake_up")
        return Starlette(routes=[*routes, *(Route(f"/{path}", self.control, methods=["POST"]) for path in paths)])

    async def models(self, request: Request) -> JSONResponse:
        base = {"id": "the-model", "max_model_len": self.context}
        loaded = [{"id": name, "parent": "the-model", "max_model_len": None} for name in self.adapters or ()]
        return JSONResponse({"data": [base, *loaded]})

    async def load(self, request: Request) -> Response:
        """As vLLM 0.24 to 0.28 do; errors in its words."""
        body = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.calls.append(f"load {name}")
        if self.adapters is None:
            return error(500, "Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable LoRA.'")
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_model.safetensors").exists():
            return error(404, f"Loading lora {name} failed: No adapter found for {folder}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.max_lora_rank:
            return error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        module = PeftModel.from_pretrained(copy.deepcopy(self.policy.engine.model), folder)
        self.adapters[name] = LocalPolicy(module.eval(), self.tokenizer, kv_memory_gib=0.02, self_check=False)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        if self.adapters is None or self.adapters.pop(name, None) is None:
            return error(404, f"The lora adapter '{name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse({"tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids})

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert (body["ignore_eos"], body["return_token_ids"], body["logprobs"]) == (True, True, 0)
        policy = {"the-model": self.policy, **(self.adapters or {})}.get(body["model"])
        if policy is None:
            return error(404, f"The model `{body['model']}` does not exist.")
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return JSONResponse({"error": "maximum context length"}, status_code=400)
        sampling = {_RENAMED.get(name, name): body[name] for name in _SAMPLING}
        params = SamplingParams(**sampling, stop_token_ids=tuple(body["stop_token_ids"]), stop=tuple(body["stop"]))
        session = policy.open(body["prompt"])
        try:
            turn = await policy.sample(session, params)
        finally:
            policy.close(session)
        choice = {
            "token_ids": turn.token_ids.tolist(),
            "logprobs": {"token_logprobs": turn.logprobs.astype(float).tolist()},
            "finish_reason": turn.finish,
        }
        return JSONResponse({"choices": [choice]})

    async def rpc(self, request: Request) -> JSONResponse:
        body = await request.json()
        method = body["method"]
        if method.startswith("palestra_") and not self.extension:
            return JSONResponse({"error": f"no method {method}"}, status_code=500)
        if method != "palestra_version":
            self.calls.append(method)
            weights = Weights.load(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            if not self.forgets:
                try:
                    self.policy.update(weights)
                except Exception as error:
                    return JSONResponse({"error": str(error)}, status_code=500)
        return JSONResponse({"results": [None]})

    async def control(self, request: Request) -> Response:
        self.calls.append(request.url.path.strip("/") + (f"?{request.url.query}" if request.url.query else ""))
        return Response()  # as vLLM 0.24 does; 0.28 says a word of JSON


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
