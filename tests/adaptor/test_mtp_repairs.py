"""Repairs of multi-token prediction: the defect without each, the right result with it."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed.adaptor.repairs.layers import mtp
from mindspeed.adaptor.repairs.parallel import parameter_marks
from mindspeed.testing import RankError
from tests.adaptor import mtp_repair_ranks
from tests.support.lazy import needs
from tests.support.release import brought_by, has_defect

needs("megatron.core")

ADAPTOR = "tests.support.warm"
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_embedding_have_one_learning_rate(ranks, tied):
    function = mtp_repair_ranks.learning_rates_of_embeddings
    assert ranks(2, function, True, tied, setup=ADAPTOR, timeout=120) == [7.0, 7.0]
    wrong = has_defect(parameter_marks, "setup_embeddings_and_output_layer")
    rates = [7.0, 1.0 if wrong else 7.0]
    assert ranks(2, function, False, tied, setup=ADAPTOR, timeout=120) == rates


def test_a_micro_batch_without_targets_predicts_nothing(ranks):
    function = mtp_repair_ranks.without_targets
    assert ranks(1, function, True, setup=ADAPTOR, timeout=120) == [(0.0, True)]
    ((loss, zero),) = ranks(1, function, False, setup=ADAPTOR, timeout=120)
    assert (math.isnan(loss) and not zero) is has_defect(mtp, "_postprocess")


@pytest.mark.parametrize(("per_token", "masked"), [(True, True), (False, False), (True, False)])
def test_predictions_weigh_the_tokens_of_the_loss(ranks, per_token, masked):
    function = mtp_repair_ranks.gradients_of_four_tokens
    (truth,) = ranks(1, function, False, False, True, setup=ADAPTOR, timeout=120)
    (found,) = ranks(1, function, True, per_token, masked, setup=ADAPTOR, timeout=120)
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    (wrong,) = ranks(1, function, False, per_token, masked, setup=ADAPTOR, timeout=120)
    differs = any(not torch.allclose(wrong[name], truth[name], rtol=1e-2) for name in truth)
    assert differs is (not masked or has_defect(mtp, "_postprocess"))


@brought_by("0.16")
def test_prediction_layers_are_recomputed_with_packed_documents(ranks):
    function = mtp_repair_ranks.packed_gradients
    (truth,) = ranks(1, function, True, {}, setup=ADAPTOR, timeout=120)
    (found,) = ranks(1, function, True, FULL, setup=ADAPTOR, timeout=120)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    if has_defect(mtp, "_checkpointed_forward"):
        with pytest.raises(RankError, match=r"can only save variables|argument 'padding_mask'"):
            ranks(1, function, False, FULL, setup=ADAPTOR, timeout=120)


@pytest.mark.skipif(
    not has_defect(mtp, "get_gpt_decoder_layer_specs"), reason="Megatron-LM asks another function"
)
def test_prediction_layers_have_the_attention_of_the_last_decoder_layer(ranks):
    function = mtp_repair_ranks.attention_of_layers
    (layers,) = ranks(1, function, True, setup=ADAPTOR, timeout=120)
    assert layers == ["SelfAttention", "GatedDeltaNet"]
    (layers,) = ranks(1, function, False, setup=ADAPTOR, timeout=120)
    assert layers == ["SelfAttention", "SelfAttention"]
