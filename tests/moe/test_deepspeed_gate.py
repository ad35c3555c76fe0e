"""Gates, slots and row selection against the published einsums."""

from __future__ import annotations

import pytest
import torch

from mindspeed.moe.deepspeed.gate import Capacity, Window, balance_loss, gumbel, route
from mindspeed.moe.dispatch.padded import Slots, select_rows
from tests.moe import einsum_oracle as oracle

HIDDEN = 6


def _leaves(tokens, experts, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (tokens, HIDDEN), "gate": (experts, HIDDEN), "w": (experts, HIDDEN, HIDDEN)}
    drawn = {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
    drawn["x"] *= 0.5
    drawn["w"] *= 0.5
    drawn["gate"][0] *= 2  # a favoured expert: tokens are dropped
    return {k: v.to(dtype).requires_grad_() for k, v in drawn.items()}


def _by_rows(leaves, topk, capacity, priority):
    x, experts = leaves["x"], leaves["gate"].shape[0]
    gates = torch.softmax(x @ leaves["gate"].t(), dim=1)
    order = None if priority is None else priority.argsort(descending=True)
    routing = route(gates, [gates.detach()] * topk, capacity, order)
    slots = Slots.of(routing.routing_map, topk, 0, capacity)
    rows = select_rows(x, slots.tokens, slots.of_token).view(experts, capacity, HIDDEN)
    probs = select_rows(routing.probs.reshape(-1, 1), slots.pairs, slots.of_pair)
    rows = torch.bmm(rows, leaves["w"]).reshape(-1, HIDDEN) * probs
    output = select_rows(rows, slots.of_token, slots.tokens)
    return output, balance_loss(gates, routing.first), routing


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7, 40.0])
@pytest.mark.parametrize(("tokens", "experts"), [(30, 4), (7, 5), (1, 3), (24, 24), (9, 2)])
@pytest.mark.parametrize(("topk", "random"), [(1, False), (1, True), (2, False)])
def test_outputs_and_gradients_equal_the_einsums(topk, random, tokens, experts, factor, dtype):
    capacity = Capacity(factor, experts, topk)(tokens)
    assert capacity == oracle.capacity_of(tokens, experts, topk, factor)
    generator = torch.Generator().manual_seed(1)
    priority = torch.rand(tokens, generator=generator).double() if random else None
    direction = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    results = []
    for kind in ("einsum", "rows"):
        leaves = _leaves(tokens, experts, torch.float64 if kind == "einsum" else dtype)
        if kind == "einsum":
            output, loss = oracle.layer(
                leaves["x"],
                leaves["gate"],
                lambda rows, w=leaves["w"]: torch.bmm(rows, w),
                topk,
                capacity,
                priority,
            )
        else:
            output, loss, routing = _by_rows(leaves, topk, capacity, priority)
        ((output * direction.to(output.dtype)).sum() + loss).backward()
        results.append({"output": output.detach(), "loss": loss.detach()})
        results[-1] |= {name: leaf.grad for name, leaf in leaves.items()}
    expected, found = results
    for name, value in expected.items():
        scale = max(value.abs().max().item(), 1.0)
        error = (found[name].double() - value).abs().max().item() / scale
        assert error < (1e-6 if dtype is torch.float32 else 1e-13), (name, error)
    if (tokens, factor) == (30, 0.5):
        assert routing.routing_map.sum() < topk * tokens, "nothing was dropped: a weaker test"
    assert routing.routing_map.sum(0).max() <= capacity


def test_random_tokens_are_kept_and_not_the_first_ones():
    gates = torch.softmax(torch.tensor([[4.0, 0.0]]).repeat(40, 1), 1)
    first = route(gates, [gates], 10).routing_map[:, 0]
    assert first.nonzero().flatten().tolist() == list(range(10))
    kept = torch.zeros(40)
    for seed in range(200):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        chosen = route(gates, [gates], 10, order).routing_map
        assert chosen.sum(0).tolist() == [10, 0]
        kept += chosen[:, 0]
    assert (kept / 200 - 0.25).abs().max() < 0.12  # 4 sigma of 200 draws


def test_a_token_without_any_room_gets_no_output_and_no_gradient():
    leaves = _leaves(30, 4, torch.float64)
    with torch.no_grad():
        leaves["x"][20] = torch.inf  # what is dropped must not be multiplied with zero either
        leaves["x"].clamp_(max=1e6)
    output, _, routing = _by_rows(leaves, 2, 4, None)
    dropped = ~routing.routing_map.any(1)
    assert dropped.any()
    (output * 3).sum().backward()
    assert not output[dropped].any() and output[~dropped].any()
    assert leaves["x"].grad[dropped].abs().max() == 0
    assert leaves["x"].grad.isfinite().all()


