"""Sizes of low-rank adapters, computed from flags alone.

An adapter of a linear layer with several parts (query, key and value; gate and up) has one A for
all of them or one for each part, as its targets say (:mod:`mindspeed.lora.names`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed.lora.config import WHOLE
from mindspeed.lora.names import targeted


@dataclass(frozen=True)
class Linear:
    """A linear layer, not sharded.

    Attributes:
        in_features: Size of its input.
        out_features: Size of each part of its output.
        column_parallel: Tensor parallelism shards the output (else the input).
        copies: Number of experts with such a layer, each with its own adapter.
    """

    in_features: int
    out_features: dict[str, int]
    column_parallel: bool = True
    copies: int = 1


EXPERT = "mlp.experts.local_experts.0"


def linear_layers(args: argparse.Namespace, *, experts: bool) -> dict[str, Linear]:
    """The layers of one transformer layer that can have adapters, by their names in it."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    found: dict[str, Linear] = {}
    if args.multi_latent_attention:
        head = args.qk_head_dim + args.qk_pos_emb_head_dim
        query, out = heads * head, heads * args.v_head_dim
        rank, latent = args.q_lora_rank, args.kv_lora_rank
        if rank is None:
            found["linear_q_proj"] = Linear(hidden, {WHOLE: query})
        else:
            found["linear_q_down_proj"] = Linear(hidden, {WHOLE: rank})
            found["linear_q_up_proj"] = Linear(rank, {WHOLE: query})
        found["linear_kv_down_proj"] = Linear(hidden, {WHOLE: latent + args.qk_pos_emb_head_dim})
        keys_and_values = heads * (args.qk_head_dim + args.v_head_dim)
        found["linear_kv_up_proj"] = Linear(latent, {WHOLE: keys_and_values})
    else:
        groups = args.num_query_groups if args.group_query_attention else heads
        out, key = heads * args.kv_channels, groups * args.kv_channels
        found["linear_qkv"] = Linear(hidden, {"q": out, "k": key, "v": key})
    found["linear_proj"] = Linear(out, {WHOLE: hidden}, column_parallel=False)
    if not experts:
        return found | _mlp(args, "mlp", args.ffn_hidden_size)
    found |= _mlp(args, EXPERT, args.moe_ffn_hidden_size, args.num_experts)
    shared = args.moe_shared_expert_intermediate_size
    return found | (_mlp(args, "mlp.shared_experts", shared) if shared else {})


def _mlp(args: argparse.Namespace, name: str, width: int, copies: int = 1) -> dict[str, Linear]:
    gated = args.swiglu or args.quick_geglu
    parts = {"gate": width, "up": width} if gated else {WHOLE: width}
    return {
        f"{name}.linear_fc1": Linear(args.hidden_size, parts, True, copies),
        f"{name}.linear_fc2": Linear(width, {WHOLE: args.hidden_size}, False, copies),
    }


def parts_kept(args: argparse.Namespace, name: str) -> int:
    """Number of A matrices in the adapter of a linear layer; 0 without one."""
    for experts in (False, True):
        layers = linear_layers(args, experts=experts)
        if name in layers:
            return len(_segments(args, name, layers[name]))
    return 0


def adapter_weights(args: argparse.Namespace, *, experts: bool) -> tuple[int, int]:
    """Adapter entries of one transformer layer: in the whole model, and on a tensor rank."""
    whole = here = 0
    for name, layer in linear_layers(args, experts=experts).items():
        tensor, copies = args.tensor_model_parallel_size, layer.copies
        if name.startswith(EXPERT):
            tensor = args.expert_tensor_parallel_size
            copies //= args.expert_model_parallel_size
        for part in _segments(args, name, layer):
            parts = layer.out_features
            outputs = sum(parts.values()) if part == WHOLE else parts[part]
            a, b = args.lora_r * layer.in_features, args.lora_r * outputs
            whole += layer.copies * (a + b)
            here += copies * (a + b // tensor if layer.column_parallel else a // tensor + b)
    return whole, here


def _segments(args: argparse.Namespace, name: str, layer: Linear) -> set[str]:
    path = f"decoder.layers.0.{name if '.' in name else f'self_attention.{name}'}"
    return targeted(path, layer.out_features, args.lora_target_modules)
