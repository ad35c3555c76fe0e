"""One linear layer for gate and up projection takes half of the collectives of two."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import mlp_fusion_ranks
from tests.support.lazy import needs

needs("megatron.core")

CALLS = {
    False: {("backward", "all_reduce"): 1},
    True: {
        ("forward", "all_gather"): 1,
        ("backward", "all_gather"): 1,
        ("backward", "reduce_scatter"): 1,
    },
}


def test_one_layer_communicates_half_as_often_as_two(ranks):
    for found in ranks(2, mlp_fusion_ranks.both_mlps, setup="tests.support.warm"):
        assert len(found) == 4
        for name, case in found.items():
            assert case["outputs"] == 2 * 128 // 2, name
            assert case["one"] == CALLS[name.endswith("sp")], name
            assert case["two"] == {key: 2 * calls for key, calls in case["one"].items()}, name
            assert case["apart"] < 1e-12, name


GATED = {"mlp_layer_fusion": True, "swiglu": True, "add_bias_linear": False}


def test_it_is_a_statement_about_a_gated_mlp_without_biases():
    names = [feature.name for feature in resolve(GATED, "cpu").enabled]
    assert "mlp-layer-fusion" in names


@pytest.mark.parametrize(
    ("change", "fix"),
    [({"swiglu": False}, "add --swiglu"), ({"add_bias_linear": True}, "--disable-bias-linear")],
)
def test_other_mlps_are_refused(change, fix):
    with pytest.raises(ConfigError, match=f"--mlp-layer-fusion: .*{fix}"):
        resolve(GATED | change, "cpu")
