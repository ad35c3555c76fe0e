"""Moving tokens to experts and back, against loops over tokens and copies in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.instruments import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.moe_permutation import (
    MOE_PERMUTE,
    MOE_UNPERMUTE,
    MOE_UNPERMUTE_BACKWARD,
    chunk_rows,
    map_rows,
    pack,
)
from mindspeed.ops.npu_moe_token_permute import npu_fused_moe_token_permute, npu_moe_token_permute
from mindspeed.ops.npu_moe_token_unpermute import (
    npu_fused_moe_token_unpermute,
    npu_moe_token_unpermute,
)
from mindspeed.testing import assert_close_with_grads
from tests.npu_emulator import wheel
from tests.ops import moe_npu_jobs
from tests.ops.traffic import traffic

T, K, E, H = 7, 2, 5, 3
EXPERTS = torch.tensor([[1, 4], [0, 1], [4, 1], [0, 4], [1, 0], [3, 1], [4, 3]])


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def copies_in_order():
    """Token and position of each copy, by expert and then by token; expert 2 has none."""
    return [(t, j) for e in range(E) for t in range(T) for j in range(K) if int(EXPERTS[t, j]) == e]


@pytest.mark.parametrize("wanted", [None, 0, 5, T * K, -3])
def test_copies_are_sorted_by_expert_then_by_token(wanted):
    order = copies_in_order()
    kept = order if not wanted else order[:wanted]

    def loop(tokens):
        return torch.stack([tokens[t] for t, _ in kept])

    def ours(tokens):
        permuted, sorted_indices = npu_moe_token_permute(tokens, EXPERTS, wanted)
        assert sorted_indices.dtype == torch.int32
        assert [order.index((t, j)) for t in range(T) for j in range(K)] == sorted_indices.tolist()
        return permuted

    assert_close_with_grads(ours, loop, (normal(T, H),), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dropped", [0, 4, T * K])
@pytest.mark.parametrize("probs_dtype", [torch.float64, torch.float32])
def test_the_weighted_sum_of_the_copies_and_its_gradients(dropped, probs_dtype):
    order = copies_in_order()
    rows = T * K - dropped
    _, sorted_indices = npu_moe_token_permute(normal(T, H), EXPERTS)

    def loop(permuted, probs):
        out = [torch.zeros(H, dtype=permuted.dtype) + 0 * probs.sum() for _ in range(T)]
        for row, (t, j) in enumerate(order[:rows]):
            out[t] = out[t] + permuted[row] * probs[t, j]
        return torch.stack(out) + 0 * permuted.sum()

    def ours(permuted, probs):
        return npu_moe_token_unpermute(permuted, sorted_indices, probs)

    inputs = (normal(rows, H), normal(T, K, seed=1, dtype=probs_dtype))
    exact = 1e-12 if probs_dtype == torch.float64 else 1e-5
    assert_close_with_grads(ours, loop, inputs, rtol=0, atol=exact)


def test_without_probabilities_a_token_has_one_copy():
    tokens, experts = normal(6, H), torch.tensor([3, 0, 2, 0, 3, 1])
    permuted, sorted_indices = npu_moe_token_permute(tokens, experts)
    assert torch.equal(permuted, tokens[[1, 3, 5, 2, 0, 4]])
    back = lambda x: npu_moe_token_unpermute(x, sorted_indices, restore_shape=(6, H))  # noqa: E731
    assert torch.equal(back(permuted), tokens)
    torch.autograd.gradcheck(back, (permuted.requires_grad_(),))


def test_gradients_of_both_orders():
    tokens, probs = normal(T, H).requires_grad_(), normal(T, K, seed=1).requires_grad_()

    def there_and_back(tokens, probs):
        permuted, sorted_indices = npu_moe_token_permute(tokens, EXPERTS)
        return npu_moe_token_unpermute(permuted * permuted, sorted_indices, probs)

    torch.autograd.gradcheck(there_and_back, (tokens, probs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_sums_are_rounded_once(dtype):
    permuted = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).to(dtype)
    rows = torch.arange(4, dtype=torch.int32)
    out = npu_moe_token_unpermute(permuted, rows, torch.ones(1, 4))
    assert out.dtype == dtype
    assert out.item() == torch.tensor(259.0).to(dtype).item()
    same = npu_moe_token_unpermute(permuted, rows, torch.ones(1, 4, dtype=dtype))
    assert torch.equal(same, out)


def test_dropped_tokens_contribute_nothing_even_if_infinite():
    permuted = torch.full((2, H), float("inf"))
    rows = torch.tensor([[5, 4], [0, 9], [-1, -1], [1, -1]], dtype=torch.int32)
    dy = torch.ones(4, H)
    out = MOE_UNPERMUTE(permuted, rows, torch.ones(4, 2), True)
    assert out.isinf().any(1).tolist() == [False, True, False, True]
    assert not out[[0, 2]].any()
    _, dprobs = MOE_UNPERMUTE_BACKWARD(dy, permuted, rows, torch.ones(4, 2), True)
    assert dprobs.isinf().tolist() == [[False, False], [True, False], [False] * 2, [True, False]]


class TestRoutingMap:
    """Megatron's form: which of E experts a token goes to, any number of them."""

    def routed(self):
        routed = torch.zeros(T, E, dtype=torch.bool).scatter_(1, EXPERTS, True)
        routed[2], routed[4, 3] = False, True
        return routed

    def test_rows_are_ordered_by_expert_and_then_by_token(self):
        routed = self.routed()
        pairs = [(t, e) for e in range(E) for t in range(T) if routed[t, e]]
        packed, by_expert = map_rows(routed)
        for t in range(T):
            expected = [pairs.index((t, e)) for e in range(E) if routed[t, e]]
            assert packed[t].tolist() == expected + [-1] * (E - len(expected))
            assert by_expert[t][routed[t]].tolist() == expected
        assert (by_expert[~routed] == -1).all()

    def test_values_of_experts_are_packed_like_the_rows(self):
        routed = self.routed()
        by_expert = map_rows(routed)[1]
        values = normal(T, E).requires_grad_()
        packed = pack(values, by_expert, 0.0)
        for t in range(T):
            assert torch.equal(packed[t][: int(routed[t].sum())], values[t][routed[t]])
            assert not packed[t][int(routed[t].sum()) :].any()
        packed.sum().backward()
        assert torch.equal(values.grad, routed.double())

    @pytest.mark.parametrize("tail", [0, 3])
    def test_unused_rows_are_zero_with_zero_gradient(self, tail):
        routed = self.routed()
        packed = map_rows(routed)[0]
        pairs = [(t, e) for e in range(E) for t in range(T) if routed[t, e]]

        def loop(tokens):
            rows = [tokens[t] for t, _ in pairs] + [torch.zeros(H).double()] * tail
            return torch.stack(rows)

        def ours(tokens):
            return MOE_PERMUTE(tokens, packed, len(pairs) + tail, True)

        assert_close_with_grads(ours, loop, (normal(T, H),), rtol=0, atol=1e-12)
        permuted = normal(len(pairs) + tail, H).requires_grad_()
        for probs in (None, torch.ones(T, E).double()):
            permuted.grad = None
            MOE_UNPERMUTE(permuted, packed, probs, True).sum().backward()
            assert permuted.grad[: len(pairs)].eq(1).all()
            assert not permuted.grad[len(pairs) :].any()


