"""One rank without tokens does not hang the others, and one that raises ends them."""

from __future__ import annotations

import pytest

from mindspeed.moe.save.policy import LEVEL0, LEVEL1
from mindspeed.testing import RankError
from tests.moe import uneven_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
OVERLAP = {"overlap": True}
PROGRAMS = {
    "alltoall": [
        {},
        {"async_permutation": True},
        OVERLAP,
        {**OVERLAP, "save": LEVEL0},
        {**OVERLAP, "save": LEVEL1},
        {**OVERLAP, "recompute_above": 1.25},
        {"exchange": "dedup"},
        {**OVERLAP, "exchange": "dedup"},
        {"pipe_slices": 1},
        {"pipe_slices": 2},
    ],
    "allgather": [{}, {"async_permutation": True}, OVERLAP],
}
SHARED = {"moe_shared_expert_intermediate_size": 20}


def check(found, atol=1e-5):
    import torch

    for expected, *results in found:
        for result in results:
            torch.testing.assert_close(result.output, expected.output, rtol=0, atol=atol)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(result.gradients[name], gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("dispatcher", PROGRAMS)
@pytest.mark.parametrize("first", [0, 4], ids=["rank 0", "rank 1"])
def test_all_tokens_on_one_rank(ranks, dispatcher, first):
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    check(ranks(2, jobs.crowded, {"expert": 2}, overrides, PROGRAMS[dispatcher], first,
                setup=ADAPTOR))  # fmt: skip


@pytest.mark.parametrize("dispatcher", PROGRAMS)
def test_all_tokens_on_one_rank_with_fused_permutation(ranks, dispatcher):
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    check(ranks(2, jobs.crowded_fused, {"expert": 2}, overrides, PROGRAMS[dispatcher], 4,
                setup=ADAPTOR))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", PROGRAMS)
def test_all_tokens_on_one_rank_of_sliced_experts(ranks, dispatcher):
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 2}
    programs = PROGRAMS[dispatcher]
    if dispatcher == "alltoall":
        kept = [one for one in programs if "exchange" not in one]
        programs = [*kept, {**OVERLAP, "expert_groups": 2}, {"expert_groups": 4}]
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    check(ranks(4, jobs.crowded, layout, overrides, programs, 0, setup=ADAPTOR))


def test_one_token_against_many(ranks):
    """Megatron's router takes one token at least; it goes to the other rank, as all do."""
    options = {"tokens": (1, 7)}
    check(ranks(2, jobs.crowded_with, options, {"expert": 2}, SHARED, PROGRAMS["alltoall"], 4,
                setup=ADAPTOR))  # fmt: skip


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dispatcher", "changes"),
    [
        ("alltoall", OVERLAP),
        ("alltoall", {**OVERLAP, "save": LEVEL1}),
        ("alltoall", {"pipe_slices": 2}),
        ("allgather", OVERLAP),
    ],
    ids=["overlap", "level1", "pieces", "all-gather"],
)
def test_a_rank_that_raises_in_a_stage_is_named_first(ranks, dispatcher, changes, where):
    """The others, which wait for it in a collective, end with it."""
    with pytest.raises(RankError) as raised:
        ranks(2, jobs.failing, changes, dispatcher, where, setup=ADAPTOR, timeout=60)
    assert (raised.value.rank, raised.value.kind) == (1, "raised")
    assert isinstance(raised.value.original, jobs.StageError)
