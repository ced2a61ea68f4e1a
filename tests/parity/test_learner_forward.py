"""The learner's packed, prefix-shared pass gives the numbers of the plain forward, family by family."""

from __future__ import annotations

import random

import pytest
import torch
from engine_families import RECURRENT, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.algo.batch import Batch
from palestra.algo.batching import pack
from palestra.core.types import Sample
from palestra.learner.forward import Scorer
from palestra.learner.micro_batches import PackedMicroBatch, pack_batch

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"head_dim": 16, "sliding_window": 5}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "mistral": {"sliding_window": 5},
    "gemma2": {**WINDOW, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": WINDOW,
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "smollm3": {},
    "granite": {"logits_scaling": 3.0},
    "cohere2": {"sliding_window": 5},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": {**WINDOW, "num_local_experts": 4},
}


def build(family: str, **extra: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # larger weights than the initial ones, so that attention is not almost uniform
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.mul_(4.0)
    return model.eval()


def groups() -> list[Sample]:
    """Two groups with siblings of unlike lengths, one with a tool result inside, and a lone row."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(n)]

    samples = []
    for group, (prompt_length, lengths) in enumerate([(11, (7, 1, 12)), (6, (4, 4)), (8, (9,))]):
        prompt = tokens(prompt_length)
        for n in lengths:
            trained = [False] * prompt_length + [not 3 <= i < 5 for i in range(n)]
            observed = [not t and i >= prompt_length for i, t in enumerate(trained)]
            size = prompt_length + n
            samples.append(Sample(prompt + tokens(n), trained, observed, [0.0] * size, 1.0, group, prompt_length))
    return samples


def packed(samples: list[Sample], max_tokens: int, share_prefix: bool = True) -> list[PackedMicroBatch]:
    device = torch.device("cpu")
    whole = pack_batch(Batch.of(samples), max_tokens=max_tokens, share_prefix=share_prefix, echo=True, device=device)
    return whole.micro_batches


def plain(model: torch.nn.Module, samples: list[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the scored tokens, one row at a time, from whole logits; tool results at 1."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.tensor([sample.token_ids.tolist()])
        scale = torch.where(torch.tensor(sample.echo_mask.tolist())[1:, None], 1.0, temperature)
        logp = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float() / scale, -1)
        scored = torch.tensor((sample.policy_mask | sample.echo_mask).tolist())[1:]
        logprobs.append(logp.gather(-1, ids[0, 1:, None]).squeeze(-1)[scored])
        entropies.append(-(logp.exp() * logp).sum(-1)[scored])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: torch.nn.Module, logprobs: Tensor, entropies: Tensor) -> list[Tensor]:
    """Of an arbitrary loss that weighs every token differently."""
    model.zero_grad()
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    ((logprobs * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_tokens", [1000, 24])
def test_packed_trees_give_the_plain_logprobs_and_gradients(family: str, max_tokens: int) -> None:
    model, samples = build(family), groups()
    expected = plain(model, samples, 0.7)
    scorer = Scorer(model, temperature=0.7)
    assert scorer.mode == "trees"
    batches = packed(samples, max_tokens)
    with scorer.session():
        parts = [scorer(batch, entropy_gradient=True) for batch in batches]
        got = tuple(torch.cat(x) for x in zip(*parts, strict=True))
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
        ours = gradients(model, *got)
    for mine, theirs in zip(ours, gradients(model, *expected), strict=True):
        scale = float(theirs.abs().max()) + 1e-8
        torch.testing.assert_close(mine / scale, theirs / scale, rtol=1e-5, atol=1e-5)


def test_the_shared_prompt_is_computed_once() -> None:
    samples = groups()[:3]
    [shared] = pack(Batch.of(samples), max_tokens=1000)
    apart = pack(Batch.of(samples), max_tokens=1000, share_prefix=False)
    assert len(shared.token_ids) == 11 + (6 + 0 + 11)
    assert sum(len(b.token_ids) for b in apart) == 3 * 11 + (6 + 0 + 11)


OTHERS = [*RECURRENT, "olmoe", "granitemoe", "gemma3n_text", "gemma4_text", "llama4_text"]
SHORT_CHUNKS = {"attention_chunk_size": 8, "floor_scale": 6}  # rows reach beyond both


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*((family, False) for family in OTHERS), ("lfm2", True), ("nemotron_h", True)]
)
def test_other_families_give_the_plain_logprobs_and_gradients(family: str, checkpointing: bool) -> None:
    changes = SHORT_CHUNKS if family == "llama4_text" else {}
    model, samples = tiny_model(family, vocab_size=128, **changes), groups()
    expected = plain(model, samples, 1.0)
    theirs = gradients(model, *expected)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    scorer = Scorer(model)
    assert scorer.mode == "trees"
    parts = []
    for batch in packed(samples, 1000):
        with scorer.session():
            parts.append(scorer(batch, entropy_gradient=True))
            got = tuple(torch.cat(x) for x in zip(*parts, strict=True))
            torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
            ours = gradients(model, *got)
    for mine, own in zip(ours, theirs, strict=True):
        assert float((mine - own).norm()) <= 1e-4 * float(own.norm()) + 1e-6


def test_a_model_of_an_unknown_recurrence_is_computed_in_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.engine.recurrent.CACHE_ARGUMENTS", ())
    model, samples = tiny_model("qwen3_next"), groups()
    scorer = Scorer(model)
    assert scorer.mode == "reference"
    [batch] = packed(samples, 1000, share_prefix=False)
    with scorer.session():
        got = scorer(batch)
    torch.testing.assert_close(got[0], plain(model, samples, 1.0)[0], rtol=1e-4, atol=1e-4)


def test_an_unknown_change_to_the_logits_is_noticed_and_computed_whole() -> None:
    model = build("qwen3")

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    model.__class__ = Odd
    scorer, samples = Scorer(model), groups()
    assert scorer.mode == "reference"
    [batch] = packed(samples, 1000, share_prefix=False)
    torch.testing.assert_close(scorer(batch)[0], plain(model, samples, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_the_model_attends_as_before_after_a_session() -> None:
    model = build("qwen3")
    scorer = Scorer(model)
    with scorer.session():
        pass
    assert model.config._attn_implementation == "eager"
