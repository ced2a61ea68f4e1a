"""Mutated requests to all servers: inference, trajectories, tools over HTTP and over MCP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzzing.check import Tally, mutate
from fuzzing.servers import check, http, mutate_json, served, to_bytes
from palestra.core.errors import PalestraError

Template = tuple[str, str, Any]  # method, path, body
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1, "n": 2, "stop": ["a", 3]}

INFERENCE: list[Template] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": ASK, "max_tokens": 4, "n": 2, "logprobs": True}),
    ("POST", "/v1/chat/completions", {"messages": ASK, "max_completion_tokens": 4, "tools": [TOOL], "stream": True}),
    (
        "POST",
        "/v1/responses",
        {"input": ASK, "max_output_tokens": 4, "tools": [{"type": "function", "name": "f"}]},
    ),
    ("POST", "/v1/messages", {"model": "m", "max_tokens": 4, "messages": ASK[1:], "system": "x", "stream": True}),
    ("POST", "/v1/messages/count_tokens", {"model": "m", "messages": ASK[1:]}),
    ("POST", "/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 3, "stop": ["x"], "logprobs": 1, "echo": True}),
    ("POST", "/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "presence_penalty": 0.5}),
    ("POST", "/generate", {"text": "hello", "sampling_params": SAMPLING, "return_logprob": True}),
    ("POST", "/generate", {"input_ids": [[1, 2], [3]], "sampling_params": [SAMPLING, SAMPLING]}),
    ("POST", "/generate", {"prompt": {"prompt_token_ids": [1, 2]}, "n": 2, "max_tokens": 3, "logprobs": 0}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
]
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128, "checkpoint_dir": "c",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
}  # fmt: skip
ENV = {"max_token_length": 128, "desired_name": "sums", "weight": 1.0, "group_size": 2}
GROUP = {
    "tokens": [[1, 2, 3], [1, 2, 4]], "masks": [[-100, 2, 3], [-100, 2, 4]], "scores": [1.0, 0.0], "env_id": 0,
    "advantages": [[0.0, 1.0, 1.0]] * 2, "inference_logprobs": [[1.0, -0.5, -0.25]] * 2, "ref_logprobs": [],
    "messages": [[{"role": "user", "content": "hi"}]] * 2, "overrides": [{}, {"set_advantage_to_zero": True}],
    "group_overrides": {"group_size": 2}, "generation_params": {"temperature": 1.0}, "images": [],
    "turns": [[["template", 1], ["model", 2]]] * 2, "versions": [[0, 4, 5]] * 2, "stops": ["answered", "truncated"],
}  # fmt: skip
TRAJECTORIES: list[Template] = [
    ("POST", "/register", REGISTRATION),
    ("GET", "/batch?after=0&saved=0&step=1", None),
    ("POST", "/batch?after=1", None),
    ("POST", "/register-env", ENV),
    ("POST", "/scored_data", GROUP),
    ("POST", "/scored_data_list", [GROUP, GROUP]),
    ("GET", "/status-env", {"env_id": 0}),
    ("POST", "/disconnect-env", {"env_id": 0}),
    *(("GET", path, None) for path in ("/", "/info", "/status", "/wandb_info", "/latest_example", "/reset_data")),
]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "rl_list_environments": {},
    "rl_select_environment": {"name": "calculator"},
    "rl_get_current_config": {},
    "rl_edit_config": {"field": "train_size", "value": 20},
    "rl_start_training": {},
    "rl_check_status": {"run_id": "abcd1234"},
    "rl_stop_training": {"run_id": "abcd1234"},
    "rl_get_results": {"run_id": "abcd1234"},
    "rl_list_runs": {"limit": 5},
    "rl_test_inference": {"num_steps": 1, "group_size": 2, "models": ["m"]},
}
SESSION = "Palestra-Session: fuzzing-session"
TOOLS: list[Template] = [
    *(("POST", f"/tools/{name}", arguments) for name, arguments in ARGUMENTS.items()),
]
INITIALIZE = {
    "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "fuzz", "version": "1"},
}  # fmt: skip
MCP: list[Template] = [
    ("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters})
    for method, parameters in (
        ("initialize", INITIALIZE),
        ("tools/list", {}),
        ("tools/call", {"name": "rl_list_runs", "arguments": {}}),
        ("resources/read", {"uri": "palestra://runs/abcd1234/metrics"}),
    )
]


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("http requests")
    servers = [inference(), trajectories(folder / "wire"), tools(folder / "home"), mcp(folder / "home")]
    for server in servers:
        with server as (app, name, templates, headers), served(app) as (port, errors):
            for template in templates:  # as they are, which must not fail
                check(tally, f"{name}, unchanged", port, request(template, headers), errors)
            for number in range(count // len(servers)):
                method, path, body = rng.choice(templates)
                if rng.random() < 0.5 and body is not None:
                    raw = request((method, path, mutate_json(body, rng)), headers)
                else:
                    raw = mutate(request((method, path, body), headers), rng)
                check(tally, f"{name} {number}", port, raw, errors)
            check(tally, f"{name}, afterwards", port, request(templates[0], headers), errors)
    return tally


def request(template: Template, headers: list[str]) -> bytes:
    method, path, body = template
    return http(method, path, b"" if body is None else to_bytes(body), *headers)


Prepared = tuple[Any, str, list[Template], list[str]]


@contextmanager
def inference() -> Iterator[Prepared]:
    """With a context of 48 tokens, so that no accepted request takes long for a good reason."""
    from palestra.servers.openai.inference import inference_app, load_completer

    completer = load_completer("palestra/tiny")
    completer.context_tokens = 48
    yield inference_app(completer), "inference", INFERENCE, []


@contextmanager
def trajectories(folder: Path) -> Iterator[Prepared]:
    from palestra.extras.atropos.server import trajectory_app

    yield trajectory_app(folder, max_body_mib=1), "trajectories", TRAJECTORIES, []


@contextmanager
def rl_clients(home: Path) -> Iterator[Any]:
    """Sessions of the tools in which an environment can be selected, and nothing else starts a process."""
    from palestra.extras.agent_tools import RlTools
    from palestra.extras.agent_tools.clients import Clients
    from palestra.extras.agent_tools.locks import RequestLimits, Site
    from palestra.runs import manager as runs_manager

    def start(*_: Any, **__: Any) -> Any:
        raise PalestraError("the fuzzer starts no runs")

    before = runs_manager.RunManager.start
    runs_manager.RunManager.start = start  # type: ignore[method-assign]
    manager = runs_manager.RunManager(home)
    try:
        yield Clients(lambda: RlTools(manager, Site(limits=RequestLimits(test_minutes=0.02))))
    finally:
        runs_manager.RunManager.start = before  # type: ignore[method-assign]


@contextmanager
def tools(home: Path) -> Iterator[Prepared]:
    from palestra.extras.agent_tools.mcp_server import http_app

    with rl_clients(home) as clients:
        yield http_app(clients, None), "tools", TOOLS, [SESSION]


@contextmanager
def mcp(home: Path) -> Iterator[Prepared]:
    from palestra.extras.agent_tools.mcp_server import http_app

    headers = ["Accept: application/json, text/event-stream", "MCP-Protocol-Version: 2025-06-18"]
    with rl_clients(home) as clients:
        yield http_app(clients, None), "mcp", MCP, headers
