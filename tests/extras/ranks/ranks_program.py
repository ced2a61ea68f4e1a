"""What tests of several ranks run in them: one process imports everything once and forks the ranks.

    python ranks_program.py COUNT FOLDER SCENARIO …

Each scenario runs in COUNT fresh ranks; what it gives in each is written to FOLDER/SCENARIO.json, by rank.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from builders import samples_of
from engine_families import tiny_model
from small_learner import loss_of, make_samples
from test_learners import BASE, LEARNERS, RATE, Case, model_of, rows

from palestra.algo.batch import Batch
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.ranks import Ranks, join
from palestra.core.types import Group, Problem, Rollout
from palestra.engine.routing import ExpertRouting
from palestra.extras.ranks.learner import FsdpLearner, share_of_rows
from palestra.extras.ranks.processes import TorchRanks
from palestra.extras.ranks.rollouts import RolloutRanks
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.rollout.collect import RemoteCollector

STEPS = 5
Weights = dict[str, torch.Tensor]


def batch_of(step: int) -> Batch:
    """Rows of an older policy, so that ratios count and some are clipped; in the first step fewer rows than ranks."""
    samples = rows(6 if step else 1, step)
    return Batch.of(samples, old_logprobs=[sample.logprobs for sample in samples])


def take_step(learner: Learner, step: int) -> tuple[dict[str, float], float]:
    batch = batch_of(step)
    options = {"echo_coefficient": 0.3, "entropy_coefficient": 0.01}
    outputs = learner.forward_backward(batch, loss_of(samples_of(batch), **options))
    norm = learner.optim_step(RATE / 10, max_grad_norm=1.0)
    return outputs.metrics(), norm


def gradients(learner: LocalLearner | FsdpLearner) -> Weights:
    local = learner._local if isinstance(learner, FsdpLearner) else learner
    found = {name: p.grad for name, p in local.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


def weights_of(learner: Learner) -> Weights:
    return {name: tensor.clone() for name, tensor in learner.weights(0).tensors().items()}


def apart(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def sections(kind: str) -> dict[str, Any]:
    return {"model": {"gradient_checkpointing": True}} if kind == "full" else {"train": {"beta": 0.1}}


def local(kind: str) -> LocalLearner:
    case = LEARNERS[kind]
    return LocalLearner(case.model(), config=case.config(**sections(kind)))


def sharded(kind: str, ranks: Ranks) -> FsdpLearner:
    case = LEARNERS[kind]
    return FsdpLearner(case.model(), config=case.config(**sections(kind)), ranks=ranks)


def parity(kind: str, ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """Five steps beside a learner of one process; then a checkpoint, and the weights after one more step; then the same
    from the checkpoint of one process."""
    one, many = local(kind), sharded(kind, ranks)
    batch, loss = batch_of(1), loss_of(samples_of(batch_of(1)))
    found: dict[str, Any] = {"rows": batch.part(*share_of_rows(batch, ranks)).rows}
    found["logprobs"] = float(np.nanmax(np.abs(one.forward(batch_of(1)) - many.forward(batch_of(1)))))
    losses = [learner.forward_backward(batch_of(1), loss).metrics() for learner in (one, many)]
    found["loss"] = abs(losses[0]["loss"] - losses[1]["loss"])
    found["gradient"] = apart(gradients(one), gradients(many))
    for learner in (one, many):
        learner.optim_step(0.0, max_grad_norm=1.0)
    metrics: dict[str, float] = {}
    for step in range(STEPS):
        (a, norm_a), (b, norm_b) = take_step(one, step), take_step(many, step)
        for name in a.keys() - {"tokens_computed"}:
            metrics[name] = max(metrics.get(name, 0.0), abs(a[name] - b[name]))
        metrics["norm"] = max(metrics.get("norm", 0.0), abs(norm_a - norm_b))
    found |= {"metrics": metrics, "weights": apart(weights_of(one), weights_of(many))}
    path = folder / f"{kind}-{ranks.size}"
    if ranks.is_first:
        path.mkdir()
    many.save(path)
    take_step(many, STEPS)
    after = weights_of(many)
    if ranks.is_first:
        torch.save(after, folder / f"{kind}-{ranks.size}.pt")
    many.load(folder / f"{kind}-1")
    take_step(many, STEPS)
    found["from one process"] = apart(torch.load(folder / f"{kind}-1.pt"), weights_of(many))
    return found


def full(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    return parity("full", ranks, folder)


def lora(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    return parity("lora", ranks, folder)


def low_precision(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """bfloat16 weights with float32 masters, and one tensor for both ends of the model: how far the updates differ."""
    case = Case(lambda: model_of("qwen3", head_dim=8, tie_word_embeddings=True).bfloat16(), {})
    one = LocalLearner(case.model(), config=case.config())
    many = FsdpLearner(case.model(), config=case.config(), ranks=ranks)
    before = [master.clone() for master in one.optimizer.masters]
    for step in range(1, STEPS):
        take_step(one, step), take_step(many, step)
    masters = [master.detach().full_tensor() for master in many._local.optimizer.masters]
    moved = sum(float((a - b).abs().sum()) for a, b in zip(one.optimizer.masters, before, strict=True))
    differ = sum(float((a - b).abs().sum()) for a, b in zip(one.optimizer.masters, masters, strict=True))
    types = {str(tensor.dtype) for tensor in (*masters, *weights_of(many).values())}
    tied = many._local.model.get_output_embeddings().weight is many._local.model.get_input_embeddings().weight
    return {"share": differ / moved, "types": sorted(types), "tied": tied}


def experts(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """A mixture of experts that replays random ones."""
    return one_step("qwen3_moe", ranks, {"train.expert_routing": "replay"}, routed=True)


def hybrid(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """Convolutions beside attention."""
    return one_step("lfm2", ranks, {"model.gradient_checkpointing": True})


def gated(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """Gated delta nets beside attention, and a mixture of experts."""
    return one_step("qwen3_5_moe_text", ranks, {"train.expert_routing": "replay"}, routed=True)


def one_step(family: str, ranks: TorchRanks, settings: dict[str, Any], routed: bool = False) -> dict[str, Any]:
    """How far log-probabilities, gradients, metrics and weights of one step are from those of one process."""
    config = RunConfig.build(BASE, settings, {"rollout.max_new_tokens": 16, "train.learning_rate": RATE})
    model = tiny_model(family)
    one = LocalLearner(copy.deepcopy(model), config=config)
    many = FsdpLearner(copy.deepcopy(model), config=config, ranks=ranks)
    samples = rows(6, 1)
    batch = Batch.of(samples)
    if routed:
        shape = (len(batch.token_ids), len(ExpertRouting(model).modules), 1)
        order = np.random.default_rng(0).permuted(np.tile(np.arange(4, dtype=np.uint8), shape), axis=-1)
        batch.sampled["routing"] = order[..., :2].copy()
        batch.sampled["routing"][::7] = 255  # unknown
        prompts = {}
        for group, start, length in zip(batch.groups, batch.offsets, batch.prompt_lengths, strict=False):
            prompt = batch.sampled["routing"][start : start + length]
            prompt[:] = prompts.setdefault(group, prompt.copy())  # siblings share theirs
    loss = loss_of(samples)
    found: dict[str, Any] = {"rows": batch.part(*share_of_rows(batch, ranks)).rows}
    found["logprobs"] = float(np.nanmax(np.abs(one.forward(batch) - many.forward(batch))))
    metrics = [learner.forward_backward(batch, loss).metrics() for learner in (one, many)]
    expected = gradients(one)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    found["gradient"] = apart(expected, gradients(many)) / scale
    for learner in (one, many):
        learner.optim_step(RATE / 10, max_grad_norm=1.0)
    found["metrics"] = {name: abs(value - metrics[1][name]) for name, value in metrics[0].items()}
    found["metrics"].pop("tokens_computed")
    found["mismatch"] = metrics[0].get("routing_mismatch")
    found["weights"] = apart(weights_of(one), weights_of(many))
    return found


def root(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    """Prompts that begin alike: each rank computes the beginning once, one process with every row."""
    base = {"train.tokens_per_micro_batch": 400, "rollout.max_new_tokens": 16}
    settings = (base | {"train.share_prefix": share} for share in (False, True))
    configs = [RunConfig.build(BASE, each) for each in settings]
    one = LocalLearner(tiny_model("qwen3"), config=configs[0])
    many = FsdpLearner(tiny_model("qwen3"), config=configs[1], ranks=ranks)
    samples = make_samples(groups=5, beginning=80)
    batch, loss = Batch.of(samples), loss_of(samples)
    own = many._local._packed(batch.part(*share_of_rows(batch, ranks)), echo=False)
    found: dict[str, Any] = {"roots": [micro.root for micro in own]}
    found["logprobs"] = float(np.nanmax(np.abs(one.forward(batch) - many.forward(batch))))
    for learner in (one, many):
        learner.forward_backward(batch, loss)
    found["gradient"] = apart(gradients(one), gradients(many))
    return found


def load(ranks: TorchRanks, folder: Path) -> dict[str, float]:
    """One more step after each checkpoint in the folder, against what its own ranks found."""
    found = {}
    for path in sorted(folder.glob("*.pt")):
        learner = sharded(path.stem.partition("-")[0], ranks)
        learner.load(path.with_suffix(""))
        take_step(learner, STEPS)
        found[path.stem] = apart(torch.load(path), weights_of(learner))
    return found


class Collecting:
    """A collector that calls `play` with the number of each problem."""

    def __init__(self, play: Callable[[str], Any], info: dict[str, Any]) -> None:
        self.play, self.info = play, info

    async def collect(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: Any = None
    ) -> list[Group]:
        groups = []
        for problem, key in zip(problems, seed_keys, strict=True):
            if wait := self.play(problem.id):
                await asyncio.sleep(wait)
            rollout = Rollout(key, (), (), "answered", reward=float(os.getpid()), info=self.info)
            on_rollout(rollout)
            groups.append(Group(problem.id, (rollout,)))
        return groups


def collect(ranks: TorchRanks, play: Callable[[str], Any] = lambda problem: None, info: Any = None) -> dict[str, Any]:
    problems, seen = [Problem(str(i), "") for i in range(5)], []
    collector = RemoteCollector(RolloutRanks(ranks, Collecting(play, info or {})), True, lambda size: 1)  # type: ignore[arg-type]
    groups = asyncio.run(collector.collect(problems, 1, [f"0/{p.id}" for p in problems], seen.append))
    whose = [group.rollouts[0].reward for group in groups]
    keys = [group.rollouts[0].problem_id for group in groups]
    return {"ids": [g.problem_id for g in groups], "keys": keys, "whose": len(set(whose)), "seen": len(seen)}


def shares(ranks: TorchRanks, folder: Path) -> dict[str, Any]:
    return collect(ranks)


def stop(ranks: TorchRanks, folder: Path) -> str:
    """The last rank alone is asked to stop, while the first attempts something long."""
    if ranks.rank == ranks.size - 1:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: ranks.request_stop())
    try:
        with ranks.guarded(lambda reason: None):
            collect(ranks, lambda problem: 60.0 if problem == "0" else None)
    except KeyboardInterrupt:
        return "stopped"
    return "went on"


def killed(ranks: TorchRanks, folder: Path) -> str:
    """The last rank is killed, while the first attempts something long."""
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: collect(ranks, lambda problem: 60.0 if problem == "0" else None), ranks)


def stuck(ranks: TorchRanks, folder: Path) -> str:
    """The last rank is killed, and the others wait where no signal arrives, as in a kernel of NCCL."""
    import palestra.extras.ranks.processes as module

    module.GRACE_S = 0.3
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note = folder / f"stuck-{ranks.rank}.txt"
    return failure(lambda: time.sleep(60), ranks, note.write_text)


def raises(ranks: TorchRanks, folder: Path) -> str:
    """The last rank alone fails, in the middle of something."""

    def work() -> None:
        if ranks.rank == ranks.size - 1:
            raise PalestraError("the disk is full")
        ranks.gather(None)

    return failure(work, ranks)


def unsendable(ranks: TorchRanks, folder: Path) -> list[str]:
    """What cannot be sent: a value and a group of the last rank, and what the first one has made."""
    last = ranks.rank == ranks.size - 1
    tries: list[Callable[[], Any]] = [
        lambda: ranks.gather({"handle": open} if last else {}, dict[str, Any]),
        lambda: collect(ranks, info={"handle": open} if last else {}),
        lambda: ranks.from_first(lambda: {"handle": open}, dict[str, Any]),
    ]
    found = []
    for work in tries:
        try:
            work()
        except PalestraError as error:
            found.append(f"{type(error).__name__}: {error}")
    assert ranks.gather(ranks.rank, int) == list(range(ranks.size)), "they can go on together"
    return found


def failure(work: Callable[[], Any], ranks: TorchRanks, on_end: Any = lambda reason: None) -> str:
    try:
        with ranks.guarded(on_end):
            work()
    except PalestraError as error:
        return str(error)
    return "went on"


def differ(ranks: TorchRanks, folder: Path) -> str:
    return failure(lambda: ranks.agree(RunConfig.build({"seed": ranks.rank})), ranks)


def fork_ranks(count: int, scenario: Callable[[TorchRanks, Path], Any], folder: Path) -> list[Any]:
    """What the scenario gives in each of fresh ranks; None for one that did not live to tell."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    files = [folder / f".{scenario.__name__}-{rank}" for rank in range(count)]
    children = []
    for rank, file in enumerate(files):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
        ranks = join(RunConfig.build({"ranks.timeout_s": 200.0}))
        assert isinstance(ranks, TorchRanks)
        try:
            file.write_text(json.dumps(scenario(ranks, folder)))
        except Exception:
            traceback.print_exc()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(file.read_text()) if file.is_file() else None for file in files]


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks_count, results = int(sys.argv[1]), Path(sys.argv[2])
    for name in sys.argv[3:]:
        began = time.monotonic()
        given = fork_ranks(ranks_count, globals()[name], results)
        report = {"ranks": given, "seconds": time.monotonic() - began}
        (results / f"{name}.json").write_text(json.dumps(report))
