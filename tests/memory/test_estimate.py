"""Costs of candidate plans without a device: real bytes, and FLOPs as seconds."""

from __future__ import annotations

import pytest
import torch

from mindspeed.memory.estimate import KEEP_ALL, LEAST, like_activations, name_of, plans_for
from mindspeed.memory.plan import SiteAction
from tests.memory import adaptive_ranks as jobs
from tests.support import gpt_ranks
from tests.support.trainer_job import SETUP


@pytest.mark.weekly_cases("layernorm-gelu-bias-local")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec"), [("rmsnorm-swiglu-gqa", "te"), ("layernorm-gelu-bias", "local")]
)
def test_costs_on_fake_tensors_are_those_on_real_ones(ranks, name, spec):
    ((real, forward),) = ranks(1, jobs.costs, name, spec, False, setup=SETUP, timeout=100)
    ((fake, same),) = ranks(1, jobs.costs, name, spec, True, setup=SETUP, timeout=100)
    assert fake == real
    assert same == forward > 0
    assert len(real) == 66
    inputs = 4 * gpt_ranks.SEQUENCE * gpt_ranks.BATCH * 32
    least, everything = real["recompute layer"], real["keep layer"]
    assert least.kept == inputs < everything.kept
    assert (everything.transient, everything.seconds, everything.host) == (0, 0.0, 0)
    assert 0 < real["recompute mlp"].seconds < least.seconds <= forward
    assert real["offload layer"].host > 0 == real["offload layer"].seconds
    both = real["recompute mlp + recompute self_attention"]
    assert both.transient < least.transient < everything.kept + inputs


def test_arguments_of_a_trial_are_apart_from_the_graph():
    x = torch.ones(3, requires_grad=True) * 2
    mask = torch.ones(3)
    ((again,), options) = like_activations(((x,), {"mask": mask, "scale": 2.0}))
    assert options["mask"] is mask and options["scale"] == 2.0
    assert again.requires_grad and not again.is_leaf
    assert again.untyped_storage()._cdata == x.untyped_storage()._cdata
    node = again.grad_fn
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    assert "AccumulateGrad" in type(node).__name__  # its own leaf, not the multiplication


def test_candidates_have_sites_that_exist_and_names_that_differ():
    sites = ["layer", "self_attention", "mlp", "mlp.experts.activation"]
    plans = plans_for(sites, offload=False, rescue=True)
    assert plans[0] == KEEP_ALL and plans[-1] == LEAST
    assert all(set(plan) <= set(sites) for plan in plans)
    assert len({name_of(plan) for plan in plans}) == len(plans) == 2 * 3 + 2
    assert {"layer": SiteAction.OFFLOAD} in plans
    assert len(plans_for([*sites, "input_layernorm"], offload=True, rescue=False)) == 3 * 4 * 2 + 2
