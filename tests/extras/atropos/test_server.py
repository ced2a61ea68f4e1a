"""The trajectory API over HTTP: the protocol's answers, and bad input that is refused in words."""

import asyncio
import gzip
import json
import math
from types import SimpleNamespace

import httpx
import pytest

from palestra.extras.atropos import server
from palestra.extras.atropos.server import trajectory_app

REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128, "checkpoint_dir": "c",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
}  # fmt: skip
ENV = {"max_token_length": 128, "desired_name": "sums", "weight": 1.0, "group_size": 2}


def group(**changes):
    small = {"tokens": [[1, 2, 3], [1, 2, 4]], "masks": [[-100, 2, 3], [-100, 2, 4]], "scores": [1.0, 0.0]}
    return small | changes


def lineage(**changes):
    turn = {"maker": "model", "token_ids": [5, 6], "logprobs": [-0.5, None], "versions": [3, 3], "finish": "stop"}
    return {"turns": [turn | changes], "messages": [], "stop": "answered"}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return trajectory_app(tmp_path_factory.mktemp("wire"), max_body_mib=1)


@pytest.fixture(scope="module")
def client(serve, app):
    with httpx.Client(base_url=serve(app), timeout=30) as made:
        yield made


@pytest.fixture
def api(client, app):
    """One server for all tests, as if it had just been started."""
    client.post("/reset_data")
    app.state.tally.refused, app.state.tally.reason, app.state.exchange.accepted = 0, "", 0
    return client


STATUS = {
    "current_step": 0, "queue_size": 0, "environments": 0, "groups_accepted": 0, "posts_refused": 0, "last_refusal": "",
}  # fmt: skip


@pytest.fixture
def trained(api):
    """A registered trainer that has asked, and one environment."""
    api.post("/register", json=REGISTRATION)
    api.get("/batch")
    assert api.post("/register-env", json=ENV).json()["status"] == "success"
    return api


def test_nothing_fails_before_anybody_registered(api):
    assert api.get("/").status_code == 200
    assert api.get("/batch").json()["batch"] is None
    assert api.get("/status").json() == STATUS
    assert api.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    assert api.get("/latest_example").json()["tokens"] == []
    assert api.post("/register-env", json=ENV).json() == {"status": "wait for trainer to start"}
    for method, path in (("GET", "/status-env"), ("POST", "/disconnect-env")):
        assert api.request(method, path, json={"env_id": 0}).status_code == 404
    assert api.get("/reset_data").status_code == 200


def test_environment_waits_until_the_trainer_asks_for_its_first_batch(api):
    assert isinstance(api.post("/register", json=REGISTRATION).json()["uuid"], int)
    assert api.post("/register-env", json=ENV).json() == {"status": "wait for trainer to start"}
    assert api.get("/batch").json() == {"batch": None}
    assert api.post("/register-env", json=ENV).json() == {
        "status": "success", "env_id": 0, "wandb_name": "sums_0", "checkpoint_dir": "c", "starting_step": 0,
        "checkpoint_interval": 5, "num_steps": 10,
    }  # fmt: skip
    assert api.post("/register-env", json=ENV).json()["wandb_name"] == "sums_1"


