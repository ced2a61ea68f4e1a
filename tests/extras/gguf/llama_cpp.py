"""The real llama.cpp (xllamacpp) with one GGUF file, compared with transformers."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from palestra.extras.gguf.export import write_gguf


class LlamaCpp:
    """llama.cpp with one GGUF file, through the server in xllamacpp."""

    def __init__(self, path: Path, context: int = 512) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.verbosity = -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(params)
        # The server shows no probabilities for half a character or an end token: it is made to answer a letter. The
        # probabilities are those of the model, before this bias.
        self.letter = self.tokenize("a")[-1]

    def post(self, route: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{route}: {error.read().decode()}") from error

    def tokenize(self, text: str) -> list[int]:
        return list(self.post("/tokenize", {"content": text})["tokens"])

    def next_logprobs(self, token_ids: Sequence[int], top: int) -> dict[int, float]:
        """The log-probabilities of the `top` most likely next tokens, by id, the most likely first."""
        body = {"prompt": list(token_ids), "n_predict": 1, "n_probs": top, "logit_bias": [[self.letter, 1e4]]}
        top_logprobs = self.post("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in top_logprobs}

    def worst_difference(self, model: Any, prompts: Sequence[Sequence[int]]) -> float:
        """The largest difference, in nats, of any next-token log-probability from transformers'."""
        worst = 0.0
        for prompt in prompts:
            expected = transformers_logprobs(model, prompt)[-1]
            actual = self.next_logprobs(prompt, len(expected))
            assert len(actual) == len(expected)
            worst = max(worst, *(abs(expected[i].item() - value) for i, value in actual.items()))
        return worst

    def top_agreement(self, model: Any, prompts: Sequence[Sequence[int]]) -> float:
        """The share of positions at which the most likely next token is the one of transformers."""
        agree = total = 0
        for prompt in prompts:
            expected = transformers_logprobs(model, prompt).argmax(-1).tolist()
            for end in range(3, len(prompt) + 1):
                agree += next(iter(self.next_logprobs(prompt[:end], 1))) == expected[end - 1]
                total += 1
        return agree / total


def transformers_logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].float(), -1)  # [T, V]


def serve_tokenizer(tokenizer: Any, folder: Path) -> LlamaCpp:
    """llama.cpp with this tokenizer on the smallest model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    return LlamaCpp(write_gguf(model.state_dict(), config, tokenizer, folder / "small.gguf"))
