"""`palestra chat RUN_OR_MODEL`: chat with a model that has the tools and instructions of its agent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from palestra.agent_source import DEMO, AgentFile, load_agent_file
from palestra.cli.common import device_option, dtype_option, load_libraries
from palestra.cli.find_run import code_for_tools, find_run, model_of, require_trust, trust_option
from palestra.cli.summary import shorten
from palestra.core.errors import PalestraError
from palestra.core.messages import show_call, to_dict
from palestra.core.text import visible
from palestra.core.types import SamplingParams
from palestra.envs.discover import load_env
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.written import check_tool_calls
from palestra.rollout.agent_loop import AttemptLimits
from palestra.train.progress import task

if TYPE_CHECKING:
    from palestra.rollout.converse import ChatSession

_LOOK_S = 0.05
_HELP = "/reset starts a new conversation, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."
_ENDS = {  # the reason why an answer ended -> a note
    "truncated": "cut off: --max-new-tokens",
    "context_full": "cut off: the model's context is full; /reset",
    "tool_limit": "ended: too many rounds of tool calls",
    "cancelled": "stopped",
}


@dataclass(frozen=True)
class Partner:
    """A model by name, with its instructions and tools; `note` says what is missing."""

    model: str
    instructions: str = ""
    tools: Sequence[Any] = ()
    note: str = ""


@click.command("chat")
@click.argument("run_or_model")
@click.option("--agent", "agent_file", metavar="FILE", help="Agent file with its tools. [default: the run's own]")
@click.option("--instructions", metavar="TEXT", help="Replace the agent's instructions.")
@click.option("--once", metavar="QUESTION", help="Answer one question and end.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each answer; all else goes to stderr.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0: greedy decoding.")
@click.option("--max-new-tokens", default=512, show_default=True, type=click.IntRange(1), help="For one answer.")
@click.option("--seed", default=0, show_default=True)
@trust_option
@dtype_option
@device_option
def command(
    run_or_model: str,
    agent_file: str | None,
    instructions: str | None,
    once: str | None,
    as_json: bool,
    trust: bool,
    **options: Any,
) -> None:
    """Chat with a run's trained model, or any other; its tools are called, and each call is shown.

    RUN is a run's id, name or folder; RUN@50 or RUN@best is one of its checkpoints.

    \b
    palestra chat runs/shop-assistant-20260131-101500
    palestra chat palestra/smollm2
    palestra chat palestra/tiny --agent my_agent.py
    palestra chat RUN --once "What do 3 red lamps cost?" --json
    """
    console = Console(stderr=as_json)
    partner = _find_partner(run_or_model, agent_file, trust)
    if instructions is not None:
        partner = replace(partner, instructions=instructions)
    load_libraries(console, partner.model)
    session = _open(console, partner, **options)
    tools = [tool.name for tool in partner.tools]
    with asyncio.Runner() as runner:
        show = _as_json(console, session) if as_json else _as_text(console)
        try:
            if once is not None:
                _answer(runner, session, once, show)
                return
            with_tools = f"with the tools {', '.join(tools)}" if tools else "without tools"
            console.print(f"{partner.model}, {with_tools}. {_HELP}", style="dim", highlight=False, soft_wrap=True)
            if partner.note:
                console.print(partner.note, style="yellow", highlight=False, soft_wrap=True)
            _chat(runner, session, _typed_lines(console, session), show)
        finally:
            show("end", "")  # of the chat: the status line goes


def _find_partner(run_or_model: str, agent_file: str | None, trust: bool) -> Partner:
    """The run's own agent, or the one in `agent_file`; a model without a run has none."""
    model, _ = model_of(run_or_model)
    if agent_file is not None:
        file = load_agent_file(DEMO if agent_file == "demo" else agent_file)
        return Partner(model, file.agent.fixed_instructions, _tools_of(file))
    if (run := find_run(run_or_model)) is None:
        return Partner(model)
    record, environment = run.folder.record, run.folder.environment()
    instructions, source = str(record.get("instructions") or ""), record.get("source")
    if environment is None and not record.get("tools"):
        return Partner(model, instructions)
    if environment is None and source is None:
        note = "The run was started from Python, so its tools are not known; name them with --agent FILE"
        return Partner(model, instructions, note=note)
    require_trust(run.folder, code_for_tools(record), trust)
    if environment is not None:  # the tools of an environment belong to one problem: here, the first held-out one
        env = load_env(*environment)
        episode = env.open(env.problems("held_out")[0])
        instructions = "\n\n".join(message.text for message in episode.prompt if message.role == "system")
        # the last user message: solved examples may precede it
        question = next((message.text for message in reversed(episode.prompt) if message.role == "user"), "")
        return Partner(model, instructions, tuple(episode.tools), f"The tools are those of the problem: {question}")
    try:
        return Partner(model, instructions, _tools_of(load_agent_file(str(source))))
    except PalestraError as error:
        return Partner(model, instructions, note=f"Without its tools: {error} (--agent FILE names another)")


