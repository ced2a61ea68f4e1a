"""`palestra chat RUN_OR_MODEL`: chat with a model that has its agent's tools."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from palestra.core.types import Message
    from palestra.faces.cli.chat_partner import Partner
    from palestra.rollout.converse import ChatSession

_HELP = "/reset starts a new conversation, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."


@click.command("chat")
@click.argument("run_or_model")
@click.option("--agent", "agent_file", metavar="FILE", help="Agent file with its tools. [default: the run's own]")
@click.option("--instructions", metavar="TEXT", help="Replace the agent's instructions.")
@click.option("--once", metavar="QUESTION", help="Answer one question and end.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each answer; all else goes to stderr.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0: greedy decoding.")
@click.option("--max-new-tokens", default=512, show_default=True, type=click.IntRange(1), help="For one answer.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16", "float16"]))
@click.option("--device", default="auto", help="auto, cpu, cuda, cuda:0, …")
@settings.debug_option
def command(
    run_or_model: str, agent_file: str | None, instructions: str | None, once: str | None, as_json: bool, **options: Any
) -> None:
    """Chat with a run's trained model, or any other; its tools are called, and each call is shown.

    RUN is a run's id, name or folder.

    \b
    palestra chat runs/shop-assistant-20260131-101500
    palestra chat palestra/smollm2
    palestra chat palestra/tiny --agent my_agent.py
    palestra chat RUN --once "What do 3 red lamps cost?" --json
    """
    from rich.console import Console

    from palestra.faces.cli.chat_partner import find_partner
    from palestra.faces.cli.common import load_libraries

    console = Console(stderr=as_json)
    partner = find_partner(run_or_model, agent_file, instructions)
    load_libraries(console, partner.model)
    talk = _open(console, partner, **options)
    show = _shown_as_json(talk) if as_json else _shown_to_people(console)
    with asyncio.Runner() as runner:
        if once is not None:
            _answer(console, runner, talk, once, show)
        else:
            _greet(console, partner)
            _loop(console, runner, talk, show)


def _open(
    console: Console, partner: Partner, *, temperature: float, max_new_tokens: int, seed: int, dtype: str, device: str
) -> ChatSession:
    from palestra.chat.template import ChatFormat
    from palestra.core.types import SamplingParams
    from palestra.models.loading import load_model
    from palestra.policy.build import build_policy
    from palestra.rollout.agent_loop import AttemptLimits
    from palestra.rollout.converse import ChatSession

    with console.status(f"loading {partner.model} …"):
        loaded = load_model(partner.model, dtype=dtype, device=device)
        chat = ChatFormat(loaded.tokenizer)
        policy = build_policy(loaded.model.eval(), loaded.tokenizer, "auto")
    sampling = SamplingParams(max_new_tokens, temperature, stop_token_ids=chat.stop_token_ids, seed=seed)
    return ChatSession(policy, chat, partner.tools, AttemptLimits(sampling), partner.instructions)


def _greet(console: Console, partner: Partner) -> None:
    tools = f"with the tools {', '.join(tool.name for tool in partner.tools)}" if partner.tools else "without tools"
    console.print(f"{partner.model}, {tools}. {_HELP}", style="dim", highlight=False, soft_wrap=True)
    if partner.note:
        console.print(partner.note, style="yellow", highlight=False, soft_wrap=True)


def _loop(console: Console, runner: asyncio.Runner, talk: ChatSession, show: Show) -> None:
    while True:
        try:
            text = _ask(console).strip()
        except (EOFError, KeyboardInterrupt):
            return
        match text:
            case "":
                continue
            case "/quit" | "/exit" | "/q":
                return
            case "/reset":
                talk.reset()
                console.print("(a new conversation)", style="dim")
            case _ if text.startswith("/"):
                console.print(_HELP, style="dim", highlight=False)
            case _:
                try:
                    _answer(console, runner, talk, text, show)
                except KeyboardInterrupt:
                    console.print("(stopped)", style="yellow")
                except PalestraError as error:
                    console.print(f"{error}  (/reset starts a new conversation)", style="red", highlight=False)


def _ask(console: Console) -> str:
    if not sys.stdin.isatty():
        return input()
    import readline  # noqa: F401 (gives input() a history)

    return input("\n› ")


# Called with each message, and at the end of an answer with None and the reason why it ended.
Show = Callable[["Message | None", str], None]


def _answer(console: Console, runner: asyncio.Runner, talk: ChatSession, text: str, show: Show) -> None:
    async def answer() -> None:
        stop = await talk.say(text, lambda message: show(message, ""))
        show(None, stop)

    if not console.is_terminal:
        runner.run(answer())
        return
    with console.status("…") as status:
        runner.run(_watched(answer(), lambda: status.update(_tail(talk.so_far, console.width - 4))))


async def _watched(work: Coroutine[Any, Any, None], look: Callable[[], None]) -> None:
    """Run a coroutine, and call `look` ten times a second."""

    async def looking() -> None:
        while True:
            look()
            await asyncio.sleep(0.1)

    watcher = asyncio.create_task(looking())
    try:
        await work
    finally:
        watcher.cancel()


def _tail(text: str, width: int) -> Text:
    """The end of an answer that is still being written, as one line."""
    from rich.text import Text

    line = " ".join(text.split())
    return Text(line if len(line) < width else "…" + line[len(line) - width + 1 :], style="dim") if line else Text("…")


def _shown_to_people(console: Console) -> Show:
    from rich.text import Text

    from palestra.faces.cli.summary import shorten, show_call

    def show(message: Message | None, stop: str) -> None:
        if message is None:
            if stop == "truncated":
                console.print("(cut off: --max-new-tokens)", style="yellow", highlight=False)
            elif stop == "tool_limit":
                console.print("(ended: too many rounds of tool calls)", style="yellow", highlight=False)
            return
        if message.role == "tool":
            console.print(Text.assemble(("  → ", "dim"), (shorten(message.text), "magenta")), soft_wrap=True)
        elif message.text or not message.tool_calls:
            console.print(Text(message.text), soft_wrap=True)
        for call in message.tool_calls:
            console.print(Text.assemble(("  calls ", "dim"), (show_call(call), "blue")), soft_wrap=True)

    return show


def _shown_as_json(talk: ChatSession) -> Show:
    from palestra.core.messages import to_dict

    new: list[dict[str, Any]] = []

    def show(message: Message | None, stop: str) -> None:
        if message is not None:
            new.append(to_dict(message))
            return
        last = talk.messages[-1]
        answer = last.text if last.role == "assistant" else ""
        click.echo(json.dumps({"answer": answer, "stop": stop, "messages": new}, ensure_ascii=False))
        new.clear()

    return show
