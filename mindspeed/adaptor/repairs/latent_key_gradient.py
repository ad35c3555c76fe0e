"""Latent attention loses the gradient of its positional keys under tensor parallelism.

All heads of multi-latent attention share one positional key, so under tensor parallelism its
gradient is a sum over the ranks. Megatron sums it only where Transformer Engine's duplicated
projection meets sequence parallelism. Without sequence parallelism nothing sums it, and the local
layer spec, whose projection is split by columns and then gathered, never does: every rank trains
with its own heads' part, and the loss looks healthy.

The repair brings the output of the projection into the form in which Megatron's own path is right:
whole rows, cut by sequence where there is sequence parallelism, with the sum in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import Patch

OWNER = "repair:latent-key-gradient"


def sum_key_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLASelfAttention.__init__``: a hook on the projection to latent keys and values."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(_whole_rows(self.config, self.tp_group))

    return __init__


def _whole_rows(config: Any, group: Any) -> Callable[..., Any]:
    from megatron.core import tensor_parallel

    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]

    def hook(module: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        rows, bias = output
        split = rows.size(-1) != sum(sizes)
        if split:
            rows = tensor_parallel.gather_from_tensor_model_parallel_region(rows, group=group)
        if not config.sequence_parallel:
            latent, key = rows.split(sizes, dim=-1)
            rows = torch.cat([latent, _SumInBackward.apply(key, group)], dim=-1)
        elif split:
            # Megatron gathers the keys from whole rows of a part of the sequence, and that sums.
            rows = tensor_parallel.scatter_to_sequence_parallel_region(rows, group=group)
        return rows, bias

    return hook


class _SumInBackward(torch.autograd.Function):
    """Identity; its gradient is summed over the group.

    Megatron's own, ``copy_to_tensor_model_parallel_region``, sums a copy and drops it when the
    gradient is not contiguous, and this one is a part of a row.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        sum_key_gradients,
        OWNER,
        "the gradient of latent attention's positional keys is summed over the tensor ranks",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
)
