"""Recurrent layers (short convolutions, gated delta nets, Mamba 2): their states, and calls over runs of packed tokens.

Engine and learner compute packed tokens of many sequences in one row. Attention is told where sequences begin; a
recurrent layer carries its state from each token to the next. So its forward is replaced for the length of a pass: it
is called for rows of as many tokens each, with the states that they continue from (`pieces_of`). The layers read and
write states through transformers' cache interface, which is all that is assumed of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.errors import UnsupportedModel
from palestra.core.machine import to_device
from palestra.core.types import Array
from palestra.engine.attention import ModulePatches, plain_forward
from palestra.engine.recurrences import calls, padded_rows, stand_ins_for

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
# In modeling files of Mamba 1 (Jamba): a scan over several tokens, which begins at zero whatever the state is.
FORGETS = "mamba_selective_scan"
PACKED = "palestra_packed"  # attribute of a module whose forward is replaced: how it is computed


@dataclass(eq=False, slots=True)
class RowStates:
    """The cache that one call of a recurrent layer sees: the states [rows, ...] of its rows, replaced by the new ones.

    It answers like a transformers cache of which every layer is this one.
    """

    conv_states: dict[int, Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)
    record_past: bool = False  # true: convolutions are not updated in place, for autograd
    begins: bool = False  # the rows begin here, and have no states yet
    lengths: Tensor | None = None  # [rows] their tokens, where they are padded at the end; None: all

    @property
    def layers(self) -> RowStates:
        return self

    def __getitem__(self, layer_idx: int) -> RowStates:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self.begins

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """The window and the new tokens [rows, channels, window + n], as the convolution reads them."""
        if self.begins:
            joined = F.pad(conv_states, (conv_kernel_size, 0))
        else:
            joined = torch.cat([self.conv_states[state_idx].to(conv_states.dtype), conv_states], dim=-1)
        if self.lengths is None:
            self.conv_states[state_idx] = joined[..., -conv_kernel_size:]
        else:
            window = self.lengths[:, None, None] + torch.arange(conv_kernel_size, device=joined.device)
            self.conv_states[state_idx] = joined.gather(-1, window.expand(-1, joined.shape[1], -1))
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @classmethod
    def of(cls, parts: Mapping[Part, Tensor], record_past: bool = False) -> RowStates:
        by_kind: dict[str, dict[int, Tensor]] = {"conv": {}, "recurrent": {}}
        for part, state in parts.items():
            by_kind[part.kind][part.number] = state
        return cls(by_kind["conv"], by_kind["recurrent"], record_past)

    @property
    def parts(self) -> dict[Part, Tensor]:
        conv = {Part("conv", number): state for number, state in self.conv_states.items()}
        return conv | {Part("recurrent", number): state for number, state in self.recurrent_states.items()}


class Part(NamedTuple):
    """One of the tensors of a layer's state."""

    kind: Literal["conv", "recurrent"]
    number: int


class PartShape(NamedTuple):
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype


StateShape = Mapping[int, Mapping[Part, PartShape]]  # by place among the model's recurrent layers


class RecurrentLayer:
    """One of a model's recurrent layers; calling it computes rows of tokens [rows, n, H] -> [rows, n, H] by the layer's
    own forward, which continues from their states and replaces them.

    `takes_padding`: the states are those after each row's own tokens (`RowStates.lengths`). Otherwise such rows would
    leave wrong ones.
    """

    def __init__(self, number: int, module: nn.Module, takes_padding: bool) -> None:
        self.number, self.module, self.takes_padding = number, module, takes_padding
        self.handle = torch.tensor(number)  # for compiled code, which would be compiled again for each number
        self.trained: list[Tensor] = []  # its weights, as a learner knows them
        self._cache_name = _cache_argument(module)

    def __call__(self, rows: Tensor, states: RowStates) -> Tensor:
        with padded_rows(states.lengths, rows.shape[1]):
            out: Tensor = type(self.module).forward(self.module, rows, **{self._cache_name: states})
        return out.view(rows.shape)  # Falcon-H1's norm drops the axis of a single token


# Makes a layer's output of packed hidden states [1, T, H].
Compute = Callable[[RecurrentLayer, Tensor], Tensor]


