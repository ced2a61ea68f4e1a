"""Which mode is right for this model? A few rows, forward and backward, against the model's own logits.

Only what is known not to work (`UnsupportedModel`) and numbers that differ lead to the reference mode, and what the
compiler cannot do to uncompiled layers; any other exception, such as a lack of memory, is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch
from palestra.core.errors import UnsupportedModel
from palestra.core.types import Sample
from palestra.engine.attention import ModulePatches
from palestra.engine.recurrent import RecurrentLayers
from palestra.engine.supported import decoder_of, has_attention_interface, is_linear, takes_keywords
from palestra.learner.tree_attention import pack_batch

log = logging.getLogger(__name__)

RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm")
# What rounding explains: the difference of log-probabilities (root mean square; unlikely tokens of a trained model
# are off by tenths in bfloat16), and of a gradient relative to its size. A wrong mask is off by whole nats.
TOLERANCES = {torch.bfloat16: (0.3, 0.5), torch.float16: (0.05, 0.1)}
FULL_PRECISION = (5e-4, 1e-2)
ROOT, PROMPT = 4, 9  # tokens with which all rows of the check begin, and with which siblings do
LONGEST_WINDOW = 1024  # sliding windows up to here are checked with rows that reach beyond them
# The compiler lays out layers for the size that it sees first, which is here: numbers of a hidden state on a GPU.
TYPICAL_SIZE = 2**22


def choose_mode(scorer: Any) -> None:
    """Set a `Scorer`'s mode to the first that gives the model's own numbers; say so when it is not the fast one."""
    model = scorer.model
    with ModulePatches() as patches:
        # As the learner will call it, so that programs compiled here are used there; a model without trainable weights
        # is a reference.
        patches.set_training(model, any(p.requires_grad for p in model.parameters()) and not has_dropout(model))
        root = ROOT if scorer.shares_root else 0
        shared, apart = _probe(model, True, root), _probe(model, False)
        expected = _numbers(model, lambda: scorer.from_logits(apart))
        scorer.mode, settings, reasons = "trees", _settings(scorer), []
        for compiled, by_flash in settings:
            scorer.compiled, scorer.flash_windows = compiled, by_flash
            is_typical = compiled and model.device.type == "cuda"
            reason = _mismatch(scorer, _probe(model, True, root, size=TYPICAL_SIZE) if is_typical else shared, expected)
            if reason is None:
                break
            reasons.append(reason)
        else:
            scorer.mode = "reference"
            log.warning("the learner computes padded rows and whole logits, slower and in more memory: %s", reasons[-1])
            return
        if reasons:
            slower = "uncompiled" if compiled != settings[0][0] else "with masks in the place of sliding windows"
            log.warning("the learner runs %s, which is slower: %s", slower, reasons[0])


def _settings(scorer: Any) -> list[tuple[bool, bool]]:
    """(compiled, windows and sinks by flash attention) from the fastest, which nearly all models run: each check takes
    time."""
    by_flash = [True, False] if scorer.model.device.type == "cuda" and has_windows(scorer.model) else [True]
    return [(compiled, flash) for compiled in ([True, False] if scorer.compiled else [False]) for flash in by_flash]


def has_windows(model: nn.Module) -> bool:
    """Whether layers attend within a sliding window, or have sinks."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return has_sinks or getattr(config, "sliding_window", None) is not None


