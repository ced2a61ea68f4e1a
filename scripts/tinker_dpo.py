"""The cookbook's DPO trainer on comparisons in a local file: short answers are preferred to long ones.

    python scripts/tinker_dpo.py MODEL RENDERER URL LOG_FOLDER STEPS

Runs in the cookbook's environment (`make test-tinker` makes one). The recipe's own command takes
datasets of the hub alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

THINGS = ("a cup", "the moon", "a river", "paper", "a clock", "snow", "a bridge", "salt")
SHORT, LONG = "It is {}.", "Well, that is a very good question, and I would like to say at length that it is {}."


def comparison(i: int) -> dict[str, object]:
    thing = THINGS[i % len(THINGS)]
    answers = [[{"role": "assistant", "content": text.format(thing)}] for text in (SHORT, LONG)]
    question = [{"role": "user", "content": f"What is number {i}?"}]
    first, second = answers if i % 2 else answers[::-1]
    pair = {"prompt_conversation": question, "completion_A": first, "completion_B": second}
    return {"comparison": pair, "label": "A" if i % 2 else "B"}


def main() -> None:
    model, renderer, url, log, steps = sys.argv[1:]
    folder = Path(log)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "comparisons.jsonl"
    data.write_text("".join(json.dumps(comparison(i)) + "\n" for i in range(8 * int(steps))))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=renderer, max_length=256, batch_size=8
    )
    comparisons = ComparisonBuilderFromJsonl(train_path=str(data))
    train_dpo.main(
        train_dpo.Config(
            log_path=log,
            model_name=model,
            renderer_name=renderer,
            recipe_name="local_dpo",
            dataset_builder=DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons),
            base_url=url,
            learning_rate=1e-3,
            dpo_beta=0.1,
            lora_rank=8,
            save_every=0,
            eval_every=0,
            max_steps=int(steps),
        )
    )


if __name__ == "__main__":
    main()
