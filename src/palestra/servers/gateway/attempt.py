"""One attempt of an agent: its key, its conversations with the model, and in the end its rollout."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.errors import ContextLengthError, PalestraError, StateError
from palestra.core.messages import with_unique_ids
from palestra.core.types import (
    Lineage,
    Message,
    Problem,
    Rollout,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
)
from palestra.models.chat.template import PROMPT_END_TOKENS
from palestra.models.chat.toolcalls import Reply, strip_reasoning
from palestra.rollout.agent_loop import check_record
from palestra.rollout.collect import seed_of
from palestra.servers.forwarding import new_key
from palestra.servers.gateway.conversation_tree import ConversationTree, Prompt, SharedPrompts, TurnNode
from palestra.servers.gateway.request import ChatAnswer, ChatRequest, Piece, PromptSize, params_of
from palestra.servers.gateway.responses import StoredResponses
from palestra.servers.openai.completer import Completer, SamplingRequest, decode


@dataclass(frozen=True, slots=True)
class AttemptCounts:
    """Statistics of an attempt. A linear agent has one lineage, and nothing recomputed or re-tokenised."""

    requests: int
    turns: int
    lineages: int
    sampled_tokens: int
    recomputed_tokens: int
    retokenised_turns: int
    discarded_turns: int  # that get no reward: rejected choices, repeated requests, side calls


@dataclass(eq=False, repr=False)
class Attempt:
    """Made by `Gateway.open`. Used in the gateway's event loop alone.

    With `records=False` nothing is recorded, every request is a conversation of its own, and seeds are random unless
    the client sets them: `palestra serve` answers all requests by one such attempt.
    """

    problem: Problem
    model: Completer
    gateway_url: str
    sampling: SamplingParams
    seed: int
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    api_key: str = field(default_factory=new_key)
    client_sampling: bool = False
    records: bool = True
    shared_prompts: SharedPrompts | None = None
    on_end: Callable[[Attempt], None] = lambda attempt: None

    def __post_init__(self) -> None:
        shared = self.shared_prompts or SharedPrompts(self.model.policy, int(self.records))
        self.tree = ConversationTree(self.model, shared)
        self.ended = False
        self.requests = 0
        self.stored = StoredResponses()
        self.failure: Exception | None = None  # of the policy, not of the agent
        self.sampling = replace(self.sampling, stop_token_ids=self.sampling.stop_token_ids or self.model.eos)
        self._under_way: set[asyncio.Task[Any] | None] = set()  # the tasks that sample
        self._nobody_samples = asyncio.Event()
        self._began = time.perf_counter()

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self.anthropic_base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        return f"{self.gateway_url}/attempt/{self.id}"

    @property
    def counts(self) -> AttemptCounts:
        tree = self.tree
        return AttemptCounts(
            requests=self.requests,
            turns=len(tree.nodes),
            lineages=len(tree.leaves),
            sampled_tokens=sum(len(node.sampled.token_ids) for node in tree.nodes),
            recomputed_tokens=tree.recomputed_tokens,
            retokenised_turns=tree.retokenised_turns,
            discarded_turns=len(tree.nodes) - len(tree.trained_nodes()),
        )

    async def finish(self) -> Rollout:
        """End the attempt: cancel turns in progress, refuse the key from now on, and return all conversations.

        The rollout is the conversation of the last turn; the others are its `lineages`. No turns: "failed".
        """
        if not self.ended:
            self.ended = True
            self.on_end(self)
            while self._under_way:
                self._nobody_samples.clear()
                for task in self._under_way:
                    if task is not None:
                        task.cancel()
                await self._nobody_samples.wait()
            self.tree.close()
        if self.failure is not None:
            raise self.failure
        return self._rollout()

    async def answer(self, request: ChatRequest) -> list[ChatAnswer]:
        """Sample the next assistant message `n` times. Cancelling this cancels the sampling."""
        with self._turns(request, await self._place(request)) as turns:
            if len(turns) == 1:  # in this task: one of its own would take longer than the rest
                return [await self._record(request, turns[0], await self._sample(turns[0]))]
            tasks = self._begin(turns)
            await asyncio.wait(tasks)
            return [await self._record(request, turn, task.result()) for turn, task in zip(turns, tasks, strict=True)]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Piece, None]:
        """Yield the prompt's size, then each choice's deltas and, at its end, its ChatAnswer.

        Yields (-1, None) while nothing is new, so that the caller can check whether its client is connected.
        """
        with self._turns(request, await self._place(request)) as turns:
            tasks = self._begin(turns)
            # a refusal of the policy comes before the stream begins
            for turn in turns:
                await self.model.policy.follow(turn.session)
            for task in tasks:
                if task.done():
                    task.result()
            yield -1, turns[0].size
            chat = self.model.chat
            with_tools = bool(request.tools and request.reads_calls)
            replies = [chat.stream(with_tools=with_tools, prompt_end=self._prompt_end(turn)) for turn in turns]
            sessions, first = [turn.session for turn in turns], turns[0]
            async for i, piece in self.model.texts(tasks, sessions, first.size.tokens, first.params):
                if piece is None:
                    yield -1, None
                elif isinstance(piece, str):
                    for delta in replies[i].push(piece):
                        yield i, delta
                else:
                    answer = await self._record(request, turns[i], piece)
                    said = Reply(answer.thinking, answer.message.text)
                    for delta in replies[i].rest(said, answer.completion.text):
                        yield i, delta
                    yield i, answer

    async def count_tokens(self, request: ChatRequest) -> int:
        return (await self._place(request)).token_count

    async def _place(self, request: ChatRequest) -> Prompt:
        return await self.tree.place(request.messages, request.tools, request.variables)

    @contextlib.contextmanager
    def _turns(self, request: ChatRequest, prompt: Prompt) -> Iterator[list[TurnNode]]:
        """The turns of a request; those that are not recorded at the end are discarded."""
        if self.ended:
            raise _ended()
        self.requests += 1
        session, cached = self.tree.open(prompt)
        try:
            limit = self._room(prompt, session)
            if request.top_logprobs:
                params = params_of(request, self.sampling, self.client_sampling, limit, 0)
                self.model.check_scoring(SamplingRequest((), 1, params, top_logprobs=request.top_logprobs))
            sessions = [session]
            if request.fields.choices > 1:
                self.model.check_total(len(session.token_ids) * request.fields.choices)
                sessions = self.tree.prompts.fork(session, request.fields.choices)
        except BaseException:
            self.tree.prompts.close_session(session)
            raise
        turns, depth = list[TurnNode](), len(prompt.path)
        for i, each in enumerate(sessions):
            number = self.tree.take_number(prompt.place)
            if not self.records:
                seed = random.getrandbits(62)
            else:  # the attempt's seed plus the turn's depth, as in the agent loop; repeated requests get other seeds
                seed = self.seed + depth if number == 0 else seed_of(f"{self.seed}/{depth}/{number}")
            params = params_of(request, self.sampling, self.client_sampling, limit, seed, i)
            turns.append(TurnNode(prompt, each, params, PromptSize(len(each.token_ids), cached), number))
        self.model.on_request(len(turns), turns[0].params)
        try:
            yield turns
        finally:
            for turn in turns:
                if turn.number < 0:  # not in the tree
                    if turn.task is not None:
                        turn.task.cancel()
                    self.tree.prompts.close_session(turn.session)
                    self.tree.free_number(prompt.place, turn.place_number)

    def _begin(self, turns: Sequence[TurnNode]) -> list[asyncio.Task[Turn]]:
        """Sample each turn in a task of its own."""
        tasks = [asyncio.create_task(self._sample(turn)) for turn in turns]
        for turn, task in zip(turns, tasks, strict=True):
            turn.task = task
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # others may have failed first
        return tasks

    async def _sample(self, turn: TurnNode) -> Turn:
        """Sample a turn in the calling task; the end of the attempt cancels it."""
        task = asyncio.current_task()
        self._under_way.add(task)
        try:
            return await self.model.policy.sample(turn.session, turn.params)
        except asyncio.CancelledError:
            if not self.ended or task is None:
                raise
            task.uncancel()
            raise _ended() from None
        except Exception as error:
            if not isinstance(error, PalestraError):
                self.failure = error
            raise
        finally:
            self._under_way.discard(task)
            if not self._under_way:
                self._nobody_samples.set()

    def _room(self, prompt: Prompt, session: Any) -> int:
        """Number of tokens that may be sampled: the rest of the lineage's budget and of the context."""
        left = self.sampling.max_new_tokens - sum(len(node.sampled.token_ids) for node in prompt.path)
        if left <= 0:
            if prompt.parent is not None:
                prompt.parent.refused = True
            raise ContextLengthError(
                f"this conversation has used up its {self.sampling.max_new_tokens} new tokens, which count over all "
                "turns; raise rollout.max_new_tokens, or let the agent say less",
                self.model.context_tokens,
            )
        return min(left, self.model.room_after(len(session.token_ids), "conversation"))

    async def _record(self, request: ChatRequest, turn: TurnNode, sampled: Turn) -> ChatAnswer:
        start = turn.size.tokens
        check_record(turn.session, start, sampled)
        completion = self.model.completion(sampled, turn.params)
        if request.top_logprobs:
            ids = tuple(turn.session.token_ids[:start])
            scored = SamplingRequest(ids, 1, turn.params, top_logprobs=request.top_logprobs)
            completion = await self.model.scored(scored, completion)
        tools = request.tools if request.reads_calls else ()
        said = self.model.read_reply(completion.text, tools, self._prompt_end(turn))
        calls = said.calls
        reply = Message("assistant", strip_reasoning(said.text), calls)
        if self.records:  # unique in the attempt, and reproducible
            texts = [f"{self.seed}/{len(self.tree.nodes)}/{i}" for i in range(len(calls))]
            call_ids = tuple(f"call_{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}" for text in texts)
            has_stop_token = isinstance(completion.matched, int)
            self.tree.add(turn, reply, sampled, call_ids, has_stop_token)
        else:
            call_ids = tuple(f"call_{secrets.token_hex(12)}" for _ in calls)
        if not calls:
            self.model.policy.skip_tool_barrier(turn.session)
        shown = replace(reply, tool_calls=tuple(replace(c, id=i) for c, i in zip(calls, call_ids, strict=True)))
        return ChatAnswer(shown, said.reasoning, completion, turn.size, turn.session.token_ids)

    def _prompt_end(self, turn: TurnNode) -> str:
        """The end of the prompt, which shows whether it opened the reasoning."""
        end = turn.size.tokens
        return decode(self.model.tokenizer, turn.session.token_ids[max(0, end - PROMPT_END_TOKENS) : end])

    def _rollout(self) -> Rollout:
        rows = dict(self.tree.rows())
        if not rows:
            return Rollout(self.problem.id, (), (), "failed")
        last, results = self.tree.nodes[-1], list[ToolResult]()  # of the agent's tools, as far as its messages show
        messages, calls = self._recorded(last), dict[str | None, ToolCall]()
        for message in messages:
            calls |= {call.id: call for call in message.tool_calls}
            if message.role == "tool" and (call := calls.get(message.tool_call_id)) is not None:
                results.append(ToolResult(call, message.text))
        return Rollout(
            self.problem.id,
            rows.pop(last),
            messages,
            self._stop_reason(last),
            tool_results=tuple(results),
            seconds=time.perf_counter() - self._began,
            tool_names=tuple(dict.fromkeys(name for node in last.path for name in node.prompt.tool_names)),
            lineages=tuple(Lineage(row, self._recorded(end), self._stop_reason(end)) for end, row in rows.items()),
        )

    def _recorded(self, leaf: TurnNode) -> tuple[Message, ...]:
        """The messages of a conversation, its calls with ids of their own if the model does not read them."""
        return leaf.messages if self.model.chat.shows_call_ids else tuple(with_unique_ids(leaf.messages))

    def _stop_reason(self, leaf: TurnNode) -> StopReason:
        if leaf.refused:
            return "truncated"
        if leaf.sampled.finish == "stop":
            return "answered"
        return "context_full" if leaf.token_count >= self.model.context_tokens else "truncated"


def _ended() -> StateError:
    return StateError("this attempt has ended; its key is not valid any more")