@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0], [4]])
def test_chunks_are_put_into_order_without_reading_their_sizes(sizes):
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(1))
    x = normal(sum(sizes), H)
    rows = chunk_rows(torch.tensor(sizes), order, sum(sizes))
    chunks = x.split(sizes)
    expected = torch.cat([chunks[i] for i in order.tolist()])
    assert torch.equal(MOE_PERMUTE(x, rows, sum(sizes), False), expected)
    assert torch.equal(MOE_UNPERMUTE(expected, rows, None, False), x)


def test_results_repeat_bit_for_bit():
    tokens, probs = normal(64, 32, dtype=torch.bfloat16), normal(64, 4, dtype=torch.float32)
    experts = torch.rand(64, 8, generator=torch.Generator().manual_seed(2)).topk(4).indices

    def once():
        permuted, rows = npu_moe_token_permute(tokens, experts)
        dy = normal(64, 32, dtype=torch.bfloat16, seed=3)
        grads = MOE_UNPERMUTE_BACKWARD(dy, permuted, rows.view(64, 4), probs, False)
        return [npu_moe_token_unpermute(permuted, rows, probs), *grads]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


class TestBytes:
    """Bytes of memory traffic per element of the tokens: bf16, two copies, fp32 weights."""

    T, H = 64, 512

    def per_element(self, moved):
        maps = self.T * 2 * (4 + 4 + 4)  # rows, weights and their gradient, at most
        assert 0 <= moved % (self.T * self.H) <= maps
        return moved // (self.T * self.H)

    def case(self):
        tokens = normal(self.T, self.H, dtype=torch.bfloat16)
        rows = torch.randperm(2 * self.T).view(self.T, 2).int()
        probs = torch.rand(self.T, 2)
        return tokens, rows, probs

    def test_fused(self):
        tokens, rows, probs = self.case()
        with traffic() as count:
            permuted = MOE_PERMUTE(tokens, rows, 2 * self.T, False)
        assert (self.per_element(count.bytes), count.kernels) == (6, 1)
        with traffic() as count:
            MOE_UNPERMUTE(permuted, rows, None, False)  # the gradient of the permutation
        assert (self.per_element(count.bytes), count.kernels) == (6, 1)
        with traffic() as count:
            MOE_UNPERMUTE(permuted, rows, probs, False)
        assert (self.per_element(count.bytes), count.kernels) == (6, 1)
        with traffic() as count:
            MOE_UNPERMUTE_BACKWARD(tokens, permuted, rows, probs, False)
        assert (self.per_element(count.bytes), count.kernels) == (10, 1)

    def test_eager(self):
        """Megatron's formulas: 6 and 14 for the permutation, 38 and 74 for the weighted sum."""
        tokens, rows, probs = self.case()
        source = torch.empty(2 * self.T, dtype=torch.long)
        source.scatter_(0, rows.flatten().long(), torch.arange(2 * self.T) // 2)
        weight = probs.flatten()[rows.flatten().argsort()].requires_grad_()
        tokens = tokens.requires_grad_()
        per_element = lambda count: round(count.bytes / tokens.numel())  # noqa: E731
        with traffic() as forward:
            permuted = tokens.index_select(0, source)
        dy = torch.ones_like(permuted)
        with traffic() as backward:
            torch.autograd.grad(permuted, tokens, dy)
        assert (per_element(forward), per_element(backward)) == (6, 14)
        permuted, dy = permuted.detach().requires_grad_(), torch.ones_like(tokens)
        with traffic() as forward:
            weighted = permuted * weight.unsqueeze(-1)
            index = source.unsqueeze(1).expand(-1, self.H)
            out = torch.zeros(self.T, self.H).scatter_add_(0, index, weighted).bfloat16()
        with traffic() as backward:
            torch.autograd.grad(out, (permuted, weight), dy)
        assert (per_element(forward), per_element(backward)) == (38, 74)

    def test_the_weighted_sum_saves_its_inputs_only(self):
        _, rows, probs = self.case()
        permuted = normal(2 * self.T, self.H, dtype=torch.bfloat16).requires_grad_()
        probs = probs.requires_grad_()
        with saved_for_backward() as saved:
            MOE_UNPERMUTE(permuted, rows, probs, False)
        assert saved.bytes == permuted.nbytes + rows.nbytes + probs.nbytes
        with saved_for_backward() as saved:
            MOE_UNPERMUTE(permuted, rows, None, False)
        assert saved.bytes == rows.nbytes


def test_checkpointed_and_compiled():
    def plain(tokens, probs):
        permuted, rows = npu_moe_token_permute(tokens, EXPERTS)
        return npu_moe_token_unpermute(permuted * 2, rows, probs)

    again = lambda *inputs: checkpoint(plain, *inputs, use_reentrant=False)  # noqa: E731
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for other in (again, compiled):
        assert_close_with_grads(
            other, plain, (normal(T, H), normal(T, K, seed=1)), rtol=0, atol=1e-12
        )


def test_no_tokens_at_all():
    permuted, rows = npu_moe_token_permute(torch.zeros(0, H), torch.zeros(0, 2, dtype=torch.long))
    assert permuted.shape == (0, H)
    assert npu_moe_token_unpermute(permuted, rows, torch.zeros(0, 2)).shape == (0, H)


def test_old_names_are_the_same_functions():
    assert npu_fused_moe_token_permute is npu_moe_token_permute
    assert npu_fused_moe_token_unpermute is npu_moe_token_unpermute


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(T, H, dtype=torch.int32)}, "permute: tokens: expected dtype"),
        ({"tokens": torch.zeros(T, 1, H)}, "tokens: expected 2 dimensions"),
        ({"indices": EXPERTS.float()}, "indices: expected dtype int64, int32, got float32"),
        ({"indices": EXPERTS[:3]}, r"indices: expected a row for each of the 7 tokens"),
        ({"num_out_tokens": 15}, "num_out_tokens: expected at most the 14 copies, got 15"),
        ({"num_out_tokens": -15}, "num_out_tokens: expected at most the 14 copies, got -15"),
    ],
)
def test_bad_arguments_of_permute(change, message):
    with pytest.raises(OperatorError, match=message):
        npu_moe_token_permute(**({"tokens": torch.zeros(T, H), "indices": EXPERTS} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"permuted_tokens": torch.zeros(15, H)}, "permuted_tokens: expected at most 14 rows"),
        ({"sorted_indices": torch.zeros(14)}, "sorted_indices: expected dtype int32"),
        ({"probs": torch.ones(T, 3)}, "probs: expected a weight for each of 14 copies"),
        ({"probs": torch.ones(T, 2).half()}, "probs: expected dtype"),
        ({"restore_shape": (T, 4)}, r"restore_shape: expected \(7, 3\), got \(7, 4\)"),
    ],
)
def test_bad_arguments_of_unpermute(change, message):
    given = {
        "permuted_tokens": torch.zeros(14, H),
        "sorted_indices": torch.arange(14).int(),
        "probs": torch.ones(T, 2),
    }
    with pytest.raises(OperatorError, match=message):
        npu_moe_token_unpermute(**(given | change))


