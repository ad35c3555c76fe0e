"""Overlapped products: results equal to the bit, the same bytes, the calls multiplied."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.lazy import needs
from tests.te.linear_ranks import Case
from tests.tensor_parallel import coc_ranks

needs("megatron.core")

SETUP = "tests.support.warm"
PARTS = (2, 4, 8)
OVERLAPPED = {
    # Parallel mode, sequence parallelism: collective of the forward and of the backward pass
    # that are divided.
    ("column", True): {("forward", "all_gather")},
    ("column", False): set(),
    ("row", True): {("forward", "reduce_scatter"), ("backward", "all_gather")},
    ("row", False): {("forward", "all_reduce")},
}
DGRAD = {True: ("backward", "reduce_scatter"), False: ("backward", "all_reduce")}
"""Collective of the input gradient of a column layer: hidden by the weight gradient."""


def sums(events):
    """Calls and bytes of each phase and operation."""
    calls, payload = Counter(), Counter()
    for phase, op, size in events:
        calls[phase, op] += 1
        payload[phase, op] += size
    return calls, payload


def assert_divided(case: Case, events, plain_events, parts: int, column_backward: bool) -> None:
    calls, payload = sums(events)
    plain_calls, plain_payload = sums(plain_events)
    assert payload == plain_payload, case
    divided = set(OVERLAPPED[case.mode, case.sp])
    if case.mode == "column" and (case.frozen or column_backward):
        divided.add(DGRAD[case.sp])
    if case.kind == "ops" and case.mode == "row" and not case.sp:
        divided.discard(("backward", "all_gather"))
    expected = {key: count * (parts if key in divided else 1) for key, count in plain_calls.items()}
    assert calls == expected, case


@pytest.mark.parametrize("size", [2, 4])
def test_layers_equal_to_the_bit_with_the_same_bytes(ranks, size):
    """Transformer Engine's, a sequence of its operations, the local spec's; frozen, with LoRA."""
    flags = [{}, *({"coc_parallel_num": parts} for parts in PARTS)]
    found = ranks(size, coc_ranks.layers, flags, torch.float32, setup=SETUP, timeout=200)
    for plain, *divided in found:
        for parts, results in zip(PARTS, divided, strict=True):
            for case, (tensors, events) in results.items():
                expected, plain_events = plain[case]
                assert_equal(tensors, expected, case)
                assert_divided(case, events, plain_events, parts, column_backward=False)


def assert_equal(actual, expected, case) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), (case, name)
