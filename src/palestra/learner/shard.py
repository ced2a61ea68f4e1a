"""A model in shards, one on each rank: FSDP2 gathers a layer's weights for its pass and sums up its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from palestra.core.errors import PalestraError
from palestra.learner.layers import decoder_layers


def shard(scorer: Any, *, master_weights: bool) -> None:
    """Leave each rank its part of the scorer's weights: of all, or of the adapters where the rest is frozen.

    Frozen weights stay whole, and shared with the sampler, which needs them whole on every rank: gathering them would
    only take time. With `master_weights` the shards are float32 and passes are computed in the model's own type.
    """
    trained = [p for p in scorer.parameters() if p.requires_grad]
    ignored = {p for p in scorer.parameters() if not p.requires_grad} if trained else set()
    managed = trained or list(scorer.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if master_weights and trained:
        policy = _with_master_weights(trained, policy)
    mesh = init_device_mesh(managed[0].device.type, (dist.get_world_size(),))
    for module in (*decoder_layers(scorer.model), scorer):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        # the loss has the normalisers of the whole step, so gradients of ranks add up
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _with_master_weights(trained: list[nn.Parameter], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    types = {weight.dtype for weight in trained}
    if types == {torch.float32}:
        return policy
    if len(types) > 1:
        raise PalestraError(
            f"model.master_weights over several ranks needs weights of one type, and these are of "
            f"{', '.join(sorted(map(str, types)))}; choose one with model.dtype, or set model.master_weights to false"
        )
    for weight in trained:
        weight.data = weight.data.float()
    return MixedPrecisionPolicy(param_dtype=types.pop(), reduce_dtype=torch.float32, cast_forward_inputs=False)
