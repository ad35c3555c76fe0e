"""Tensors stay alive until gloo has sent them."""

from __future__ import annotations

from tests.device import send_ranks


def test_plain_gloo_sends_from_memory_that_is_freed(ranks):
    freed, _ = ranks(2, send_ranks.send_freed_tensor, False)
    assert freed


def test_a_tensor_lives_until_it_is_sent(ranks):
    assert ranks(2, send_ranks.send_freed_tensor, True) == [False, [1.0, 1.0]]
