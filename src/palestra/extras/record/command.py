"""`palestra record`: record what an agent says to an API; `palestra gateway`: the exact tokens of attempts."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli.common import device_option, dtype_option, load_libraries, out_option
from palestra.cli.find_run import model_of
from palestra.cli.serve import PORT, address_options, require_serve_extra, run_server, server_port


@click.command("record")
@out_option("For traces.", "traces.jsonl")
@click.option("--upstream", metavar="URL", help="The API. [default: OpenAI's or Anthropic's, by the request]")
@click.option("--port", default=8005, show_default=True, type=PORT, help="0: any free.")
def record(out: Path, upstream: str | None, port: int) -> None:
    """Record what an agent and an OpenAI- or Anthropic-style API say to each other, as chat JSONL.

    All passes through unchanged, streams too. Your key goes to the API and is written nowhere.

    \b
    palestra record --out traces.jsonl
    OPENAI_BASE_URL=http://127.0.0.1:8005/v1 ANTHROPIC_BASE_URL=http://127.0.0.1:8005 python my_agent.py
    palestra eval --cases traces.jsonl --measure score.py:score
    """
    socket = server_port("127.0.0.1", port, None)
    from palestra.extras.record.recorder import Recorder

    run_server(Recorder(out, upstream).app(), socket, f"traces go to {out}; set OPENAI_BASE_URL to", "/v1")


@click.command("gateway")
@click.argument("run_or_model")
@out_option("For rollouts.", "rollouts.jsonl")
@click.option("--cases", metavar="FILE", help="Cases as JSON lines, handed out one after the other.")
@click.option("--max-new-tokens", default=1024, show_default=True, type=click.IntRange(1), help="Of one conversation.")
@address_options(8005)
@dtype_option
@device_option
def gateway(
    run_or_model: str, out: Path, cases: str | None, max_new_tokens: int, dtype: str, device: str, **address: Any
) -> None:
    """Serve a model to agents and record the exact tokens of each attempt, without a training.

    \b
    palestra gateway palestra/tiny --out rollouts.jsonl
    curl http://127.0.0.1:8005/attempts --json '{"input": "What does a red lamp cost?"}'
      → {"id": …, "base_url": …, "api_key": …}; point an agent there, and end it with
    curl http://127.0.0.1:8005/attempts/ID/reward -H "Authorization: Bearer KEY" --json '{"reward": 1}'

    With --host 0.0.0.0, agents in containers and on other machines open attempts with the token as bearer token.
    """
    require_serve_extra()
    from palestra.evals.suite import EvalSuite
    from palestra.servers.web import check_token

    check_token(address["host"], address["token"])
    suite = EvalSuite.from_jsonl(cases) if cases else ()
    model, _ = model_of(run_or_model)
    load_libraries(Console(stderr=True), model)
    from palestra.servers.openai.inference import load_completer
    from palestra.sources.programs.outside import StandaloneGateway

    completer = load_completer(model, dtype=dtype, device=device)
    lone = StandaloneGateway(completer, out, cases=tuple(suite), max_new_tokens=max_new_tokens, **address)
    click.echo(f"{model} is served at {lone.gateway.url}; POST /attempts opens an attempt, rollouts go to {out}")

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await lone.gateway.start()
        await stop.wait()
        await lone.gateway.close()

    asyncio.run(serve())
