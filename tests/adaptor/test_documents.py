"""Packed documents through Megatron's model: each trains like a separate sequence."""

from __future__ import annotations

import pytest
import torch

from mindspeed.testing import RankError
from tests.adaptor import documents_ranks

SETUP = "tests.support.warm"
NAMES = list(documents_ranks.MODELS)


@pytest.fixture(scope="module")
def alone(rank_pool):
    """``alone(names)``: of each model losses and gradients, computed when first asked for."""
    known = {}

    def get(names):
        if new := [name for name in names if name not in known]:
            (found,) = rank_pool.run(1, documents_ranks.alone, new, setup=SETUP, timeout=240)
            known.update(found)
        return {name: known[name] for name in names}

    return get


@pytest.mark.weekly_cases("te-2-None-names1-False", "local-1-None-names0-False")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "ranks_of_group", "algorithm", "names", "script"),
    [
        ("local", 1, None, NAMES, False),
        ("te", 2, None, NAMES, False),
        ("local", 2, "ulysses", ["gqa", "mla-yarn"], False),
        ("te", 4, "adaptive", ["gqa", "recomputed"], False),
        ("te", 2, None, ["gqa", "recomputed"], True),
    ],
)
def test_packed_documents_train_like_separate_sequences(
    ranks, alone, spec, ranks_of_group, algorithm, names, script
):
    given = (names, spec, ranks_of_group, algorithm, script)
    results = ranks(ranks_of_group, documents_ranks.packed, *given, setup=SETUP, timeout=240)
    for name, wanted in alone(names).items():
        for found in (result[name] for result in results):
            torch.testing.assert_close(found["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)
            assert found["gradients"].keys() == wanted["gradients"].keys()
            for key, gradient in wanted["gradients"].items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(
                    found["gradients"][key], gradient, rtol=1e-5, atol=1e-5 * scale,
                    msg=lambda text, key=key, name=name: f"{name} {key}: {text}",
                )  # fmt: skip


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_cu_seqlens_reach_every_tensor_parallel_rank_of_megatron_lm(ranks, megatron_lm):
    read, checkout = documents_ranks.megatron_reads, str(megatron_lm)
    with pytest.raises(RankError, match="get_batch_on_this_tp_rank"):  # lengths out of garbage
        ranks(2, read, checkout, False, timeout=30)
    batch = documents_ranks.rows(0)
    for found in ranks(2, read, checkout, True, timeout=240):
        assert found["cu_seqlens"].tolist() == [0, 5, 6, 12, 16, 26, 32]
        assert found["max_seqlen"].tolist() == [10]
        for name in ("tokens", "labels", "loss_mask"):
            assert found[name].equal(batch[name])


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_packed_conversations_of_megatron_lm_are_sharded_over_context_parallel_ranks(
    ranks, megatron_lm
):
    read = documents_ranks.conversations_of_megatron
    parts = ranks(2, read, str(megatron_lm), timeout=240)
    tokens = torch.cat([own for own, _, _ in parts], dim=1).flatten()
    assert tokens.sort().values.equal(torch.arange(documents_ranks.SIZE))
    inside = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    for own, cu_seqlens, positions in parts:
        assert cu_seqlens == [0, 5, 6, documents_ranks.SIZE]
        assert own.shape == (1, documents_ranks.SIZE // 2)
        assert positions.equal(inside[own])
