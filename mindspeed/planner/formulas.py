"""Memory by Megatron-LM's closed formula, which plans show beside the counted bytes.

Per rank of the first pipeline stage, in bytes: parameters of the fullest shard times 18, or
6 + 12 / d with a distributed optimizer over d ranks, and activations

    s b h (18 + 4 f/h) / t      a layer, with sequence parallelism and selective recomputation
    s b h (10 + 24/t)           a layer, otherwise, and 5 % for the rest

times the micro-batches in flight of 1F1B (f: width of the MLP, t: tensor parallel size). It knows
no gated activations, grouped heads, kernels, experts' tokens or context parallelism, and is not
shown for experts that are sharded otherwise than dense layers, which it does not know either.
Source: ``megatron/training/theoretical_memory_usage.py``; Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

import argparse

from mindspeed.adaptor.repairs.memory_estimate import has_unknown_experts
from mindspeed.profiling.model_flops import moe_pattern


def megatron_formula(args: argparse.Namespace, micro_batches: int) -> float | None:
    """Bytes of a rank of the first stage; None where the formula does not exist.

    Args:
        args: final values.
        micro_batches: of a step.
    """
    if args.multi_latent_attention or has_unknown_experts(vars(args)):
        return None
    return _weights_and_optimizer(args) + _activations(args, micro_batches)


def _weights_and_optimizer(args: argparse.Namespace) -> float:
    pattern = moe_pattern(vars(args))
    extra = args.mtp_num_layers or 0
    sparse, last = sum(pattern), pattern[-1] if pattern else 0
    norm = args.hidden_size * (1 if args.normalization == "RMSNorm" else 2)
    widths = {
        0: args.ffn_hidden_size,
        1: (args.moe_ffn_hidden_size or 0) * (args.num_experts or 1)
        + (args.moe_shared_expert_intermediate_size or 0),
    }
    layer = {kind: _layer(args, width) + 2 * norm for kind, width in widths.items()}
    block = layer[0] * (len(pattern) - sparse) + layer[1] * sparse + norm
    edge = args.hidden_size * args.padded_vocab_size
    untied_here = args.untie_embeddings_and_output_weights and _stages(args) == 1
    fullest = block / _stages(args) + extra * layer[last] + edge * (2 if untied_here else 1)
    shared = args.use_distributed_optimizer
    each = 6 + 12 / args.data_parallel_size if shared else 18
    return each * fullest / args.tensor_model_parallel_size


def _layer(args: argparse.Namespace, width: int) -> float:
    """Entries of the matrices of attention and of an MLP."""
    query = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    attention = 2 * args.hidden_size * query * (1 + groups / args.num_attention_heads)
    return attention + args.hidden_size * width * (3 if args.swiglu else 2)


def _activations(args: argparse.Namespace, micro_batches: int) -> float:
    tokens = args.seq_length * args.micro_batch_size
    hidden, tp, stages = args.hidden_size, args.tensor_model_parallel_size, _stages(args)
    parted = args.sequence_parallel and args.recompute_granularity == "selective"
    layer = 18 * hidden + 4 * args.ffn_hidden_size if parted else hidden * (10 + 24 / tp)
    kept = layer * args.num_layers + (8 + hidden) * stages
    chunks = args.virtual_pipeline_model_parallel_size
    if chunks is not None:
        kept *= 1 + (stages - 1) / (stages * chunks)
    elif stages > 1:
        kept *= min(1, micro_batches / stages)
    if stages == 1:
        vocab = args.padded_vocab_size
        kept += 4 * (hidden + vocab) if parted else 2 * (vocab / tp + hidden)
    return float(tokens * kept / tp if parted else 1.05 * tokens * kept)


def _stages(args: argparse.Namespace) -> int:
    return int(args.pipeline_model_parallel_size)
