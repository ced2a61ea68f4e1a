"""`palestra chat RUN_OR_MODEL`: chat with a model that has the tools and instructions of its agent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from palestra.agent_source import DEMO, AgentFile, load_agent_file
from palestra.cli.common import debug_option, device_option, dtype_option, load_libraries
from palestra.cli.find_run import find_run, model_of
from palestra.cli.summary import shorten
from palestra.cli.trust import code_for_tools, require_trust, trust_option
from palestra.core.errors import PalestraError
from palestra.core.messages import show_call, to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.show import visible
from palestra.core.types import Message, SamplingParams
from palestra.envs.load import load_env
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.written import check_tool_calls
from palestra.rollout.agent_loop import AttemptLimits
from palestra.train.progress import task

if TYPE_CHECKING:
    from palestra.rollout.converse import ChatSession

T = TypeVar("T")
_LOOK_S = 0.05
_HELP = "/reset starts a new conversation, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."


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
@click.option("--events", "as_events", is_flag=True, help="For programs: lines of JSON in and out.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0: greedy decoding.")
@click.option("--max-new-tokens", default=512, show_default=True, type=click.IntRange(1), help="For one answer.")
@click.option("--seed", default=0, show_default=True)
@trust_option
@dtype_option
@device_option
@debug_option
def command(
    run_or_model: str,
    agent_file: str | None,
    instructions: str | None,
    once: str | None,
    as_json: bool,
    as_events: bool,
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
    console = Console(stderr=as_json or as_events)
    partner = _find_partner(run_or_model, agent_file, instructions, trust)
    load_libraries(console, partner.model)
    session = _open(console, partner, **options)
    show = _shown_as_json(session) if as_json else _shown_to_people(console)
    with asyncio.Runner() as runner:
        if as_events:
            _serve_events(session, runner, partner)
        elif once is not None:
            _answer(console, runner, session, once, show)
        else:
            _greet(console, partner)
            _loop(console, runner, session, show)


def _find_partner(run_or_model: str, agent_file: str | None, instructions: str | None, trust: bool) -> Partner:
    """The run's own agent, or the one in `agent_file`; a model without a run has none."""
    model, _ = model_of(run_or_model)
    if agent_file is not None:
        file = load_agent_file(DEMO if agent_file == "demo" else agent_file)
        partner = Partner(model, file.agent.fixed_instructions, _tools_of(file))
    else:
        run = find_run(run_or_model)
        partner = Partner(model) if run is None else _of_run(model, run.folder, trust)
    return partner if instructions is None else replace(partner, instructions=instructions)


def _of_run(model: str, run: RunFolder, trust: bool) -> Partner:
    record = run.record
    if environment := run.environment():
        require_trust(run, code_for_tools(record), trust)
        return _of_environment(model, *environment)
    instructions = str(record.get("instructions") or "")
    source = record.get("source")
    if not record.get("tools"):
        return Partner(model, instructions)
    if source is None:
        note = "The run was started from Python, so its tools are not known; name them with --agent FILE"
        return Partner(model, instructions, note=note)
    require_trust(run, code_for_tools(record), trust)
    try:
        tools = _tools_of(load_agent_file(str(source)))
    except PalestraError as error:
        return Partner(model, instructions, note=f"Without its tools: {error} (--agent FILE names another)")
    return Partner(model, instructions, tools)


def _tools_of(file: AgentFile) -> Sequence[Any]:
    """The agent's tools; those that work on the state of an attempt get that of the first case."""
    context = file.suite.context_of(file.suite.cases[0])
    return tuple(tool.bind(context) for tool in file.agent.tools)


def _of_environment(model: str, name: str, settings: dict[str, Any]) -> Partner:
    """The tools of an environment belong to one problem: here, the first held-out one."""
    env = load_env(name, settings)
    episode = env.open(env.problems("held_out")[0])
    instructions = "\n\n".join(message.text for message in episode.prompt if message.role == "system")
    # the last user message: solved examples may precede it
    question = next((message.text for message in reversed(episode.prompt) if message.role == "user"), "")
    return Partner(model, instructions, tuple(episode.tools), f"The tools are those of the problem: {question}")


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


def _greet(console: Console, partner: Partner) -> None:
    tools = f"with the tools {', '.join(tool.name for tool in partner.tools)}" if partner.tools else "without tools"
    console.print(f"{partner.model}, {tools}. {_HELP}", style="dim", highlight=False, soft_wrap=True)
    if partner.note:
        console.print(partner.note, style="yellow", highlight=False, soft_wrap=True)


