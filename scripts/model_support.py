"""What works for which model architecture: tries each with a tiny random model, and writes the table of docs/models.md.

    python scripts/model_support.py

A row says what was seen, nothing else. The engine's and the learner's own checks compare with the model's forward.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from palestra.core.config_sections import LoraSection
from palestra.core.errors import UnsupportedModel
from palestra.engine.engine import Engine
from palestra.extras.gguf.config import is_written_here
from palestra.learner.forward import Scorer
from palestra.learner.lora import add_lora
from palestra.plan.shape import shape_of

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from engine_families import tiny_model  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MARKS = ("<!-- model support: scripts/model_support.py -->", "<!-- end of model support -->")
NAMES = {
    "llama": "Llama 2, 3",
    "qwen2": "Qwen2, 2.5",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n (text)",
    "gemma4_text": "Gemma 4 (text)",
    "phi3": "Phi-3, Phi-4",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "granite": "Granite 3",
    "gpt2": "GPT-2",
    "qwen3_moe": "Qwen3 MoE",
    "olmoe": "OLMoE",
    "granitemoe": "Granite 3 MoE",
    "gpt_oss": "gpt-oss",
    "llama4_text": "Llama 4 (text)",
    "lfm2": "LFM2, LFM2.5",
    "lfm2_moe": "LFM2 MoE",
    "qwen3_5_text": "Qwen3.5, 3.6 (text)",
    "qwen3_5_moe_text": "Qwen3.5 MoE (text)",
    "qwen3_next": "Qwen3-Next",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "granitemoehybrid": "Granite 4",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "olmo_hybrid": "OLMo Hybrid",
    "kimi_linear": "Kimi Linear",
    "olmo3": "OLMo 3",
    "ministral3": "Ministral 3",
    "seed_oss": "Seed-OSS",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "deepseek_v3": "DeepSeek-V3, R1",
    "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral",
}
COLUMNS = ("family", "architecture", "engine", "learner", "LoRA", "merged export", "GGUF", "plan")
IDS = torch.tensor([[5, 17, 99, 23, 64, 3, 42, 81, 7]])


def row_of(family: str) -> list[str]:
    """The table's row of one architecture."""
    model = tiny_model(family)
    config = model.config
    cells = [NAMES[family], f"`{family}`", _engine(model), _learner(model)]
    targets = ["all-linear", "experts"] if _has_stacked_experts(model) else None
    adapted = add_lora(model, LoraSection(r=4, target_modules=targets))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    works = _engine(adapted) != NAIVE and _learner(adapted) == PACKED
    cells.append(("linear layers, experts" if targets else "linear layers") if works else "slower")
    cells.append("yes" if _merges(adapted) else "no")
    cells.append("yes" if is_written_here(config) else "converter")
    return [*cells, "yes" if shape_of(config) is not None else "no"]


NAIVE, PACKED = "naive sampling", "packed, prompts shared"


def _engine(model: Any) -> str:
    try:
        engine = Engine(model, page_size=4, kv_memory_gib=0.01)
    except UnsupportedModel:
        return NAIVE
    return "fast decoder" if engine.runner.fast_decoder is not None else "module"  # type: ignore[attr-defined]


def _learner(model: Any) -> str:
    return PACKED if Scorer(model).mode == "trees" else "padded rows"


def _has_stacked_experts(model: Any) -> bool:
    return any(name.split(".")[-2] == "experts" and p.dim() == 3 for name, p in model.named_parameters())


@torch.no_grad()
def _merges(adapted: Any) -> bool:
    """Whether the merged model, saved and loaded, gives the numbers of the adapted one."""
    merged = copy.deepcopy(adapted).merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)
        attention = adapted.get_base_model().config._attn_implementation
        loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    expected, found = (m(input_ids=IDS, use_cache=False).logits for m in (adapted.eval(), loaded))
    return bool((expected - found).abs().max() < 1e-4)


def table() -> str:
    lines = [line(COLUMNS), line(["---"] * len(COLUMNS))]
    return "\n".join([*lines, *(line(row_of(family)) for family in NAMES)])


def line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def written_rows() -> dict[str, str]:
    """The rows of the page by architecture."""
    text = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    return {line.split("`")[1]: line for line in rows}


def main() -> None:
    logging.disable(logging.WARNING)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