def _tools_of(file: AgentFile) -> Sequence[Any]:
    """The agent's tools; those that work on the state of an attempt get that of the first case."""
    context = file.suite.context_of(file.suite.cases[0])
    return tuple(tool.bind(context) for tool in file.agent.tools)


def _open(
    console: Console, partner: Partner, *, temperature: float, max_new_tokens: int, seed: int, dtype: str, device: str
) -> ChatSession:
    from palestra.models.loading import load_model
    from palestra.policy.build import build_policy
    from palestra.rollout.converse import ChatSession

    with task(console, f"loading {partner.model}"):
        loaded = load_model(partner.model, dtype=dtype, device=device)
        chat = ChatFormat(loaded.tokenizer)
        if partner.tools:
            check_tool_calls(chat)
        policy = build_policy(loaded.model.eval(), loaded.tokenizer, "auto")
    sampling = SamplingParams(max_new_tokens, temperature, stop_token_ids=chat.stop_token_ids, seed=seed)
    return ChatSession(policy, chat, partner.tools, AttemptLimits(sampling), partner.instructions)


# Called with ("so_far", text) while a message is sampled, ("message", Message) when it is whole, and at the end of an
# answer with ("done", reason) or ("error", text); at last with ("end", "").
Show = Callable[[str, Any], None]


def _chat(runner: asyncio.Runner, session: ChatSession, questions: Iterator[str], show: Show) -> None:
    """Answer questions until there are no more; SIGINT ends an answer."""
    for text in questions:
        try:
            _answer(runner, session, text, show)
        except KeyboardInterrupt:
            show("done", "cancelled")
        except PalestraError as error:
            show("error", str(error))


def _answer(runner: asyncio.Runner, session: ChatSession, text: str, show: Show) -> None:
    async def look() -> None:
        while True:
            show("so_far", session.so_far)
            await asyncio.sleep(_LOOK_S)

    async def answer() -> str:
        looking = asyncio.create_task(look())
        try:
            return await session.say(text, lambda message: show("message", message))
        finally:
            looking.cancel()

    show("done", runner.run(answer()))


def _typed_lines(console: Console, session: ChatSession) -> Iterator[str]:
    """Questions that are typed; commands begin with a slash."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 (gives input() a history)
    while True:
        try:
            text = input("\n› " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        match text:
            case "/quit" | "/exit" | "/q":
                return
            case "/reset":
                session.reset()
                console.print("(a new conversation)", style="dim")
            case _ if text.startswith("/"):
                console.print(_HELP, style="dim", highlight=False)
            case _ if text:
                yield text


def _as_text(console: Console) -> Show:
    """Show answers to people; on a terminal also while they are written."""
    status = console.status("…")

    def show(kind: str, data: Any) -> None:
        if kind == "so_far":
            if console.is_terminal:
                line, width = " ".join(visible(data).split()), console.width - 4  # its end, as one line
                status.start()
                shown = line if len(line) < width else f"…{line[len(line) - width + 1 :]}"
                status.update(Text(shown or "…", style="dim" if line else ""))
        elif kind == "message":
            if data.role == "tool":
                text = Text.assemble(("  → ", "dim"), (visible(shorten(data.text)), "magenta"))
                console.print(text, soft_wrap=True)
            elif data.text or not data.tool_calls:
                console.print(Text(visible(data.text)), soft_wrap=True)
            for call in data.tool_calls:
                text = Text.assemble(("  calls ", "dim"), (visible(show_call(call)), "blue"))
                console.print(text, soft_wrap=True)
        else:
            status.stop()
            if kind == "error":
                console.print(f"{data}  (/reset starts a new conversation)", style="red", highlight=False)
            elif data in _ENDS:
                console.print(f"({_ENDS[data]})", style="yellow", highlight=False)

    return show


def _as_json(console: Console, session: ChatSession) -> Show:
    """Print a line of JSON for each answer."""
    new: list[dict[str, Any]] = []
    show_text = _as_text(console)

    def show(kind: str, data: Any) -> None:
        if kind == "message":
            new.append(to_dict(data))
            return
        show_text(kind, data)
        if kind == "done" and data != "cancelled":
            last = session.messages[-1]
            answer = last.text if last.role == "assistant" else ""
            click.echo(json.dumps({"answer": answer, "stop": data, "messages": new}, ensure_ascii=False))
        if kind != "so_far":
            new.clear()

    return show
