"""One rank of a job in this process: process groups of torch's ``fake`` backend, FakeTensors.

Nothing is allocated, computed or sent, so a model of any size is built and run in seconds, for
figures that depend on shapes alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed.job import Parallel
from mindspeed.journal import Journal


def rank_in_stage(args: argparse.Namespace, stage: int) -> int:
    """The first rank of a pipeline stage."""
    return Parallel.of(args).first_rank_of(stage)


@contextlib.contextmanager
def fake_groups(rank: int, world_size: int) -> Iterator[None]:
    """A default process group without communication, and no random states in forks of them.

    Megatron's groups, which the block may create, are destroyed with it. Those of other ranks,
    thousands in a large job, are not made.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        # Until torch 2.10 this module alone teaches FakeTensors collectives.
        from torch.distributed._tools import fake_collectives  # noqa: F401
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    tracker, new_group, journal = get_cuda_rng_tracker(), dist.new_group, Journal()

    @functools.wraps(new_group)
    def own_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **options)

    journal.set(dist, "new_group", own_group, owner="fake job")
    journal.set(parallel_state.RankGenerator, "get_ranks", _listed_ranks, owner="fake job")
    try:
        tracker.fork = lambda *names: contextlib.nullcontext()  # FakeTensors have no random state
        yield
    finally:
        journal.undo()
        vars(tracker).pop("fork", None)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _listed_ranks(generator: Any, kinds: str) -> list[list[int]]:
    """Groups of ranks as Megatron lists them, thousands of times as quickly."""
    varies = generator.get_mask(generator.order, kinds)
    places = np.arange(generator.world_size).reshape(generator.ordered_size[::-1])
    last = range(len(varies) - 1, -1, -1)  # the first size varies fastest
    inside = [last[i] for i in last if varies[i]]
    groups = places.transpose(*(last[i] for i in last if not varies[i]), *inside)
    ranks = (groups + generator.rank_offset).reshape(-1, math.prod(groups.shape[-len(inside) :]))
    found: list[list[int]] = ranks.tolist()
    return found


@contextlib.contextmanager
def fake_job(args: argparse.Namespace, stage: int, tensor_rank: int = 0) -> Iterator[None]:
    """Process groups without communication, of a tensor-parallel rank in ``stage``."""
    from mindspeed.training import setup

    with fake_groups(rank_in_stage(args, stage) + tensor_rank, Parallel.of(args).world):
        setup.parallel_groups(args)
        setup.seed_everything(args)
        yield


def build_chunks(args: argparse.Namespace, config: Any) -> list[Any]:
    """This rank's chunks, in the precision of their parameters."""
    from mindspeed import session
    from mindspeed.adaptor.pipeline_ends import pipeline_ends
    from mindspeed.lora.flags import attach_by_flags
    from mindspeed.training.model import gpt_model, left_out, store_weights

    def build(vp_stage: int | None) -> Any:
        ends = pipeline_ends(session.install().seams, vp_stage)
        with left_out(args):
            chunk = gpt_model(args, config, *ends, vp_stage)
        store_weights(args, chunk, torch.device("cpu"))
        return chunk

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)
    try:
        chunks = [build(vp_stage) for vp_stage in Parallel.of(args).vp_stages]
    finally:
        torch.set_default_dtype(before)
    attach_by_flags(chunks, args)
    return chunks
