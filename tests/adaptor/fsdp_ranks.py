"""Jobs for the ranks of test_fsdp.py: a few steps of training with Megatron-FSDP, or without."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.te import marks_ranks
from tests.te.marks_ranks import SEQUENCE, VOCABULARY, Layout

SAMPLES, MICRO_BATCH, STEPS = 4, 1, 2


class Case(NamedTuple):
    """A training.

    Attributes:
        layout: The model and its tensor- and expert-parallel ranks.
        strategy: What Megatron-FSDP shards; None: without it.
        overlap: Gradients are reduced during backward.
        average: The collectives average.
        recompute: Layers are computed again in backward.
    """

    layout: Layout
    strategy: str | None = None
    overlap: bool = False
    average: bool = False
    recompute: bool = False


def trained(cases: list[Case], shapes: dict[Layout, Any]) -> dict[Case, Any]:
    """For each case losses, norms, zeros and squared gradients, as all ranks together have them.

    Args:
        cases: For the ranks of this process group.
        shapes: The shapes of each model on one rank; empty on one rank.
    """
    from megatron.core import parallel_state

    from mindspeed import session

    found = {}
    for case in cases:
        layout = case.layout
        session.current().configure({"use_megatron_fsdp": case.strategy is not None})
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        found[case] = _train(case, shapes.get(layout.model))
        parallel_state.destroy_model_parallel()
    return found


def _train(case: Case, whole: Any) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    names, shapes, chunk, optimizer = _built(case, whole)
    found: dict[str, Any] = {"shapes": shapes, "losses": [], "norms": [], "zeros": []}
    for _ in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = _batches()
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=iter(batches), model=[chunk],
            num_microbatches=len(batches), seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )  # fmt: skip
        loss = torch.stack([report["loss"] for report in reports]).mean()
        dist.all_reduce(loss)
        found["losses"].append(loss.item() / dist.get_world_size())
        found.setdefault("squares", _squares(chunk, names))
        _, norm, zeros = optimizer.step()
        found["norms"].append(float(norm))
        found["zeros"].append(zeros)
    return found


def _built(case: Case, whole: Any) -> tuple[Any, ...]:
    """Global names and shapes of parameters, the wrapped model and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7)
    model = marks_ranks.build_model(case.layout)
    config, names, shapes = model.config, {}, {}
    for name, parameter in model.named_parameters():
        expert_rank = parallel_state.get_expert_model_parallel_rank()
        names[name] = full = marks_ranks.global_name(name, expert_rank)
        shapes[full] = tuple(parameter.shape)
        with torch.no_grad():
            shape = whole[full] if whole else shapes[full]
            parameter.copy_(marks_ranks.slice_of(full, shape, parameter.shape))
    if case.recompute:
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 1
    sharded = case.strategy is not None
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, use_megatron_fsdp=sharded, grad_reduce_in_fp32=True,
        data_parallel_sharding_strategy=case.strategy or "no_shard",
        overlap_grad_reduce=case.overlap, average_in_collective=case.average,
    )  # fmt: skip
    wrap = FullyShardedDataParallel if sharded else DistributedDataParallel
    chunk = wrap(config, ddp, model)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=0.1, use_distributed_optimizer=sharded,
        log_num_zeros_in_grad=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [chunk])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = chunk.no_sync if case.overlap else None
    return names, shapes, chunk, optimizer


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
    mine = tokens.chunk(parallel_state.get_data_parallel_world_size())
    parts = mine[parallel_state.get_data_parallel_rank()].split(MICRO_BATCH)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def _forward_step(batches: Any, chunk: Any) -> Any:
    tokens, labels = next(batches)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    losses = chunk(tokens, torch.arange(SEQUENCE)[None], mask, labels=labels)

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.mean(), {"loss": output.mean().detach()}

    return losses, mean


def _squares(chunk: Any, names: dict[str, str]) -> dict[str, float]:
    """The squared norm of the gradient of each parameter, experts of a layer together."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    found = defaultdict[str, Any](float)
    for name, parameter in chunk.named_parameters():
        name = names[name.replace("module.", "")]
        gradient = getattr(parameter, "main_grad", parameter.grad)
        gradient = getattr(gradient, "_local_tensor", gradient)
        square = torch.zeros(()) if gradient is None else gradient.square().sum()
        group = parallel_state.get_tensor_model_parallel_group()
        square = square * param_is_not_tensor_parallel_duplicate(parameter, group)
        found[marks_ranks.EXPERT.sub(r"\1*", name) if ".experts." in name else name] += square
    for square in found.values():
        dist.all_reduce(square)
    return {name: square.item() for name, square in found.items()}


def tracked_generators() -> dict[str, bytes]:
    """The generators of this rank after Megatron-FSDP has wrapped a model."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mindspeed import session

    session.current().configure({"use_megatron_fsdp": True})
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _built(Case(Layout(tp=2), "optim"), None)
    states = get_cuda_rng_tracker().get_states()
    return {name: bytes(state.tolist()) for name, state in states.items()}
