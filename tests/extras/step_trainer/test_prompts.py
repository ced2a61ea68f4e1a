"""A reward of one's own for prompts: it may take its time, and may not be called twice at once."""

import asyncio
import threading
import time

from palestra.core.types import Message, Problem
from palestra.extras.step_trainer.prompts import PromptEpisode, reward_function


def test_a_reward_that_blocks_runs_off_the_event_loop_and_one_at_a_time() -> None:
    inside, most, threads = 0, 0, set()

    def reward(output: str, expected_answer: str) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threads.add(threading.get_ident())
        time.sleep(0.002)
        inside -= 1
        return float(output == expected_answer)

    async def all_scored() -> list[float]:
        episode = PromptEpisode(Problem("p", "2 + 2?", "4"), reward_function(reward))
        said = [(Message("assistant", text),) for text in ("4", "5", "4")]
        return [scores["reward"].value for scores in await asyncio.gather(*(episode.score(m, ()) for m in said))]

    assert asyncio.run(all_scored()) == [1.0, 0.0, 1.0]
    assert most == 1
    assert threading.get_ident() not in threads
