"""Models of this process that help in rollouts: the policy itself, or another one that is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from palestra.core.chat_model import POLICY, Chat
from palestra.core.errors import UnsupportedError
from palestra.core.types import Message, SamplingParams
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.policy.build import build_policy
from palestra.policy.channel import ChannelPolicy


@dataclass(frozen=True, slots=True)
class LocalModels:
    """Chats with the policy, and with models by name, which are loaded once for the whole process."""

    policy: Policy[Any] | None = None
    format: ChatFormat | None = None

    async def chat(
        self, name: str, messages: Chat, max_new_tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        policy, chat = self.policy, self.format
        if name != POLICY:
            if isinstance(policy, ChannelPolicy):
                raise UnsupportedError(
                    f"the helper model {name!r} cannot be loaded in a worker process; set rollout.workers to 0, or use "
                    "an endpoint"
                )
            policy, chat = load_chat(name)
        if policy is None or chat is None:
            raise UnsupportedError(
                f"the model {POLICY!r} is the one in training, and here there is none; name a model or an endpoint"
            )
        opening = [Message(m["role"], m["content"]) for m in messages]  # type: ignore[arg-type]
        session = policy.open((prompt := chat.prompt(opening)).token_ids.tolist())
        try:
            stops = chat.stop_token_ids
            sampling = SamplingParams(max_new_tokens, temperature, stop_token_ids=stops, seed=seed)
            turn = await policy.sample(session, sampling)
        finally:
            policy.close(session)
        text = chat.read_text(turn.token_ids.tolist(), prompt.token_ids.tolist())
        usage = {"prompt_tokens": len(prompt.token_ids), "completion_tokens": len(turn.token_ids)}
        return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


@lru_cache(maxsize=8)
def load_chat(name: str) -> tuple[Policy[Any], ChatFormat]:
    """A model of this machine that only samples. Loading blocks the event loop, once."""
    from palestra.models.loading import load_model  # here: it imports torch

    loaded = load_model(name)
    model = loaded.model.eval().requires_grad_(False)
    return build_policy(model, loaded.tokenizer, "auto"), ChatFormat(loaded.tokenizer)
