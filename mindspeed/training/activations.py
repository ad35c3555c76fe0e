"""Bytes per token that a layer saves for its backward pass.

Elements of one token on one rank (h hidden, q and k widths of all query and key heads, f of the
MLP, g 2 with a gate, K experts a token visits, F their width; t tensor parallel ranks):

    both norms       2 h          their inputs
    attention        h            input of the first linear layer
                     (q + 2 k) / t            queries, keys (rotated) and values
                     (q + k) / t  inputs of the norms of queries and keys, if there are any
                     q / t        output, which is the input of the last linear layer; and 4 bytes
                                  a head for the softmax's normalizer
    dense MLP        h + (g + 1) f / t        input, what the activation takes, what it gives
    experts          h + K (h + (g + 1) F)    router's input and every expert's, as a dense MLP;
                     8 bytes an expert        logits and probabilities
    shared experts   h + (g + 1) F' / t
    hot experts      N (g + 1) h F    weights, once for all tokens of a micro-batch (N hot experts)

With sequence parallelism what has width h is divided by t, too. ``--moe-zero-memory`` and the
load-aware experts keep less (:mod:`mindspeed.moe.save.policy`); loads are balanced.

A frozen linear layer keeps no input unless it has an adapter, which also keeps r fp32 numbers for
each of its parts.

This is what fused operators keep (norm, rotary embedding, SwiGLU, attention); without them it may
be one and a half times as much. Checked against the bytes that autograd really holds
(``tests/training/test_estimate.py``).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed.moe.save.policy import ALL, LEVEL0, LEVEL1, LEVELS, X_ONLY, SavePolicy
from mindspeed.training.adapter_size import EXPERT, parts_kept


@dataclass(frozen=True)
class _Widths:
    """Terms of the formulas; ``hidden`` is divided by TP with sequence parallelism."""

    hidden: float
    element: int
    tensor: int
    gate: int


def policy_of(args: argparse.Namespace, layer: int) -> SavePolicy:
    """What experts of a layer keep if every rank has the same load.

    Args:
        args: final values.
        layer: index among the layers of a pipeline stage.
    """
    policy = LEVELS[getattr(args, "moe_zero_memory", "disable")]
    number = getattr(args, "moe_zero_memory_num_layers", None)
    if policy is LEVEL1 and number is not None and layer >= number:
        policy = LEVEL0
    if getattr(args, "moe_adaptive_recompute_activation", False):
        policy |= X_ONLY if args.moe_adaptive_recompute_activation_scale < 1 else ALL
    return policy


def layer_bytes(args: argparse.Namespace, *, experts: bool, policy: SavePolicy = ALL) -> float:
    """Bytes of one token in one layer.

    Args:
        args: final values.
        experts: the layer has routed experts in place of its MLP.
        policy: what they keep.
    """
    widths = _widths(args)
    mlp = (
        _experts(args, widths, policy)
        if experts
        else _mlp(args, widths, args.ffn_hidden_size, "mlp")
    )
    kept = 2 * widths.hidden * widths.element + _attention(args, widths) + mlp
    if args.hidden_dropout:
        kept += 2 * widths.hidden  # a byte for each bit of two masks
    return kept


def input_bytes(args: argparse.Namespace) -> float:
    """Bytes of one token at the input of a layer: the only tensor that full recomputation keeps."""
    widths = _widths(args)
    return widths.hidden * widths.element


def head_bytes(args: argparse.Namespace) -> float:
    """Bytes of one token in the last norm, the output layer and the loss (in fp32)."""
    widths = _widths(args)
    inputs = 1 + (not args.lora_target_modules)
    logits = 4 * args.padded_vocab_size / widths.tensor
    return inputs * widths.hidden * widths.element + logits


def _widths(args: argparse.Namespace) -> _Widths:
    tensor = args.tensor_model_parallel_size
    hidden = args.hidden_size / (tensor if args.sequence_parallel else 1)
    gated = args.swiglu or args.quick_geglu
    return _Widths(hidden, 2 if args.fp16 or args.bf16 else 4, tensor, 2 if gated else 1)


def _attention(args: argparse.Namespace, widths: _Widths) -> float:
    element, heads = widths.element, args.num_attention_heads / widths.tensor
    kept = 4 * heads + _input(args, "linear_proj", 0, widths)
    if args.multi_latent_attention:
        head = args.qk_head_dim + args.qk_pos_emb_head_dim
        kept += heads * (2 * head + 2 * args.v_head_dim) * element
        latent = args.kv_lora_rank + args.qk_pos_emb_head_dim
        rank = args.q_lora_rank
        if args.qk_layernorm:
            kept += (latent + (rank or 0)) * element
        query = {"linear_q_proj": widths.hidden}
        if rank is not None:
            query = {"linear_q_down_proj": widths.hidden, "linear_q_up_proj": rank}
        first = _input(args, "linear_kv_down_proj", widths.hidden, widths)
        for name, width in query.items():
            also = _input(args, name, width, widths)
            # Both down projections have the same input.
            first = max(first, also) if width == widths.hidden else first + also
        return kept + first + _input(args, "linear_kv_up_proj", latent, widths)
    key = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    key = key * args.kv_channels / widths.tensor
    query_width = heads * args.kv_channels
    kept += (2 * query_width + 2 * key) * element
    if args.qk_layernorm:
        kept += (query_width + key) * element
    return kept + _input(args, "linear_qkv", widths.hidden, widths)


def _mlp(args: argparse.Namespace, widths: _Widths, width: int, name: str) -> float:
    inner = width / widths.tensor
    first = _input(args, f"{name}.linear_fc1", widths.hidden, widths)
    return (
        first
        + widths.gate * inner * widths.element
        + _input(args, f"{name}.linear_fc2", inner, widths)
    )


def _experts(args: argparse.Namespace, widths: _Widths, policy: SavePolicy) -> float:
    visits = args.moe_router_topk * args.expert_tensor_parallel_size
    visits /= widths.tensor if args.sequence_parallel else 1
    width = args.moe_ffn_hidden_size / args.expert_tensor_parallel_size
    kept = policy.fc1 * widths.gate * width * widths.element
    # An adapter's own product stays, that of the first layer unless it runs again.
    if policy.fc1 or policy.rows:
        rows = policy.rows * args.hidden_size
        kept += _input(args, f"{EXPERT}.linear_fc1", rows, widths, adapter=policy.fc1)
    kept += _input(args, f"{EXPERT}.linear_fc2", policy.act * width, widths)
    kept = visits * kept + 8 * args.num_experts  # logits and probabilities of all
    shared = args.moe_shared_expert_intermediate_size
    if shared and policy.shared:
        kept += _mlp(args, widths, shared, "mlp.shared_experts")
    elif shared:
        kept += widths.hidden * widths.element
    elif not args.lora_target_modules:
        kept += widths.hidden * widths.element  # the router's
    return kept + _hot_weights(args, widths)


def _hot_weights(args: argparse.Namespace, widths: _Widths) -> float:
    """Weights of hot experts that a micro-batch keeps, for each of its tokens."""
    if not getattr(args, "balanced_moe_experts", False):
        return 0.0
    expert = (widths.gate + 1) * args.hidden_size * args.moe_ffn_hidden_size * widths.element
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    return float(args.balanced_moe_hot_expert_num * expert / tokens)


def _input(
    args: argparse.Namespace, name: str, width: float, widths: _Widths, adapter: bool = True
) -> float:
    """Saved bytes of a linear layer: its input, and the output of its adapter's first matrix."""
    if not args.lora_target_modules:
        return width * widths.element
    parts = parts_kept(args, name)
    return width * widths.element + 4 * args.lora_r * parts * adapter if parts else 0.0
