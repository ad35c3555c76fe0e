"""``--dry-run``: the resolved job, its memory per rank, FLOPs and pipeline bubble.

Memory per rank, in bytes (b micro-batch, s sequence, h hidden, p parameters on the rank, d ranks
that share an optimizer):

    weights              2 p  (fp16, bf16) or 4 p; and 4 a of adapters, which are fp32
    gradients            4 p  (2 p without fp32 accumulation); of adapters alone 4 a
    optimizer            8 p  and 4 p main weights in 16-bit training, all / d if distributed; of
                         adapters alone 8 a; other storages: .optimizer_size
    gradient copies      4 p  of 16-bit gradients, / d if distributed, when activations are gone
    ZeRO 2, 3            gradients / d; ZeRO 3: weights / d, and for a moment two layers whole, and
                         embedding and output layer
    activations          s b per layer times what it keeps of a token (.activations); with full
                         recomputation its input, and one layer whole
    in flight            micro-batches that a rank holds with the schedule of the job
                         (.pipeline_figures): stages - rank with 1F1B, a part more with the
                         interleaved one

It is an estimate for choosing a layout, not a promise. Below it is a table of the bytes that one
micro-batch keeps at each site (:mod:`mindspeed.training.activation_trace`), which are exact.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.training.activations import head_bytes, input_bytes, layer_bytes, policy_of
from mindspeed.training.adapter_size import adapter_weights
from mindspeed.training.flops import (
    attention_weights,
    layer_kinds,
    mlp_weights,
    training_flops,
)
from mindspeed.training.optimizer_size import (
    exempt_bytes,
    gradient_copy_bytes,
    host_bytes,
    state_bytes,
    window_bytes,
)
from mindspeed.training.pipeline_figures import (
    PipelineFigures,
    figures,
    layers_of_stages,
    micro_batches,
)
from mindspeed.training.resolve import Settings
from mindspeed.training.zero import STRATEGIES

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Estimate for one layout; memory in bytes of the rank that needs most."""

    parameters: int
    parameters_per_rank: int
    weights: float
    gradients: float
    optimizer: float
    host: float
    windows: float
    gradient_copies: float
    gathered: float
    activations: float
    bubble: float
    schedule: str
    flops_per_step: float

    @property
    def memory(self) -> float:
        """Total bytes on the rank that needs most."""
        kept = self.weights + self.gathered + self.gradients + self.optimizer
        return kept + max(self.activations, self.gradient_copies + self.windows)


