"""The CUDA kernels' calls into torch, on CPU tensors.

``aten._flash_attention_*`` and ``aten._efficient_attention_*`` have no CPU kernels; here they get
some, which restate what torch documents of them (alignment at the bottom right, windows, layouts,
the shapes and special values of the log-sum-exp) as dense formulas.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from mindspeed.ops import _attention_cpu, _attention_cuda
from mindspeed.ops._attention_problem import Problem


def scores_of(q, k, scale, allowed, bias=None):
    """[b, s, n, d] tensors to [b, n, sq, sk] scores, -inf where not allowed."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqnd,bknd->bnqk", q.float(), k.float()) * scale
    scores = scores if bias is None else scores + bias.float()
    return scores.masked_fill(~allowed, -torch.inf)


def attend(q, k, v, scale, allowed, bias=None):
    scores = scores_of(q, k, scale, allowed, bias)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2).float()
    lse = scores.logsumexp(-1)
    out = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1).nan_to_num(0), v)
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def gradients(dout, q, k, v, out, lse, scale, allowed, bias=None):
    groups, dtype = q.shape[2] // k.shape[2], q.dtype
    p = (scores_of(q, k, scale, allowed, bias) - lse[..., None]).exp()
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bqnd,bknd->bnqk", dout, v) - delta) * scale
    add_up = lambda x: x.unflatten(2, (-1, groups)).sum(3)  # noqa: E731
    dq = torch.einsum("bnqk,bknd->bqnd", ds, k)
    dk = add_up(torch.einsum("bnqk,bqnd->bknd", ds, q))
    dv = add_up(torch.einsum("bnqk,bqnd->bknd", p, dout))
    return tuple(x.to(dtype) for x in (dq, dk, dv))


def flash_window(sq, sk, causal, left, right):
    left, right = (-1 if x is None else x for x in (left, right))
    assert left >= -1
    assert right >= -1
    right = 0 if causal else right
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    allowed = torch.ones(sq, sk, dtype=torch.bool)
    allowed &= distance >= -left if left >= 0 else allowed
    return allowed & (distance <= right) if right >= 0 else allowed


def sequences(cu_q, cu_k, *lengths):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == lengths
    ends = [itertools.pairwise(x.tolist()) for x in (cu_q, cu_k)]
    return [(slice(*a), slice(*b)) for a, b in zip(*ends, strict=True)]


def flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **unused,
):  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] % 8 == 0
    assert v.shape[-1] == q.shape[-1]
    window = (causal, window_size_left, window_size_right)
    if cu_q is None:
        assert (q.shape[1], k.shape[1]) == (max_q, max_k)
        out, lse = attend(q, k, v, scale, flash_window(max_q, max_k, *window))
    else:
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        for rows, columns in sequences(cu_q, cu_k, max_q, max_k):
            allowed = flash_window(rows.stop - rows.start, columns.stop - columns.start, *window)
            one, log_sum = attend(q[None, rows], k[None, columns], v[None, columns], scale, allowed)
            out[rows], lse[:, rows] = one[0], log_sum[0]
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty(0, dtype=torch.uint64), q.new_empty(0)


def flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert state.dtype == torch.uint64
    assert state.shape == (2,)
    window = (causal, window_size_left, window_size_right)
    if cu_q is None:
        return gradients(dout, q, k, v, out, lse, scale, flash_window(max_q, max_k, *window))
    results = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, columns in sequences(cu_q, cu_k, max_q, max_k):
        allowed = flash_window(rows.stop - rows.start, columns.stop - columns.start, *window)
        given = [dout[rows], q[rows], k[columns], v[columns], out[rows]]
        grads = gradients(*(x[None] for x in given), lse[None, :, rows], scale, allowed)
        for result, where, grad in zip(results, (rows, columns, columns), grads, strict=True):
            result[where] = grad[0]
    return tuple(results)


