"""The end of a job: no forked process holds a connection, and gloo's ranks exit in order."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP, train


def leave(flags: list[str]) -> dict[str, float]:
    """Readers at the last step and at leaving; when leaving began and ended."""
    import multiprocessing
    import time

    import torch.distributed as dist

    from mindspeed.training import step

    seen: dict[str, float] = {}
    destroy, train_step = dist.destroy_process_group, step.Trainer.step

    def destroy_and_note(*args):
        seen.update(readers_left=len(multiprocessing.active_children()), began=time.monotonic())
        destroy(*args)
        seen.update(ended=time.monotonic())

    def step_and_note(*args):
        result = train_step(*args)
        seen.update(readers=len(multiprocessing.active_children()))
        return result

    dist.destroy_process_group, step.Trainer.step = destroy_and_note, step_and_note
    assert train(flags)["error"] is None
    return seen


@pytest.mark.slow
def test_ranks_exit_in_reverse_order_after_their_data_workers(rank_pool):
    flags = "--train-iters 2 --global-batch-size 6 --num-workers 2 --eval-iters 1 --eval-interval 1"
    ranks = rank_pool.run(3, leave, flags.split(), setup=SETUP, backend=None)
    assert [rank["readers"] for rank in ranks] == [6, 6, 6]  # two for each part of the data
    assert [rank["readers_left"] for rank in ranks] == [0, 0, 0]
    assert ranks[2]["ended"] < ranks[1]["began"] and ranks[1]["ended"] < ranks[0]["began"]