class RecurrentLayers:
    """The recurrent layers of a model, in order; empty for a model that only attends."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if _is_recurrent(module)]
        self._stand_ins = stand_ins_for(self.modules)
        ours = {file.__name__ for file, _ in self._stand_ins}
        self.layers = [
            RecurrentLayer(number, module, type(module).__module__ in ours or _only_convolves(module))
            for number, module in enumerate(self.modules)
        ]

    @contextmanager
    def use(self, compute: Compute) -> Iterator[None]:
        """Let `compute(layer, hidden)` make the output of each layer."""
        with ModulePatches() as patches, calls(self._stand_ins):
            for layer in self.layers:
                # The same function for all: the compiler compiles again for each function that it meets.
                patches.set(layer.module, "forward", MethodType(_forward, layer.module))
                patches.set(layer.module, PACKED, (compute, layer))
            yield


def _forward(module: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    compute, layer = module.__dict__[PACKED]
    out: Tensor = compute(layer, hidden_states)
    return out


def _is_recurrent(module: nn.Module) -> bool:
    """A mixer with a causal convolution of its own that continues from its state in a cache."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    continues = not hasattr(sys.modules[type(module).__module__], FORGETS)
    return has_convolution and hasattr(module, "layer_idx") and continues and _cache_argument(module) is not None


def _only_convolves(module: nn.Module) -> bool:
    """Whether nothing decays: the state is a window of tokens."""
    return not any(name.endswith("A_log") for name, _ in module.named_parameters())


def _cache_argument(module: nn.Module) -> Any:
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def state_shape(model: Any, layers: RecurrentLayers) -> StateShape:
    """Run a few tokens through the model with transformers' own cache and read the shapes of its states."""
    if not layers.modules:
        return {}
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    plain_forward(model, ids, use_cache=True, past_key_values=cache)
    shapes: dict[int, dict[Part, PartShape]] = {}
    for place, module in enumerate(layers.modules):
        held: Any = cache.layers[module.layer_idx]
        tensors = {Part("conv", i): x for i, x in getattr(held, "conv_states", {}).items() if x is not None}
        tensors |= {Part("recurrent", i): x for i, x in getattr(held, "recurrent_states", {}).items() if x is not None}
        if not tensors:
            raise UnsupportedModel(f"{type(module).__name__} keeps its state outside of transformers' cache")
        shapes[place] = {part: PartShape(tuple(x.shape[1:]), x.dtype) for part, x in tensors.items()}
    return shapes


def state_bytes(shape: StateShape) -> int:
    """The bytes of one session's state."""
    parts = [part for layer in shape.values() for part in layer.values()]
    return sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in parts)


class StateStore:
    """The states of many sessions on one device. All parts of one dtype lie side by side, so a copy is one or two
    kernels. Slot 0 belongs to no session: the padding rows of a step use it."""

    def __init__(self, shape: StateShape, slots: int, zeros: Callable[..., Tensor]) -> None:
        self._zeros, self._shape = zeros, shape
        self.reserve(slots)

    def reserve(self, slots: int) -> None:
        sizes: dict[torch.dtype, int] = {}
        places: list[tuple[int, Part, PartShape, int]] = []
        for layer, parts in self._shape.items():
            for part, s in parts.items():
                places.append((layer, part, s, sizes.get(s.dtype, 0)))
                sizes[s.dtype] = places[-1][3] + torch.Size(s.shape).numel()
        self._flat = {dtype: self._zeros((slots, size), dtype=dtype) for dtype, size in sizes.items()}
        self._views: dict[int, dict[Part, Tensor]] = {layer: {} for layer in self._shape}
        for layer, part, s, first in places:
            columns = self._flat[s.dtype][:, first : first + torch.Size(s.shape).numel()]
            self._views[layer][part] = columns.unflatten(1, s.shape)

    def release(self) -> None:
        self._flat, self._views = {}, {}

    def copy(self, source: int, target: int) -> None:
        for flat in self._flat.values():
            flat[target].copy_(flat[source])

    def clear(self, slot: int) -> None:
        for flat in self._flat.values():
            flat[slot].zero_()

    def parts(self, layer: int) -> Mapping[Part, Tensor]:
        """The states [slots, ...] of one layer, in their place."""
        return self._views[layer]

    def read(self, layer: int, slots: Tensor) -> RowStates:
        return RowStates.of({part: view.index_select(0, slots) for part, view in self._views[layer].items()})

    def write(self, layer: int, slots: Tensor, states: RowStates, alive: Tensor | None) -> None:
        """Store new states; rows that are not `alive` keep theirs."""
        new = states.parts
        for part, view in self._views[layer].items():
            state = new[part].to(view.dtype)
            if alive is not None:
                kept = view.index_select(0, slots)
                state = torch.where(alive.view(-1, *[1] * (state.dim() - 1)), state, kept)
            view.index_copy_(0, slots, state)


