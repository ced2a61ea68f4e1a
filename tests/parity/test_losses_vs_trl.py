"""Our objectives against TRL's own code: its `_compute_loss` runs unchanged on injected logprobs."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.algo.advantage import advantages as our_advantages
from palestra.algo.losses import Objective, importance_weights, token_weights
from palestra.algo.losses import policy_loss as token_policy_loss
from palestra.algo.step_loss import entropy_bonus, next_entropy_coefficient

if find_spec("trl") is None:
    pytest.skip("pip install trl", allow_module_level=True)


def policy_loss(objective, logprobs, old, row, advantages, **more):
    """With one advantage a row."""
    return token_policy_loss(objective, logprobs, old, row, advantages[row], rows=len(advantages), **more)


ROWS, LENGTH, MAX_COMPLETION = 6, 9, 12
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CAP = 1.1  # low enough that both sides of it occur


@cache
def trl_trainer() -> Any:
    """TRL's trainer, imported when the first test runs: it takes seconds, which collecting the tests need not."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def _masks(pattern: str) -> tuple[Tensor, Tensor | None]:
    """Completion mask and tool mask, [ROWS, LENGTH]."""
    lengths = torch.tensor([LENGTH, 3, 1, 7, LENGTH, 5])
    completion = (torch.arange(LENGTH) < lengths[:, None]).long()
    if pattern == "ragged":
        return completion, None
    tool = torch.ones(ROWS, LENGTH, dtype=torch.long)
    tool[:, 2:4] = 0
    if pattern == "rows_masked":
        completion[1] = 0  # a truncated row
        tool[4] = 0  # nothing but tool output
        completion[2] = 0
    return completion, tool


def _batch(pattern: str, seed: int = 0) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    noise = lambda scale: scale * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs = -noise(1.0).abs() - 0.01
    old = logprobs + noise(0.35)
    completion, tool = _masks(pattern)
    return {
        "logprobs": logprobs,
        "old": old,
        "sampler": old + noise(0.15),
        "ref": logprobs + noise(0.5),
        "entropy": noise(1.0).abs(),
        "advantages": torch.tensor([1.3, -0.7, 0.4, -1.1, 0.0, -0.2], dtype=torch.float64),
        "completion_mask": completion,
        "tool_mask": tool,
    }


def _mask(batch: dict[str, Any]) -> Tensor:
    return batch["completion_mask"] if batch["tool_mask"] is None else batch["completion_mask"] * batch["tool_mask"]


