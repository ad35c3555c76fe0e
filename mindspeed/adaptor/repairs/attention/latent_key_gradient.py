"""Defect: MLA loses the gradient of its shared positional key under tensor parallelism.

Where: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention``. All heads share one
positional key, so its gradient is a sum over the tensor-parallel ranks. Megatron reduces it only
for Transformer Engine's duplicated projection with sequence parallelism; not without sequence
parallelism, and never in the local layer spec, whose projection is column-parallel and gathered.
Symptom: silent; each rank trains with the gradient of its own heads only, and the loss still falls.
Fix: a forward hook brings the output of the projection into the form for which Megatron's own path
is correct: full hidden size, sharded by sequence under sequence parallelism, with an all-reduce in
the backward.

Defect: before 0.15 MLA gathers keys along the sequence though each rank has all of it.

Where: ``MLASelfAttention.get_query_key_value_tensors``, with tensor parallelism but without
sequence parallelism.
Symptom: an error about sizes in the first forward.
Fix: without sequence parallelism keys are not gathered.
Versions: <0.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.journal import Journal
from mindspeed.spmd import Columns, I, R, typed


def sum_key_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLASelfAttention.__init__``: a hook on the projection to latent keys and values."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            group = self.tp_group if hasattr(self, "tp_group") else self.pg_collection.tp
            self.linear_kv_down_proj.register_forward_hook(_full_output(self.config, group))

    return __init__


def gather_parts_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MLASelfAttention.get_query_key_value_tensors``."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer import multi_latent_attention

        journal = Journal()
        if not self.config.sequence_parallel:
            name = "gather_from_sequence_parallel_region"
            journal.set(multi_latent_attention, name, lambda keys: keys, owner="")
        try:
            return original(self, *args, **kwargs)
        finally:
            journal.undo()

    return get_query_key_value_tensors


@typed(Columns(types=(I, R)))
class _SumOfKeyGradients(torch.autograd.Function):
    """Returns latents and key ``[s, b, latent + key]``; the gradient of the key is summed."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, sizes: list[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        latent, key = grads[0].split(ctx.sizes, dim=-1)
        key = key.contiguous()
        dist.all_reduce(key, group=ctx.group)
        return torch.cat([latent, key], dim=-1), None, None


def _full_output(config: Any, group: Any) -> Callable[..., Any]:
    from megatron.core import tensor_parallel

    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]

    def hook(module: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        full, bias = output
        sharded = full.size(-1) != sum(sizes)
        if sharded:
            full = tensor_parallel.gather_from_tensor_model_parallel_region(full, group=group)
        if not config.sequence_parallel:
            full = _SumOfKeyGradients.apply(full, sizes, group)
        elif sharded:
            # Megatron gathers the keys along the sequence; the backward of that gather reduces.
            full = tensor_parallel.scatter_to_sequence_parallel_region(full, group=group)
        return full, bias

    return hook


PATCHES = (
    repair(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        sum_key_gradients,
        "the gradient of latent attention's positional keys is summed over the tensor ranks",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
    repair(
        "megatron.core.transformer.multi_latent_attention:"
        "MLASelfAttention.get_query_key_value_tensors",
        gather_parts_only,
        "keys that are whole are not gathered along the sequence",
        expects="(self, hidden_states, ...)",
        versions="<0.15",
    ),
)
