"""Operations, bytes and collectives of DeepSpeed's mixture of experts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.moe.deepspeed.gate import Capacity, route
from mindspeed.moe.dispatch.padded import Slots, select_rows
from tests.moe import deepspeed_ranks as jobs
from tests.moe import einsum_oracle as oracle
from tests.moe import one_hot_costs as costs
from tests.support.lazy import needs

ADAPTOR = "tests.support.warm"


@pytest.mark.parametrize(("tokens", "percent"), [(2048, 10), (8192, 38), (32768, 152)])
def test_share_of_the_one_hot_products(tokens, percent):
    assert round(100 * costs.share(tokens, 14336)) == percent
    pair = costs.einsum_flops(tokens, 2 * tokens, 4096)
    assert pair / costs.expert_flops(2 * tokens, 4096, 14336) == pytest.approx(
        costs.share(tokens, 14336)
    )
    assert costs.one_hot_elements(tokens, 2) == 2 * (tokens * 8 * (2 * tokens // 8))


@pytest.mark.parametrize("topk", [1, 2])
def test_operations_and_bytes_that_are_saved(topk):
    tokens, experts, hidden, ffn = 64, 8, 16, 24
    capacity = Capacity(1.0, experts, topk)(tokens)
    x = torch.randn(tokens, hidden, dtype=torch.float64)
    gates = torch.softmax(torch.randn(tokens, experts, dtype=torch.float64), 1)
    w = [torch.randn(experts, *shape).double() for shape in ((hidden, 2 * ffn), (ffn, hidden))]

    def compute(rows):
        a, b = torch.bmm(rows, w[0]).chunk(2, -1)
        return torch.bmm(torch.nn.functional.silu(a) * b, w[1])

    weights, _ = oracle.combine_weights(gates, topk, capacity)
    with FlopCounterMode(display=False) as by_einsum:
        mask = weights.bool().double()
        rows = torch.einsum("sec,sm->ecm", mask, x)
        expected = torch.einsum("sec,ecm->sm", weights, compute(rows))
    with FlopCounterMode(display=False) as by_rows:
        routing = route(gates, [gates] * topk, capacity)
        slots = Slots.of(routing.routing_map, topk, 0, capacity)
        rows = select_rows(x, slots.tokens, slots.of_token).view(experts, capacity, hidden)
        probs = select_rows(routing.probs.reshape(-1, 1), slots.pairs, slots.of_pair)
        found = select_rows(compute(rows).view(-1, hidden) * probs, slots.of_token, slots.tokens)
    torch.testing.assert_close(found, expected)
    assert by_rows.get_total_flops() == costs.expert_flops(experts * capacity, hidden, ffn)
    saved = by_einsum.get_total_flops() - by_rows.get_total_flops()
    assert saved == costs.einsum_flops(tokens, experts * capacity, hidden)
    assert saved / by_rows.get_total_flops() == pytest.approx(costs.share(tokens, ffn))
    assert mask.numel() + weights.numel() == costs.one_hot_elements(tokens, topk)


@pytest.mark.parametrize(("largest", "ratio"), [(23, 2.3), (71, 7.1)])
def test_dropless_sends_what_there_is(ranks, largest, ratio):
    """80 tokens on 8 experts of two ranks: 10 rows on average, and the most loaded one has more."""
    needs("megatron.core")
    for exact, padded, window, overflow in ranks(2, jobs.loads, largest, setup=ADAPTOR):
        assert exact.bytes / padded.bytes == pytest.approx(1 / ratio)
        assert round(1 - exact.bytes / padded.bytes, 2) in (0.57, 0.86)
        assert exact.calls == ["count.counts", "dispatch.rows", "combine.rows"]
        assert padded.calls == window.calls == ["dispatch.rows", "combine.rows"]
        assert overflow.calls == ["dispatch.rows", "rest.rest", "combine.rows"]
        for other in (padded, window, overflow):
            assert_same(other, exact)


def test_all_tokens_to_one_expert_and_uneven_ranks(ranks):
    needs("megatron.core")
    for exact, *others in ranks(2, jobs.adversarial, setup=ADAPTOR):
        for other in others:
            assert_same(other, exact)


def assert_same(found: jobs.Sent, expected: jobs.Sent) -> None:
    """Equal but for fp32 sums of up to 80 rows in another order, which the processor decides."""
    for name, truth in {"output": expected.output, **expected.gradients}.items():
        value = found.output if name == "output" else found.gradients[name]
        largest = truth.abs().max().item()
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-5 * largest, msg=name)


def test_noise_is_drawn_once_for_ranks_with_the_same_tokens_and_again_in_a_recomputation(ranks):
    needs("megatron.core")
    answers = ranks(2, jobs.noise, setup=ADAPTOR)
    first, second = answers
    for name, (alike, apart) in first.items():
        assert alike.equal(second[name][0]), f"{name}: one noise for the same tokens"
        assert not apart.equal(second[name][1]), f"{name}: noise of its own for other tokens"


def test_recomputation_and_evaluation(ranks):
    needs("megatron.core")
    for answer in ranks(1, jobs.recomputed, setup=ADAPTOR):
        assert answer["recomputed"] < 1e-6
        assert answer["without_noise"] > 1e-3, "there was no noise to replay"
        assert answer["evaluations_equal"]
        assert answer["kept_in_evaluation"]
        assert answer["loads"] == [answer["largest"]]
