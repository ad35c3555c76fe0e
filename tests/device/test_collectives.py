"""torch.distributed on gloo does what Megatron expects of NCCL."""

from __future__ import annotations

import pytest

from mindspeed.device.torch_cuda_shim.process_groups import gloo
from mindspeed.processes import free_port
from tests.device import device_ranks


def test_collectives_that_move_work_in_every_dtype(ranks):
    assert ranks(4, device_ranks.moving_collectives) == [[], [], [], []]


def test_collectives_that_reduce_equal_the_sum_over_ranks_in_every_dtype_and_operation(ranks):
    assert ranks(4, device_ranks.reducing_collectives) == [[], [], [], []]


@pytest.mark.parametrize(
    "job", [device_ranks.moving_collectives, device_ranks.reducing_collectives]
)
def test_what_older_gloo_lacks_is_built_from_what_it_has(job, ranks):
    assert ranks(4, device_ranks.as_with_torch, "2.7", job) == [[], [], [], []]


def test_reducing_float8_is_refused_with_the_remedy(ranks):
    for messages in ranks(2, device_ranks.refused_reductions):
        assert len(messages) == 2
        assert all("float8_e4m3fn" in text and "bfloat16" in text for text in messages)


def test_a_coalescing_manager_takes_mixed_collectives_and_survives_an_exception(ranks):
    assert ranks(2, device_ranks.mixed_coalescing) == [[], []]


def test_groups_are_gloo_in_every_spelling_and_say_so(ranks):
    expected = ["gloo", *[("gloo", 2.0)] * 5, True, "cpu", 2, "cpu"]
    assert ranks(2, device_ranks.init_like_megatron, free_port()) == [expected, expected]


def test_only_accelerator_backends_are_renamed():
    assert [gloo(name) for name in ("nccl", "NCCL", "cuda:nccl", "cpu:gloo,cuda:nccl")] == [
        "gloo"
    ] * 4
    assert [gloo(name) for name in ("fake", "mpi", None)] == ["fake", "mpi", None]