def _loop(console: Console, runner: asyncio.Runner, session: ChatSession, show: Show) -> None:
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
                session.reset()
                console.print("(a new conversation)", style="dim")
            case _ if text.startswith("/"):
                console.print(_HELP, style="dim", highlight=False)
            case _:
                try:
                    _answer(console, runner, session, text, show)
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


def _answer(console: Console, runner: asyncio.Runner, session: ChatSession, text: str, show: Show) -> None:
    async def answer() -> None:
        stop = await session.say(text, lambda message: show(message, ""))
        show(None, stop)

    if not console.is_terminal:
        runner.run(answer())
        return
    with console.status("…") as status:
        runner.run(_watched(answer(), lambda: status.update(_tail(session.so_far, console.width - 4))))


async def _watched(work: Coroutine[Any, Any, T], look: Callable[[], None], every_s: float = 0.1) -> T:
    """Run a coroutine, and call `look` every `every_s` seconds until it ends."""

    async def looking() -> None:
        while True:
            look()
            await asyncio.sleep(every_s)

    watcher = asyncio.create_task(looking())
    try:
        return await work
    finally:
        watcher.cancel()


def _tail(text: str, width: int) -> Text:
    """The end of an answer that is still being written, as one line."""
    line = " ".join(visible(text).split())
    return Text(line if len(line) < width else "…" + line[len(line) - width + 1 :], style="dim") if line else Text("…")


def _shown_to_people(console: Console) -> Show:
    def show(message: Message | None, stop: str) -> None:
        if message is None:
            if stop == "truncated":
                console.print("(cut off: --max-new-tokens)", style="yellow", highlight=False)
            elif stop == "context_full":
                console.print("(cut off: the model's context is full; /reset)", style="yellow", highlight=False)
            elif stop == "tool_limit":
                console.print("(ended: too many rounds of tool calls)", style="yellow", highlight=False)
            return
        if message.role == "tool":
            console.print(Text.assemble(("  → ", "dim"), (visible(shorten(message.text)), "magenta")), soft_wrap=True)
        elif message.text or not message.tool_calls:
            console.print(Text(visible(message.text)), soft_wrap=True)
        for call in message.tool_calls:
            console.print(Text.assemble(("  calls ", "dim"), (visible(show_call(call)), "blue")), soft_wrap=True)

    return show


def _shown_as_json(session: ChatSession) -> Show:
    new: list[dict[str, Any]] = []

    def show(message: Message | None, stop: str) -> None:
        if message is not None:
            new.append(to_dict(message))
            return
        last = session.messages[-1]
        answer = last.text if last.role == "assistant" else ""
        click.echo(json.dumps({"answer": answer, "stop": stop, "messages": new}, ensure_ascii=False))
        new.clear()

    return show


# A chat for programs: questions come as lines of JSON on stdin, everything that happens goes out as lines on stdout.
#
#   > {"say": "What do 3 red lamps cost?"}
#   < {"delta": "That"}                                  what has been sampled of the current message
#   < {"message": {"role": "assistant", "text": …}}      a whole one, in place of its deltas
#   < {"done": {"stop": "answered"}}                     or {"error": "…"}
#
# SIGINT ends an answer, the end of stdin the chat.


def _serve_events(session: ChatSession, runner: asyncio.Runner, partner: Partner) -> None:
    tools = [tool.name for tool in partner.tools]
    ready = {"model": partner.model, "instructions": partner.instructions, "tools": tools, "note": partner.note}
    _send("ready", ready)
    while line := _next_line():
        try:
            stop = runner.run(_answer_by_events(session, str(json.loads(line)["say"])))
            _send("done", {"stop": stop})
        except KeyboardInterrupt:
            _send("done", {"stop": "cancelled"})
        except PalestraError as error:
            _send("error", str(error))
        except (ValueError, KeyError, TypeError):
            _send("error", 'expected a line such as {"say": "…"}')


def _next_line() -> str:
    while True:
        try:
            return sys.stdin.readline()
        except KeyboardInterrupt:  # it came after the answer had ended
            continue


async def _answer_by_events(session: ChatSession, text: str) -> str:
    sent = ""

    def on_message(message: Message) -> None:
        nonlocal sent
        sent = ""
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments, "error": c.error} for c in message.tool_calls]
        _send("message", {"role": message.role, "text": message.text, "tool_calls": calls, "name": message.name})

    def look() -> None:
        nonlocal sent
        now = session.so_far
        # a character of several tokens changes until it is whole
        if now.startswith(sent) and len(now) > len(sent) and not now.endswith("\ufffd"):
            _send("delta", now[len(sent) :])
            sent = now

    return await _watched(session.say(text, on_message), look, _LOOK_S)


def _send(kind: str, data: Any) -> None:
    click.echo(json.dumps({kind: data}))
    sys.stdout.flush()
