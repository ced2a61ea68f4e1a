"""`palestra record`: record what an agent says to an API."""

from __future__ import annotations

from pathlib import Path

import click

from palestra.cli.common import out_option
from palestra.cli.serve import port_option, run_server, server_port


@click.command("record")
@out_option("For traces.", "traces.jsonl")
@click.option("--upstream", metavar="URL", help="The API. [default: OpenAI's or Anthropic's, by the request]")
@port_option(8005)
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
