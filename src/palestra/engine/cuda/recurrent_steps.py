"""Recurrent layers in three to five kernels each, with the states updated in the store, and their fast decoder.

Each class is the forward of some transformers modules, for decode steps and for prompts and appends of up to `MAX_RUN`
tokens: rows and heads in parallel, the tokens of each one after the other. Longer prompts and other modules are left to
the module's own forward (`engine/recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from palestra.engine.cuda import recurrent_kernels as kernels
from palestra.engine.cuda.fast_decoder import CudaFastDecoder, Layer, Product
from palestra.engine.cuda.paged_ops import DecodePlan, pad
from palestra.engine.recurrent import Part, StateStore
from palestra.engine.supported import (
    base_linear,
    base_model,
    can_fuse,
    has_static_rope,
    is_linear,
    linear_groups,
    norm_epsilon,
    text_config,
)

DELTA_NETS = (
    "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet", "OlmoHybridGatedDeltaNet"
)  # fmt: skip
MAMBA_LAYERS = ("NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer", "FalconH1Mixer")
SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
CONV, RECURRENT = Part("conv", 0), Part("recurrent", 0)
CHANNELS_AT_ONCE = 256
MAX_TILE = 128 * 256  # numbers of a head's state that a program holds in registers
MAX_RUN = 1024  # tokens; longer ones take less time in chunks, by products of matrices
DELTA_NUMBERS, MAMBA_NUMBERS = 128, 32  # of these in a thread: on an H200 two programs, or four, fit a multiprocessor


class StateRows(NamedTuple):
    """Where the states of a step's rows are. Each row is one token, unless there are `firsts`."""

    slots: Tensor  # [rows] int32, of the store
    lens: Tensor  # [rows] int32; 0: a dead row, whose state stays as it is. With `firsts`, the tokens of each row
    firsts: Tensor | None = None  # [rows] int32, of the step's tokens
    row_of: Tensor | None = None  # [tokens] int32


