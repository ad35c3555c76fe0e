"""What one micro-batch keeps for backward, site by site, from a forward pass on FakeTensors.

``--dry-run`` builds one rank of each kind of pipeline stage in a process group of torch's ``fake``
backend, so it needs neither devices nor memory: shapes alone pass through the model, autograd
saves, and :func:`mindspeed.instruments.saved_for_backward` counts. Recomputation and offloading
are in force as in training, so bytes are those of a real step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.job import Parallel
from mindspeed.training.fake_job import ROUTED, build_chunks, fake_job
from mindspeed.training.pipeline_figures import (
    PipelineFigures,
    figures,
    layers_of_stages,
    scheduled_pipeline,
)

_LAYER = re.compile(
    r"^(?:module\.)*(decoder|mtp)\.layers\.\d+(?:\.(?:transformer|mtp_model)_layer)?"
)
MOST_LAYERS, MOST_RANKS, MOST_KINDS = 256, 512, 8
OUTSIDE = "outside of layers"
"""Embedding, final norm, output layer and loss."""


class NotTraced(Exception):
    """The model cannot be traced, or not in seconds; says why."""


@dataclass
class Kept:
    """Bytes of one micro-batch in one model chunk.

    Attributes:
        sites: on the device, by site, summed over the layers.
        host: copies in host memory.
        dropped: computed again in backward.
    """

    sites: Counter[str] = field(default_factory=Counter)
    host: int = 0
    dropped: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.sites.total()


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    Attributes:
        number: of the stage.
        chunks: what a micro-batch keeps in each of its chunks.
        held: micro-batches of each chunk that are held at the fullest moments; no whole numbers
            where sizes differ or a part of the activations is kept.
    """

    number: int
    chunks: list[Kept]
    held: frozenset[tuple[float, ...]]

    @property
    def bytes(self) -> int:
        """Bytes of all micro-batches in flight, at the moment at which they are most."""
        return max(
            round(sum(k * chunk.total for k, chunk in zip(held, self.chunks, strict=True)))
            for held in self.held
        )


def trace(args: argparse.Namespace) -> list[Stage]:
    """The first and the last pipeline stage, and one of others with the same number of layers.

    Of those alike it is the one that holds most.

    Args:
        args: final values.

    Raises:
        NotTraced: the process is part of a job, the model has routed experts, whose shapes depend
            on values, or so many layers or ranks that tracing would take minutes.
    """
    model_ranks = Parallel.of(args).model
    layers = args.num_layers // args.pipeline_model_parallel_size
    for refused, reason in (
        (dist.is_initialized(), "the process is part of a job"),
        (args.num_experts, ROUTED),
        (layers > MOST_LAYERS, f"more than {MOST_LAYERS} layers on a stage"),
        (model_ranks > MOST_RANKS, f"a model on more than {MOST_RANKS} ranks"),
    ):
        if refused:
            raise NotTraced(reason)
    pipeline = figures(args)
    ranks = _different(args, pipeline)
    chunks = {rank: _trace_rank(args, rank) for rank in ranks}
    if pipeline.recompute:
        stored = sum(kept.total for found in chunks.values() for kept in found)
        dropped = sum(k.total for r in ranks for k in _trace_rank(args, r, dropped=True))
        pipeline = figures(args, dropped / stored)
    return [Stage(rank, chunks[rank], pipeline.held[rank]) for rank in ranks]


def _different(args: argparse.Namespace, pipeline: PipelineFigures) -> list[int]:
    """Of all ranks with the same layers and ends the one that holds most."""
    layers, placement = layers_of_stages(args), pipeline.placement
    alike: dict[tuple[Any, ...], int] = {}
    for rank, stages in enumerate(placement.stages):
        ends = (0 in stages, placement.num_stages - 1 in stages)
        kind = (ends, tuple(layers[stage] for stage in stages))
        other = alike.setdefault(kind, rank)
        if pipeline.in_flight(rank) > pipeline.in_flight(other):
            alike[kind] = rank
    if len(alike) > MOST_KINDS:
        raise NotTraced(f"{len(alike)} different stages, more than {MOST_KINDS}")
    return sorted(alike.values())


