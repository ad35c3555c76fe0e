"""Which experts a token goes to, as ids and weights."""

from __future__ import annotations

import pytest
import torch

from mindspeed.moe.dispatch.compact import (
    NOBODY,
    TOO_MANY,
    as_bytes,
    chosen,
    compact,
    expand,
    from_bytes,
    places,
    within,
)


def test_places_of_a_token():
    assert places(8, 256, padded=False) == 8
    assert places(8, 256, padded=True) == 256


def test_compact_and_expand_are_inverses():
    routing_map = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    probs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ids, weights = compact(probs, routing_map, 2)
    assert ids.tolist() == [[0, 3], [NOBODY, NOBODY], [1, NOBODY]]
    assert from_bytes(as_bytes(ids)).equal(ids)
    dense, again = expand(ids, weights, 5)
    assert again.equal(routing_map)
    assert chosen(ids, 5).equal(routing_map)
    assert dense.equal(probs * routing_map)
    grad = torch.randn(3, 5, dtype=torch.float64)
    dense.backward(grad)
    assert probs.grad is not None
    assert probs.grad.equal(grad * routing_map)


def test_experts_of_a_range():
    routing_map = torch.tensor([[1, 1, 1, 0, 0, 1], [0, 0, 1, 0, 1, 0]]).bool()
    probs = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    ids, weights = compact(probs, routing_map, 4)
    ids, weights = within(ids, weights, 2, 4, 3)
    assert ids.tolist() == [[0, 3, NOBODY], [0, 2, NOBODY]]
    dense, _ = expand(ids, weights, 4)
    assert dense.equal((probs * routing_map)[:, 2:])
    dense.sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 1, 0]]


def test_a_token_with_more_experts_than_places_is_marked():
    ids, _ = compact(torch.rand(2, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool(), 2)
    assert ids.tolist() == [[TOO_MANY, TOO_MANY], [0, 1]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 4)])
def test_compact_of_no_tokens_and_of_columns_of_a_larger_tensor(shape):
    wide = torch.rand(shape[0], 8)
    probs, routing_map = wide[:, ::2], wide[:, 1::2] > 0.5
    ids, weights = compact(probs, routing_map, 4)
    dense, again = expand(ids, weights, 4)
    assert again.equal(routing_map)
    assert dense.equal(probs * routing_map)
