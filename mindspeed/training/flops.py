"""Floating-point operations of one training step, by Megatron's convention.

Matrix products only, 2 operations per multiply-add, backward counted as twice the forward, causal
attention as half of the square, less in a sliding window, recomputation not counted. So these are
model FLOPs, the numerator of MFU; executed FLOPs are counted by ``--op-cal-tflops``.

    per token = 6 * (MLP weights + attention weights + output layer) + 6 * causal attention
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from mindspeed import session
from mindspeed.profiling.model_flops import causal_keys, moe_pattern, window_of, window_pattern

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_ADD = 2


def training_flops(args: argparse.Namespace, samples: int) -> float:
    """Floating-point operations to train on ``samples`` sequences of full length."""
    tokens = args.seq_length * samples
    return flops_of_tokens(args, tokens, tokens * keys_of_a_query(args)(args.seq_length))


def keys_of_a_query(args: argparse.Namespace) -> Callable[[int], float]:
    """Length of a sequence -> keys that a query sees, mean over its queries and the layers."""
    values, active = vars(args), session.current()
    computing = list if active is None else active.seams.computing_layers.pipe
    return partial(causal_keys, window_of(values), window_pattern(values, computing))


def flops_of_tokens(args: argparse.Namespace, tokens: int, pairs: float) -> float:
    """Floating-point operations to train on tokens of sequences of any lengths.

    Args:
        args: final values.
        tokens: of all sequences.
        pairs: of queries and keys in one attention head, mean over layers: half the squares of the
            lengths, less in a sliding window.
    """
    dense, sparse = layer_kinds(args)
    layers = dense + sparse
    per_token = (
        dense * mlp_weights(args, args.ffn_hidden_size)
        + (sparse * _experts(args) if sparse else 0)
        + layers * attention_weights(args)
        + (1 + (args.mtp_num_layers or 0)) * args.hidden_size * args.padded_vocab_size
        + (args.mtp_num_layers or 0) * (3 * args.hidden_size + 2 * args.hidden_size**2)
    )
    attention = layers * _attention_core(args) * pairs
    return _FORWARD_AND_BACKWARD * _MULTIPLY_ADD * (per_token * tokens + attention)


def layer_kinds(args: argparse.Namespace) -> tuple[int, int]:
    """Numbers of dense and of MoE layers that compute, multi-token prediction included."""
    extra = args.mtp_num_layers or 0
    pattern = moe_pattern(vars(args))
    active = session.current()  # features may have layers that do not compute
    computing = pattern if active is None else active.seams.computing_layers.pipe(pattern)
    sparse = sum(computing) + extra * pattern[-1]
    return len(computing) + extra - sparse, sparse


def mlp_weights(args: argparse.Namespace, width: int) -> int:
    """Entries of the matrices of one MLP."""
    return args.hidden_size * width * (3 if args.swiglu or args.quick_geglu else 2)


def attention_weights(args: argparse.Namespace) -> int:
    """Entries of the matrices of one attention; with latent attention, of its norms too."""
    if args.multi_latent_attention:
        return _latent_attention_weights(args)
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    key_and_value = 2 * args.kv_channels * groups
    gate = query if args.attention_output_gate else 0
    return args.hidden_size * (query + key_and_value + gate) + query * args.hidden_size


def _latent_attention_weights(args: argparse.Namespace) -> int:
    heads, hidden = args.num_attention_heads, args.hidden_size
    query_head = args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank is None:
        query = hidden * heads * query_head
    else:
        query = args.q_lora_rank * (hidden + heads * query_head + 1)
    latent = args.kv_lora_rank * (hidden + heads * (args.qk_head_dim + args.v_head_dim) + 1)
    rope = hidden * args.qk_pos_emb_head_dim
    return query + latent + rope + heads * args.v_head_dim * hidden


def _attention_core(args: argparse.Namespace) -> int:
    """Multiply-adds of a query with one key and its value, in all heads."""
    if args.multi_latent_attention:
        width = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
    else:
        width = 2 * args.kv_channels
    return int(args.num_attention_heads * width)


def _experts(args: argparse.Namespace) -> int:
    shared = mlp_weights(args, args.moe_shared_expert_intermediate_size or 0)
    routed = args.moe_router_topk * mlp_weights(args, args.moe_ffn_hidden_size)
    if latent := args.moe_latent_size:  # the input of experts, with a projection to and from it
        routed = routed // args.hidden_size * latent + 2 * args.hidden_size * latent
    return routed + shared
