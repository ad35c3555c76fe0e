"""A forward is stopped where it calls a part, of which nobody notices."""

from __future__ import annotations

import pytest
import torch

from mindspeed.moe.first_call import arguments_of_first_call


@pytest.fixture
def layer() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("replaced", [False, True], ids=["own forward", "a feature's forward"])
def test_a_part_that_is_called_later_is_called_once(layer, replaced):
    x, calls = torch.randn(2, 3), []
    part = layer[2]
    if replaced:
        forward = part.forward
        part.forward = lambda hidden: 2 * forward(hidden)
    expected = layer(x)
    part.register_forward_pre_hook(lambda module, given: calls.append("before"))
    part.register_forward_hook(lambda module, given, result: calls.append("after"))
    (hidden,), options = arguments_of_first_call(part, lambda: layer(x))
    assert (calls, options) == ([], {})
    torch.testing.assert_close(part(hidden), expected, rtol=0, atol=0)
    assert calls == ["before", "after"]


def test_a_part_that_is_not_called_is_an_error(layer):
    with pytest.raises(RuntimeError, match="Linear was not called"):
        arguments_of_first_call(layer[2], lambda: layer[0](torch.randn(2, 3)))
    assert layer[2](torch.randn(1, 4)).shape == (1, 2)
