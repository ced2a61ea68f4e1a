"""A Tinker service without a server: a bigram model behind the SDK's own data types, which can lose its sessions."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from tinker import NotFoundError, types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

VOCABULARY = 16
Answer = AwaitableConcurrentFuture[Any]


def gone(what: str) -> NotFoundError:
    response = httpx.Response(404, request=httpx.Request("POST", "http://fake"))
    return NotFoundError(what, response=response, body={"detail": f"there is no {what}"})


@dataclass
class FakeServer:
    """What outlives a session: saved states; and a log of every call."""

    states: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    sessions: list[FakeService] = field(default_factory=list)
    fails: list[Exception] = field(default_factory=list)  # raised by the next calls instead of an answer

    def connect(self) -> FakeService:
        self.sessions.append(FakeService(self))
        self.log.append("session")
        return self.sessions[-1]

    def rest(self, url: str | None) -> Any:
        def delete(path: str) -> Answer:
            self.log.append(f"delete {path}")
            return self.sessions[-1].answer(lambda: self.states.pop(path))

        return SimpleNamespace(delete_checkpoint_from_tinker_path=delete)

    def restart(self) -> None:
        for session in self.sessions:
            session.is_lost = True


@dataclass
class FakeService:
    server: FakeServer
    is_lost: bool = False
    holder: Any = None

    def create(self) -> FakeTraining:
        self.server.log.append("create")
        return FakeTraining(self, torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64))

    def create_training_client_from_state_with_optimizer(self, path: str) -> FakeTraining:
        self.server.log.append(f"load {path}")
        if path not in self.server.states:
            raise gone(path)
        weights, optimizer = self.server.states[path]
        client = FakeTraining(self, weights.clone())
        client.adam.load_state_dict(copy.deepcopy(optimizer))
        return client

    def create_sampling_client(self, base_model: str) -> FakeSampling:
        return FakeSampling(self, torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64))

    def close(self, status: str) -> Future[None]:
        self.server.log.append(f"close {status}")
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended

    def answer(self, work: Any) -> Answer:
        future: Future[Any] = Future()
        try:
            if self.server.fails:
                raise self.server.fails.pop(0)
            if self.is_lost:
                raise gone("session")
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return AwaitableConcurrentFuture(future)


class FakeTraining:
    def __init__(self, service: FakeService, weights: torch.Tensor) -> None:
        self.service = service
        self.weights = weights.requires_grad_()
        self.adam = torch.optim.AdamW([self.weights], eps=1e-8, weight_decay=0.0)
        self.saved = 0

    def forward(self, data: list[types.Datum], loss_fn: str, config: Any = None) -> Answer:
        return self.service.answer(lambda: self._outputs(data, loss_fn, config, backward=False))

    def forward_backward(self, data: list[types.Datum], loss_fn: str, config: Any = None) -> Answer:
        self.service.server.log.append(loss_fn)
        return self.service.answer(lambda: self._outputs(data, loss_fn, config, backward=True))

    def optim_step(self, params: types.AdamParams) -> Answer:
        self.service.server.log.append("optim_step")
        return self.service.answer(lambda: self._step(params))

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Answer:
        def save() -> Any:
            path = f"tinker://run/weights/{name}"
            state = self.weights.detach().clone(), copy.deepcopy(self.adam.state_dict())
            self.service.server.states[path] = state
            return SimpleNamespace(path=path)

        return self.service.answer(save)

    def save_weights_and_get_sampling_client(self) -> FakeSampling:
        self.service.server.log.append("sampler")
        return self.service.answer(lambda: FakeSampling(self.service, self.weights.detach().clone())).result()

    def _step(self, params: types.AdamParams) -> Any:
        for group in self.adam.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
        norm = torch.nn.utils.clip_grad_norm_([self.weights], params.grad_clip_norm)
        self.adam.step()
        self.weights.grad = None
        return SimpleNamespace(metrics={"grad_norm:mean": float(norm)})

    def _outputs(self, data: list[types.Datum], loss_fn: str, config: Any, backward: bool) -> Any:
        total, outputs = torch.zeros((), dtype=torch.float64), []
        for datum in data:
            inputs = {name: torch.from_numpy(value._numpy) for name, value in datum.loss_fn_inputs.items()}
            logprobs = scored(self.weights, datum.model_input.to_ints(), inputs["target_tokens"])
            total = total + fake_loss(loss_fn, config or {}, logprobs, inputs)
            outputs.append({"logprobs": types.TensorData.from_torch(logprobs.detach().float())})
        if backward:
            total.backward()
        return SimpleNamespace(loss_fn_outputs=outputs, metrics={"loss:sum": float(total.detach())})


@dataclass
class FakeSampling:
    service: FakeService
    weights: torch.Tensor

    def sample(self, prompt: types.ModelInput, n: int, params: types.SamplingParams) -> Future[Any]:
        def work() -> Any:
            tokens, logprobs, last = [], [], prompt.to_ints()[-1]
            generator = torch.Generator().manual_seed(params.seed or 0)
            while len(tokens) < (params.max_tokens or 1) and (not tokens or tokens[-1] not in (params.stop or [])):
                row = self.weights[last].log_softmax(-1)
                last = int(torch.multinomial(row.exp(), 1, generator=generator))
                tokens.append(last)
                logprobs.append(float(row[last]))
            ended = "stop" if tokens[-1] in (params.stop or []) else "length"
            sequence = types.SampledSequence(ended, "s", _tokens_list=tokens, _logprobs_list=logprobs)
            return SimpleNamespace(sequences=[sequence])

        return self.service.answer(work).future()

    def compute_logprobs(self, prompt: types.ModelInput) -> Future[Any]:
        ids = prompt.to_ints()
        return self.service.answer(
            lambda: [None, *scored(self.weights, ids[:-1], torch.tensor(ids[1:])).tolist()]
        ).future()


def scored(weights: torch.Tensor, inputs: list[int], targets: torch.Tensor) -> torch.Tensor:
    return weights[torch.tensor(inputs)].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def fake_loss(name: str, config: Any, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The losses by their public formulas: sums over tokens."""
    if name == "cross_entropy":
        return -(logprobs * inputs["weights"]).sum()
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    if name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    assert name == "cispo"
    return -(clipped.detach() * logprobs * advantages).sum()