def efficient_allowed(sq, sk, mask_type):
    allowed = torch.ones(sq, sk, dtype=torch.bool)
    return {0: allowed, 1: allowed.tril()}[mask_type]


def checked(bias, q, k):
    assert q.shape[2] == k.shape[2]  # no groups
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (q, k))
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.stride(-2) % 16 == 0
    return bias


def efficient_forward(
    q, k, v, bias, cu_q, cu_k, max_q, max_k, p, mask_type, with_lse, *, scale=None, **unused
):
    assert with_lse
    assert p == 0
    allowed = efficient_allowed(q.shape[1], k.shape[1], mask_type)
    out, lse = attend(q, k, v, scale, allowed, checked(bias, q, k))
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), 0, 0


def efficient_backward(
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, p, seed, offset, mask_type, bias_grad,
    *, scale=None, **unused,
):  # fmt: skip
    assert (q.shape[1], k.shape[1], lse.shape[-1] % 32) == (max_q, max_k, 0)
    allowed = efficient_allowed(max_q, max_k, mask_type)
    log_sum = lse[..., :max_q]
    grads = gradients(dout, q, k, v, out, log_sum, scale, allowed, checked(bias, q, k))
    return *grads, q.new_empty(0)


@pytest.fixture(scope="module", autouse=True)
def restated():
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("_flash_attention_forward", flash_forward),
        ("_flash_attention_backward", flash_backward),
        ("_efficient_attention_forward", efficient_forward),
        ("_efficient_attention_backward", efficient_backward),
    ):
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def tensors(layout, sq, sk, dtype, dv=16):
    generator = torch.Generator().manual_seed(0)
    sizes = {"B": 2, "T": None, "S": None}

    def one(n, s, d):
        shape = [{**sizes, "S": s, "T": s, "N": n, "D": d}[axis] for axis in layout]
        return torch.randn(shape, generator=generator).to(dtype)

    return one(4, sq, 16), one(2, sk, 16), one(2, sk, dv)


