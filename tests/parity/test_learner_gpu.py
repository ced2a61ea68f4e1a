"""On a GPU: flash attention over trees, compiled layers and the compiled head give the model's own numbers."""

from __future__ import annotations

import random

import pytest
import torch
from engine_families import tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.core.types import Sample
from palestra.learner import head
from palestra.learner.forward import Scorer
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import pack_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def build() -> torch.nn.Module:
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=1024,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def group(prompt_length: int, lengths: tuple[int, ...], number: int, root: int = 0) -> list[Sample]:
    """Siblings; the first `root` tokens of the prompt are the same for all numbers."""
    rng, common = random.Random(number), random.Random("root")
    prompt = [(common if i < root else rng).randrange(1024) for i in range(prompt_length)]
    samples = []
    for n in lengths:
        tokens = tuple(prompt + [rng.randrange(1024) for _ in range(n)])
        trained = (False,) * prompt_length + (True,) * n
        samples.append(
            Sample(tokens, trained, (False,) * len(tokens), (0.0,) * len(tokens), 1.0, number, prompt_length)
        )
    return samples


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpu_learner_agrees_with_the_plain_float32_forward(compiled: bool) -> None:
    exact = build()
    model = build().to("cuda", torch.bfloat16)
    scorer = Scorer(model, compile_layers=compiled)
    assert (scorer.mode, scorer.compiled) == ("trees", compiled)
    with_root = [sample for number in range(6) for sample in group(110, (40, 9, 133), number, root=90)]
    lone_rows = [sample for number in range(9) for sample in group(110, (70,), number, root=100)]
    plain = group(70, (40, 9, 33), 0) + group(20, (50,), 1), group(33, (8,) * 4, 2)
    for samples, root in ((plain[0], 0), (plain[1], 0), (with_root, 90), (lone_rows, 100)):
        options = {"max_tokens": 10_000, "share_prefix": True, "min_root": scorer.min_root}
        [batch] = pack_batch(Batch.of(samples), echo=False, device=torch.device("cuda"), **options)
        assert batch.root == root
        with scorer.session():
            logprobs = scorer(batch)[0]
            weights = torch.linspace(-1.0, 1.0, len(logprobs), device="cuda")
            model.zero_grad()
            (logprobs * weights).sum().backward()
        rows = []
        for sample in samples:
            ids = torch.tensor([sample.token_ids.tolist()])
            logp = torch.log_softmax(exact(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
            rows.append(logp[torch.tensor(sample.policy_mask.tolist())[1:]])
        expected = torch.cat(rows)
        exact.zero_grad()
        (expected * weights.cpu()).sum().backward()
        assert float((logprobs.cpu() - expected).abs().max()) < 0.1
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            error = (mine.grad.float().cpu() - theirs.grad).norm() / theirs.grad.norm()
            assert float(error) < 0.1


@pytest.mark.parametrize("root", [0, 80])
def test_the_same_pass_gives_the_same_bits_each_time(root: int) -> None:
    model = build().to("cuda", torch.bfloat16)
    scorer = Scorer(model, compile_layers=False)
    samples = [sample for number in range(64) for sample in group(100, (40,) * 8, number, root)]
    options = {"max_tokens": 100_000, "share_prefix": True, "min_root": scorer.min_root}
    [batch] = pack_batch(Batch.of(samples), echo=False, device=torch.device("cuda"), **options)
    assert batch.root == root

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        scorer(batch)[0].sum().backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    with scorer.session():
        with torch.no_grad():
            first, *others = (scorer(batch)[0] for _ in range(20))
        assert all(torch.equal(first, other) for other in others)
        expected, *again = (gradients() for _ in range(3))
    assert all(torch.equal(a, b) for more in again for a, b in zip(expected, more, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_windows_and_sinks_are_computed_by_flash_attention(family: str, compiled: bool) -> None:
    scorer = Scorer(tiny_model(family).to("cuda", torch.bfloat16), compile_layers=compiled)  # compares all numbers
    assert (scorer.mode, scorer.compiled, scorer.flash_windows) == ("trees", compiled, True)


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    adapted = add_lora(model, LoraSection(r=8))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # zeros at first: then half of the gradients are zero, too
            torch.nn.init.normal_(weight, std=0.05)
    return adapted


@pytest.mark.parametrize("root", [0, 80])
@pytest.mark.parametrize("lora", [False, True])
def test_captured_passes_give_the_numbers_of_plain_ones(lora: bool, root: int) -> None:
    model = build().to("cuda", torch.bfloat16)
    model = with_adapters(model) if lora else model
    scorer = Scorer(model, compile_layers=True)
    assert scorer.graphs is not None
    shapes = Shapes(10_000)
    # Two micro-batches of one shape; those with a root have two trees each.
    max_tokens = 430 if root else 200
    for number in range(5):
        samples = group(90 + number, (40, 9, 33 - number), number) + group(70, (50, 12), 10 + number)
        if root:
            known = root + number  # the root grows from step to step
            sizes = ((140 + number, (40, 9, 33 - number)), (140, (50, 12)), (139, (40, 30)), (141 + number, (50, 12)))
            samples = [
                sample
                for i, (prompt, lengths) in enumerate(sizes)
                for sample in group(prompt, lengths, 10 * i + number, known)
            ]
        results = []
        for some in (shapes, None):
            packed = pack_batch(
                Batch.of(samples),
                max_tokens=max_tokens,
                share_prefix=True,
                echo=False,
                device=torch.device("cuda"),
                shapes=some,
                min_root=scorer.min_root,
            )
            assert [micro.root for micro in packed] == [known if root else 0] * 2
            model.zero_grad()
            found = []
            for batch in packed:
                with scorer.session():
                    logprobs = scorer(batch)[0]
                    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs), device="cuda")).sum().backward()
                found.append(logprobs.detach())
                del logprobs  # its autograd graph is of another stream than the one that captures
            gradients = [weight.grad.float().clone() for weight in model.parameters() if weight.grad is not None]
            results.append((torch.cat(found), gradients))
        (ours, gradients), (theirs, expected) = results
        assert float((ours - theirs).abs().max()) < 0.03
        for mine, other in zip(gradients, expected, strict=True):
            assert float((mine - other).norm() / other.norm()) < 0.05
    assert scorer.graphs.captured == 1  # both micro-batches have one shape


def test_the_heads_gradients_at_once_are_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cuda": 0})  # chunks of 128 tokens
    monkeypatch.setattr(head, "KEPT_BYTES", {"cuda": 1})
    inputs = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((300, 64), (1000, 64))]
    target, upstream = torch.randint(0, 1000, (300,), device="cuda"), torch.randn(2, 300, device="cuda")
    results = []
    for gradient in (lambda _, __, part: (upstream[0, part], upstream[1, part]), None):
        hidden, weight = leaves = [x.clone().requires_grad_() for x in inputs]
        logprobs, entropy = head.score_tokens(
            hidden, weight, None, target, head.LogitRule(), entropy_gradient=True, loss_gradient=gradient
        )
        ((logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
        results.append([logprobs, entropy, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3)  # type: ignore[arg-type]


def test_a_step_of_several_micro_batches_is_captured() -> None:
    config = RunConfig.build({"train.tokens_per_micro_batch": 200}).with_step_size()
    learner = LocalLearner(build().to("cuda", torch.bfloat16), config=config)
    learner._scorer = Scorer(learner.model, compile_layers=True)  # which so small a model is not by itself
    learner._shapes = Shapes(10_000)
    batch = Batch.of([sample for i in range(4) for sample in group(90, (40, 9), i)])
    for _ in range(2):
        learner.forward_backward(batch, StepLoss.of(batch, Objective(), max_completion_length=64))
    graphs = learner._scorer.graphs
    assert graphs is not None
    assert graphs.captured
