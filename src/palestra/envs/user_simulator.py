"""A simulated user: a model that plays the person whom the agent talks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.core.calls import call_user_code
from palestra.core.chat_model import CallLimits, ChatModel
from palestra.core.errors import SettingError
from palestra.core.types import Message, Problem

DONE = "###DONE###"
_CASE_TIMEOUT_S = 300.0  # of a function of the case
_TASK = f"""You play a person who talks to an assistant. Stay in this role; you are not the assistant and never help it.
Write only what this person says next: one message, in the first person, short and natural. Tell what you know when you
are asked for it, not all at once, and invent nothing that your goal does not say.
When your goal is reached, or clearly cannot be reached, answer with {DONE} and nothing else."""

OfCase = str | Callable[[Mapping[str, Any]], Any]


class UserSimulator:
    """Continues the conversation after each answer of the agent, until its goal is reached.

    `model` is a name at an OpenAI-style endpoint (`base_url`), a local model ("local/Qwen/Qwen3-0.6B", a folder), or
    "policy". `persona` and `goal` are texts, or functions of the case's record; by default the record's columns
    `persona` and `goal`. The user says at most `max_messages` after the first one. `limits` are those of a judge.

        suite = EvalSuite.from_records(rows, measures=[…], user=UserSimulator("gpt-5-mini", "Impatient.", "A refund."))

    In an `Env`: `async def step(self, answer): return await self.user.reply(self.messages, self.problem)`.
    """

    def __init__(
        self,
        model: str,
        persona: OfCase | None = None,
        goal: OfCase | None = None,
        *,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        max_messages: int = 5,
        temperature: float | None = 0.7,
        max_new_tokens: int | None = None,
        **limits: Any,
    ) -> None:
        if max_messages < 1:
            raise SettingError(f"UserSimulator: max_messages={max_messages}; expected at least 1")
        self._persona, self._goal = persona, goal
        self._max_messages = max_messages
        self._model = ChatModel(
            model,
            base_url,
            purpose="user",
            api_key_env=api_key_env,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            cache=False,  # conversations hardly ever come again
            limits=CallLimits.of("UserSimulator", limits),
        )

    async def reply(self, messages: Sequence[Message], case: Problem) -> str | None:
        """The next message of the user, or None at the end; RolloutError if the model gives no answer."""
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        opening = sum(1 for i in users if not any(m.role == "assistant" for m in messages[:i]))
        count = len(users) - opening
        if count >= self._max_messages:
            return None
        about = []
        for column, heading, own in (("persona", "Who you are", self._persona), ("goal", "Your goal", self._goal)):
            value = case.row.get(column, "") if own is None else own
            if callable(own):
                value = await call_user_code(f"the simulated user's {column}", own, case.row, limit_s=_CASE_TIMEOUT_S)
            if value and str(value):
                about.append(f"# {heading}\n{value}")
        # the roles are exchanged; the user sees no instructions and no tools
        spoken = [m for m in messages if m.role in ("user", "assistant") and m.text.strip()]
        heard = "\n\n".join(f"{'You' if m.role == 'user' else 'Assistant'}: {m.text}" for m in spoken)
        question = "\n\n".join([*about, f"# The conversation so far\n{heard}", "What do you say next?"])
        chat = [{"role": "system", "content": _TASK}, {"role": "user", "content": question}]
        text = await self._model.ask(chat, str.strip, seed=count)
        return None if not text or DONE in text else text
