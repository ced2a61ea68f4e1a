"""Compiled layers of a learner session, and what they call without tracing it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from palestra.engine.attention import ModulePatches

T = TypeVar("T")
MAX_RECOMPUTED_COLUMNS = 256  # a product over fewer, as those of adapters' ranks, is cheaper to repeat than to keep
COSTLY = {  # in addition to products
    "bitsandbytes.gemm_4bit.default",
    "palestra.tree_attention.default",
    "palestra.walk_trees.default",
}
# What traced layers hold of ours, and the compiler's cache does not look into: the rule of what is kept, and attention.
TRACED_FILES = [Path(__file__), Path(__file__).with_name("tree_attention_cuda.py")]


def compile_layers(layers: list[nn.Module], patches: ModulePatches, *, with_hooks: bool) -> None:
    """Compile the call of each layer, with the hooks around it or without."""
    for layer in layers:
        if with_hooks:
            patches.set(layer, "_compiled_call_impl", partial(_call_alike, layer))
        else:
            patches.set(layer, "forward", partial(_compiled_layer(with_hooks=False), layer))


def _call_alike(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Let the first trained layer above frozen embeddings use the compiled program of the other layers."""
    if torch.is_grad_enabled() and not hidden.requires_grad and any(p.requires_grad for p in layer.parameters()):
        hidden = hidden.detach().requires_grad_()
    return _compiled_layer(with_hooks=True)(layer, hidden, *args, **kwargs)


@cache
def _compiled_layer(*, with_hooks: bool) -> Callable[..., Any]:
    """Runs a layer compiled: for any length, since every micro-batch has its own, and once for all layers.

    Of its activations only the products' and the attention's are kept; the cheap steps between them are computed again
    in the backward pass, fused into what needs them. Two layers as one program take as long, and compile twice as long.
    """
    keep = _checkpoint_contexts()

    def call(layer: nn.Module, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        run = layer._call_impl if with_hooks else partial(type(layer).forward, layer)
        if torch.is_grad_enabled():
            return checkpoint(run, hidden, *args, use_reentrant=False, context_fn=keep, **kwargs)
        return run(hidden, *args, **kwargs)

    return _compiled(call)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """One program for micro-batches of every size: what compiles in the middle of a run holds it up for long."""
    from torch._inductor import config

    # It warns of in-place operations inside of checkpoints, which these layers do not have: the self-check would fail.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        # Before anything else the compiler tries which vector instructions C++ code may use, and takes half a minute
        # for it. Layers on a GPU have no such code.
        config.cpp.vec_isa_ok = False
    # Padding would compile again for lengths that are no multiple of 8; the weights' sides are aligned anyway.
    options: dict[str, Any] = {"shape_padding": False}
    if hasattr(config, "deterministic"):
        options["deterministic"] = True  # else it tries which blocks are fastest, and the order of sums is chance
    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        # Else the gradient of norms is fused from 5 Mi numbers on alone, which makes two programs.
        options["triton.mix_order_reduction_non_strict_mode"] = True
    return torch.compile(call, dynamic=True, options=options)


def _checkpoint_contexts() -> Any:
    """By `cache_hash` the compiler finds on disk what an earlier process traced, unless these files have changed."""
    contexts = partial(create_selective_checkpoint_contexts, _what_to_keep)
    contexts.cache_hash = hashlib.sha256(b"".join(map(Path.read_bytes, TRACED_FILES))).hexdigest()  # type: ignore[attr-defined]
    return contexts


def _what_to_keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention, but not what an adapter adds: made from few columns, and wide as the layer."""
    if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        costly = args[-2].shape[1] > MAX_RECOMPUTED_COLUMNS
    else:
        costly = str(operation) in COSTLY
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


# Code that walks trees, which differ in every micro-batch, is a custom operation of compiled layers. Compiled programs
# know objects by a number in a tensor, so that another object is no reason to compile again. The gradient comes from
# autograd, which computes the operation again in the backward pass.

# By name: (objects' numbers, constants of the layer) -> the code, a function of tensors, and trained weights in it.
WALKS: dict[str, Callable[[list[Tensor], list[float]], tuple[Callable[..., Tensor], Sequence[Tensor]]]] = {}
# Dispatch keys that an operation's own code does not pass through, and autograd needs.
AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


class Registry(Generic[T]):
    """Living objects by their number."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = count()

    def add(self, item: T) -> Tensor:
        """The handle of the item; whoever runs a forward and backward pass keeps the item."""
        number = next(self._numbers)
        self._alive[number] = item
        return torch.tensor(number)

    def __getitem__(self, handle: Tensor) -> T:
        return self._alive[int(handle)]


LAYOUTS: Registry[Any] = Registry()  # of `tree_attention.Layout`


def gradients(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """The gradients by inputs and weights of `compute(*inputs)`, whose code uses the weights; zeros where unused."""
    # Record operations inside of a custom operation, whose code runs below autograd.
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in AUTOGRAD:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        own = [x.detach().requires_grad_() for x in inputs]
        results = torch.autograd.grad(compute(*own), [*own, *weights], grad, allow_unused=True)
    pairs = zip(results, (*inputs, *weights), strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


@torch.library.custom_op("palestra::walk_trees", mutates_args=())
def walk_trees(
    name: str, inputs: list[Tensor], weights: list[Tensor], handles: list[Tensor], constants: list[float]
) -> Tensor:
    """[T, ...] what the code of this name makes of its inputs, as wide as the third of them, or the last.

    `weights` are those in the code that are trained: autograd sees the operation's arguments alone.
    """
    compute, _ = WALKS[name](handles, constants)
    return compute(*inputs).to(inputs[0].dtype)


@walk_trees.register_fake
def _(name: str, inputs: list[Tensor], *_: Any) -> Tensor:
    return inputs[0].new_empty(*inputs[0].shape[:-1], inputs[:3][-1].shape[-1])


@torch.library.custom_op("palestra::walk_trees_backward", mutates_args=())
def _backward(
    grad: Tensor, name: str, inputs: list[Tensor], weights: list[Tensor], handles: list[Tensor], constants: list[float]
) -> list[Tensor]:
    compute, own = WALKS[name](handles, constants)
    return [x.contiguous() for x in gradients(compute, inputs, own, grad)]


@_backward.register_fake
def _(grad: Tensor, name: str, inputs: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*inputs, *weights)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.name, *lists, ctx.constants = inputs
    ctx.sizes = [len(tensors) for tensors in lists]
    ctx.save_for_backward(*(x for tensors in lists for x in tensors))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    inputs, weights, handles = ([next(saved) for _ in range(size)] for size in ctx.sizes)
    found = torch.ops.palestra.walk_trees_backward(grad, ctx.name, inputs, weights, handles, ctx.constants)
    constants: Any = None if ctx.constants else []  # torch takes an empty list for one of tensors
    return None, found[: len(inputs)], found[len(inputs) :], [None] * len(handles), constants


walk_trees.register_autograd(_differentiate, setup_context=_remember)
