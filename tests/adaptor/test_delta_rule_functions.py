"""Megatron's own gated delta net without the package ``fla``: this library's operators in it."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.adaptor.repairs.layers import delta_rule_functions as functions
from mindspeed.errors import ConfigError
from tests.adaptor import delta_rule_ranks as ranks_of
from tests.support.release import brought_by

SETUP = "tests.support.warm"
pytestmark = brought_by("0.16")


def test_outputs_and_gradients_are_those_of_megatrons_own_formula(ranks):
    """Deterministic mode: torch's convolution and the rule in plain torch, token by token in L."""
    ((ours, formula),) = ranks(1, ranks_of.ours_and_formula, setup=SETUP)
    assert ours.keys() == formula.keys() and len(ours) > 6
    for name, value in formula.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


@brought_by("0.18")
def test_context_parallelism_of_megatrons_layer_is_one_rank(ranks):
    (truth,) = ranks(1, ranks_of.shared, setup=SETUP)
    for found in ranks(2, ranks_of.shared, setup=SETUP):
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_what_takes_the_place_of_the_packages_functions():
    x = torch.randn(2, 6, 4, dtype=torch.bfloat16)
    unit = functions.l2norm(x)
    assert unit.dtype is torch.bfloat16
    expected = torch.nn.functional.normalize(x.double(), dim=-1)
    torch.testing.assert_close(unit.double(), expected, rtol=1e-2, atol=1e-2)
    weight, bias = torch.randn(6, 3), torch.randn(6)
    wide = torch.nn.functional.pad(x.float(), (2, 0))
    truth = torch.nn.functional.conv1d(wide, weight[:, None], bias, groups=6)
    found = functions.causal_conv1d_fn(x.float(), weight, bias)
    torch.testing.assert_close(found, truth)
    found = functions.causal_conv1d_fn(x.float(), weight, bias, activation="silu")
    torch.testing.assert_close(found, torch.nn.functional.silu(truth))
    found, state = functions.fla_causal_conv1d(x.float().transpose(1, 2), weight, bias)
    torch.testing.assert_close(found, truth.transpose(1, 2))
    assert state is None
    with pytest.raises(ConfigError, match="keeps no state"):
        functions.fla_causal_conv1d(x, weight, output_final_state=True)
