"""The learner on this machine: any Hugging Face causal language model, whole or with adapters."""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, nothing_scored, tokens_to_column
from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import Loss, LossTerms, LossTokens
from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError, SettingError, UnsupportedModel
from palestra.core.extras import provided
from palestra.core.machine import phases, to_device
from palestra.core.ranks import ONE_PROCESS, Ranks
from palestra.core.types import Array
from palestra.core.weights import Weights
from palestra.engine.supported import NO_EXACT, base_linear, base_model
from palestra.learner import state as learner_state
from palestra.learner.base import noop
from palestra.learner.forward import Scorer
from palestra.learner.micro_batches import (
    MicroBatchLimit,
    captured_tokens,
    micro_batch_tokens,
    rows_of,
    score_all,
    unless_out_of_memory,
)
from palestra.learner.optimizer import Optimizer
from palestra.learner.replicas import Replicas, can_be_replicated
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import on_device, pack_batch


@dataclass(slots=True)
class LocalOutputs:
    """The results of one forward_backward, still on the device."""

    batch: Batch
    loss: Loss
    policy_lengths: Tensor  # [R] policy tokens of each row
    echo_lengths: Tensor  # [R]
    terms: Tensor  # [K] float64: the terms of the loss
    stats: TokenStats
    token_losses: list[tuple[Tensor, Tensor]]  # [N] losses and their rows, for error messages
    token_logprobs: list[tuple[MicroBatch, Tensor]]
    token_entropies: list[tuple[MicroBatch, Tensor]]

    @classmethod
    def empty(cls, batch: Batch, loss: Loss, device: torch.device) -> LocalOutputs:
        policy_lengths, echo_lengths = to_device(map(torch.from_numpy, batch.loss_lengths()), device)
        terms = torch.zeros(len(loss.weights), dtype=torch.float64, device=device)
        return cls(batch, loss, policy_lengths, echo_lengths, terms, TokenStats(), [], [], [])

    def logprobs(self) -> Array:
        return tokens_to_column(self.token_logprobs, self.batch)

    def entropies(self) -> Array:
        return tokens_to_column(self.token_entropies, self.batch)

    def metrics(self) -> dict[str, float]:
        return self.loss.metrics(self.terms, self.stats) | self.costs()

    def costs(self) -> dict[str, float]:
        """Tokens computed and memory used on this machine."""
        costs = {"tokens_computed": float(sum(len(micro.token_ids) for micro, _ in self.token_logprobs))}
        if self.terms.is_cuda:
            costs["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.terms.device) / 2**30
        return costs

    def add(self, micro: MicroBatch, terms: LossTerms, logprobs: Tensor, entropies: Tensor) -> None:
        """Add the results of one micro-batch's forward pass; log-probabilities and entropies are [N]."""
        self.terms += terms.terms
        self.stats += terms.stats
        self.token_losses.append((terms.token_losses, terms.row))
        self.token_logprobs.append((micro, logprobs))
        self.token_entropies.append((micro, entropies))


def explain_not_finite(pending: Sequence[LocalOutputs], loss: float, grad_norm: float, ranks: Ranks) -> str:
    """Names the groups with a NaN or an infinity; all of them where their losses are finite, but not the gradient."""
    guilty, everyone = set[int](), set[int]()
    for outputs in pending:
        sums = torch.zeros(outputs.batch.rows, device=outputs.terms.device)  # of the losses of each row
        for token_loss, row in outputs.token_losses:
            sums.index_add_(0, row, token_loss.float())
        guilty.update(outputs.batch.groups[(~sums.isfinite()).cpu().numpy()].tolist())
        everyone.update(outputs.batch.groups.tolist())
    guilty, everyone = (set[int]().union(*ranks.gather(groups, set[int])) for groups in (guilty, everyone))
    groups = guilty or everyone
    what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
    return (
        f"group {', '.join(map(str, sorted(groups)))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate, or use float32 or bfloat16 instead of float16"
    )


class LocalLearner:
    """Trains one model in place. A sampler that drives the same module sees every step at once.

    The model's weights at construction are the KL reference, if `train.beta` asks for one. One of several `ranks` holds
    its shard of the model and computes its own rows; all of them call the same methods (`extras/ranks` sees to it).

    >>> learner = LocalLearner(model, config=config)                        # doctest: +SKIP
    >>> outputs = learner.forward_backward(batch, StepLoss.of(batch, objective, max_completion_length=256))
    >>> learner.optim_step(1e-5, max_grad_norm=1.0)
    >>> policy.update(learner.weights(version=1))
    """

    def __init__(
        self,
        model: Any,
        *,
        config: RunConfig,
        pad_token_id: int = 0,
        optimizer: Optimizer | None = None,
        ranks: Ranks = ONE_PROCESS,
        max_rows: int | None = None,
        shares_device: bool = False,
    ) -> None:
        """`max_rows` limits the rows of a micro-batch. `shares_device`: other threads compute there, too, so that no
        CUDA graphs are captured, and gradients are added strictly in the order of the rows."""
        # What torch takes on an H200 anyway; other threads may compute while this one is `in_one_order`.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.model = model
        self._ranks = ranks
        self._has_adapter = hasattr(model, "disable_adapter")
        self._require_support(config)
        hf = base_model(model)
        if config.model.gradient_checkpointing:
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        in_shards = ranks is not ONE_PROCESS
        rollout = config.rollout
        options: dict[str, Any] = {  # of the scorers of the policy, its replicas and the reference
            "temperature": rollout.temperature,
            "truncation": {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p},
            "pad_token_id": pad_token_id,
            "in_shards": in_shards,
        }
        self._scorer = Scorer(model, exact=config.model.exact, routing=config.train.expert_routing, **options)
        if shares_device:
            self._scorer.graphs = None
        whole_logits = self._scorer.mode == "reference"
        self._limit = MicroBatchLimit(micro_batch_tokens(config, hf.config, self.device, whole_logits=whole_logits))
        self._max_rows = max_rows
        self._suits_memory = config.train.tokens_per_micro_batch is None
        captured = 0 if self._scorer.graphs is None else captured_tokens(config, hf.config, self.device)
        self._shapes = Shapes(captured) if captured else None
        self._share_prefix = config.train.share_prefix and self._scorer.shares_prefix
        self._min_root = self._scorer.min_root if self._share_prefix else 0
        self._reference: Scorer | None = None
        if config.train.beta > 0:  # the base weights below an adapter, else a copy of the weights
            frozen = None if self._has_adapter else copy.deepcopy(model).requires_grad_(False).eval()
            self._reference = self._scorer if frozen is None else Scorer(frozen, **options)
        if in_shards:
            for scorer in {self._scorer, self._reference} - {None}:
                provided("models in shards").shard(scorer, master_weights=config.model.master_weights)
        self._replicas: Replicas | None = None
        if not shares_device and can_be_replicated(model, self._scorer):
            self._replicas = Replicas(model, self._scorer, config.model.threads, **options)
        self.optimizer = optimizer or Optimizer(model, config.train, master_weights=config.model.master_weights)
        self._pending: list[LocalOutputs] = []  # whose gradients wait for an optim_step
        self._packings: WeakKeyDictionary[Batch, tuple[bool, list[MicroBatch]]] = WeakKeyDictionary()

    def _require_support(self, config: RunConfig) -> None:
        if config.lora.r > 0 and not self._has_adapter:
            raise SettingError(
                "lora.r > 0 but the model has no adapter; wrap it with palestra.learner.lora.add_lora first"
            )
        if config.model.exact and self.device.type != "cuda":
            raise UnsupportedModel(f"model.exact has no kernels for a {self.device.type.upper()}; {NO_EXACT}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocabulary(self) -> int:
        """How many tokens the output layer gives logits for."""
        return len(base_linear(self._scorer.head.output).weight)

    @property
    def has_pending(self) -> bool:
        """Whether a forward_backward waits for an optim_step."""
        return bool(self._pending)

    @torch.no_grad()
    def forward(self, batch: Batch, *, reference: bool = False) -> Array:
        if reference and self._reference is None:
            raise SettingError(
                "train.beta > 0 but the learner was built without it; set it in the config from the start"
            )
        scorer = self._reference if reference and self._reference is not None else self._scorer

        def score(micro: MicroBatch) -> Any:
            if reference:  # another policy, which chooses its experts itself
                micro = replace(micro, routing=None)
            return scorer(micro)

        with self.model.disable_adapter() if reference and self._has_adapter else nullcontext():
            parts = [(micro, micro.of_each(scored[0])) for micro, scored in self._passes(scorer, batch, score)]
        return tokens_to_column(parts, batch)

    @torch.no_grad()
    def top_logprobs(self, batch: Batch, k: int) -> tuple[Array, Array]:
        """([M, k] int64 ids, [M, k] float32 log-probabilities) of the current model's k most likely tokens.

        M are the tokens of the policy mask, in the order of the batch. Both are at `rollout.temperature`, as all
        log-probabilities of sampled tokens are. Where the vocabulary is smaller than k, all of it is returned.
        """
        assert batch.targets is None
        scorer = self._scorer
        passes = self._passes(scorer, batch, lambda micro: scorer.top(micro, k))
        if not passes:
            return np.zeros((0, k), np.int64), np.zeros((0, k), np.float32)
        order = np.argsort(np.concatenate([micro.at for micro, _ in passes]))
        ids, logprobs = (torch.cat(part).cpu().numpy()[order] for part in zip(*(top for _, top in passes), strict=True))
        return ids, logprobs

    def _passes(
        self, scorer: Scorer, batch: Batch, score: Callable[[MicroBatch], tuple[Tensor, Tensor]]
    ) -> list[tuple[MicroBatch, tuple[Tensor, Tensor]]]:
        """What `score` gives for each micro-batch; those that do not fit in memory are made smaller."""
        parts = score_all(scorer, score, self._pack(batch, echo=False), partial(self._smaller, batch, echo=False))
        if self._limit.lowered_from is not None:
            self._limit.log_reduction()
        return parts

    def forward_backward(self, batch: Batch, loss: Loss) -> LocalOutputs:
        try:
            with self._scorer.session(training=True):
                outputs = self._accumulate(batch, loss)
        except BaseException:  # part of a gradient is of no use
            self.discard_gradients()
            raise
        if self._limit.lowered_from is not None:
            self._limit.log_reduction()
        self._pending.append(outputs)
        return outputs

    def _accumulate(self, batch: Batch, loss: Loss) -> LocalOutputs:
        """The gradient of all micro-batches. If one does not fit in memory, it and those after it are made smaller."""
        echo = loss.scores_echo
        packed = self._pack(batch, echo=echo)
        outputs = LocalOutputs.empty(batch, loss, self.device)
        weights = torch.tensor(loss.weights, device=self.device)
        if self._replicas is not None and (parts := min(self._replicas.parts_of(batch), len(packed))) > 1:

            def work(scorer: Scorer, part: int) -> list[Any]:
                return [self._gradient(scorer, m, outputs, weights) for m in packed[part::parts]]

            results_of_parts = self._replicas.run(work, parts)
            for i, micro in enumerate(packed):
                outputs.add(micro, *results_of_parts[i % parts][i // parts])
            return outputs
        waiting = deque(packed)
        while waiting:
            micro = waiting.popleft()
            self.optimizer.accumulate_into_masters()
            before = self.optimizer.gradient_marks()
            results = unless_out_of_memory(partial(self._gradient, self._scorer, micro, outputs, weights))
            if results is not None:
                outputs.add(micro, *results)
                continue
            left = [micro, *waiting]
            partly = before != self.optimizer.gradient_marks()  # some weights have their part of the failed one
            if partly and not self.optimizer.discard_failed_backward():
                if self._pending:
                    raise torch.OutOfMemoryError("CUDA out of memory in the backward pass of a step's later batch")
                self.optimizer.clear()
                outputs, left = LocalOutputs.empty(batch, loss, self.device), packed
            waiting = deque(self._smaller(batch, left, echo=echo))
        return outputs

    def _gradient(
        self, scorer: Scorer, micro: MicroBatch, outputs: LocalOutputs, weights: Tensor
    ) -> tuple[LossTerms, Tensor, Tensor]:
        """Compute a micro-batch and add the gradient of its loss to those of the weights; terms of the loss,
        log-probabilities [N] and entropies [N]."""
        loss = outputs.loss
        trains = loss.has_gradient(outputs.batch, micro.at)
        inputs = dict(micro.inputs)
        for name in ("old_logprobs", "ref_logprobs"):
            if (column := getattr(outputs.batch, name)) is not None:
                inputs[name] = torch.from_numpy(column[micro.at].astype(np.float32)).to(self.device)
        tokens = LossTokens(
            rows=outputs.batch.rows,
            row=micro.row,
            inputs=inputs,
            policy=None if len(micro.policy) == len(micro.row) else micro.policy,
            echo=micro.echo,
            policy_lengths=outputs.policy_lengths,
            echo_lengths=outputs.echo_lengths,
        )
        with torch.set_grad_enabled(trains):
            logprobs, entropies = scorer(
                micro,
                temperature=loss.temperature,
                entropy_gradient=loss.entropy_gradient,
                loss_gradient=loss.gradient(tokens),
            )
            logprobs, entropies = micro.of_each(logprobs), micro.of_each(entropies)
            terms = loss(tokens, logprobs, entropies)
            if scorer.routing is not None and (mismatch := scorer.routing_mismatch(micro)) is not None:
                stats = TokenStats(sums={"routing_mismatch": mismatch[0]}, counts={"routing_mismatch": mismatch[1]})
                terms = replace(terms, stats=terms.stats + stats)
        if trains:
            (terms.terms * weights).sum().backward()
        # A tensor that keeps a graph of autograd alive keeps the next pass from being captured.
        return replace(terms, terms=terms.terms.detach()), logprobs.detach(), entropies.detach()

    def _smaller(self, batch: Batch, micros: Sequence[MicroBatch], *, echo: bool) -> list[MicroBatch]:
        """Repack the rows of these micro-batches, of which the first did not fit, into smaller ones."""
        graphs = self._scorer.graphs
        if graphs is not None and graphs.captured:
            graphs.forget()  # its memory may be enough
        else:
            self._limit.halve(micros[0])
        self._packings.pop(batch, None)  # the next pass packs it by the new limit
        return self._packed(batch, echo=echo, rows=rows_of(micros))

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        pending, self._pending = self._pending, []
        if not any(outputs.token_logprobs for outputs in pending):
            return 0.0
        norm = self.optimizer.clip(max_grad_norm)
        checks = torch.stack([torch.stack([outputs.terms.sum() for outputs in pending]).sum(), norm.double()])
        # If supported, the update is launched before the host waits for the numbers: the device may skip it.
        ahead = self.optimizer.supports_conditional_step
        if ahead:
            self.optimizer.step(learning_rate, finite=checks.isfinite().all())
        try:
            host_work()
        except BaseException:
            self.discard_gradients()
            raise
        own_loss, grad_norm = checks.tolist()
        loss = own_loss if self._ranks.size == 1 else sum(self._ranks.gather(own_loss, float))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.discard_gradients()
            raise NotFiniteError(explain_not_finite(pending, loss, grad_norm, self._ranks))
        if not ahead:
            self.optimizer.step(learning_rate)
        return grad_norm

    def discard_gradients(self) -> None:
        """Forget the gradients accumulated since the last `optim_step`."""
        self.optimizer.clear()
        self._pending = []

    def weights(self, version: int) -> Weights:
        def trained() -> dict[str, Tensor]:
            return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

        return Weights(version, trained, self.model)

    @torch.no_grad()
    def snapshot(self, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy the trained weights to the host, into an earlier snapshot if one is given."""
        weights = self.weights(0).tensors()
        copies = into or {name: torch.empty_like(weight, device="cpu") for name, weight in weights.items()}
        for name, copied in copies.items():
            copied.copy_(weights[name])
        return copies

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Set the trained weights to those of a snapshot, and reset the optimizer."""
        for name, weight in self.weights(0).tensors().items():
            weight.copy_(snapshot[name])
        self._pending = []
        self.optimizer.reset()

    def save(self, folder: Path) -> None:
        packing = {"shapes": [] if self._shapes is None else self._shapes.state(), "micro_batch": self._limit.tokens}
        learner_state.save(folder, self.model, {"optimizer": self.optimizer.state_dict(), **packing})

    def load(self, folder: Path) -> None:
        state = learner_state.load(folder, self.model)
        if (folder / learner_state.SHARDS).is_dir():
            provided("models in shards").load_sharded(folder, self.optimizer)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        if self._shapes is not None:
            self._shapes.restore(state.get("shapes", []))
        if self._suits_memory and "micro_batch" in state:  # another free memory would divide batches otherwise
            self._limit = MicroBatchLimit(state["micro_batch"])

    def export(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        learner_state.save_model(folder, self.model)
        return folder

    def _pack(self, batch: Batch, *, echo: bool) -> list[MicroBatch]:
        """The batch's micro-batches, kept between passes over it."""
        known = self._packings.get(batch)
        if known is not None and known[0] == echo:
            return known[1]
        packed = self._packed(batch, echo=echo)
        if self._ranks.size > 1:  # every rank takes as many passes, since each gathers the shards of all
            for _ in range(max(self._ranks.gather(len(packed), int)) - len(packed)):
                packed.append(on_device(nothing_scored(), self.device))
        self._packings[batch] = echo, packed
        return packed

    def _packed(self, batch: Batch, *, echo: bool, rows: Collection[int] | None = None) -> list[MicroBatch]:
        graphs = self._scorer.graphs
        with phases("packing"):
            return pack_batch(
                batch,
                max_tokens=self._limit.tokens,
                max_rows=self._max_rows,
                share_prefix=self._share_prefix,
                echo=echo,
                device=self.device,
                rows=rows,
                at_least=1 if self._replicas is None else self._replicas.parts_of(batch),
                min_root=self._min_root,
                shapes=self._shapes if graphs is not None and graphs.pads else None,
            )
