"""Megatron-FSDP trains as data parallelism without sharding does, whatever it shards.

Repairs: ``fsdp``, ``parameter_marks``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.adaptor.repairs.parallel import fsdp
from tests.adaptor import fsdp_ranks
from tests.adaptor.fsdp_ranks import Case
from tests.te.marks_ranks import Layout

SETUP = "tests.support.warm"
DENSE, EXPERTS = Layout(), Layout("moe", bias=True)
WHOLE = [Case(DENSE), Case(EXPERTS)]
ON_ONE_RANK = [Case(EXPERTS, "optim_grads_params", overlap=True)]
ON_TWO_RANKS = [
    Case(DENSE, "optim", overlap=True),
    Case(DENSE, "optim_grads_params", overlap=True, recompute=True),
    Case(DENSE._replace(tp=2), "optim_grads", overlap=True),
    Case(EXPERTS._replace(ep=2), "optim", average=True),
    Case(EXPERTS._replace(tp=2, sp=True, ep=2), "optim_grads_params", overlap=True),
]


@pytest.mark.slow
def test_sharded_training_equals_training_on_one_rank(ranks):
    (found,) = ranks(1, fsdp_ranks.trained, WHOLE + ON_ONE_RANK, {}, setup=SETUP, timeout=120)
    truth = {case.layout: found[case] for case in WHOLE}
    shapes = {layout: result["shapes"] for layout, result in truth.items()}
    sharded = ranks(2, fsdp_ranks.trained, ON_TWO_RANKS, shapes, setup=SETUP, timeout=120)
    for results in (found, *sharded):
        for case, result in results.items():
            expected = truth[case.layout.model]
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), case
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
            assert result["zeros"] == expected["zeros"], case
            assert result["squares"] == pytest.approx(expected["squares"], rel=1e-3), case


def test_tensor_parallel_ranks_keep_generators_of_their_own(ranks):
    first, second = ranks(2, fsdp_ranks.tracked_generators, setup=SETUP)
    assert first["model-parallel-rng"] != second["model-parallel-rng"]
    assert first["data-parallel-rng"] == second["data-parallel-rng"]


def test_only_gated_layers_are_split_in_checkpoints():
    import torch

    def mlp(gated):
        module = torch.nn.Module()
        module.config = SimpleNamespace(gated_linear_unit=gated)
        module.mlp = torch.nn.Module()
        module.mlp.linear_fc1 = torch.nn.Linear(2, 4, bias=False)
        return module

    def original(model, weights, optimizer):
        assert all(model.get_parameter(f"module.{name}") is not None for name in weights)
        halves = {f"{name}_{half}": 0 for name in weights for half in "wv"}
        return halves, {**optimizer, "state": {f"{name}_w": 0 for name in optimizer["state"]}}

    model = torch.nn.Module()
    model.vision, model.language = mlp(False), mlp(True)
    wrapped = torch.nn.Module()
    wrapped.module = model
    name = "{}.mlp.linear_fc1.weight".format
    state = {name("vision"): 1, name("language"): 2}
    states = {"state": {f"module.{name('vision')}": 3, f"module.{name('language')}": 4}, "lr": 5}
    weights, optimizer = fsdp.split_gated_layers(original)(wrapped, state, states)
    halves = {name("language") + half: 0 for half in ("_w", "_v")}
    assert weights == {**halves, name("vision"): 1}
    split = f"module.{name('language')}_w"
    assert optimizer == {"state": {split: 0, f"module.{name('vision')}": 3}, "lr": 5}