PACK = {"layout": "TND", "cu_q": torch.tensor([0, 3, 7, 12]), "cu_k": torch.tensor([0, 4, 6, 13])}
SQUARE = {**PACK, "cu_k": PACK["cu_q"]}
CASES = {
    # rules, queries, keys, calls of flash (None: the efficient kernel instead)
    "full": ({}, 9, 12, 1),
    "causal": ({"mode": 3, "layout": "SBND"}, 9, 12, 1),
    "top-left-square": ({"mode": 2, "layout": "BSND"}, 9, 9, 1),
    "window": ({"mode": 4, "pre": 3, "next": 1}, 9, 12, 1),
    "tall": ({"mode": 3}, 12, 9, 1),
    "packed": ({**PACK, "mode": 3}, 12, 13, 1),
    "packed-window": ({**PACK, "mode": 4, "pre": 2, "next": 0}, 12, 13, 1),
    "packed-square": ({**SQUARE, "mode": 2}, 12, 12, 1),
    "cut-behind": ({**PACK, "mode": 7, "pre": 3, "next": 1}, 12, 13, 2),
    "cut-in-front": ({**SQUARE, "mode": 8, "pre": 3, "next": 1}, 12, 12, 2),
    "negative-next": ({"mode": 4, "pre": 5, "next": -2}, 9, 12, None),
    "top-left-wide": ({"mode": 2}, 9, 12, None),
    "mask": ({"mask": torch.rand(2, 1, 9, 12) < 0.5}, 9, 12, None),
    "blind-row": ({"mask": torch.arange(9)[:, None].expand(9, 12) == 4}, 9, 12, None),
    "prefix": ({"mode": 6, "prefix": [3, 8]}, 9, 12, None),
    "bias": ({"pse": torch.randn(1, 4, 9, 12), "pse_type": 0, "mode": 3}, 9, 12, None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_the_formula_of_the_cpu(name, dtype, monkeypatch):
    rules, sq, sk, flash_calls = CASES[name]
    rules = {key: x.to(dtype) if key == "pse" else x for key, x in rules.items()}
    problem = Problem(**{"scale": 0.3, **rules})
    q, k, v = tensors(problem.layout, sq, sk, dtype, dv=8 if flash_calls else 16)
    calls = []
    arrange = _attention_cuda._Flash.arrange
    monkeypatch.setattr(
        _attention_cuda._Flash, "arrange", lambda *x: calls.append(1) or arrange(*x)
    )
    ours = _attention_cuda.forward(q, k, v, *problem.options())
    expected_calls = flash_calls if flash_calls and dtype == torch.bfloat16 else 0
    assert len(calls) == expected_calls
    expected = _attention_cpu.forward(q, k, v, *problem.options())
    dout = torch.linspace(-1, 1, expected[0].numel()).view(expected[0].shape).to(dtype)
    given = (dout, q, k, v, *expected, *problem.options(), False)
    ours += _attention_cuda.backward(*given)
    expected += _attention_cpu.backward(*given)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for got, wanted in zip(ours, expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_alibi_in_16_bit_is_not_rounded_to_16_bit():
    """Its distances are no bf16 numbers, so the efficient kernel, which wants that, is not used."""
    q, k, v = tensors("BNSD", 600, 600, torch.bfloat16)
    problem = Problem(scale=0.3, mode=3, pse=torch.tensor([1.0, 0.5, 0.2, 0.1]), pse_type=2)
    ours, _ = _attention_cuda.forward(q, k, v, *problem.options())
    expected, _ = _attention_cpu.forward(q, k, v, *problem.options())
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [12, 16])
def test_head_sizes_that_are_no_multiple_of_8(size):
    q, k, v = (x[..., :size] for x in tensors("BNSD", 9, 9, torch.bfloat16))
    problem = Problem(scale=0.3, mode=2)
    ours = _attention_cuda.forward(q, k, v, *problem.options())
    expected = _attention_cpu.forward(q, k, v, *problem.options())
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["cut-behind", "cut-in-front"])
def test_calls_draw_different_numbers_and_their_backward_the_same(name, monkeypatch):
    rules, sq, sk, count = CASES[name]
    rng = torch.tensor([7, 8])
    problem = Problem(scale=0.3, dropout=0.5, rng=rng, **rules)
    q, k, v = tensors(problem.layout, sq, sk, torch.bfloat16)
    drawn, again = [], []

    @contextlib.contextmanager
    def at(x, pair):
        drawn.append(pair.tolist())
        yield

    state = _attention_cuda._random_state
    monkeypatch.setattr(_attention_cuda, "default_generator_at", at)
    monkeypatch.setattr(
        _attention_cuda, "_random_state", lambda *x: again.append(x[0].tolist()) or state(*x)
    )
    out, lse = _attention_cuda.forward(q, k, v, *problem.options())
    _attention_cuda.backward(out, q, k, v, out, lse, *problem.options(), False)
    assert drawn == again
    assert [seed for seed, _ in drawn] == [7] * count
    offsets = [offset for _, offset in drawn]
    assert offsets[0] == 8
    sequences, heads = (2 if name == "cut-behind" else 1), 4  # of the first call
    assert offsets[1] - offsets[0] == sequences * heads * 32


@pytest.mark.parametrize("name", ["full", "causal", "window", "packed", "cut-behind"])
def test_torchs_own_shape_kernels_take_the_calls(name):
    rules, sq, sk, _ = CASES[name]
    problem = Problem(scale=0.3, **rules)
    q, k, v = (x.to("meta") for x in tensors(problem.layout, sq, sk, torch.bfloat16, dv=8))
    out, lse = _attention_cuda.forward(q, k, v, *problem.options())
    assert out.shape == (*q.shape[:-1], 8)
    grads = _attention_cuda.backward(out, q, k, v, out, lse, *problem.options(), False)
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
