"""Uneven rows, and models of uneven sizes, equal one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.lazy import needs
from tests.tensor_parallel import unaligned_ranks

needs("megatron.core")

ADAPTOR = "tests.support.warm"
GATED = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MODELS = {
    "25 heads": {"num_attention_heads": 25, "ffn_hidden_size": 96},
    "5 groups, gated": {
        "num_attention_heads": 10,
        "num_query_groups": 5,
        "ffn_hidden_size": 33,
        **GATED,
    },
    "even heads": {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 33, **GATED},
}
CASES = {
    "te-25-heads-tp2": ("25 heads", "te", 2, False, 16),
    "te-25-heads-tp4-sp": ("25 heads", "te", 4, True, 17),
    "local-25-heads-tp4": ("25 heads", "local", 4, False, 16),
    "local-25-heads-tp2-sp": ("25 heads", "local", 2, True, 17),
    "te-groups-tp2-sp": ("5 groups, gated", "te", 2, True, 17),
    "local-groups-tp4-sp": ("5 groups, gated", "local", 4, True, 18),
    "te-groups-tp2-sp-even-rows": ("5 groups, gated", "te", 2, True, 16),
    "te-even-heads-tp4-sp": ("even heads", "te", 4, True, 19),
}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sizes", [(5, 4), (2, 2), (1, 0)])
def test_rows_of_integers_are_exact(ranks, sizes, async_op):
    shape = (3, 2)
    for result in ranks(2, unaligned_ranks.rows, sizes, shape, async_op):
        sent, _ = result.pop("bytes"), result
        assert all(result.values()), result
        # Twice; (p - 1) ceil(s / p) rows of 3 * 2 floats. An all-reduce would send twice that.
        assert sent == (2 * max(sizes) * 6 * 4,) * 2


def test_four_ranks(ranks):
    sizes = (257, 257, 256, 256)
    for result in ranks(4, unaligned_ranks.rows, sizes, (2, 3), True):
        sent = result.pop("bytes")
        assert all(result.values()), result
        assert sent == (2 * 3 * 257 * 6 * 4,) * 2


def test_npu_uses_its_collectives_of_uneven_rows(npu_ranks):
    """Both ranks are on one machine; torch's own collectives are not called."""
    for async_op in (False, True):
        job = unaligned_ranks.rows
        for result in npu_ranks(2, job, (5, 4), (3, 2), async_op, "npu"):
            assert result.pop("bytes") == (0, 0)
            assert all(result.values()), result


def test_other_numbers_of_rows_are_refused(ranks):
    for errors in ranks(2, unaligned_ranks.wrong_rows):
        assert len(errors) == 2 and all("--seq-length" in error for error in errors)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_a_model_equals_one_rank(ranks, case):
    name, spec, size, sequence_parallel, length = CASES[case]
    arguments = (MODELS[name], spec, sequence_parallel, length)
    build, gated = unaligned_ranks.model_results, "gated" in name or name == "even heads"
    (one,) = ranks(1, build, *arguments, setup=ADAPTOR, timeout=240)
    several = ranks(size, build, *arguments, setup=ADAPTOR, timeout=240)
    for result in several:
        torch.testing.assert_close(result["loss"], one["loss"], rtol=1e-5, atol=1e-5)
    for kind, tolerance in (("weights", 0), ("gradients", 1e-5)):
        assert one[kind].keys() == several[0][kind].keys()
        for key, expected in one[kind].items():
            shards = [result[kind][key] for result in several]
            whole = unaligned_ranks.joined(key, shards, gated)
            torch.testing.assert_close(
                whole, expected, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("spec", ["te", "local"])
def test_layers_send_ten_times_the_padded_activation(ranks, spec):
    """Two layers: 6 all-gathers and 4 reduce-scatters each; embedding 1 + 1, output layer 2 + 1."""
    size, length, hidden, element = 2, 17, 24, 4
    arguments = (MODELS["25 heads"], spec, True, length, True)
    unit = (size - 1) * -(-length // size) * unaligned_ranks.BATCH * hidden * element
    for result in ranks(size, unaligned_ranks.model_results, *arguments, setup=ADAPTOR):
        assert result["bytes"] == [(2 * 6 + 1 + 2) * unit, (2 * 4 + 1 + 1) * unit]