@cache
def _trl_block(method: str, assigned: str) -> CodeType:
    """The `if` statement in one of TRL's methods that assigns a variable, compiled by itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(trl_trainer(), method))))
    for node in ast.walk(tree):
        first_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if isinstance(node, ast.If) and assigned in first_names:
            return compile(ast.Module([node], []), f"trl:{method}", "exec")
    raise AssertionError(f"TRL's {method} no longer assigns {assigned}")


def _trl_importance_ratio(mode: str, batch: dict[str, Any], floor: float | None = None) -> Tensor:
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=floor,
        vllm_importance_sampling_clip_max=CAP,
    )
    scope = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "completion_mask": batch["completion_mask"],
        "tool_mask": batch["tool_mask"],
        "old_per_token_logps": batch["old"],
        "sampling_per_token_logps": batch["sampler"],
    }
    exec(_trl_block("_generate_and_score_completions", "vllm_importance_sampling_ratio"), scope)
    return scope["vllm_importance_sampling_ratio"]


def _trl_trainer(objective: Objective, logprobs: Tensor, entropy: Tensor, coefficient: float, steps: int) -> Any:
    """What `_compute_loss` reads of a trainer, with the logprobs put in its mouth."""
    corrected = objective.importance_correction != "none"
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        get_off_policy_mask=trl_trainer().get_off_policy_mask,
        get_gamma_weights=trl_trainer().get_gamma_weights,
        args=SimpleNamespace(
            use_bias_correction_kl=objective.kl_bias_correction,
            delta=objective.delta,
            sapo_temperature_pos=objective.sapo_temperature_pos,
            sapo_temperature_neg=objective.sapo_temperature_neg,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=steps,
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        loss_type=objective.loss,
        importance_sampling_level=objective.ratio,
        epsilon_low=objective.epsilon,
        epsilon_high=objective.upper - (objective.loss != "cispo"),
        beta=objective.beta,
        off_policy_mask_threshold=objective.off_policy_mask_threshold,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=MAX_COMPLETION,
        current_gradient_accumulation_steps=steps,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=coefficient != 0.0,
        use_adaptive_entropy=False,
        entropy_coef=coefficient,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def _trl_loss(objective: Objective, batch: dict[str, Any], coefficient: float = 0.0, steps: int = 1) -> tuple:
    """Loss, its gradients by logprob and entropy, and the metrics, all by TRL; `steps` micro-batches of equal rows."""
    logprobs, entropy = (batch[k].clone().requires_grad_() for k in ("logprobs", "entropy"))
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(ROWS).chunk(steps):
        part = {k: v if v is None else v[rows] for k, v in batch.items()}
        trainer = _trl_trainer(objective, logprobs[rows], entropy[rows], coefficient, steps)
        inputs = {
            "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
            "completion_ids": torch.zeros(len(rows), LENGTH, dtype=torch.long),
            "completion_mask": part["completion_mask"],
            "advantages": part["advantages"],
            "num_items_in_batch": _mask(batch).sum(),
            "sampling_per_token_logps": part["sampler"],
            "ref_per_token_logps": part["ref"],
            "old_per_token_logps": part["old"],
            "tool_mask": part["tool_mask"],
        }
        inputs = {name: value for name, value in inputs.items() if value is not None}  # as TRL leaves them out
        if objective.importance_correction != "none":
            inputs["importance_sampling_ratio"] = _trl_importance_ratio(objective.importance_correction, part)
        total = total + trl_trainer()._compute_loss(trainer, None, inputs)
    total.backward()
    return total.detach(), logprobs.grad, entropy.grad, trainer._metrics["train"]


def _our_loss(objective: Objective, batch: dict[str, Any], coefficient: float = 0.0, steps: int = 1) -> tuple:
    logprobs, entropy = (batch[k].clone().requires_grad_() for k in ("logprobs", "entropy"))
    tokens_total = int(_mask(batch).sum())
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(ROWS).chunk(steps):
        mask = _mask(batch)[rows].bool()
        flat = {k: batch[k][rows][mask] if batch[k] is not None else None for k in ("old", "sampler", "ref")}
        row = mask.nonzero()[:, 0]
        per_token, stats = policy_loss(
            objective,
            logprobs[rows][mask],
            flat["old"],
            row,
            batch["advantages"][rows],
            sampler_logprobs=flat["sampler"],
            ref_logprobs=flat["ref"] if objective.beta else None,
            entropy=entropy[rows][mask],
        )
        weights = token_weights(
            objective.loss,
            row,
            mask.sum(1),
            rows_total=ROWS,
            tokens_total=tokens_total,
            max_completion_length=MAX_COMPLETION,
        )
        total = total + (per_token * weights).sum()
        total = total + entropy_bonus(entropy[rows][mask], coefficient, tokens_total=tokens_total)
    total.backward()
    return total.detach(), logprobs.grad, entropy.grad, stats.finish()


def _assert_same(ours: tuple, theirs: tuple, case: object) -> None:
    for name, mine, other in zip(("loss", "gradient", "entropy gradient"), ours, theirs, strict=False):
        if mine is None and other is None:
            continue
        mine = torch.zeros_like(other) if mine is None else mine
        other = torch.zeros_like(mine) if other is None else other
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n} of {case}: {m}")


@pytest.mark.parametrize("pattern", ["ragged", "tools", "rows_masked"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_trls(loss: str, ratio: str, pattern: str) -> None:
    batch = _batch(pattern)
    kl_terms = ((0.0, False), (0.1, False), (0.1, True))
    deltas = (None,) if loss in ("cispo", "sapo", "vespo") else (None, 1.4)
    corrections = [c for c in CORRECTIONS if not (loss == "vespo" and c.startswith("sequence"))]
    for (beta, corrected), delta, correction, threshold in itertools.product(
        kl_terms, deltas, corrections, (None, 0.02)
    ):
        objective = Objective(
            loss=loss,
            ratio=ratio,
            epsilon_high=1.2 if loss == "cispo" else None,
            delta=delta,
            beta=beta,
            kl_bias_correction=corrected,
            importance_correction=correction,
            importance_cap=CAP,
            off_policy_mask_threshold=threshold,
        )
        ours, theirs = _our_loss(objective, batch), _trl_loss(objective, batch)
        _assert_same(ours, theirs, objective)
        assert (ours[1][~_mask(batch).bool()] == 0).all()


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_importance_weights_with_two_bounds_equal_trls(correction: str) -> None:
    batch, floor = _batch("tools"), 0.95
    mask = _mask(batch).bool()
    theirs = _trl_importance_ratio(correction, batch, floor).expand(ROWS, LENGTH)[mask]
    objective = Objective(importance_correction=correction, importance_cap=CAP, importance_floor=floor)
    row = mask.nonzero()[:, 0]
    torch.testing.assert_close(
        importance_weights(objective, batch["old"][mask], batch["sampler"][mask], row, ROWS), theirs
    )
    assert not torch.equal(theirs, _trl_importance_ratio(correction, batch).expand(ROWS, LENGTH)[mask])


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_exactly_on_policy_loss_and_gradient_equal_trls(loss: str, ratio: str) -> None:
    batch = _batch("rows_masked") | {"old": None}
    for beta, threshold in itertools.product((0.0, 0.1), (None, 0.02)):
        objective = Objective(loss=loss, ratio=ratio, beta=beta, off_policy_mask_threshold=threshold)
        _assert_same(_our_loss(objective, batch), _trl_loss(objective, batch), objective)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "bnpo"])
def test_accumulated_micro_batches_equal_trls(loss: str) -> None:
    objective = Objective(loss=loss, beta=0.05)
    batch = _batch("tools")
    _assert_same(_our_loss(objective, batch, steps=3), _trl_loss(objective, batch, steps=3), objective)


def test_bnpo_is_the_token_mean_of_the_step_where_trl_averages_micro_batch_means() -> None:
    objective = Objective(loss="bnpo")
    batch = _batch("tools")
    whole = _trl_loss(objective, batch)
    _assert_same(_our_loss(objective, batch, steps=3), whole, objective)
    assert not torch.isclose(_trl_loss(objective, batch, steps=3)[0], whole[0], atol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_entropy_bonus_equals_trls_whatever_the_reduction(loss: str) -> None:
    objective = Objective(loss=loss)
    batch = _batch("rows_masked")
    _assert_same(_our_loss(objective, batch, coefficient=0.07), _trl_loss(objective, batch, coefficient=0.07), loss)


def test_gspo_is_trls_grpo_with_the_sequence_ratio() -> None:
    batch = _batch("tools")
    theirs = _trl_loss(Objective(loss="grpo", ratio="sequence"), batch)
    _assert_same(_our_loss(Objective(loss="gspo"), batch), theirs, "gspo")


def test_reported_metrics_equal_trls() -> None:
    objective = Objective(loss="dapo", beta=0.1)
    batch = _batch("tools")
    ours, theirs = _our_loss(objective, batch)[3], _trl_loss(objective, batch)[3]
    assert ours["clip_fraction_low"] == pytest.approx(theirs["clip_ratio/low_mean"][0])
    assert ours["clip_fraction_high"] == pytest.approx(theirs["clip_ratio/high_mean"][0])
    assert ours["clip_fraction_low"] > 0
    assert ours["clip_fraction_high"] > 0
    assert ours["kl_reference"] == pytest.approx(theirs["kl"][0])
    assert ours["entropy"] == pytest.approx(theirs["entropy"][0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trls(scale: str) -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards[4:8] = 0.3
    scope = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=torch.ones(1)
        ),
        "torch": torch,
        "nanstd": nanstd,
        "device": "cpu",
        "num_generations": 4,
        "rewards_per_func": rewards[:, None],
        "unscorable_mask": torch.zeros(12, dtype=torch.bool),
    }
    exec(_trl_block("_generate_and_score_completions", "mean_grouped_rewards"), scope)
    ours = our_advantages(rewards, torch.arange(12) // 4, scale=scale)
    torch.testing.assert_close(ours, scope["advantages"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("entropy", [0.1, 0.9])
def test_entropy_controller_moves_as_trls_defaults_do(entropy: float) -> None:
    objective, batch = Objective(), _batch("ragged")
    batch["entropy"] = torch.full_like(batch["logprobs"], entropy)
    trainer = _trl_trainer(objective, batch["logprobs"], batch["entropy"], 0.02, 1)
    vars(trainer).update(use_adaptive_entropy=True, _last_world_entropy=0.0, _entropy_window_stats=None)
    vars(trainer.args).update(entropy_target=0.5, entropy_coef_delta=0.005, entropy_coef_max=1.0, entropy_coef_min=0.0)
    ids = torch.zeros(ROWS, 1, dtype=torch.long)
    trl_trainer()._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": ids,
            "prompt_mask": ids + 1,
            "completion_ids": batch["completion_mask"],
            "completion_mask": batch["completion_mask"],
            "advantages": batch["advantages"],
            "num_items_in_batch": batch["completion_mask"].sum(),
        },
    )
    assert next_entropy_coefficient(0.02, entropy, 0.5) == pytest.approx(trainer.entropy_coef)
