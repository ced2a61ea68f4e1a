"""docs/tinker_compatibility.md: what `palestra tinker` answers to every public method of the installed SDK.

Each method of the SDK's clients is called against a server in this process, with the embedded model; a method without a
probe is an error, so that a newer SDK cannot add one unseen. `python scripts/tinker_compatibility.py` writes the page.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "tinker_compatibility.md"
MODEL = str(Path(__file__).parents[1] / "src" / "palestra" / "models" / "tiny")  # a folder: the SDK loads its tokenizer
WAIT_S = 60.0
ROW = [5, 9, 200, 31, 77, 300, 12]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a server in a thread."""
    from palestra.extras.tinker.server.base_model import BaseModel
    from palestra.extras.tinker.server.server import tinker_app
    from palestra.extras.tinker.server.service import Service, ServiceLimits
    from palestra.servers.web import Server, open_port, url_of

    service = Service([BaseModel.load(MODEL, device="cpu")], folder, ServiceLimits(models=64))
    sock = open_port("127.0.0.1", 0, None)
    server = Server(tinker_app(service))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join(10)


def given(*arguments: Any, **options: Any) -> Arguments:
    return arguments, options


@dataclass
class World:
    """A session with one trained model, and paths of all that it has saved."""

    url: str

    def __post_init__(self) -> None:
        import tinker
        from tinker import types

        self.types = types
        self.service = self.connect()
        self.training = resolved(self.service.create_lora_training_client(MODEL, rank=2, seed=0))
        self.data = [self.datum("weights")]
        self.training.forward_backward(self.data, "cross_entropy").result()
        self.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        self.sampling = resolved(self.training.save_weights_and_get_sampling_client())
        self.rest = tinker.RestClient(base_url=self.url, api_key="tml-compatibility")
        self.prompt = types.ModelInput.from_ints(ROW)
        self.params = types.SamplingParams(max_tokens=2, stop=[], seed=1)
        self.session = self.service.holder.get_session_id()
        self.tinker = tinker

    def connect(self) -> Any:
        import tinker

        return tinker.ServiceClient(project_id="project", base_url=self.url, api_key="tml-compatibility")

    def datum(self, *inputs: str) -> Any:
        values = {name: [0.0, *[0.5] * (len(ROW) - 2)] for name in inputs}
        tokens = self.types.ModelInput.from_ints(ROW[:-1])
        return self.types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": ROW[1:], **values})

    def fresh_state(self) -> str:
        """A path that may be deleted."""
        return str(self.training.save_state(f"state-{os.urandom(4).hex()}").result().path)

    def fresh_name(self) -> str:
        return f"name-{os.urandom(4).hex()}"

    def external(self) -> str:
        return str(self.training.save_weights_external(self.fresh_name()).result(WAIT_S).path)

    def run_of(self, path: str) -> str:
        return path.removeprefix("tinker://").partition("/")[0]

    def checkpoint_of(self, path: str) -> str:
        return path.removeprefix("tinker://").partition("/")[2]

    def receiver(self, owner: str, name: str) -> Any:
        clients = {
            "ServiceClient": self.connect() if name.startswith("close") else self.service,
            "TrainingClient": self.training,
            "SamplingClient": self.sampling,
            "RestClient": self.rest,
        }
        return clients[owner]


def squared(data: Any, logprobs: Any) -> Any:
    total = sum((row**2).sum() for row in logprobs)
    return total, {"squared": float(total)}