def _trace_rank(args: argparse.Namespace, rank: int, dropped: bool = False) -> list[Kept]:
    """What a micro-batch keeps in the chunks of a rank of the pipeline.

    Args:
        args: final values.
        rank: of the pipeline.
        dropped: where the schedule recomputes, count the forwards whose activations it drops.
    """
    from mindspeed.training.configs import transformer_config

    args = copy.copy(args)
    args.enable_gloo_process_groups = False
    args.world_size //= args.data_parallel_size  # replicas keep the same
    args.data_parallel_size = args.num_distributed_optimizer_instances = 1
    with fake_job(args, rank):
        config = transformer_config(args)
        schedule = scheduled_pipeline(args)
        found = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            for chunk in build_chunks(args, config):
                with contextlib.nullcontext() if dropped else _stored(schedule, chunk):
                    found.append(forward(args, config, chunk))
        return found


def _stored(schedule: Any, chunk: Any) -> AbstractContextManager[object]:
    """Where a schedule chooses what is recomputed: a forward whose activations it stores."""
    make = getattr(schedule, "recomputation", None)
    recomputation = make(chunk) if make is not None else None
    return contextlib.nullcontext() if recomputation is None else recomputation.stored()


def forward(args: argparse.Namespace, config: Any, chunk: Any) -> Kept:
    """What a forward pass of one model chunk keeps.

    Args:
        args: final values.
        config: Megatron's configuration of the model.
        chunk: the chunk, with real or with FakeTensors.
    """
    from mindspeed.instruments import saved_for_backward

    model = getattr(chunk, "module", chunk)
    shape = (args.micro_batch_size, args.seq_length // args.context_parallel_size)
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.arange(shape[1]).expand(shape)
    if not model.pre_process:
        rows = shape[1]
        if config.sequence_parallel:
            rows //= config.tensor_model_parallel_size
        size = (rows, shape[0], config.hidden_size)
        received = torch.zeros(size, dtype=config.pipeline_dtype, requires_grad=True)
        model.set_input_tensor(received.view_as(received))
    labels = tokens if model.post_process else None
    with saved_for_backward(chunk) as saved:
        output = chunk(tokens, positions, None, labels=labels)
        kept = Kept(host=saved.live_host_bytes, dropped=saved.dropped_bytes)
        for module, nbytes in saved.by_module().items():
            kept.sites[_site(module)] += nbytes
    del output
    return kept


def _site(module: str) -> str:
    found = _LAYER.match(module)
    return module[found.end() + 1 :] or "layer" if found else OUTSIDE


def table(stages: list[Stage]) -> str:
    """MiB by site and stage."""
    names = sorted({site for stage in stages for chunk in stage.chunks for site in chunk.sites})

    def row(name: str, values: list[int]) -> str:
        return f"  {name:<{width}}" + "".join(f"{value / 2**20:>14,.3f}" for value in values)

    def summed(read: Any) -> list[int]:
        return [sum(read(chunk) for chunk in stage.chunks) for stage in stages]

    last = ("total", "on the host", "computed again", "all micro-batches in flight")
    width = max(len(name) for name in (*names, *last))
    lines = [f"  {'':<{width}}" + "".join(f"{'stage ' + str(s.number):>14}" for s in stages)]
    lines += [row(name, summed(lambda chunk, name=name: chunk.sites[name])) for name in names]
    lines.append(row(last[0], summed(lambda chunk: chunk.total)))
    lines.append(row(last[1], summed(lambda chunk: chunk.host)))
    lines.append(row(last[2], summed(lambda chunk: chunk.dropped)))
    lines.append(row(last[3], [stage.bytes for stage in stages]))
    return "\n".join(lines)