def test_padded_mode_is_refused():
    with pytest.raises(NotImplementedError, match="padded_mode"):
        npu_moe_token_permute(torch.zeros(T, H), EXPERTS, padded_mode=True)
    with pytest.raises(NotImplementedError, match="padded_mode"):
        npu_moe_token_unpermute(torch.zeros(14, H), torch.arange(14).int(), padded_mode=True)


FUSED = [
    "npu::npu_moe_token_permute",
    "npu::npu_moe_token_permute_grad_v2",
    "npu::npu_moe_token_unpermute",
    "npu::npu_moe_token_unpermute_grad",
]


@pytest.mark.parametrize("rows", [None, 40, 90], ids=["all", "some-dropped", "padded"])
def test_a_routing_map_goes_through_the_fused_operators_of_the_npu(rows, npu):
    """Rows that nobody goes to are zero whatever the device leaves there."""
    ours, expected, seen = npu(moe_npu_jobs.npu_and_cpu, 19, 10, rows)
    # Without one of its operators, the definition of moe_unpermute runs.
    absent = FUSED[1:3] if wheel.falls_back("moe_unpermute") else ()
    assert seen == [name for name in FUSED if name not in absent]
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_more_experts_than_the_fused_operators_take_go_through_the_formula(npu):
    ours, expected, seen = npu(moe_npu_jobs.npu_and_cpu, 3, 513, None)
    assert seen == []
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
