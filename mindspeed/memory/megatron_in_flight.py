"""The order in which Megatron's schedules visit the chunks of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    get_pp_rank_microbatches,
    get_schedule_table,
)

from mindspeed.memory.in_flight import Held, held_at_once


@dataclass(frozen=True)
class _Group:
    """A process group as ``get_pp_rank_microbatches`` sees it: any stage, in any process."""

    stages: int
    stage: int

    def size(self) -> int:
        return self.stages

    def rank(self) -> int:
        return self.stage


@dataclass(frozen=True)
class _Communicator:
    pp_group: _Group
    virtual_pipeline_model_parallel_size: int | None


def held_by_stage(stage: int, micro_batches: int, config: Any) -> frozenset[Held]:
    """:func:`~mindspeed.memory.in_flight.held_at_once` for one pipeline stage."""
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks:
        group = config.microbatch_group_size_per_vp_stage or stages
        micro_batches = _fewest_alike(micro_batches, stages, group)
    else:
        group = micro_batches = _fewest_alike(micro_batches, stages, 1)
    _, _, warm_up, _ = get_pp_rank_microbatches(
        micro_batches,
        chunks or 1,
        group,
        overlap_moe_expert_parallel_comm=config.overlap_moe_expert_parallel_comm,
        p2p_communicator=_Communicator(_Group(stages, stage), chunks),
    )
    table = get_schedule_table(micro_batches, chunks or 1, group)
    return held_at_once([chunk for _, chunk in table], warm_up)


def _fewest_alike(micro_batches: int, stages: int, group: int) -> int:
    """The smallest step that holds the same chunks at once: longer ones repeat their middle."""
    enough = 2 * stages + 4 * group
    excess = max(micro_batches - enough, 0)
    return micro_batches - excess // group * group


def layer_calls_in_flight(
    layers: Mapping[int, int], samples: tuple[int | None, int | None], config: Any
) -> int:
    """The most layer calls of this rank that wait for backward at once.

    Args:
        layers: Chunk -> number of its layers that count.
        samples: Of a step and of a micro-batch; None: a step has many micro-batches.
        config: Megatron's ``ModelParallelConfig``.
    """
    in_step, in_micro_batch = samples
    if in_step and in_micro_batch:
        ranks = parallel_state.get_data_parallel_world_size()
        micro_batches = max(in_step // (in_micro_batch * ranks), 1)
    else:
        group = config.microbatch_group_size_per_vp_stage or 1
        micro_batches = 4 * max(config.pipeline_model_parallel_size, group)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    moments = held_by_stage(stage, micro_batches, config)
    return max(sum(n * layers.get(chunk, 0) for chunk, n in enumerate(held)) for held in moments)
