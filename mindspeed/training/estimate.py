"""``--dry-run``: what would run, how large it is, and how much of the pipeline idles.

Memory per rank, in bytes (b micro-batch, s sequence, h hidden, p parameters on the rank, d ranks
that share an optimizer):

    weights              2 p  (fp16, bf16) or 4 p
    gradients            4 p  (2 p without fp32 accumulation)
    optimizer            8 p  and 4 p main weights in 16-bit training, all / d if distributed
    activations          s b h (34 / t + 10 (1 - sequence parallel)(1 - 1/t)) per layer, without the
                         s x s scores; 2 s b h per layer with full recomputation
    in flight            stages - rank micro-batches with the 1F1B schedule

The activation formula is Korthikanti et al. 2022 (arXiv:2205.05198) for attention that does not
keep its scores. It is an estimate for choosing a layout, not a promise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mindspeed.training.flops import (
    attention_weights,
    layer_kinds,
    mlp_weights,
    training_flops,
)
from mindspeed.training.resolve import Settings

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Figures of one layout; memory in bytes on the fullest rank."""

    parameters: int
    parameters_per_rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    bubble: float
    flops_per_step: float

    @property
    def memory(self) -> float:
        """Bytes of everything on the fullest rank."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(args: argparse.Namespace) -> Estimate:
    """Estimate a run from its final values."""
    dense, expert = _matrices(args)
    edge = args.padded_vocab_size * args.hidden_size
    edges = 2 if args.untie_embeddings_and_output_weights else 1
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    layers = -(-args.num_layers // pp)  # experts are in the last ones: the last stage is fullest
    experts_per_rank = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    dense_here = (sum(dense[-layers:]) + (edges if pp == 1 else 1) * edge) // tp
    expert_here = sum(expert[-layers:]) // experts_per_rank
    on_rank = dense_here + expert_here
    narrow = args.fp16 or args.bf16
    main = 12 if narrow else 8
    replicas = args.data_parallel_size * args.context_parallel_size
    expert_replicas = max(1, args.world_size // (experts_per_rank * pp))
    if not args.use_distributed_optimizer:
        replicas = expert_replicas = 1
    trained = 0 if args.lora_target_modules else 1  # adapters are too few to matter
    wide_gradients = not narrow or args.accumulate_allreduce_grads_in_fp32
    return Estimate(
        parameters=sum(dense) + sum(expert) + edges * edge,
        parameters_per_rank=on_rank,
        weights=on_rank * (2 if narrow else 4),
        gradients=trained * on_rank * (4 if wide_gradients else 2),
        optimizer=trained * main * (dense_here / replicas + expert_here / expert_replicas),
        activations=_activations(args),
        bubble=bubble_fraction(args),
        flops_per_step=training_flops(args, args.global_batch_size),
    )


def bubble_fraction(args: argparse.Namespace) -> float:
    """Part of a step in which a pipeline stage waits: (p - 1) / (v m + p - 1)."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    work = _micro_batches(args) * (chunks or 1)
    return (stages - 1) / (work + stages - 1)


def describe(settings: Settings) -> str:
    """The text of ``--dry-run``."""
    args, e = settings.args, estimate(settings.args)
    rows: list[tuple[str, Any]] = [
        ("ranks", _layout(args)),
        ("micro-batches", f"{_micro_batches(args)} per step and rank"),
        ("parameters", f"{e.parameters:,} ({e.parameters_per_rank:,} on the fullest rank)"),
        ("weights", f"{e.weights / GIB:10.3f} GiB per rank"),
        ("gradients", f"{e.gradients / GIB:10.3f} GiB per rank"),
        ("optimizer", f"{e.optimizer / GIB:10.3f} GiB per rank"),
        ("activations", f"{e.activations / GIB:10.3f} GiB per rank"),
        ("memory", f"{e.memory / GIB:10.3f} GiB per rank, estimated"),
        ("pipeline bubble", f"{100 * e.bubble:.1f} %"),
        ("model FLOPs", f"{e.flops_per_step:.3e} per step"),
    ]
    figures = "\n".join(f"  {name:<16} {value}" for name, value in rows)
    return f"# resolved configuration\n{settings.recipe}\n# figures\n{figures}"


def _micro_batches(args: argparse.Namespace) -> int:
    return max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def _layout(args: argparse.Namespace) -> str:
    return (
        f"{args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
        f"{args.data_parallel_size}"
    )


def _matrices(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Entries of every layer's matrices: what all replicas hold, and the routed experts.

    Norms and biases are left out as too few to matter.
    """
    plain, sparse = layer_kinds(args)
    attention = attention_weights(args)
    dense = [attention + mlp_weights(args, args.ffn_hidden_size)] * plain
    if not sparse:
        return dense, [0] * plain
    shared = mlp_weights(args, args.moe_shared_expert_intermediate_size or 0)
    router = args.num_experts * args.hidden_size
    experts = args.num_experts * mlp_weights(args, args.moe_ffn_hidden_size)
    return dense + [attention + shared + router] * sparse, [0] * plain + [experts] * sparse


def _activations(args: argparse.Namespace) -> float:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size * args.hidden_size / args.context_parallel_size
    width = 1 if args.fp16 or args.bf16 else 2  # the formula counts 2-byte activations
    if args.recompute_granularity == "full":
        per_layer = 2.0 * tokens
    else:
        replicated = 0 if args.sequence_parallel else 10 * (1 - 1 / tp)
        per_layer = tokens * (34 / tp + replicated)
    in_flight = min(pp, _micro_batches(args))
    logits = 4 * args.seq_length * args.micro_batch_size * args.padded_vocab_size / tp
    return width * per_layer * args.num_layers / pp * in_flight + logits