class RecurrentStep:
    """One recurrent layer of a step of the engine; `of` finds the class for a module.

    Calling it maps the layer's input [tokens, hidden] to its output. `HybridDecoder` calls `inputs`, `mix` and `out`
    itself, to add the output to the residual.
    """

    def __init__(self, module: Any, linears: Sequence[Any]) -> None:
        self.module, self._linears = module, linears
        self.find_weights()

    @staticmethod
    def of(module: Any) -> RecurrentStep | None:
        """None if the module is of another kind, or has quantised weights, hooks or an unusual adapter."""
        name, own = type(module).__name__, type(module).__module__.startswith("transformers.models.")
        if not own or any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
            return None
        kinds = ((DELTA_NETS, DeltaNetStep), (MAMBA_LAYERS, MambaStep), (SHORT_CONVOLUTIONS, ShortConvolutionStep))
        kind = next((kind for names, kind in kinds if name in names), None)
        return kind.of_known(module) if kind is not None else None

    def find_weights(self) -> None:
        """Look up the weights' tensors; to be called again after they have been moved."""
        self.inputs, self.out = Product.of(*self._linears), Product.of(_output_of(self.module))

    def refresh_adapters(self) -> None:
        self.inputs.refresh_adapter()
        self.out.refresh_adapter()

    def __call__(self, x: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        return self.out(self.mix(self.inputs(x), parts, rows))

    def mix(self, projected: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        """What the output projection reads [tokens, width], of the input projection [tokens, inputs]; updates the
        states `parts` of the layer in the store."""
        raise NotImplementedError


class DeltaNetStep(RecurrentStep):
    """A gated delta net: convolution, delta rule and gated norm."""

    @classmethod
    def of_known(cls, module: Any) -> DeltaNetStep | None:
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next: queries, keys, values and gates of each key head
            names = ["in_proj_qkvz", "in_proj_ba"]
        elif hasattr(module, "g_proj"):  # OLMo Hybrid
            names = [f"{x}_proj" for x in "qkvgba"]
        else:
            names = [f"in_proj_{x}" for x in ("qkv", "z", "b", "a")]
        linears = [getattr(module, name) for name in names]
        tile = pad(module.head_k_dim) * pad(module.head_v_dim)
        usual = module.activation == "silu" and getattr(_norm_of(module), "activation", "silu") == "silu"
        if not usual or tile > MAX_TILE or not _are_usual(module.conv1d, [*linears, _output_of(module)]):
            return None
        return cls(module, linears)

    def find_weights(self) -> None:
        super().find_weights()
        m = self.module
        repeats, keys, values = m.num_v_heads // m.num_k_heads, m.key_dim, m.value_dim
        if not hasattr(m, "in_proj_qkvz"):
            self._columns = None
            self._z, self._b, self._a = 2 * keys + values, 2 * (keys + values), 2 * (keys + values) + m.num_v_heads
            self._z_group, self._b_group = repeats * m.head_v_dim, repeats
            return
        group_values = repeats * m.head_v_dim
        group = 2 * m.head_k_dim + 2 * group_values
        of_groups = torch.arange(m.num_k_heads * group, dtype=torch.int32).view(m.num_k_heads, group)
        q, k, v, _ = of_groups.split([m.head_k_dim, m.head_k_dim, group_values, group_values], 1)
        self._columns = torch.cat([x.flatten() for x in (q, k, v)]).to(m.A_log.device)
        self._z, self._z_group = 2 * m.head_k_dim + group_values, group
        self._b, self._a, self._b_group = of_groups.numel(), of_groups.numel() + repeats, 2 * repeats

    def mix(self, projected: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        m, norm, state = self.module, _norm_of(self.module), parts[RECURRENT]
        qkv = convolve(m.conv1d, projected, parts[CONV], rows, self._columns, silu=True)
        out = projected.new_empty(len(projected), m.value_dim)
        beta_scale = 2.0 if getattr(m, "allow_neg_eigval", False) else 1.0
        kernels.delta_rule_step[(len(rows.slots), m.num_v_heads)](
            qkv, projected[:, self._z :], projected[:, self._b :], projected[:, self._a :], m.A_log, m.dt_bias,
            norm.weight, state, *_arguments(rows), out, projected.stride(0), self._z_group, self._b_group,
            state.stride(0), norm_epsilon(norm), m.head_k_dim**-0.5, beta_scale, HK=m.num_k_heads, HV=m.num_v_heads,
            DK=m.head_k_dim, DKP=pad(m.head_k_dim), DV=m.head_v_dim, DVP=pad(m.head_v_dim),
            RUNS=rows.firsts is not None,
            num_warps=warps_for(pad(m.head_k_dim) * pad(m.head_v_dim), DELTA_NUMBERS),
        )  # fmt: skip
        return out


class MambaStep(RecurrentStep):
    """Mamba 2: convolution, selective state update, gated norm within groups."""

    @classmethod
    def of_known(cls, module: Any) -> MambaStep | None:
        tile = pad(module.head_dim) * pad(module.ssm_state_size)
        even = module.num_heads * module.head_dim == module.intermediate_size
        usual = module.activation in ("silu", "swish") and even and tile <= MAX_TILE
        scales = getattr(module, "mup_vector", module.conv1d.weight)
        gates_last = getattr(module.norm, "norm_before_gate", False)
        if gates_last or scales.dtype != module.conv1d.weight.dtype:
            return None
        if not usual or not _are_usual(module.conv1d, [module.in_proj, module.out_proj]):
            return None
        return cls(module, [module.in_proj])

    def __call__(self, x: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        m = self.module
        if not hasattr(m, "mup_vector"):
            return super().__call__(x, parts, rows)
        projected = self.inputs(x * m.ssm_in_multiplier).mul_(m.mup_vector[0])
        return self.out(self.mix(projected, parts, rows))

    def mix(self, projected: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        m, state, width = self.module, parts[RECURRENT], self.module.intermediate_size
        count, stride = len(projected), projected.stride(0)
        xbc = convolve(m.conv1d, projected[:, width:], parts[CONV], rows, silu=True)
        out = projected.new_empty(count, width)
        kernels.mamba_step[(len(rows.slots), m.num_heads)](
            xbc, projected[:, width + m.conv_dim :], m.A_log, m.dt_bias, m.D, state, *_arguments(rows), out, stride,
            state.stride(0), H=m.num_heads, P=m.head_dim, PP=pad(m.head_dim), N=m.ssm_state_size,
            NP=pad(m.ssm_state_size), GROUPS=m.n_groups, RUNS=rows.firsts is not None,
            num_warps=warps_for(pad(m.head_dim) * pad(m.ssm_state_size), MAMBA_NUMBERS),
        )  # fmt: skip
        if isinstance(m.norm, nn.Identity):
            return out.mul_(F.silu(projected[:, :width]))
        normed, size = torch.empty_like(out), getattr(m.norm, "group_size", width // getattr(m.norm, "n_groups", 1))
        kernels.gated_group_norm[(count, width // size)](
            out, projected, m.norm.weight, normed, stride, width, norm_epsilon(m.norm), SIZE=size,
            BLOCK=triton.next_power_of_2(size), num_warps=8 if size > 2048 else 4,
        )  # fmt: skip
        return normed


class ShortConvolutionStep(RecurrentStep):
    """LFM2's convolution of a gated input, whose output is gated too."""

    @classmethod
    def of_known(cls, module: Any) -> ShortConvolutionStep | None:
        usual = _are_usual(module.conv, [module.in_proj, module.out_proj])
        return cls(module, [module.in_proj]) if usual else None

    def mix(self, projected: Tensor, parts: Mapping[Part, Tensor], rows: StateRows) -> Tensor:
        return convolve(self.module.conv, projected, parts[CONV], rows, gated=True)


def _output_of(module: Any) -> Any:
    return module.o_proj if hasattr(module, "o_proj") else module.out_proj


def _norm_of(module: Any) -> Any:
    return module.o_norm if hasattr(module, "o_norm") else module.norm


def convolve(
    conv: Any, x: Tensor, state: Tensor, rows: StateRows, columns: Tensor | None = None, silu: bool = False,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    """The output [tokens, channels] of a convolution for one or more tokens a row, whose windows `state` advance."""
    _, channels, window = state.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, CHANNELS_AT_ONCE)
    inputs = (x, x if columns is None else columns)
    weights = (conv.weight, x if conv.bias is None else conv.bias)
    sizes = (x.stride(0), state.stride(0), channels)
    of_input = {"WINDOW": window, "BLOCK": CHANNELS_AT_ONCE, "MAPPED": columns is not None, "GATED": gated}
    of_output = {"K": conv.kernel_size[0], "BIASED": conv.bias is not None, "SILU": silu}
    if rows.firsts is None:
        kernels.convolution_step[(len(x), blocks)](
            *inputs, *weights, state, rows.slots, rows.lens, out, *sizes, WP=triton.next_power_of_2(window),
            **of_input, **of_output, num_warps=4,
        )  # fmt: skip
        return out
    kernels.convolution_runs[(len(x), blocks)](
        *inputs, *weights, state, rows.slots, rows.firsts, rows.row_of, out, *sizes, **of_input, **of_output,
        num_warps=4,
    )  # fmt: skip
    kernels.keep_windows[(len(rows.slots), blocks)](
        *inputs, state, rows.slots, rows.firsts, rows.lens, *sizes, WP=triton.next_power_of_2(window), **of_input,
        num_warps=4,
    )  # fmt: skip
    return out


def _arguments(rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.slots, rows.lens, rows.lens if rows.firsts is None else rows.firsts


def _are_usual(conv: nn.Conv1d, linears: Sequence[Any]) -> bool:
    """A convolution of each channel by itself, and ordinary linear layers of its dtype, all with a bias or none."""
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.dilation == (1,) and conv.stride == (1,)
    if not depthwise or not all(is_linear(linear) for linear in linears):
        return False
    inputs = {base_linear(linear).bias is None for linear in linears[:-1]}
    return len(inputs) == 1 and {base_linear(linear).weight.dtype for linear in linears} == {conv.weight.dtype}


def warps_for(tile: int, numbers: int) -> int:
    """Warps of a program that holds a head's state of `tile` numbers, with `numbers` of them in a thread."""
    return max(1, min(8, tile // (32 * numbers)))


HYBRIDS = {"qwen3_5_text": "Qwen3_5ForCausalLM"}


class HybridDecoder(CudaFastDecoder):
    """Decode steps of dense decoders with attention and gated delta nets (Qwen3.5), in nine or ten kernels per layer.

    The query projection of their attention also gives, head by head, a gate of the output. The KV is the plan's,
    recurrent states are the store's. Prompts and appends go through the module.
    """

    one_plus = True

    def __init__(self, model: Any, context: int, recurrent: Mapping[nn.Module, RecurrentStep]) -> None:
        self._recurrent = recurrent
        self._place = {module: place for place, module in enumerate(recurrent)}
        super().__init__(model, context)

    @classmethod
    def of(cls, model: Any, context: int, recurrent: Mapping[nn.Module, RecurrentStep]) -> HybridDecoder | None:
        """None for models of other families. `recurrent` has the steps of all their recurrent layers, in order."""
        return cls(model, context, recurrent) if _is_known(base_model(model), recurrent) else None

    def _positions(self, positions: Tensor) -> Tensor:
        return positions.expand(3, 1, -1)  # of text, height and width

    def _layer(self, index: int, module: Any) -> Layer:
        """The weights of a layer; those of recurrent layers must be looked up before."""
        if hasattr(module, "self_attn"):
            return super()._layer(index, module)
        step = self._recurrent[module.linear_attn]
        return self._with_mlp(index, module, step.inputs, step.out)

    def decode_with_states(self, ids: Tensor, plan: DecodePlan, states: StateStore, rows: StateRows) -> Tensor:
        """Logits [rows, vocabulary] of one token a row."""
        modules = self.model.model.layers

        def mix(layer: Layer, projected: Tensor) -> Tensor:
            module = modules[layer.index]
            if hasattr(module, "self_attn"):
                return self._attend(layer, module.self_attn, projected, plan)
            step = self._recurrent[module.linear_attn]
            return step.mix(projected, states.parts(self._place[module.linear_attn]), rows)

        return self._logits(ids, mix)

    def _attend(self, layer: Layer, module: Any, qkv: Tensor, plan: DecodePlan) -> Tensor:
        q_and_gate, k, v = self._heads(qkv).tensor_split((-2 * self.kv_heads, -self.kv_heads), 1)
        place = plan.kv_layer(module)
        out = plan.over_pages(place, q_and_gate[:, ::2], k, v, layer.scale, 0.0, 0, layer.rope)
        (rows, count, dim), result = out.shape, torch.empty_like(out)
        kernels.gate_heads[(rows, count)](
            out, qkv[:, dim:], result, qkv.stride(0), H=count, D=dim, DP=pad(dim), num_warps=1
        )
        return result.flatten(1)


def _is_known(model: Any, recurrent: Mapping[nn.Module, RecurrentStep]) -> bool:
    """A decoder of a known family, with ordinary linear layers (LoRA too) and no hooks."""
    config, name = text_config(model), type(model).__name__
    own = type(model).__module__.startswith("transformers.models.")
    if not own or HYBRIDS.get(config.model_type) != name or config.hidden_act != "silu" or not has_static_rope(config):
        return False
    if not all(hasattr(layer, "self_attn") or layer.linear_attn in recurrent for layer in model.model.layers):
        return False
    if not can_fuse(model):
        return False
    weights = [base_linear(linear).weight for group in linear_groups(model) for linear in group]
    return len({(weight.dtype, weight.device) for weight in [*weights, model.model.norm.weight]}) == 1