class Piece(NamedTuple):
    """One call: some rows, as many tokens of each, and which of a row's tokens is the first."""

    rows: Array
    firsts: Array
    tokens: int


# What a call's launches take, in tokens of a long row: there are a few more for every chunk of it.
CALL_TOKENS = 1000


def pieces_of(lengths: Sequence[int]) -> list[Piece]:
    """The calls, in their order, that compute rows of these lengths. No row is padded, which would change its state.

    One call for each length; or, where it takes less time, all rows as far as the shortest one goes, then the rest of
    each in powers of two. No such part is one token: layers update that one's state in place.

    >>> [(piece.rows.tolist(), piece.tokens) for piece in pieces_of([7, 9, 7])]
    [([0, 2], 7), ([1], 9)]
    >>> [(piece.rows.tolist(), piece.tokens) for piece in pieces_of([20, 21, 22, 23, 24, 25, 26, 27])]
    [([0, 2, 4, 6], 20), ([1, 3, 5, 7], 21), ([4, 5, 6, 7], 4), ([2, 3, 6, 7], 2)]
    """
    n = np.array(lengths, np.int64)
    whole = _of_each_length(n)
    if len(whole) <= 2:
        return whole
    begin = n.min() + (n - n.min()) % 2
    parts, rest = _of_each_length(begin), n - begin
    for bit in reversed(range(1, int(rest.max()).bit_length())):
        rows = np.flatnonzero(rest >> bit & 1)
        if len(rows):
            parts.append(Piece(rows, (begin + (rest & -(2 << bit)))[rows], 1 << bit))
    return min(whole, parts, key=lambda pieces: sum(CALL_TOKENS + piece.tokens for piece in pieces))


def _of_each_length(n: Array) -> list[Piece]:
    return [Piece(rows := np.flatnonzero(n == tokens), 0 * rows, int(tokens)) for tokens in np.unique(n)]


class Run(NamedTuple):
    """Rows of a step with `tokens` tokens each."""

    slots: Tensor  # [rows] of the store
    tokens: int
    alive: Tensor | None = None  # [rows]; None: all
    places: Tensor | None = None  # [rows · tokens] of the step's tokens; None: all of them, one row after the other


def runs_of(rows: Sequence[tuple[int, int]], device: torch.device) -> list[Run]:
    """The calls for packed rows, each a slot and a number of tokens."""
    if not rows:
        return []
    slots, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    starts = lengths.cumsum() - lengths
    pieces = pieces_of(lengths.tolist())
    places = [(starts[p.rows] + p.firsts)[:, None] + np.arange(p.tokens) for p in pieces]
    arrays = [array for p, at in zip(pieces, places, strict=True) for array in (slots[p.rows], at.reshape(-1))]
    on_device = to_device(map(torch.from_numpy, arrays), device)
    if len(pieces) == 1:
        return [Run(on_device[0], pieces[0].tokens)]
    return [Run(on_device[2 * i], p.tokens, places=on_device[2 * i + 1]) for i, p in enumerate(pieces)]


# By place among the model's recurrent layers: a layer's output of all tokens [tokens, H].
RecurrentSteps = Mapping[int, Callable[[Tensor], Tensor]]
NO_STEPS: RecurrentSteps = MappingProxyType({})


def over_runs(store: StateStore, runs: Sequence[Run], steps: RecurrentSteps = NO_STEPS) -> Compute:
    """How recurrent layers compute a step of the engine, for `RecurrentLayers.use`.

    Layers of `steps` compute all tokens by that function instead of their own forward.
    """

    def compute(layer: RecurrentLayer, hidden: Tensor) -> Tensor:
        number = layer.number
        if number in steps:
            return steps[number](hidden[0])[None]
        whole = torch.empty_like(hidden[0])
        for run in runs:
            tokens = hidden[0] if run.places is None else hidden[0].index_select(0, run.places)
            states = store.read(number, run.slots)
            out = layer(tokens.unflatten(0, (len(run.slots), run.tokens)), states).flatten(0, 1)
            store.write(number, run.slots, states, run.alive)
            if run.places is None:
                return out[None]
            whole.index_copy_(0, run.places, out)
        return whole[None]

    return compute
