"""Repairs of Megatron's schedules: the defect without them, the right result with them."""

from __future__ import annotations

import pytest
import torch

from mindspeed.adaptor.repairs.experts import expert_overlap, router_loss_scale
from mindspeed.adaptor.repairs.layers import offloading_state, recompute
from mindspeed.adaptor.repairs.parallel import overlap
from mindspeed.adaptor.versions import at_least
from mindspeed.testing import RankError
from tests.adaptor import schedule_ranks
from tests.support.release import brought_by, has_defect

ADAPTOR = "tests.support.warm"


def test_an_output_lives_until_it_is_sent(ranks):
    if has_defect(overlap, "_p2p_ops"):
        broken = ranks(2, schedule_ranks.late_sends, False, setup=ADAPTOR, timeout=240)
        assert all(lost for rank in broken for lost, _ in rank.values())
        assert any(pending for rank in broken for _, pending in rank.values())
    for rank in ranks(2, schedule_ranks.late_sends, True, setup=ADAPTOR, timeout=240):
        assert set(rank.values()) == {(0, 0)}


def test_the_last_group_of_recomputed_layers_may_be_smaller(ranks):
    if has_defect(recompute, "_get_layer"):
        with pytest.raises(RankError, match="IndexError"):
            ranks(1, schedule_ranks.uneven_recomputation, False, setup=ADAPTOR, timeout=120)
    function = schedule_ranks.uneven_recomputation
    assert ranks(1, function, True, setup=ADAPTOR, timeout=120) == [(True, True)]


@pytest.mark.parametrize("repaired", [False, True])
def test_backwards_of_every_chunk_are_ended(ranks, repaired):
    ((begun, ended),) = ranks(1, schedule_ranks.ended_backwards, repaired, setup=ADAPTOR)
    assert begun == [0, 1]
    wrong = not repaired and has_defect(expert_overlap, "for_interleaved_pipelining")
    assert ended == ([0] if wrong else begun)  # 1 is of chunk 0


@brought_by("0.16")
@pytest.mark.parametrize("repaired", [False, True])
def test_a_last_layer_without_experts_is_followed_by_the_final_norm(ranks, repaired):
    (found,) = ranks(1, schedule_ranks.dense_layer_at_the_end, repaired, setup=ADAPTOR)
    assert found == [2.0, 20.0 if repaired else 2.0]


@brought_by("0.16")
def test_rows_of_a_single_expert_outlive_their_dispatch(ranks):
    """Without the copy of feature moe-fb-overlap its weight gradients are made of freed memory."""
    ((freed, broken),) = ranks(1, schedule_ranks.rows_of_one_expert, False, setup=ADAPTOR)
    assert freed is not at_least("0.17")
    assert any(bool(gradient.isnan().any()) for gradient in broken) is freed
    ((_, found),) = ranks(1, schedule_ranks.rows_of_one_expert, True, setup=ADAPTOR)
    assert all(bool(gradient.isfinite().all()) and gradient.any() for gradient in found)


@brought_by("0.16")
def test_delayed_weight_gradients_of_latent_projections_are_computed(ranks):
    function = schedule_ranks.latent_projections
    ((found),) = ranks(1, function, True, setup=ADAPTOR)
    for name, (gradient, right) in found.items():
        torch.testing.assert_close(gradient, right, msg=name)
    (broken,) = ranks(1, function, False, setup=ADAPTOR)
    lost = {name for name, (gradient, _) in broken.items() if gradient is None}
    wrong = has_defect(expert_overlap, "MoELayer.backward_dw")
    assert lost == ({"fc1_latent_proj.weight", "fc2_latent_proj.weight"} if wrong else set())


def test_no_layers_of_multi_token_prediction_are_none(ranks):
    if has_defect(expert_overlap, "TransformerConfig.__post_init__"):
        with pytest.raises(RankError, match="AssertionError: MTP layernum"):
            ranks(1, schedule_ranks.no_prediction, False, setup=ADAPTOR)
    (layers,) = ranks(1, schedule_ranks.no_prediction, True, setup=ADAPTOR)
    assert not layers


@pytest.mark.parametrize("repaired", [False, True])
def test_reductions_and_gradients_on_streams_wait_for_each_other(ranks, repaired):
    function = schedule_ranks.streams_of_a_reduction
    wait = repaired or not has_defect(overlap, "start_grad_sync")
    assert ranks(1, function, repaired, setup=ADAPTOR) == [(wait, wait)]


@pytest.mark.parametrize("repaired", [False, True])
def test_scores_of_router_losses_are_not_rounded(ranks, repaired):
    (found,) = ranks(1, schedule_ranks.scores_of_16_bits, repaired, setup=ADAPTOR)
    routing_map, scores, right_map, right = found
    exact = repaired or not has_defect(router_loss_scale, "compute_routing_scores_for_aux_loss")
    assert (scores.dtype == torch.float32 and torch.equal(scores, right)) is exact
    assert torch.equal(routing_map, right_map) is exact


@brought_by("0.16")
def test_an_evaluation_does_not_change_what_is_offloaded(ranks):
    """The first training step offloads everything, and may show what need not be."""
    steps = [True, False, False, True, False]
    (found,) = ranks(1, schedule_ranks.offloaded_bytes, True, steps, setup=ADAPTOR)
    assert found[0] == found[3] == 0
    assert found[1] >= found[2] == found[4]
    assert (found[4] > 0) is not at_least("0.19")  # which takes nothing from a CPU
    if has_defect(offloading_state):
        with pytest.raises(RankError, match="Chunk mismatch"):
            ranks(1, schedule_ranks.offloaded_bytes, False, steps[1:], setup=ADAPTOR)