def estimate(args: argparse.Namespace) -> Estimate:
    """Estimate a run from its final values."""
    dense, expert = _matrices(args)
    edge = args.padded_vocab_size * args.hidden_size
    edges = 2 if args.untie_embeddings_and_output_weights else 1
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    pipeline = figures(args)
    layers = _layers_of_ranks(args, pipeline.placement)
    experts_per_rank = args.expert_model_parallel_size * args.expert_tensor_parallel_size

    def weights_of(rank: int) -> tuple[int, int]:
        """Of the layers and the ends that a rank has, and of its experts."""
        of_layers = sum(dense[layer] for layer in layers[rank])
        here = edge * min(edges, _ends_of(rank, pipeline.placement))
        return (of_layers + here) // tp, sum(expert[n] for n in layers[rank]) // experts_per_rank

    fullest = max(range(pp), key=lambda rank: (sum(weights_of(rank)), rank))
    dense_here, expert_here = weights_of(fullest)
    on_rank = dense_here + expert_here
    narrow = args.fp16 or args.bf16
    replicas = args.data_parallel_size * args.context_parallel_size
    expert_replicas = max(1, args.world_size // (experts_per_rank * pp))
    if not args.use_distributed_optimizer:
        replicas = expert_replicas = 1
    layer = max(d / tp + e / experts_per_rank for d, e in zip(dense, expert, strict=True))
    trained = 0 if args.lora_target_modules else 1
    adapters, adapters_here = _adapters(args, layers[fullest])
    wide_gradients = not narrow or args.accumulate_allreduce_grads_in_fp32
    width = 2 if narrow else 4
    # Of the model and of the adapters: what a rank computes with, and its share if ranks have any.
    whole = (on_rank, adapters_here)
    share = (dense_here / replicas + expert_here / expert_replicas, adapters_here / replicas)
    embeds = 0 in pipeline.placement.stages[fullest] or edges == 1
    # Of one bucket the last data-parallel rank has the embedding, of several each a part.
    embedded = edge / tp / replicas if args.overlap_grad_reduce else min(edge / tp, share[0])
    exempt = embeds * embedded * exempt_bytes(args)
    sharded = args.use_megatron_fsdp
    gathers = sharded and args.data_parallel_sharding_strategy == STRATEGIES[3]
    weights, gradients = share if gathers else whole, share if sharded else whole
    host = trained * host_bytes(args, share[0])
    return Estimate(
        parameters=sum(dense) + sum(expert) + edges * edge + adapters,
        parameters_per_rank=on_rank + adapters_here,
        weights=weights[0] * width + weights[1] * 4,
        gathered=width * (2 * layer + edges * edge / tp) if gathers else 0.0,
        gradients=trained * gradients[0] * (4 if wide_gradients else 2) + gradients[1] * 4,
        optimizer=trained * (share[0] * state_bytes(args) + exempt) + share[1] * 8 - host,
        host=host,
        windows=trained * share[0] * window_bytes(args),
        gradient_copies=trained * share[0] * gradient_copy_bytes(args),
        activations=_activations(args, pipeline, layers),
        bubble=pipeline.bubble,
        schedule=pipeline.name,
        flops_per_step=training_flops(args, args.global_batch_size),
    )


def describe(settings: Settings) -> str:
    """The text of ``--dry-run``."""
    args, e = settings.args, estimate(settings.args)
    sites, traced = _sites(args)
    by_formula = ", by formula: not traced, see below"
    if traced is not None:
        e, by_formula = replace(e, activations=traced), ""
    only_with_flags = [
        ("gathered weights", e.gathered, "per rank"),
        ("optimizer (host)", e.host, "of host memory"),
        ("swap windows", e.windows, "per rank, not with activations"),
        ("gradient copies", e.gradient_copies, "per rank, not with activations"),
    ]
    lines: list[tuple[str, Any]] = [
        ("ranks", _layout(args)),
        ("micro-batches", f"{micro_batches(args)} per step and rank"),
        ("parameters", f"{e.parameters:,} ({e.parameters_per_rank:,} on the fullest rank)"),
        ("weights", f"{e.weights / GIB:10.3f} GiB per rank"),
        ("gradients", f"{e.gradients / GIB:10.3f} GiB per rank"),
        ("optimizer", f"{e.optimizer / GIB:10.3f} GiB per rank"),
        *((name, f"{size / GIB:10.3f} GiB {of}") for name, size, of in only_with_flags if size),
        ("activations", f"{e.activations / GIB:10.3f} GiB per rank{by_formula}"),
        ("memory", f"{e.memory / GIB:10.3f} GiB per rank, estimated"),
        ("pipeline bubble", f"{100 * e.bubble:.1f} % ({e.schedule})"),
        ("model FLOPs", f"{e.flops_per_step:.3e} per step"),
    ]
    figures = "\n".join(f"  {name:<16} {value}" for name, value in lines)
    return (
        f"# resolved configuration\n{settings.recipe}\n# figures\n{figures}\n"
        f"# MiB that one micro-batch keeps for backward, by site\n{sites}"
    )


def _sites(args: argparse.Namespace) -> tuple[str, int | None]:
    """Table by site, and bytes of the micro-batches in flight on the fullest stage, if traced."""
    from mindspeed.training import activation_trace

    try:
        stages = activation_trace.trace(args)
        return activation_trace.table(stages), max(stage.bytes for stage in stages)
    except Exception as error:  # the other figures do not depend on it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"  not traced: {reason}", None


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


def _adapters(args: argparse.Namespace, layers: Sequence[int]) -> tuple[int, int]:
    """Entries of all adapters, and of those in some layers."""
    if not args.lora_target_modules:
        return 0, 0
    sizes = [adapter_weights(args, experts=kind) for kind in _kinds(args)]
    return sum(whole for whole, _ in sizes), sum(sizes[layer][1] for layer in layers)


def _kinds(args: argparse.Namespace) -> list[bool]:
    """For every layer, whether it has experts; dense ones come first."""
    dense, sparse = layer_kinds(args)
    return [False] * dense + [True] * sparse


def _activations(
    args: argparse.Namespace, pipeline: PipelineFigures, layers: Sequence[Sequence[int]]
) -> float:
    """On the fullest rank: the first holds most micro-batches, the last the logits of one."""
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    kinds, placement, counts = _kinds(args), pipeline.placement, layers_of_stages(args)
    if pipeline.recompute:  # what is held is there as a whole
        args = copy.copy(args)
        args.recompute_granularity = args.recompute_method = None
    last = placement.rank(placement.num_stages - 1)
    kept = []
    for rank, here in enumerate(layers):
        held, once = _stage(args, [kinds[layer] for layer in here])
        parts = tuple(counts[stage] / max(len(here), 1) for stage in placement.stages[rank])
        head = head_bytes(args) if rank == last else 0.0
        kept.append(pipeline.in_flight(rank, parts) * held + once + head)
    return tokens * max(kept)


def _layers_of_ranks(args: argparse.Namespace, placement: Placement) -> list[list[int]]:
    """The layers on each pipeline rank, counted from 0 in the model."""
    counts = layers_of_stages(args)
    ends = list(itertools.accumulate(counts))
    return [
        [n for stage in stages for n in range(ends[stage] - counts[stage], ends[stage])]
        for stages in placement.stages
    ]


def _ends_of(rank: int, placement: Placement) -> int:
    """How many of embedding and output layer a rank has."""
    stages = placement.stages[rank]
    return (0 in stages) + (placement.num_stages - 1 in stages)


def _stage(args: argparse.Namespace, kinds: Sequence[bool]) -> tuple[float, float]:
    """Bytes per token: kept by every micro-batch in flight, and by the one in backward."""
    everything = [layer_bytes(args, experts=kind) for kind in kinds]
    whole = [
        layer_bytes(args, experts=kind, policy=policy_of(args, layer))
        for layer, kind in enumerate(kinds)
    ]
    # The level takes the granularity from Megatron, and keeps two inputs a layer if it is 2.
    level = getattr(args, "optimize_recomp_communication_level", 0)
    if args.recompute_granularity != "full" and not (level and args.recompute_method):
        again = max((x - y for x, y in zip(everything, whole, strict=True)), default=0.0)
        return sum(whole), again
    kept = input_bytes(args) * (2 if level == 2 else 1)
    every = args.recompute_num_layers or 1
    if args.recompute_method == "block":  # this many layers of a stage are computed again
        chunks = args.virtual_pipeline_model_parallel_size or 1
        again = min(len(whole), every * chunks)
        return sum(whole[again:]) + again * kept, max(whole[:again], default=0.0)
    return len(whole) / every * kept, every * max(whole)