def test_groups_go_round_with_every_field(trained):
    whole = group(
        env_id=0, advantages=[[0.0, 1.0, 1.0]] * 2, inference_logprobs=[[1.0, -0.5, -0.25]] * 2, ref_logprobs=[],
        messages=[[{"role": "user", "content": "hi"}]] * 2, overrides=[{}, {"set_advantage_to_zero": True}],
        group_overrides={"group_size": 2}, generation_params={"temperature": 1.0}, images=[],
        turns=[[["template", 1], ["model", 2]]] * 2, versions=[[0, 4, 5]] * 2, stops=["answered", "truncated"],
        lineages=[[lineage()], []], info=[{"exit_code": 0}, {}], metrics={"agent/rows": 1.5},
        errors=[None, "broken"], seconds=[0.5, 0.25], tool_seconds=[0.0, 0.125],
        verdicts=[{"right": {"value": 1.0, "passed": True, "reason": "so", "error": False, "counts": True}}, {}],
        tool_results=[
            [{"id": "c", "name": "a", "ok": False, "seconds": 0.5, "raised": True, "error": "?", "format": "json"}], [],
        ],
    )  # fmt: skip
    assert trained.post("/scored_data", json=whole).json() == {"status": "received"}
    packed = gzip.compress(json.dumps([group(env_id=0, scores=[0.25, 0.5])]).encode())
    answer = trained.post("/scored_data_list", content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.json() == {"status": "received", "groups_processed": 1}
    status = trained.request("GET", "/status-env", json={"env_id": 0}).json()
    assert (status["queue_size"], status["self_queue_size"], status["max_group_size"]) == (2, 2, 2)
    first, second = trained.get("/batch").json()["batch"]
    assert {key: first[key] for key in whole if whole[key] != []} == {k: v for k, v in whole.items() if v != []}
    assert first["ref_logprobs"] is None
    assert second["scores"] == [0.25, 0.5]
    assert trained.get("/batch").json() == {"batch": None}
    assert trained.get("/status").json() == STATUS | {"current_step": 1, "environments": 1, "groups_accepted": 2}
    assert trained.get("/latest_example").json()["scores"] == [0.25, 0.5]
    assert trained.get("/reset_data").text == "Reset successful"
    assert trained.get("/info").json()["batch_size"] == -1


BAD = {
    "no tokens": ({"tokens": []}, "tokens"),
    "an empty sequence": ({"tokens": [[], [1, 2, 4]]}, "sequence 0 is empty"),
    "a mask too short": ({"masks": [[-100, 2], [-100, 2, 4]]}, "masks: sequence 0 has 2 entries"),
    "a mask missing": ({"masks": [[-100, 2, 3]]}, "masks has 1 entries"),
    "a score missing": ({"scores": [1.0]}, "scores has 1 entries"),
    "a score that is a word": ({"scores": [1.0, "good"]}, "scores.1"),
    "no scores": ({"scores": None}, "scores"),
    "tokens that are text": ({"tokens": "abc"}, "tokens"),
    "a negative token": ({"tokens": [[1, 2, -3], [1, 2, 4]]}, "tokens.0.2"),
    "too few logprobs": ({"inference_logprobs": [[-0.5]] * 2}, "inference_logprobs: sequence 0"),
    "advantages for one": ({"advantages": [[0.0, 1.0, 1.0]]}, "advantages has 1"),
    "messages without roles": ({"messages": [[{"text": "hi"}]] * 2}, "'role' and 'content'"),
    "turns for one": ({"turns": [[["template", 3]]]}, "turns has 1"),
    "turns that do not add up": ({"turns": [[["template", 1], ["model", 1]]] * 2}, "sequence 0 has 3 tokens"),
    "a turn by nobody": ({"turns": [[["judge", 3]]] * 2}, "turns.0.0.0"),
    "a stop for no reason": ({"stops": ["answered", "bored"]}, "stops.1"),
    "versions too short": ({"versions": [[1], [1]]}, "versions: sequence 0 has 1"),
    "a score beyond float32": ({"scores": [0.0, 1e39]}, "scores.1"),
    "scores whose squares do not fit": ({"scores": [1e20, -1e20]}, "scores.0"),
    "an advantage beyond float32": ({"advantages": [[0.0, 1e308, 0.0]] * 2}, "advantages.0.1"),
    "a logprob beyond float32": ({"inference_logprobs": [[0.0, -1e308, 0.0]] * 2}, "inference_logprobs.0.1"),
    "a mask beyond int32": ({"masks": [[-100, 2, 10**30], [-100, 2, 4]]}, "masks.0.2"),
    "a version beyond int32": ({"versions": [[0, 0, 2**40]] * 2}, "versions.0.2"),
    "a verdict without a value": ({"verdicts": [{"right": {"passed": True}}, {}]}, "verdicts.0.right.value"),
    "lineages for one": ({"lineages": [[]]}, "lineages has 1"),
    "a lineage with too few logprobs": ({"lineages": [[lineage(logprobs=[-0.5])], []]}, "1 logprobs and 2 versions"),
    "a lineage with a negative token": ({"lineages": [[lineage(token_ids=[5, -6])], []]}, "token_ids.1"),
    "a metric beyond float32": ({"metrics": {"x": 1e39}}, "metrics.x"),
    "a tool result without a name": ({"tool_results": [[{"id": "c", "ok": True}], []]}, "tool_results.0.0.name"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_group_is_refused_with_the_reason(trained, case):
    changes, words = BAD[case]
    answer = trained.post("/scored_data", json=group(**changes))
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]
    assert trained.get("/status").json()["queue_size"] == 0


def test_numbers_that_are_none_are_refused_and_the_status_says_how_many_posts_were_and_why(trained):
    for score in (math.nan, math.inf):
        verdict = {"value": score, "passed": False}
        for changes in ({"scores": [1.0, score]}, {"verdicts": [{"right": verdict}, {}]}, {"seconds": [score, 1.0]}):
            assert trained.post("/scored_data", content=json.dumps(group(**changes))).status_code == 422
    trained.post("/scored_data", json=group(env_id=7))
    status = trained.get("/status").json()
    assert (status["posts_refused"], status["groups_accepted"]) == (7, 0)
    assert status["last_refusal"].startswith("/scored_data: env_id=7 is not registered")


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b"null", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_body_that_is_no_group_is_refused(trained, body):
    for path in ("/scored_data", "/scored_data_list", "/register", "/register-env"):
        assert 400 <= trained.post(path, content=body).status_code < 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register-env", ENV | {"max_token_length": 10**400}),
        ("/register-env", ENV | {"group_size": 10**9}),
        ("/register-env", ENV | {"weight": 1e300}),
        ("/register-env", ENV | {"desired_name": "x" * 10_000}),
        ("/register", REGISTRATION | {"num_steps": 10**400}),
        ("/register", REGISTRATION | {"max_token_len": 10**400}),
        ("/disconnect-env", {"env_id": 10**400}),
    ],
)
def test_numbers_and_names_without_bound_are_refused(trained, path, body):
    assert trained.post(path, json=body).status_code == 422
    assert trained.request("GET", "/status-env", json={"env_id": 0}).status_code == 200