def has_dropout(model: nn.Module) -> bool:
    """Whether training differs from evaluation by chance."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    settings = vars(model.config) | vars(model.config.get_text_config())  # type: ignore[operator, union-attr]
    return any(value for name, value in settings.items() if "dropout" in name or "jitter" in name)


def require_tree_support(model: Any) -> None:
    """UnsupportedModel for what is known not to work with packed trees."""
    name = type(model).__name__
    kinds = [str(kind) for kind in getattr(model.config, "layer_types", None) or []]
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT)]
    if recurrent and not RecurrentLayers(model).modules:  # their state would pass from one sibling to the next
        raise UnsupportedModel(f"{name} has {recurrent[0]} layers")
    if not has_attention_interface(model):
        raise UnsupportedModel(f"{name} does not attend through transformers' attention interface")
    if decoder_of(model) is model:
        raise UnsupportedModel(f"{name} does not name its decoder")
    if not is_linear(model.get_output_embeddings()):
        raise UnsupportedModel(f"the output layer of {name} is not an nn.Linear")
    if not takes_keywords(decoder_of(model)):
        raise UnsupportedModel(f"{name} hands no keywords to its attention layers")


def _mismatch(scorer: Any, micro: MicroBatch, expected: list[Tensor]) -> str | None:
    """Why the scorer as it is set cannot be used, or None."""
    model = scorer.model
    name = type(model).__name__
    try:
        require_tree_support(model)
        with scorer.session():
            found = _numbers(model, lambda: scorer(micro), count=len(expected[0]))
    except UnsupportedModel as reason:
        return str(reason)
    except TorchDynamoException as error:
        return f"{name} cannot be compiled: {error!s:.300}"
    logprob_limit, gradient_limit = TOLERANCES.get(model.dtype, FULL_PRECISION)
    difference = float((found[0] - expected[0]).square().mean().sqrt())
    if not difference <= logprob_limit:
        return f"{name} differs by {difference:.2g} from its own log-probabilities on a small check"
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        error_norm, norm = float((mine - theirs).norm()), float(theirs.norm())
        if not error_norm <= gradient_limit * norm + 1e-6:
            return f"{name} differs by {error_norm / max(norm, 1e-6):.0%} from its own gradient on a small check"
    return None


def _numbers(model: nn.Module, score: Callable[[], tuple[Tensor, Tensor]], count: int | None = None) -> list[Tensor]:
    """The first log-probabilities, and the gradient of their weighted sum by a few weights, where any is trained.

    By matrices: gradients of vectors, such as the decays of recurrent layers, may be little but rounding in bfloat16.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() == 2] or trainable
    watched = [*matrices[:2], *matrices[-1:]] if len(matrices) > 2 else matrices
    with torch.set_grad_enabled(bool(watched)):
        logprobs = score()[0][:count]
        weights = torch.linspace(-1.0, 1.0, len(logprobs), device=logprobs.device)
        gradients = torch.autograd.grad((logprobs * weights).sum(), watched, allow_unused=True) if watched else ()
    return [logprobs.detach(), *(g.float() for g in gradients if g is not None)]


def _probe(model: Any, share_prefix: bool, min_root: int = 0, size: int = 0) -> MicroBatch:
    """Three siblings of unlike lengths, as one tree or apart, and a row that begins like them; the scored tokens come
    in the same order. For recurrent layers two siblings with a shorter prompt, too: it is padded.

    The longest reaches well beyond the model's sliding window, where there is one of moderate size: a few tokens
    with a few keys too many would not show. Other rows follow until a hidden state of all has about `size` numbers.
    """
    embeddings = model.get_input_embeddings().weight
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0
    longest = PROMPT + (window + window // 4 if window <= LONGEST_WINDOW else 0)
    ids = [(i * 7919 + 17) % len(embeddings) for i in range(19 + longest)]
    completions = ((PROMPT, 15), (15, 15 + longest), (15 + longest, 19 + longest))
    samples = [
        _row(ids[:PROMPT] + ids[first:last], last - first, group=0, prompt_length=PROMPT) for first, last in completions
    ]
    samples.append(_row(ids[:ROOT] + ids[PROMPT:15], 4, group=1, prompt_length=0))
    if RecurrentLayers(model).modules:
        prompt = ids[:ROOT] + ids[PROMPT : 2 * PROMPT - ROOT - 1]  # one token less
        samples += [_row(prompt + ids[15 : 15 + n], n, group=-1, prompt_length=len(prompt)) for n in (4, 3)]
    others = range(2, 2 + min(4096, size // embeddings.shape[1]) // 128)
    samples += [_row((ids * 10)[:129], 1, group=group, prompt_length=0) for group in others]
    batch, device = Batch.of(samples), embeddings.device
    options: dict[str, Any] = {"max_tokens": 8192, "share_prefix": share_prefix, "min_root": min_root}
    return pack_batch(batch, echo=False, device=device, **options)[0]


def _row(tokens: list[int], trained: int, *, group: int, prompt_length: int) -> Sample:
    """Its last tokens are trained."""
    mask = [False] * (len(tokens) - trained) + [True] * trained
    no = [False] * len(tokens)
    return Sample(tokens, mask, no, [0.0] * len(tokens), advantages=0.0, group=group, prompt_length=prompt_length)  # type: ignore[arg-type]
