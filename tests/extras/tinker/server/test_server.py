"""The server by plain HTTP: keys, limits, order, what is refused, and what survives a restart."""

import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fuzzing.tinker_requests import forward_backward_body

from palestra.extras.tinker.server.checkpoints import TinkerPath
from palestra.extras.tinker.server.futures import Gone, TooBusy
from palestra.extras.tinker.server.messages import Datum, Tensor
from palestra.extras.tinker.server.requests import CreateModel, CreateSession, Sample
from palestra.extras.tinker.server.service import ServiceLimits

LORA = {"rank": 2, "seed": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


class Client:
    """What the SDK does, one request at a time."""

    def __init__(self, url: str, **headers: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=30)
        self.seq = 0

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"] if status >= 400 else answer.json()

    def result(self, promise: Any) -> Any:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": promise["request_id"]})
            assert answer.status_code == 200, answer.text
            if "json" not in answer.headers["content-type"]:
                return answer.content
            if answer.json().get("type") != "try_again":
                return answer.json()

    def create(self, **more: Any) -> str:
        self.session = self.post("create_session", {})["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "palestra/tiny", "lora_config": LORA}
        self.model = str(self.result(self.post("create_model", {**body, **more}))["model_id"])
        return self.model

    def forward_backward(self, seq_id: int, rows: list[Datum], loss_fn: str = "cross_entropy") -> Any:
        body = forward_backward_body(self.model, seq_id, rows, loss_fn)
        answer = self.http.post("forward_backward", content=body, headers={"content-type": "application/x-protobuf"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def step(self, seq_id: int) -> Any:
        adam = {"learning_rate": 1e-2}
        return self.post("optim_step", {"model_id": self.model, "seq_id": seq_id, "adam_params": adam})

    def next(self, what: str, **body: Any) -> Any:
        self.seq += 1
        return self.result(self.post(what, {"model_id": self.model, "seq_id": self.seq, **body}))


@pytest.fixture
def client(running: Any) -> Iterator[Client]:
    made = Client(running.url)
    made.create()
    yield made
    made.http.post(f"sessions/{made.session}/finish", json={})


@pytest.fixture(scope="module")
def refused_client(running: Any) -> Client:
    """Whose requests change nothing, so that one is enough."""
    made = Client(running.url)
    made.create()
    return made


def words(seed: int, length: int = 6) -> Datum:
    ids = np.random.default_rng(seed).integers(0, 1000, length + 1)
    inputs = {"target_tokens": Tensor(ids[1:], (length,)), "weights": Tensor(np.ones(length, np.float32), (length,))}
    return Datum(ids[:-1].astype(np.int32), inputs)


def test_chunks_in_any_order_and_sent_twice_give_the_same_gradient(running: Any) -> None:
    rows = [words(i) for i in range(8)]
    norms = []
    for sent in ([(1, rows)], [(2, rows[4:]), (2, rows[4:]), (1, rows[:4]), (2, rows[4:])]):
        client = Client(running.url)
        client.create()
        last = max(number for number, _ in sent) + 1
        step = client.step(last)  # before all that it needs
        promises = [client.forward_backward(number, part) for number, part in sent]
        assert len({promise["request_id"] for promise in promises}) == last - 1
        norms.append(client.result(step)["metrics"]["grad_norm"])
        client.http.post(f"sessions/{client.session}/finish", json={})
    assert norms[0] == norms[1]


def test_a_key_is_asked_for_where_one_is_set_and_an_answer_that_takes_long_again(serve):
    with serve(token="tml-right", long_poll_s=0.05) as server:
        for key, status in (({}, 401), ({"X-API-Key": "tml-wrong"}, 401), ({"X-API-Key": "tml-right"}, 200)):
            client = Client(server.url, **key)
            assert client.http.get("healthz").status_code == status
        client.create()
        early = client.step(2)
        answer = client.post("retrieve_future", {"request_id": early["request_id"]})
        assert answer == {"type": "try_again", "request_id": early["request_id"], "queue_state": "active"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words_"),
    [
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, 422, "optimizer 'dimuon' is not supported"),
        ("create_model", {"base_model": "nobody/none"}, 404, "not served here; this server has palestra/tiny"),
        ("create_model", {"lora_config": {"rank": -1}}, 400, "rank -1 is outside"),
        ("create_model", {"session_id": "s-1"}, 410, "continue from a saved tinker:// path"),
        ("create_model", {"quantize": True}, 422, "quantize is not supported by this server"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, 422, "use adamw"),
        ("optim_step", {"adam_params": {"learning_rate": -1}}, 422, "greater than or equal to 0"),
        ("optim_step", {"seq_id": 0, "adam_params": {}}, 422, "seq_id"),
        ("save_weights", {"path": "../../etc"}, 400, "cannot name a checkpoint"),
        ("load_weights", {"path": "/etc/passwd"}, 400, "look like tinker://RUN/weights/NAME"),
        ("save_weights_for_sampler", {"kind": "inflight", "path": "a"}, 422, "leave path and ttl_seconds out"),
        ("save_weights_for_sampler", {"kind": "other"}, 422, "'snapshot' or 'inflight'"),
        ("weights_info", {"tinker_path": "tinker://x/weights/a"}, 404, "no training run 'x'"),
        ("asample", {"sampling_session_id": "nobody"}, 404, "sampling session 'nobody' does not exist"),
        ("asample", {"prompt": {"chunks": [{"type": "image"}]}}, 422, "text tokens alone"),
        ("asample", {"prompt": {"chunks": []}}, 400, "the prompt has 0 tokens"),
        ("asample", {"prompt": {"chunks": [{"tokens": [99999]}]}}, 400, "outside the vocabulary"),
        ("asample", {"num_samples": 0}, 422, "num_samples"),
        ("asample", {"sampling_params": {"stop": ["a"] * 300}}, 422, "at most 256"),
        ("retrieve_future", {"request_id": "r-1"}, 410, "knows no request"),
        ("get_info", {"model_id": "m"}, 404, "the model 'm' does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_at_once_with_a_sentence(refused_client, path, body, status, words_):
    defaults = {
        "create_model": {"session_id": refused_client.session, "model_seq_id": 9, "base_model": "palestra/tiny"},
        "asample": {"base_model": "palestra/tiny", "prompt": PROMPT},
        "retrieve_future": {},
        "weights_info": {},
        "get_info": {},
    }
    given = defaults.get(path, {"model_id": refused_client.model, "seq_id": 1})
    assert words_ in refused_client.post(path, {**given, **body}, status)


def test_rows_that_cannot_be_computed_are_the_answer_of_their_request(client: Client) -> None:
    wrong = words(0)
    wrong.inputs["target_tokens"].values[0] = 5000
    found = client.result(client.forward_backward(1, [words(1), wrong]))
    assert found["category"] == "user"
    assert "datum 1: token id 5000" in found["error"]
    assert client.result(client.step(2))["metrics"]["grad_norm"] == 0.0


def test_bodies_may_be_zstd_and_not_bombs(client: Client) -> None:
    zstandard = pytest.importorskip("zstandard")
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    body = forward_backward_body(client.model, 1, [words(0)])
    packed = zstandard.ZstdCompressor().compress(body)
    answer = client.http.post("forward_backward", content=packed, headers=headers)
    assert isinstance(client.result(answer.json()), bytes)
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    assert client.http.post("forward_backward", content=bomb, headers=headers).status_code == 413
    assert client.http.post("forward_backward", content=b"no", headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("limits", "words_"),
    [
        (ServiceLimits(sessions=1), "1 sessions are open, which is the limit"),
        (ServiceLimits(models=1), "1 models are being trained, which is the limit"),
        (ServiceLimits(memory_gib=1e-6), "rank 2 needs about"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_until_later(serve, limits, words_):
    with serve(limits) as server:
        first, second = Client(server.url), Client(server.url)
        if limits.memory_gib is None:
            first.create()
        answer = second.http.post("create_session", json={})
        if limits.sessions > 1:
            body = {"session_id": answer.json()["session_id"], "model_seq_id": 0, "base_model": "palestra/tiny"}
            answer = second.http.post("create_model", json={**body, "lora_config": LORA})
        assert answer.status_code == 429
        assert words_ in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"


def test_a_version_that_is_not_kept_any_more_is_named(serve):
    with serve(ServiceLimits(versions=1)) as server:
        client = Client(server.url)
        client.create()
        pinned = []
        for number in range(2):
            saved = client.next("save_weights_for_sampler", sampling_session_seq_id=number)
            pinned.append(saved["sampling_session_id"])
            client.seq += 1
            client.result(client.forward_backward(client.seq, [words(0)]))
            client.next("optim_step", adam_params={})
        asked = {"prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
        assert "save it under a name" in client.post("asample", {**asked, "sampling_session_id": pinned[0]}, 410)
        assert isinstance(client.result(client.post("asample", {**asked, "sampling_session_id": pinned[1]})), bytes)


def test_an_inflight_session_follows_the_newest_save_whatever_is_kept(serve):
    asked = {"prompt": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 3, "stop": []}}
    with serve(ServiceLimits(versions=1)) as server:
        client = Client(server.url)
        client.create()

        def save(number: int, kind: str) -> str:
            saved = client.next("save_weights_for_sampler", sampling_session_seq_id=number, kind=kind)
            return str(saved["sampling_session_id"])

        def sample(session: str) -> bytes:
            found = client.result(client.post("asample", {**asked, "sampling_session_id": session}))
            assert isinstance(found, bytes)
            return found

        first = save(0, "inflight")
        before = sample(first)
        for number in (1, 2):  # snapshots of two versions, one more than is kept
            client.seq += 1
            client.result(client.forward_backward(client.seq, [words(0)]))
            client.next("optim_step", adam_params={"learning_rate": 0.1})
            snapshot = save(number, "snapshot")
        assert sample(first) == before
        second = save(3, "inflight")
        assert sample(first) == sample(second) == sample(snapshot) != before
        client.result(client.post("unload_model", {"model_id": client.model}))
        assert "does not exist" in client.post("asample", {**asked, "sampling_session_id": first}, 404)


@pytest.mark.parametrize("optimizer", [True, False])
def test_load_weights_with_a_session_makes_the_model(serve, optimizer):
    with serve() as server:
        client = Client(server.url)
        client.create()
        norms = []
        for number in range(4):
            client.seq += 1
            client.result(client.forward_backward(client.seq, [words(0)]))
            norms.append(client.next("optim_step", adam_params={"learning_rate": 0.05})["metrics"]["grad_norm"])
            if number == 1:
                saved = client.next("save_weights", path="two")["path"]
                sampler = client.next("save_weights_for_sampler", path="two")["path"]
        body = {"session_id": client.session, "path": saved, "optimizer": optimizer}
        promise = client.post("load_weights", {**body, "model_seq_id": 1, "base_model": "palestra/tiny"})
        assert client.post("load_weights", {**body, "model_seq_id": 1})["request_id"] == promise["request_id"]
        other = f"{client.session}:train:1"
        assert client.result(promise) == {"type": "load_weights", "model_id": other, "path": saved}
        info = client.post("get_info", {"model_id": other})
        assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 2, "palestra/tiny")
        client.model, client.seq = other, 0  # its numbers begin at 1
        again = []
        for _ in range(2):
            client.seq += 1
            client.result(client.forward_backward(client.seq, [words(0)]))
            again.append(client.next("optim_step", adam_params={"learning_rate": 0.05})["metrics"]["grad_norm"])
        assert again[0] == norms[2]
        assert (again[1] == norms[3]) == optimizer
        refused = client.result(client.post("load_weights", {**body, "model_seq_id": 2, "path": sampler}))
        assert ("without the optimizer" in refused.get("error", "")) == optimizer
        for more, status, says in (
            ({"base_model": "nobody/none"}, 404, "not served here"),
            ({"path": saved + "-none"}, 404, "there is no"),
            ({"optimizer_config": {"type": "dimuon"}}, 422, "use adamw"),
            ({"weights_access_token": "x"}, 422, "weights_access_token is not supported"),
        ):
            assert says in client.post("load_weights", {**body, "model_seq_id": 3, **more}, status)


def test_a_disconnected_client_makes_room_unless_it_has_work_and_ends_with_its_models(service):
    service.limits = ServiceLimits(models=2, sessions=4)

    def client(silent_s: float) -> str:
        session = service.create_session(CreateSession(display_name="client"))["session_id"]
        body = CreateModel(session_id=session, model_seq_id=0, base_model="palestra/tiny", lora_config=LORA)
        service.create_model(body).future.result(30)
        service.sessions[session].last_seen -= silent_s
        return session

    gone, gone_longest = client(60.0), client(90.0)
    connected = client(0.0)
    assert set(service.sessions) == {gone, connected}
    with pytest.raises(Gone, match="saved tinker://"):
        service.session(gone_longest)
    done = threading.Event()
    work = service.models[f"{gone}:train:0"].worker.run("work", lambda: {"done": done.wait(30)})
    with pytest.raises(TooBusy):
        client(0.0)
    done.set()
    work.future.result(30)
    client(0.0)
    assert gone not in service.sessions
    service.limits = ServiceLimits(session_idle_s=0.05)
    time.sleep(0.1)
    service.end_idle()
    assert (service.sessions, service.models) == ({}, {})


@pytest.mark.parametrize(
    ("stop", "ids", "texts"),
    [
        (None, (2, 3), ()),
        ("]\n", (2, 3), ("]\n",)),
        (["a", "b"], (2, 3), ("a", "b")),
        ([7], (2, 3, 7), ()),
        ([], (), ()),
    ],
)
def test_stops_add_to_the_models_own_and_an_empty_list_is_none(stop, ids, texts):
    sample = Sample.model_validate({"prompt": PROMPT, "sampling_params": {"stop": stop}})
    (params,) = sample.turns(10, (2, 3))
    assert (params.stop_token_ids, params.stop) == (ids, texts)


def test_what_was_saved_survives_a_restart_and_what_was_not_is_told(tmp_path, serve):
    asked = {"prompt": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 3, "stop": []}}
    with serve() as server:
        client = Client(server.url)
        model = client.create()
        client.seq += 1
        client.result(client.forward_backward(1, [words(0)]))
        client.next("optim_step", adam_params={"learning_rate": 0.05})
        state = client.next("save_weights", path="last")["path"]
        weights = client.next("save_weights_for_sampler", path="last")["path"]
        before = client.result(client.post("asample", {**asked, "model_path": weights}))
    partial = next((tmp_path / "runs").glob("*/tinker/weights")) / ".next.partial"
    partial.mkdir()  # as a kill in the middle of a save leaves it
    with serve() as server:
        client = Client(server.url)
        assert "continue from a saved tinker:// path" in client.post("get_info", {"model_id": model}, 404)
        assert client.result(client.post("asample", {**asked, "model_path": weights})) == before
        assert client.post("weights_info", {"tinker_path": state})["lora_rank"] == 2
        client.create()
        assert client.next("load_weights", path=state, optimizer=True)["path"] == state
        assert client.http.get(f"training_runs/{model}").json()["last_checkpoint"]["tinker_path"] == state
        assert len(client.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]) == 2


def test_a_checkpoint_is_downloaded_as_an_adapter_that_peft_reads(client: Client, tmp_path: Path) -> None:
    path = client.next("save_weights_for_sampler", path="mine")["path"]
    where = f"training_runs/{client.model}/checkpoints/sampler_weights/mine"
    answer = client.http.get(f"{where}/archive")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        tar.extractall(tmp_path, filter="data")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], "lm_head" in config["target_modules"]) == (2, 32, True)
    urls = client.http.get(f"{where}/external_weights_urls").json()["urls"]
    assert httpx.get(urls["adapter_model.safetensors"]).content == (tmp_path / "adapter_model.safetensors").read_bytes()
    assert client.http.get(f"{where}/files/..%2f..%2frun.json").status_code == 404
    assert client.http.delete(where).status_code == 204
    assert f"there is no {path}" in client.post("weights_info", {"tinker_path": path}, 404)


def test_a_time_to_live_is_changed_without_writing_the_weights_again(client: Client, running: Any) -> None:
    path = client.next("save_weights", path="kept")["path"]
    store, parsed = running.service.checkpoints, TinkerPath.parse(path)
    before = {file.name: file.stat().st_ino for file in store.find(parsed).files.values()}
    where = f"training_runs/{client.model}/checkpoints/weights/kept"
    for ttl_s in (60, None):
        assert client.http.put(f"{where}/ttl", json={"ttl_seconds": ttl_s}).status_code == 200
        found = store.find(parsed, check=True)
        assert (found.expires is None) == (ttl_s is None)
    assert {file.name: file.stat().st_ino for file in found.files.values()} == before


def test_of_many_checkpoints_a_message_names_a_few_and_a_damaged_one_is_not_loaded(client, running):
    for number in range(12):
        client.next("save_weights_for_sampler", path=f"n{number}")
    missing = f"tinker://{client.model}/weights/none"
    assert client.post("weights_info", {"tinker_path": missing}, 404).endswith("and 2 more")
    path = client.next("save_weights", path="hurt")["path"]
    folder = running.service.checkpoints.run(client.model).tinker / "weights" / "hurt"
    (folder / "learner.pt").write_bytes(b"x")
    assert "corrupt" in client.next("load_weights", path=path, optimizer=True)["error"]
    body = {"model_path": path, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert "corrupt" in client.result(client.post("asample", body))["error"]
