"""A base model whose weights many adapters share: each gets modules of its own around the same tensors."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from palestra.core.config_sections import LoraSection
from palestra.core.errors import SettingError
from palestra.learner.lora import add_lora
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.local import sampling_copy

MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Which weights are trained. Rank 0 trains all of them, in a copy of the base."""

    rank: int = 32
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: int = 32  # what the SDK does not say; the update is scaled by alpha / rank

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= MAX_RANK:
            raise SettingError(f"lora rank {self.rank} is outside 0..{MAX_RANK}; 0 trains all weights")
        if self.rank and not (self.train_attn or self.train_mlp or self.train_unembed):
            raise SettingError("train_attn, train_mlp and train_unembed are all false, so nothing would be trained")


class BaseModel:
    """One loaded model. It is never run itself, so nothing that a client does can change it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.name = loaded.name
        # absolute: clients load the tokenizer from it, and may run in another folder
        self.path = str(Path(loaded.path).resolve()) if Path(loaded.path).is_dir() else loaded.path
        self.tokenizer = loaded.tokenizer
        self.vocabulary = loaded.vocabulary
        self.context = loaded.context_tokens
        self.device: torch.device = loaded.model.device
        self.architecture = type(loaded.model).__name__
        ends = loaded.model.generation_config.eos_token_id
        # the tokens that end a text, unless a client says otherwise
        self.end_ids: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)
        self._model = loaded.model.eval().requires_grad_(False)
        self.building = threading.Lock()  # peft and the random generator are not made for two at once

    @classmethod
    def load(cls, name: str, *, dtype: str = "auto", device: str = "auto") -> BaseModel:
        return cls(load_model(name, dtype=dtype, device=device))

    @property
    def loadable_name(self) -> str:
        """A folder instead of a name: the SDK loads the tokenizer from it; it cuts "/a/b" short, but not "/a/b/"."""
        return self.path + "/" * (self.path.count("/") == 2)

    def use_stream(self) -> None:
        """On a GPU each thread has its own stream, so that one client's kernels do not wait for another's."""
        if self.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def module(self, spec: AdapterSpec | None, seed: int = 0) -> nn.Module:
        """The base with a fresh adapter, or alone where there is no spec; frozen weights are shared, others its own."""
        with self.building:
            if spec is not None and not spec.rank:
                return copy.deepcopy(self._model).requires_grad_(True)
            model: nn.Module = sampling_copy(self._model)  # all of it is frozen, so that all is shared
            if spec is None:
                return model
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(seed)
                section = LoraSection(r=spec.rank, alpha=spec.alpha, target_modules=self._targets(spec))
                with warnings.catch_warnings():  # that a tied head cannot be merged, which nobody does
                    warnings.simplefilter("ignore", UserWarning)
                    return add_lora(model, section)

    def trained_bytes(self, spec: AdapterSpec) -> int:
        """About what one training with it holds: weights, gradient, two moments, and one pinned version."""
        if not spec.rank:
            return 5 * 4 * sum(weight.numel() for weight in self._model.parameters())
        targets = set(self._targets(spec))
        sides = sum(sum(m.weight.shape) for n, m in self._linears() if n.rpartition(".")[2] in targets)
        return 5 * 4 * spec.rank * sides

    def _targets(self, spec: AdapterSpec) -> list[str]:
        """The last names of the linear layers to adapt."""
        head = self._model.get_output_embeddings()
        chosen = set()
        for name, module in self._linears():
            is_trained = spec.train_attn if "attn" in name or "attention" in name else spec.train_mlp
            if spec.train_unembed if module is head else is_trained:
                chosen.add(name.rpartition(".")[2])
        return sorted(chosen)

    def _linears(self) -> list[tuple[str, nn.Linear]]:
        return [(name, module) for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
