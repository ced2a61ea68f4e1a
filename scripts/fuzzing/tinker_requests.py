"""Mutated and shuffled requests to the Tinker server: each is refused with a sentence, and no order is lost.

Meanwhile a model is trained by good requests, in shuffled order and some of them twice: it must end with the very
numbers that it has when nobody disturbs it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.check import Tally, mutate
from fuzzing.servers import Errors, check, http, mutate_json, send, served, to_bytes

STEPS = 12
SPEC = {"rank": 2, "seed": 1}
SAMPLING = {"max_tokens": 3, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 5, "top_p": 0.9}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
Good = tuple[str, bytes, bool]  # path, body, whether it is protobuf


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    from palestra.extras.tinker.server.base_model import BaseModel
    from palestra.extras.tinker.server.server import tinker_app
    from palestra.extras.tinker.server.service import Service, ServiceLimits
    from palestra.models.loading import load_model

    tally = Tally("tinker requests")
    loaded = load_model("palestra/tiny", device="cpu")
    del loaded.model.model.layers[1:]
    config = loaded.model.config
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    config.max_position_embeddings = 48  # so that no accepted request takes long for a good reason
    service = Service([BaseModel(loaded)], folder / "runs", ServiceLimits(models=64, sessions=100_000))
    with served(tinker_app(service, long_poll_s=2.0)) as (port, errors):
        calm = train(port, 0, [], None)
        trained = train(port, 1, garbage(count, rng, port), (tally, errors, rng))
        if calm != trained:
            tally.fault(f"a disturbed training ended with {trained[-3:]}, an undisturbed one with {calm[-3:]}")
    return tally


def train(
    port: int, number: int, others: list[bytes], watched: tuple[Tally, Errors, random.Random] | None
) -> list[Any]:
    """The results of good requests, in their order; `others` are sent between them."""
    session = post(port, "create_session", {"display_name": f"good-{number}"})["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": "palestra/tiny", "lora_config": SPEC}
    model = wait(port, post(port, "create_model", lora)["request_id"])["model_id"]
    good = good_requests(model)
    arrival = list(range(len(good)))
    if watched is not None:
        tally, errors, rng = watched
        arrival = [
            i for start in range(0, len(good), 6) for i in shuffled(range(start, min(start + 6, len(good))), rng)
        ]
        arrival = [i for i in arrival for _ in range(rng.choice((1, 1, 2, 3)))]
        share = -(-len(others) // len(arrival))
    promises: dict[int, str] = {}
    for place, i in enumerate(arrival):
        promises[i] = json.loads(raw(port, good[i]))["request_id"]
        if watched is not None:
            for n, request in enumerate(others[place * share : (place + 1) * share]):
                check(tally, f"request {place * share + n}", port, request, errors)
    return [wait(port, promises[i]) for i in range(len(good))]


def good_requests(model: str) -> list[Good]:
    from palestra.extras.tinker.server.messages import Datum, Tensor

    random_ = np.random.default_rng(0)
    found: list[Good] = []
    for _ in range(STEPS):
        for _ in range(2):
            ids = random_.integers(0, 1000, 9)
            inputs = {"target_tokens": Tensor(ids[1:], (8,)), "weights": Tensor(np.ones(8, np.float32), (8,))}
            rows = [Datum(ids[:-1].astype(np.int32), inputs)]
            found.append(("forward_backward", forward_backward_body(model, len(found) + 1, rows), True))
        step = {"model_id": model, "seq_id": len(found) + 1, "adam_params": {"learning_rate": 1e-3}}
        found.append(("optim_step", to_bytes(step), False))
    return found


def forward_backward_body(model: str, seq_id: int, rows: list[Any], loss_fn: str = "cross_entropy") -> bytes:
    """A ForwardBackwardRequest, as a client sends it."""
    from palestra.extras.tinker.server.messages import _tensor, pb

    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss_fn)
    for datum in rows:
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = datum.token_ids.astype("<i4").tobytes()
        for key, tensor in datum.inputs.items():
            row.loss_fn_inputs[key].CopyFrom(_tensor(tensor))
    return bytes(message.SerializeToString())


def garbage(count: int, rng: random.Random, port: int) -> list[bytes]:
    """Mutations of good requests to a model that nobody needs, with numbers in any order."""
    session = post(port, "create_session", {})["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": "palestra/tiny", "lora_config": SPEC}
    model = wait(port, post(port, "create_model", lora)["request_id"])["model_id"]
    wait(port, post(port, "save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["request_id"])
    other = post(port, "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0})
    sampler, path = other["sampling_session_id"], f"tinker://{model}/weights/a"
    of_model = {"model_id": model, "seq_id": 2}
    templates: list[tuple[str, str, Any]] = [
        ("POST", "client/config", {"sdk_version": "0.36.0"}),
        ("POST", "create_session", {"tags": ["a"], "user_metadata": {"a": "b"}, "display_name": "x"}),
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", "create_model", lora),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "optim_step", {**of_model, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "eps": 1e-8}}),
        ("POST", "save_weights", {**of_model, "path": "b", "overwrite": True, "ttl_seconds": 3600}),
        ("POST", "save_weights_for_sampler", {**of_model, "sampling_session_seq_id": 3}),
        ("POST", "save_weights_for_sampler", {**of_model, "sampling_session_seq_id": 4, "kind": "inflight"}),
        ("POST", "load_weights", {**of_model, "path": path, "optimizer": True}),
        ("POST", "load_weights", {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}),
        ("POST", "weights_info", {"tinker_path": path}),
        ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}),
        ("POST", "asample", {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 2, "prompt": PROMPT,
                             "sampling_params": SAMPLING, "prompt_logprobs": True, "topk_prompt_logprobs": 2}),
        ("POST", "retrieve_future", {"request_id": "r0-0", "allow_metadata_only": True}),
        ("GET", f"training_runs/{model}", None),
        ("GET", f"training_runs/{model}/checkpoints/weights/a/archive", None),
        ("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 3600}),
        ("GET", "training_runs?limit=5&offset=0", None),
        ("POST", f"sessions/{session}x/finish", {"reason": {"type": "success"}}),
    ]  # fmt: skip
    bodies = [body for _, body, protobuf in good_requests(model) if protobuf]
    return [one(templates, bodies, rng) for _ in range(count)]


def one(templates: list[tuple[str, str, Any]], bodies: list[bytes], rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        body = mutate(rng.choice(bodies), rng)
        return as_protobuf(http("POST", "/api/v1/forward_backward", body))
    method, path, content = rng.choice(templates)
    if isinstance(content, dict) and "seq_id" in content and rng.random() < 0.5:
        content = {**content, "seq_id": rng.choice((1, 2, 3, 5, 100, 5000, 2**40))}
    elif content is not None and rng.random() < 0.7:
        content = mutate_json(content, rng)
    request = http(method, f"/api/v1/{path}", b"" if content is None else to_bytes(content))
    return request if rng.random() < 0.7 else mutate(request, rng)


def as_protobuf(request: bytes) -> bytes:
    return request.replace(b"application/json", b"application/x-protobuf", 1)


def shuffled(numbers: Any, rng: random.Random) -> list[int]:
    found = list(numbers)
    rng.shuffle(found)
    return found


def raw(port: int, good: Good) -> bytes:
    path, body, protobuf = good
    request = http("POST", f"/api/v1/{path}", body)
    answer = send(port, as_protobuf(request) if protobuf else request)
    assert answer is not None, path
    assert answer.status == 200, answer.body
    return answer.body


def post(port: int, path: str, body: Any) -> Any:
    return json.loads(raw(port, (path, to_bytes(body), False)))


def wait(port: int, request_id: str) -> Any:
    """What a request came to; protobuf as it is."""
    while True:
        found = raw(port, ("retrieve_future", to_bytes({"request_id": request_id}), False))
        try:
            answer = json.loads(found)
        except ValueError:
            return found
        if answer.get("type") != "try_again":
            return {key: value for key, value in answer.items() if key != "model_id" or "type" in answer}