def negative(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


# what each method is called with; its `_async` twin gets the same
PROBES: dict[str, dict[str, Callable[[World], Arguments]]] = {
    "ServiceClient": {
        "close": lambda w: given("success"),
        "copy_weights": lambda w: given(w.fresh_state()),
        "create_custom_loss": lambda w: given(negative, {"logprobs": 1, "weights": 1}),
        "create_lora_training_client": lambda w: given(MODEL, rank=2),
        "create_rest_client": lambda w: given(),
        "create_sampling_client": lambda w: given(base_model=MODEL),
        "create_training_client_from_state": lambda w: given(w.fresh_state()),
        "create_training_client_from_state_with_optimizer": lambda w: given(w.fresh_state()),
        "get_console_url": lambda w: given(),
        "get_server_capabilities": lambda w: given(),
        "get_telemetry": lambda w: given(),
    },
    "TrainingClient": {
        "create_sampling_client": lambda w: given(w.training.save_weights_for_sampler(w.fresh_name()).result().path),
        "forward": lambda w: given(w.data, "cross_entropy"),
        "forward_backward": lambda w: given(w.data, "cross_entropy"),
        "forward_backward_custom": lambda w: given(w.data, squared),
        "get_console_url": lambda w: given(),
        "get_info": lambda w: given(),
        "get_telemetry": lambda w: given(),
        "get_tokenizer": lambda w: given(),
        "load_state": lambda w: given(w.fresh_state()),
        "load_state_with_optimizer": lambda w: given(w.fresh_state()),
        "optim_step": lambda w: given(w.types.AdamParams(learning_rate=1e-4)),
        "save_state": lambda w: given(w.fresh_name()),
        "save_weights_and_get_sampling_client": lambda w: given(),
        "save_weights_external": lambda w: given(w.fresh_name()),
        "save_weights_for_sampler": lambda w: given(w.fresh_name()),
    },
    "SamplingClient": {
        "compute_logprobs": lambda w: given(w.prompt),
        "create": lambda w: given(w.service.holder, base_model=MODEL),
        "from_sampler_handle": lambda w: given(w.sampling.get_sampler_handle(), api_key="tml-compatibility"),
        "get_base_model": lambda w: given(),
        "get_sampler_handle": lambda w: given(),
        "get_telemetry": lambda w: given(),
        "get_tokenizer": lambda w: given(),
        "on_queue_state_change": lambda w: given(None, None),
        "sample": lambda w: given(w.prompt, 2, w.params),
    },
    "RestClient": {
        "assign_session_project": lambda w: given(w.session, "project"),
        "copy_weights": lambda w: given(w.fresh_state(), "project"),
        "delete_checkpoint": lambda w: given(w.run_of(path := w.fresh_state()), w.checkpoint_of(path)),
        "delete_checkpoint_from_tinker_path": lambda w: given(w.fresh_state()),
        "export_session_trace": lambda w: given(w.session),
        "get_audit_log": lambda w: given(day=date(2026, 1, 1)),
        "get_billing_usage": lambda w: given("2026-01-01", "2026-01-02"),
        "get_current_checkpoint_storage_usage": lambda w: given(),
        "get_external_weights_urls": lambda w: given(w.external()),
        "get_sampler": lambda w: given(w.sampling._sampling_session_id),
        "get_server_capabilities": lambda w: given(),
        "get_session": lambda w: given(w.session),
        "get_telemetry": lambda w: given(),
        "get_training_run": lambda w: given(w.run_of(w.fresh_state())),
        "get_training_run_by_tinker_path": lambda w: given(w.fresh_state()),
        "get_weights_info_by_tinker_path": lambda w: given(w.fresh_state()),
        "list_checkpoints": lambda w: given(w.run_of(w.fresh_state())),
        "list_sessions": lambda w: given(),
        "list_training_runs": lambda w: given(),
        "list_user_checkpoints": lambda w: given(),
        "publish_checkpoint_from_tinker_path": lambda w: given(w.fresh_state()),
        "search_sessions": lambda w: given(w.types.SessionSearchRequest()),
        "set_checkpoint_ttl_from_tinker_path": lambda w: given(w.fresh_state(), 3600),
        "unpublish_checkpoint_from_tinker_path": lambda w: given(w.fresh_state()),
        "whoami": lambda w: given(),
    },
}
RATIO = ("logprobs", "advantages")
BOTH = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
# what a method may be asked for besides
OPTIONS: dict[str, Callable[[World], Any]] = {
    "loss `importance_sampling`": lambda w: w.training.forward_backward([w.datum(*RATIO)], "importance_sampling"),
    "loss `ppo`": lambda w: w.training.forward_backward([w.datum(*RATIO)], "ppo", {"clip_low_threshold": 0.9}),
    "loss `cispo`": lambda w: w.training.forward_backward([w.datum(*RATIO)], "cispo", {"clip_high_threshold": 4.0}),
    "loss `dro`": lambda w: w.training.forward_backward([w.datum(*RATIO)], "dro", {"beta": 0.05}),
    "loss `gspo`": lambda w: w.training.forward_backward([w.datum(*RATIO, "sequence_ratio_mask")], "gspo", BOTH),
    "loss `stable_reinforce`": lambda w: w.training.forward_backward([w.datum(*RATIO)], "stable_reinforce"),
    "rank 0 (all weights)": lambda w: w.service.create_lora_training_client(MODEL, rank=0),
    "optimizer Dimuon": lambda w: w.service.create_lora_training_client(
        MODEL, rank=2, optimizer=w.types.DimuonOptimizerConfig()
    ),
    "`kind='inflight'` of a sampling client": lambda w: w.training.save_weights_and_get_sampling_client(
        kind="inflight"
    ),
    "an image in a prompt": lambda w: w.sampling.sample(
        w.types.ModelInput(chunks=[w.types.ImageChunk(data=b"x", format="png", expected_tokens=4)]), 1, w.params
    ),
    "`include_prompt_logprobs`": lambda w: w.sampling.sample(w.prompt, 1, w.params, include_prompt_logprobs=True),
    "`topk_prompt_logprobs`": lambda w: w.sampling.sample(
        w.prompt, 1, w.params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ),
    "`topk_sample_logprobs`": lambda w: w.sampling.sample(w.prompt, 1, w.params, topk_sample_logprobs=3),
    "`target_prompt_logprobs`": lambda w: w.sampling.sample(
        w.prompt,
        1,
        w.params,
        include_prompt_logprobs=True,
        target_prompt_logprobs=w.types.TensorData(data=[7] * (len(ROW) - 1), dtype="int64", shape=[len(ROW) - 1, 1]),
    ),
    "`prompt_alt_tokens_k`": lambda w: w.sampling.sample(w.prompt, 1, w.params, prompt_alt_tokens_k=2),
    "`prompt_logprobs_last_n`": lambda w: w.sampling.compute_logprobs(w.prompt, prompt_logprobs_last_n=2),
}


def methods_of(client: type) -> list[str]:
    """The public methods that the SDK's users see, without async twins."""
    public = {name: found for name, found in vars(client).items() if not name.startswith("_")}
    names = [name for name, found in public.items() if not isinstance(found, property)]
    return sorted(name for name in names if not (name.endswith("_async") and name.removesuffix("_async") in names))


def outcome(call: Callable[[], Any]) -> str:
    """`works`, or the sentence with which it is refused."""
    from palestra.extras.tinker.client.model import refusal

    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(resolved(call()))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        done.result(WAIT_S)
    except TimeoutError:
        return f"**no answer** within {WAIT_S:g} s"
    except Exception as error:
        text = str(refusal(error)).removeprefix("the Tinker server ").removeprefix("answers ")
        return "refused: " + re.sub(r"state-[0-9a-f]{8}", "…", " ".join(text.split())).replace("|", "\\|")
    return "works"


def resolved(found: Any) -> Any:
    if inspect.iscoroutine(found):
        return asyncio.run(_resolved_async(found))
    if hasattr(found, "result"):
        return found.result(WAIT_S)
    return found


async def _resolved_async(coroutine: Any) -> Any:
    found = await coroutine
    return await found.result_async(WAIT_S) if hasattr(found, "result_async") else found


def rows_of(world: World, client: type) -> Iterator[tuple[str, str]]:
    owner, names = client.__name__, methods_of(client)
    if unknown := sorted(set(names) ^ set(PROBES[owner])):
        raise SystemExit(f"{owner}: {', '.join(unknown)} have no probe, or are gone from the SDK; change PROBES")
    for name in names:
        twin = f"{name}_async" if hasattr(client, f"{name}_async") else None
        calls = {n: partial(_call, world, owner, name, n) for n in (name, twin) if n is not None}
        found = {n: outcome(call) for n, call in calls.items()}
        if len(set(found.values())) == 1:
            yield f"`{name}`" + (", `_async`" if twin else ""), found[name]
        else:
            yield from ((f"`{n}`", answer) for n, answer in found.items())


def _call(world: World, owner: str, probe: str, name: str) -> Any:
    arguments, options = PROBES[owner][probe](world)
    return getattr(world.receiver(owner, name), name)(*arguments, **options)


def page() -> str:
    import tinker
    from tinker.lib.public_interfaces.rest_client import RestClient

    clients = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PALESTRA_HOME": f"{folder}/home", "TINKER_TELEMETRY": "0"}
        with serving(Path(folder) / "runs") as url:
            world = World(url)
            tables = {client.__name__: list(rows_of(world, client)) for client in clients}
            tables["Options"] = [(name, outcome(partial(call, world))) for name, call in OPTIONS.items()]
            world.service.close("success").result(WAIT_S)
    every = [answer for rows in tables.values() for _, answer in rows]
    works = sum(answer == "works" for answer in every)
    lines = [
        "# Compatibility with the Tinker SDK",
        "",
        "What `palestra tinker` answers to every public method of the clients of the official SDK, version "
        f"{tinker.__version__}. This page is written by",
        "`scripts/tinker_compatibility.py`, and a test fails when it is not what the script finds.",
        f"{works} of {len(every)} work; the others are rejected with the message in their row.",
    ]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", "| what | answer |", "| --- | --- |"]
        lines += [f"| {name} | {answer} |" for name, answer in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    text = page()
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: {text.splitlines()[4]}")
    os._exit(0)  # threads of calls that never came back