def test_changing_requests_are_posts_and_the_protocols_own_gets_stay(trained):
    for _ in range(4):
        trained.post("/scored_data", json=group())
    assert trained.post("/batch?after=0").json()["number"] == 1
    assert trained.get("/batch").json()["number"] == 2
    page = {"Sec-Fetch-Site": "cross-site"}
    for method, path in (("GET", "/batch"), ("GET", "/reset_data"), ("POST", "/reset_data")):
        assert trained.request(method, path, headers=page).status_code == 403
    assert trained.get("/info").json()["batch_size"] == 4
    assert trained.post("/reset_data").text == "Reset successful"


def test_a_large_post_is_parsed_in_a_process_of_its_own_with_the_same_result(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.extras.atropos.server._LARGE", 100)
    with httpx.Client(base_url=serve(trajectory_app(tmp_path)), timeout=30) as api:
        api.post("/register", json=REGISTRATION)
        large = group(messages=[[{"role": "user", "content": "x" * 200}]] * 2)
        assert api.post("/scored_data_list", json=[large, group(scores=[0.5, 1.0])]).json()["groups_processed"] == 2
        answer = api.post("/scored_data", json=large | {"scores": [1.0]})
        assert (answer.status_code, "scores has 1 entries" in answer.text) == (422, True)
        batch = api.get("/batch").json()["batch"]
        assert [g["scores"] for g in batch] == [[1.0, 0.0], [0.5, 1.0]]
        assert batch[0]["messages"] == large["messages"]


def test_large_posts_do_not_add_up(monkeypatch):
    """Few are read at once, and one is parsed: that takes thirty times its memory."""
    under_way, most = {"read": 0, "parse": 0}, {"read": 0, "parse": 0}

    async def count(what):
        under_way[what] += 1
        most[what] = max(most[what], under_way[what])
        await asyncio.sleep(0.001)
        under_way[what] -= 1

    async def read_body(request, limit):
        await count("read")
        return b"x" * 200

    async def parse_apart(body, is_list):
        await count("parse")
        return []

    async def all_at_once():
        reader, request = server.PostReader(1 << 20), SimpleNamespace(headers={"content-length": "200"})
        await asyncio.gather(*(reader.read(request) for _ in range(20)))

    monkeypatch.setattr(server, "_LARGE", 100)
    monkeypatch.setattr(server, "read_body", read_body)
    monkeypatch.setattr(server, "_parse_apart", parse_apart)
    asyncio.run(all_at_once())
    assert most["read"] <= server._LARGE_AT_ONCE
    assert most["parse"] == 1


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/scored_data", group(env_id=7), {}, 404),
        ("/scored_data", group(tokens=[[1]] * 5, masks=[[1]] * 5, scores=[0.0] * 5), {}, 400),
        ("/scored_data_list", [group(), group(scores=[1.0])], {}, 422),
        ("/scored_data", group(), {"Idempotency-Key": "k" * 257}, 400),
        ("/batch?after=1000000000000000", None, {}, 422),
        ("/batch?after=1&saved=x", None, {}, 422),
    ],
    ids=["unknown environment", "larger than a batch", "one bad group of a list", "a long key", "after", "saved"],
)
def test_what_cannot_be_accepted_changes_nothing(trained, path, body, headers, status):
    assert trained.post(path, json=body, headers=headers).status_code == status
    assert trained.get("/status").json()["queue_size"] == 0


def test_a_full_queue_asks_to_come_again(serve, tmp_path):
    with httpx.Client(base_url=serve(trajectory_app(tmp_path / "small", max_waiting=2))) as api:
        assert api.post("/scored_data", json=group()).status_code == 200
        answer = api.post("/scored_data", json=group())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_body_that_is_too_large_is_refused_packed_or_not(trained):
    large = b" " * (3 << 20)
    assert trained.post("/scored_data", content=large).status_code == 413
    packed = trained.post("/scored_data", content=gzip.compress(large), headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 413
    for broken in (b"not gzip", gzip.compress(large)[:-10]):
        answer = trained.post("/scored_data", content=broken, headers={"Content-Encoding": "gzip"})
        assert answer.status_code in (400, 413)
    assert trained.post("/scored_data", json=group()).status_code == 200


def test_token_is_asked_for_and_other_sites_are_not_answered(serve, tmp_path):
    url = serve(trajectory_app(tmp_path / "locked", token="secret"))
    assert httpx.get(f"{url}/status").status_code == 401
    assert httpx.get(f"{url}/status", headers={"Authorization": "Bearer secret"}).status_code == 200
    url = serve(trajectory_app(tmp_path / "open"))
    assert httpx.get(f"{url}/status", headers={"Origin": "https://example.org"}).status_code == 403
    assert httpx.get(f"{url}/status", headers={"Host": "example.org"}).status_code == 403
