"""Features replace the forward of mixture-of-experts layers on the instances."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mindspeed.adaptor.moe import replace_forward
from mindspeed.journal import Journal
from tests.support.lazy import needs


def test_replacements_stack_and_are_undone():
    layer, journal, other = torch.nn.Identity(), Journal(), Journal()
    replace_forward(layer, lambda forward: lambda x: forward(x) + 1, journal)
    replace_forward(layer, lambda forward: lambda x: forward(x) * 10, other)
    assert layer(1) == 20
    other.undo()
    assert layer(1) == 2
    journal.undo()
    assert layer(1) == 1 and "forward" not in vars(layer)


def test_the_journal_does_not_keep_a_module_alive():
    layer, journal = torch.nn.Identity(), Journal()
    for _ in range(2):
        replace_forward(layer, lambda forward: lambda x: forward(x), journal)
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None
    journal.undo()


@pytest.mark.parametrize("spec", ["te", "local"])
def test_experts_of_both_specs_and_of_multi_token_prediction(ranks, spec):
    needs("megatron.core")
    from tests.adaptor import moe_ranks

    setup = "tests.support.warm"
    for found in ranks(2, moe_ranks.doubled_by_a_feature, spec, setup=setup, timeout=240):
        assert len(found["seen"]) == 3
        assert sum(name.startswith("mtp.") for name in found["seen"]) == 1
        assert not found["alive"] and not found["left"]
        (loss, grads), (expected, by_weights) = found["replaced"], found["weights"]
        assert torch.equal(loss, expected)
        for name, grad in grads.items():
            factor = 2 if "experts" in name and "linear_fc2" in name else 1
            assert torch.equal(grad, by_weights[name] * factor), name
        assert not torch.equal(loss, found["plain"][0])
