"""An environment written against atroposlib and nothing else: the more digits in an answer, the better.

One turn through the managed server (server_type sglang or vllm), or two turns in chat (server_type openai).
"""

from __future__ import annotations

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class DigitsConfig(BaseEnvConfig):
    turns: int = 1


class Digits(BaseEnv):
    name = "digits"
    env_config_cls = DigitsConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="m", base_url="http://localhost:9001/v1", server_type="sglang")
        return DigitsConfig(group_size=4, max_token_length=256), [server]

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return {"role": "user", "content": f"What is {self.number % 9} + {self.number % 7}?"}

    async def collect_trajectories(self, item):
        if self.config.turns > 1:
            return await self.talk(item), []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[item], n=self.config.group_size, max_tokens=16, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            scores=[score(node.full_text) for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
        ), []

    async def talk(self, item):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for _ in range(self.config.group_size):
            chat = [item]
            for turn in range(self.config.turns):
                answer = await self.server.chat_completion(messages=chat, n=1, max_tokens=16, temperature=1.0)
                choice = answer.choices[0]
                chat = [*chat, {"role": "assistant", "content": choice.message.content}]
                if turn + 1 < self.config.turns:
                    chat = [*chat, {"role": "user", "content": "Say it again."}]
            row = tokenize_for_trainer(
                self.tokenizer, chat, train_on_all_assistant_turns=True, finish_reason=choice.finish_reason
            )
            group["tokens"].append(row["tokens"])
            group["masks"].append(row["masks"])
            group["scores"].append(sum(score(m["content"]) for m in chat if m["role"] == "assistant"))
        return group

    async def evaluate(self, *args, **kwargs):
        pass


def score(text: str) -> float:
    return sum(c.isdigit() for c in text) / 20


if __name__ == "__main__":
    Digits.cli()
