"""How far sampler and learner are apart during a training, and which of the two is off.

    python benchmarks/sampler_gap.py [--steps 12] [--at 1,4,8,12] [-- options of `palestra train`, e.g. --lora.r 16]

SmolLM2-135M on the calculator. After the given steps, the engine samples replies to the step's first prompts, the
learner scores their tokens, and so does the same model in float32. With adapters, all of it again with the adapters
merged into the bfloat16 weights: the same policy without adapters.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training import SETTINGS

from palestra.algo.batch import Batch, Sample
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.forward import Scorer
from palestra.learner.tree_attention import pack_batch
from palestra.train.group_source import StepRollouts
from palestra.train.loop import Training


def sampled(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], advantages: Sequence[float]
) -> Batch:
    """Sample siblings of each prompt, one for each of `params`, as a batch."""
    siblings = len(params) // len(prompts)
    sessions = [each for prompt in prompts for each in engine.fork(engine.open(prompt), siblings)]
    samples = []
    for i, (session, turn) in enumerate(zip(sessions, engine.sample(sessions, params), strict=True)):
        prompt = prompts[i // siblings]
        mask = (False,) * len(prompt) + (True,) * len(turn.token_ids)
        logprobs = (0.0,) * len(prompt) + tuple(turn.logprobs)
        ids = (*prompt, *turn.token_ids)
        samples.append(Sample(ids, mask, (False,) * len(ids), logprobs, advantages[i], i // siblings, len(prompt)))
        engine.close(session)
    return Batch.of(samples)


@torch.no_grad()
def scored(scorer: Scorer, batch: Batch) -> np.ndarray:
    packed = pack_batch(
        batch, max_tokens=16384, share_prefix=scorer.shares_prefix, echo=False, device=scorer.model.device
    )
    found = np.full(len(batch.token_ids), np.nan, np.float32)
    with scorer.session(training=False):
        for micro in packed:
            found[micro.at] = scorer(micro, temperature=1.0)[0].float().cpu().numpy()
    return found[batch.policy_mask]


@torch.no_grad()
def in_float32(model: Any, batch: Batch) -> np.ndarray:
    """Row by row, by the model's own forward pass."""
    whole = copy.deepcopy(model).float().eval()
    parts = []
    for first, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.tensor(batch.token_ids[first:end][None], dtype=torch.long, device=model.device)
        logprobs = whole(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()
        parts.append(own[batch.policy_mask[first + 1 : end]])
    return np.concatenate(parts)


def apart(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    d = b - a
    return {
        "mean": round(float(np.abs(d).mean()), 4),
        "max": round(float(np.abs(d).max()), 3),
        "kl": round(float((np.exp(d) - 1 - d).mean()), 5),
    }


def compare(name: str, step: int, model: Any, engine: Engine, scorer: Scorer, prompts: Any, stop: Any) -> None:
    rows = 4 * len(prompts)
    params = [SamplingParams(max_new_tokens=96, seed=i, stop_token_ids=stop) for i in range(rows)]
    batch = sampled(engine, prompts, params, [0.0] * rows)
    sampler = batch.logprobs[batch.policy_mask]
    learner, true = scored(scorer, batch), in_float32(model, batch)
    row = {"sampler_learner": apart(sampler, learner), "sampler_float32": apart(sampler, true)}
    row["learner_float32"] = apart(learner, true)
    about = {"step": step, "model": name, "tokens": len(sampler), "mean_logprob": round(float(sampler.mean()), 3)}
    print(json.dumps(about | row), flush=True)


def watch(at: set[int]) -> None:
    learn = Training.learn

    def watched(training: Training, rollouts: StepRollouts, *args: Any) -> dict[str, float]:
        metrics = learn(training, rollouts, *args)
        names = ("step", "kl_sampler", "sampler_gap_mean", "sampler_gap_max", "entropy", "reward_mean", "learning_rate")
        print(json.dumps({"step": training.state.step} | {n: metrics[n] for n in names if n in metrics}), flush=True)
        if training.state.step in at:
            prompts = [list(map(int, group.rollouts[0].turns[0].token_ids)) for group in rollouts.groups[:32]]
            engine, learner = training.policy.engine, training.learner  # type: ignore[attr-defined]
            model = learner.model  # type: ignore[attr-defined]
            stop = (model.config.eos_token_id,)
            step = training.state.step
            compare("as trained", step, model, engine, learner._scorer, prompts, stop)  # type: ignore[attr-defined]
            if hasattr(model, "merge_and_unload"):
                merged = copy.deepcopy(model).merge_and_unload()
                other = Engine(merged, kv_memory_gib=4)
                compare("adapters merged", step, merged, other, Scorer(merged), prompts, stop)
        return metrics

    Training.learn = watched  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--at", default="1,4,8,12")
    arguments, more = parser.parse_known_args()
    options = SETTINGS | {"train.max_steps": arguments.steps, "train.problems_per_step": 32}
    words = ["train", "--env", "calculator", "--folder", str(Path(tempfile.mkdtemp()) / "run")]
    words += [f"--{name}={value}" for name, value in options.items()] + [word for word in more if word != "--"]
    watch(set(map(int, arguments.at.split(","))))
    from palestra.cli.main import run

    run(words)


if __name__ == "__main__":
    main()
