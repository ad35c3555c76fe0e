"""Parallel sizes: derived from the number of ranks, and contradictions."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator

from mindspeed import device
from mindspeed.device import host_memory
from mindspeed.errors import ConfigError
from mindspeed.training import resolve_zero

_BYTES_OF_A_RANK = 256 << 20  # torch and Megatron Core, imported


def model_parallel_size(args: argparse.Namespace) -> int:
    """Ranks that hold one copy of the model."""
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def parts_of_a_sequence(args: argparse.Namespace) -> int:
    """Parts of which ranks share the tokens of a sequence, two each of context parallelism."""
    return 2 * args.context_parallel_size * args.tensor_model_parallel_size


def default_ranks(args: argparse.Namespace) -> int:
    """Number of ranks where neither a launcher nor ``--nproc`` gives it.

    Those of ``--devices`` for ``--dry-run`` and where this machine has as many, else as few as can
    hold the model.
    """
    smallest = model_parallel_size(args)
    if args.devices is None:
        return smallest
    return args.devices if args.dry_run or device.current().count() >= args.devices else smallest


def check_fits_here(ranks: int) -> None:
    """Check that this machine has memory for the processes that a command starts itself.

    Raises:
        ConfigError: it cannot: its memory is less than the interpreters and libraries alone need.
    """
    most = max(8, host_memory.total() // _BYTES_OF_A_RANK)
    if ranks > most:
        raise ConfigError(
            f"{ranks} ranks do not fit on this machine, whose memory holds {most} at most: start "
            "them with torchrun on several machines, choose smaller parallel sizes or --nproc, or "
            "look at them with --dry-run"
        )


def parallel(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    """Complete the sizes of the parallel groups; yields contradictions."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    size = model_parallel_size(args)
    args.world_size = world_size
    args.data_parallel_size = max(1, world_size // size)
    if world_size % size:
        yield (
            f"{world_size} ranks cannot be divided by tensor {tp} x pipeline {pp} x context {cp} "
            f"= {size} parallel ranks: start a multiple of {size} processes or change "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
        )
    hierarchy = args.hierarchical_context_parallel_sizes
    if hierarchy is not None and math.prod(hierarchy) != cp:
        yield (
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, hierarchy))}: their product "
            f"must be --context-parallel-size {cp}"
        )
    settings = args.nccl_communicator_config_path
    if settings is not None and not os.path.isfile(settings):
        yield f"--nccl-communicator-config-path {settings}: there is no such file"
    if args.expert_tensor_parallel_size is None:
        # Megatron's experts with biases are whole on a rank.
        args.expert_tensor_parallel_size = 1 if args.num_experts and args.add_bias_linear else tp
    if ep > 1 and not args.num_experts:
        yield "--expert-model-parallel-size needs --num-experts"
    elif ep > 1 and args.num_experts % ep:
        yield f"--num-experts {args.num_experts} is not divisible by expert parallel size {ep}"
    expert_size = args.expert_tensor_parallel_size * pp * ep
    if args.num_experts and world_size % expert_size:
        yield (
            f"{world_size} ranks cannot be divided by expert tensor "
            f"{args.expert_tensor_parallel_size} x expert {ep} x pipeline {pp} = {expert_size}"
            + (f" (--moe-tp-extend-ep: expert {ep} with tensor {tp})" * args.moe_tp_extend_ep)
        )
    if tp == 1:
        args.sequence_parallel = False
    yield from resolve_zero.complete(args, args.expert_model_parallel_size)
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer"
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    yield from _pipeline(args)


def _pipeline(args: argparse.Namespace) -> Iterator[str]:
    pp, layers = args.pipeline_model_parallel_size, args.num_layers or 0
    per_stage = args.num_layers_per_virtual_pipeline_stage
    chunks = args.num_virtual_stages_per_pipeline_rank
    layout = args.pipeline_model_parallel_layout
    if sum(value is not None for value in (per_stage, chunks, layout)) > 1:
        yield (
            "give one of --num-layers-per-virtual-pipeline-stage, "
            "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout"
        )
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout as Layout,
        )

        try:
            stages = Layout.get_num_stages_from_str(layout)
        except (AssertionError, ValueError) as error:
            yield f"--pipeline-model-parallel-layout {layout}: {error}"
            return
        if stages % pp:
            yield f"--pipeline-model-parallel-layout has {stages} stages, not a multiple of {pp}"
        chunks = stages // pp
    counted = layers + args.account_for_embedding_in_pipeline_split
    counted += args.account_for_loss_in_pipeline_split
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if layout is None and first is None and last is None and counted % pp:
        yield f"{counted} layers cannot be divided by --pipeline-model-parallel-size {pp}"
    if per_stage is not None:
        if counted // pp % per_stage:
            yield f"{counted // pp} layers per stage are not divisible by {per_stage}"
        chunks = counted // pp // per_stage
    args.virtual_pipeline_model_parallel_size = chunks if chunks and chunks > 1 else None
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = args.align_param_gather = False
    elif pp == 1:
        yield "the interleaved schedule needs --pipeline-model-parallel-size of at least 2"
