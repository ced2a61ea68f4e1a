"""Private names of torch and transformers that the source uses: a new version without one of them fails here first."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import palestra
from palestra.engine.recurrences import STAND_INS, StandIn
from palestra.learner.compiled_layers import AUTOGRAD

SOURCE = Path(palestra.__file__).parent
FOREACH = ("_foreach_copy_", "_foreach_add_", "_foreach_norm")
OTHERS = {"_inductor", "_higher_order_ops", "_C", "_dynamo"}


def test_every_private_name_of_torch_in_the_source_is_listed() -> None:
    names = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\btorch\.(_[a-z]\w*)", path.read_text(encoding="utf-8"))
    }
    assert names <= {*FOREACH, *OTHERS}


@pytest.mark.parametrize("name", FOREACH)
def test_torch_has_its_functions_on_lists_of_tensors(name: str) -> None:
    assert callable(getattr(torch, name))


def test_a_module_calls_what_its_compiled_call_names() -> None:
    layer = nn.Linear(2, 2)
    layer._compiled_call_impl = lambda x: "compiled"
    assert layer(torch.zeros(1, 2)) == "compiled"


def test_the_attention_of_a_config_can_be_replaced() -> None:
    config = LlamaConfig(attn_implementation="sdpa")
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager"


def test_transformers_has_its_grouped_product() -> None:
    from transformers.integrations.moe import _grouped_mm

    x, weights, ends = torch.ones(3, 4), torch.ones(2, 4, 8), torch.tensor([1, 3], dtype=torch.int32)
    assert _grouped_mm(x, weights, ends).tolist() == [[4.0] * 8] * 3


def test_autograd_can_be_switched_on_inside_of_a_custom_operation() -> None:
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for name in AUTOGRAD:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        assert torch.ones(1, requires_grad=True).exp().requires_grad


@pytest.mark.parametrize("found", STAND_INS, ids=lambda found: found.name)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_transformers_has_the_functions_that_ours_stand_in_for(family: str, found: StandIn) -> None:
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert hasattr(file, found.name) == (found.package == ("fla" if family == "qwen3_5" else "mamba_ssm"))
    if hasattr(file, found.name):
        theirs, ours = (list(inspect.signature(f).parameters) for f in (getattr(file, found.name), found.ours))
        assert theirs[: len(ours) - 1] == ours[:-1]  # the last one takes what else there may be