def test_infinite_rows_in_dropped_slots_do_not_reach_anything():
    routing_map = torch.tensor([[True], [True], [False]])
    slots = Slots.of(routing_map, 1, 0, 3)
    rows = torch.tensor([[1.0], [2.0], [torch.inf]], requires_grad=True)  # the third slot is empty
    output = select_rows(rows, slots.of_token, slots.tokens)
    assert output.flatten().tolist() == [1.0, 2.0, 0.0]
    output.backward(torch.tensor([[1.0], [1.0], [torch.inf]]))
    assert rows.grad.flatten().tolist() == [1.0, 1.0, 0.0]


def test_noisy_logits_draw_experts_by_their_gates():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).repeat(20000, 1)
    uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))
    uniform[0], uniform[1] = 0.0, 1.0
    noise = gumbel(uniform)
    assert noise.isfinite().all()
    chosen = route(logits.softmax(1), [logits + noise], None).routing_map
    assert (chosen.float().mean(0) - logits[0].softmax(0)).abs().max() < 0.015  # 4 sigma


def test_no_capacity_keeps_every_choice():
    gates = torch.softmax(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), 1)
    for topk in (1, 2):
        routing = route(gates, [gates] * topk, None)
        assert (routing.routing_map.sum(1) == topk).all()
        expected = gates.topk(topk, 1).values
        expected = expected / (expected.sum(1, keepdim=True) if topk == 2 else 1)
        found = routing.probs[routing.routing_map].view(50, topk).sort(1, descending=True).values
        torch.testing.assert_close(found, expected)


def test_slots_of_a_part_of_the_capacity():
    routing_map = torch.rand(40, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = Slots.of(routing_map, 5, 0, 12).tokens.view(5, 12)
    parts = [Slots.of(routing_map, 5, first, 4).tokens.view(5, 4) for first in (0, 4, 8)]
    assert torch.cat(parts, 1).equal(whole)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 1)])
def test_few_tokens(shape):
    gates = torch.softmax(torch.randn(shape), 1).requires_grad_()
    capacity = Capacity(1.0, shape[1], 1)(shape[0])
    assert capacity == shape[0]
    routing = route(gates, [gates.detach()], capacity)
    slots = Slots.of(routing.routing_map, 1, 0, capacity)
    x = torch.randn(shape[0], 4).t().contiguous().t().requires_grad_()  # not contiguous
    rows = select_rows(x, slots.tokens, slots.of_token)
    back = select_rows(rows, slots.of_token, slots.tokens)
    torch.testing.assert_close(back, x)
    (back.sum() + balance_loss(gates, routing.first)).backward()
    assert x.grad.equal(torch.ones_like(x))


def test_padding_is_not_in_the_balance_loss():
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    gates = torch.softmax(logits, 1)
    first = route(gates, [gates], None).first
    valid = torch.arange(12) < 7
    expected = balance_loss(gates[:7], first[:7])
    torch.testing.assert_close(balance_loss(gates, first, valid), expected)
    balanced = torch.full((8, 4), 0.25), torch.eye(4).repeat(2, 1).bool()
    assert balance_loss(*balanced).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tokens", "factor", "topk", "expected"),
    [
        (100, 1.0, 1, 10),
        (100, 1.1, 1, 11),
        (100, 1.11, 2, 23),
        (3, 1.0, 1, 3),
        (40, 0.01, 1, 4),
        (100, 99, 2, 100),
    ],
)
def test_capacity(tokens, factor, topk, expected):
    assert Capacity(factor, 10, topk)(tokens) == expected


def test_the_window_predicts_the_next_one_from_its_last_loads():
    window = Window()
    for load in range(1000, 1020):
        assert window(7) == 256
        for observed in (3, load, 5, load):  # micro-batches, and one of them recomputed
            window.observe(observed)
        window.advance()
        window.advance()  # of a step without training
    assert window(7) == 1037  # 1017 + 20
    window.observe(5)
    window.advance()
    assert window(7) == 1037


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_rows_have_the_gradients_of_a_one_hot_product(dtype):
    generator = torch.Generator().manual_seed(3)
    routing_map = torch.rand(20, 6, generator=generator) < 0.4
    slots = Slots.of(routing_map, 6, 0, 7)
    x = torch.randn(42, 5, generator=generator).to(dtype).requires_grad_()
    one_hot = torch.zeros(20, 42, dtype=torch.float64)
    for token, row in enumerate(slots.of_token):
        one_hot[token, row[row >= 0]] = 1
    tolerance = (
        {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 8e-3}
    )
    output = select_rows(x, slots.of_token, slots.tokens)
    torch.testing.assert_close(output.double(), one_hot @ x.double(), **tolerance)
    direction = torch.randn(20, 5, generator=generator).to(dtype)
    output.backward(direction)
    torch.testing.assert_close(x.grad.double(), one_hot.t() @ direction.double(), **tolerance)
