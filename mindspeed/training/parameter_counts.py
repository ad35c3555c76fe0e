"""The parameters of every rank of a pipeline, counted in the model that its flags build.

Each rank builds its chunks on FakeTensors, so norms, biases, embeddings, routers, adapters and
layers of multi-token prediction are there, in the dtypes and on the ranks in which training has
them:

    stages = count(args)
    stages[0].entries(), stages[0].nbytes()         # of the first rank of the first stage
    entries_of_model(args, stages)                  # of the whole model, copies counted once
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.errors import ConfigError
from mindspeed.flags import changed
from mindspeed.job import Parallel
from mindspeed.lora.attach import meant, unknown
from mindspeed.lora.flags import config_by_flags
from mindspeed.training.fake_job import build_chunks, fake_job


@dataclass(frozen=True)
class CountedParameter:
    """A parameter on one rank.

    Attributes:
        entries: on this rank.
        element: bytes of an entry.
        expert: its replicas are the expert-data-parallel ranks.
        sharded: the tensor-parallel ranks have a part each, else all of it.
        copied: an embedding that belongs to another stage.
    """

    entries: int
    element: int
    expert: bool
    sharded: bool
    copied: bool


@dataclass(frozen=True)
class RankParameters:
    """All parameters of one rank.

    Attributes:
        parameters: of all its chunks.
        names: those of adapters' options that mean something there, and those of linear layers.
    """

    parameters: tuple[CountedParameter, ...]
    names: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def entries(self, choose: Callable[[CountedParameter], bool] = lambda one: True) -> int:
        return sum(one.entries for one in self.parameters if choose(one))

    def nbytes(self, choose: Callable[[CountedParameter], bool] = lambda one: True) -> int:
        """Bytes of those that are chosen."""
        return sum(one.entries * one.element for one in self.parameters if choose(one))


def count(args: argparse.Namespace) -> list[RankParameters]:
    """Parameters of the first rank of each pipeline stage.

    Args:
        args: final values, of a dry run; the process is not part of a job.

    Raises:
        ConfigError: a name of ``--lora-target-modules`` or ``--lora-modules-to-save`` means nothing
            on any stage.
    """
    args = with_fewest_replicas(args)
    stages = [_of_rank(args, stage) for stage in range(Parallel.of(args).pipeline)]
    if adapters := config_by_flags(args):
        matched = set[str]().union(*(one.names[0] for one in stages))
        there = set[str]().union(*(one.names[1] for one in stages))
        if problems := unknown(adapters, matched, there):
            raise ConfigError("\n".join(problems))
    return stages


def entries_of_model(args: argparse.Namespace, stages: list[RankParameters]) -> int:
    """Entries of the whole model.

    Args:
        args: as for :func:`count`.
        stages: what it has found.
    """
    args = with_fewest_replicas(args)
    return sum(
        _entries_of_stage(args, _tensor_ranks(args, stage, first))
        for stage, first in enumerate(stages)
    )


def _entries_of_stage(args: argparse.Namespace, ranks: list[RankParameters]) -> int:
    """Entries that belong to a stage, from all its tensor-parallel ranks."""
    replicated = ranks[0].entries(lambda one: not (one.expert or one.sharded or one.copied))
    shards = sum(
        rank.entries(lambda one: one.sharded and not (one.expert or one.copied)) for rank in ranks
    )
    parallel = Parallel.of(args)
    experts = parallel.expert_tensor * ranks[0].entries(
        lambda one: one.expert and one.sharded
    ) + ranks[0].entries(lambda one: one.expert and not one.sharded)
    return replicated + shards + parallel.expert * experts


def _tensor_ranks(
    args: argparse.Namespace, stage: int, first: RankParameters
) -> list[RankParameters]:
    """All tensor-parallel ranks of a stage; those between first and last if these differ."""
    ranks = Parallel.of(args).tensor
    if ranks == 1 or _of_rank(args, stage, ranks - 1) == first:
        return [first] * ranks
    return [first, *(_of_rank(args, stage, rank) for rank in range(1, ranks))]


def with_fewest_replicas(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of the values with as few data-parallel ranks as the experts need."""
    parallel = Parallel.of(args)
    experts, model = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
    enough = (n for n in range(1, parallel.data) if model * n % experts == 0)
    fewest = next(enough, parallel.data)
    return changed(
        args,
        enable_gloo_process_groups=False,
        world_size=parallel.world // parallel.data * fewest,
        data_parallel_size=fewest,
        num_distributed_optimizer_instances=1,
    )


def _of_rank(args: argparse.Namespace, stage: int, tensor_rank: int = 0) -> RankParameters:
    """Build the chunks of a rank."""
    from mindspeed.training.configs import transformer_config

    with fake_job(args, stage, tensor_rank), FakeTensorMode(allow_non_fake_inputs=True):
        chunks = build_chunks(args, transformer_config(args))
        found = {id(one): _parameter(one) for chunk in chunks for one in chunk.parameters()}
        adapters = config_by_flags(args)
        matched, there = meant(chunks, adapters) if adapters else (set(), set())
        return RankParameters(tuple(found.values()), (frozenset(matched), frozenset(there)))


def _parameter(parameter: Any) -> CountedParameter:
    return CountedParameter(
        entries=parameter.numel(),
        element=parameter.element_size(),
        expert=not getattr(parameter, "allreduce", True),
        sharded=getattr(parameter, "tensor_model_parallel", False),
        copied=getattr(parameter, "shared", False),
    )
