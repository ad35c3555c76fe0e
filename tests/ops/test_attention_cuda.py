"""Attention on CUDA against attention written out in float64.

Tests marked ``cuda`` run torch's kernels. Without a GPU the same cases run on CPU tensors, where
``aten._flash_attention_*`` and ``aten._efficient_attention_*`` have no kernels; here they get some,
which restate as dense formulas what torch documents of them, and assert what the real ones demand
of their arguments: alignment at the bottom right, windows, layouts, strides and addresses, the
shapes and special values of the log-sum-exp.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from mindspeed.ops import _attention_cuda, _attention_cudnn, _attention_tiles
from mindspeed.ops.attention import attention
from mindspeed.ops.attention_problem import AttentionProblem
from tests.ops import exact_attention, strided


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


def assert_loadable(*tensors):
    """The kernels load 16 bytes at a time from where rows begin; else an illegal address."""
    for x in tensors:
        assert x.stride(-1) == 1
        steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
        assert all(at * x.itemsize % 16 == 0 for at in (x.storage_offset(), *steps))


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
    assert_loadable(q, k, v)
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
    assert_loadable(dout, q, k, v, out)
    assert lse.is_contiguous()
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
    assert all(x.shape[-1] % 8 == 0 for x in (q, k))
    assert_loadable(q, k)
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.stride(-2) % 16 == 0
        assert bias.stride(-1) == 1
    return bias


def efficient_forward(
    q, k, v, bias, cu_q, cu_k, max_q, max_k, p, mask_type, with_lse, *, scale=None, **unused
):
    assert with_lse
    assert p == 0
    assert_loadable(v)
    allowed = efficient_allowed(q.shape[1], k.shape[1], mask_type)
    out, lse = attend(q, k, v, scale, allowed, checked(bias, q, k))
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), 0, 0


def efficient_backward(
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, p, seed, offset, mask_type, bias_grad,
    *, scale=None, **unused,
):  # fmt: skip
    assert (q.shape[1], k.shape[1], lse.shape[-1] % 32) == (max_q, max_k, 0)
    assert_loadable(dout, v, out)
    assert lse.is_contiguous()
    assert out.is_contiguous()  # its rows are taken to be that far apart
    allowed = efficient_allowed(max_q, max_k, mask_type)
    log_sum = lse[..., :max_q]
    grads = gradients(dout, q, k, v, out, log_sum, scale, allowed, checked(bias, q, k))
    return *grads, q.new_empty(0)


def cudnn_forward(q, k, v, bias, with_lse, p=0, causal=False, debug=False, *, scale=None):
    assert bias is None
    assert with_lse
    assert p == 0
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 128
    assert not causal or q.shape[2] == k.shape[2]
    assert_loadable(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attend(q, k, v, scale, efficient_allowed(q.shape[1], k.shape[1], int(causal)))
    number = torch.zeros((), dtype=torch.int64)
    empty = q.new_empty(0)
    return out.transpose(1, 2), lse[..., None], empty, empty, 0, 0, number, number, empty


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale=None
):
    assert_loadable(dout, q, k, v, out)
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    allowed = efficient_allowed(max_q, max_k, int(causal))
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = gradients(dout, q, k, v, out, lse[..., 0], scale, allowed)
    return tuple(x.transpose(1, 2) for x in grads)


@pytest.fixture(scope="module", autouse=True)
def restated():
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("_flash_attention_forward", flash_forward),
        ("_flash_attention_backward", flash_backward),
        ("_efficient_attention_forward", efficient_forward),
        ("_efficient_attention_backward", efficient_backward),
        ("_scaled_dot_product_cudnn_attention", cudnn_forward),
        ("_scaled_dot_product_cudnn_attention_backward", cudnn_backward),
    ):
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def tensors(layout, sq, sk, dtype, dv=16, d=16):
    generator = torch.Generator().manual_seed(0)
    sizes = {"B": 2, "T": None, "S": None}

    def one(n, s, d):
        shape = [{**sizes, "S": s, "T": s, "N": n, "D": d}[axis] for axis in layout]
        return torch.randn(shape, generator=generator).to(dtype)

    return one(4, sq, d), one(2, sk, d), one(2, sk, dv)


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


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def case(name, dtype):
    """Tensors and options; values are numbers of ``dtype``, so the formula gets the same ones."""
    rules, sq, sk, flash_calls = CASES[name]
    rules = {key: x.to(dtype) if key == "pse" else x for key, x in rules.items()}
    rules = {"scale": 0.3, **rules}
    layout = rules.get("layout", "BNSD")
    return rules, tensors(layout, sq, sk, dtype, dv=8 if flash_calls else 16)


def assert_is_exact(ours, expected, dtype):
    """Out, log-sum-exp and three gradients, against float64."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, wanted in zip(ours, expected, strict=True):
        assert got.shape == wanted.shape
        largest = max(float(wanted[wanted.isfinite()].abs().max()), 1.0)
        torch.testing.assert_close(
            got.detach().cpu().double(), wanted, rtol=tolerance, atol=tolerance * largest
        )


@dtypes
@pytest.mark.parametrize("name", CASES)
def test_calls_match_the_emulated_kernels(name, dtype, monkeypatch):
    rules, (q, k, v) = case(name, dtype)
    problem, calls = AttentionProblem(**rules), []
    arrange = _attention_cuda._Flash.arrange
    monkeypatch.setattr(
        _attention_cuda._Flash, "arrange", lambda *x: calls.append(1) or arrange(*x)
    )
    out, lse = _attention_cuda.forward(q, k, v, *problem.options())
    flash_calls = CASES[name][3]
    assert len(calls) == (flash_calls if flash_calls and dtype == torch.bfloat16 else 0)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
    # The gradient kernels get what the device's forward would hand them: rounded numbers.
    grads = _attention_cuda.backward(dout, q, k, v, out, lse, *problem.options(), False)[:3]
    assert [x.dtype for x in (out, *grads)] == [dtype] * 4
    expected = exact_attention.with_gradients(q, k, v, dout, **rules)
    assert_is_exact((out, lse, *grads), expected, dtype)


SQUARES = {
    # rules, queries, keys, whether cuDNN computes it
    "full": ({}, 9, 12, True),
    "causal": ({"mode": 3}, 12, 12, True),
    "top-left": ({"mode": 2}, 12, 12, True),
    "mask without effect": ({"mode": 0}, 9, 9, True),
    "causal rectangle": ({"mode": 3}, 9, 12, False),
    "window": ({"mode": 4, "pre": 3, "next": 0}, 12, 12, False),
    "mask": ({"mask": torch.arange(12)[:, None] < torch.arange(12)}, 12, 12, False),
    "bias": ({"pse": torch.randn(1, 4, 12, 12), "pse_type": 0}, 12, 12, False),
    "one query": ({}, 1, 12, False),
}


@pytest.fixture
def hopper(monkeypatch):
    """A device that cuDNN's kernels are for."""
    monkeypatch.setattr(_attention_cudnn, "_is_there", lambda device: True)


@pytest.mark.parametrize("layout", ["SBND", "BSND", "BNSD"])
@pytest.mark.parametrize("name", SQUARES)
def test_squares_are_cudnns(name, layout, hopper, monkeypatch):
    rules, sq, sk, expected = SQUARES[name]
    rules = {key: x.to(torch.bfloat16) if key == "pse" else x for key, x in rules.items()}
    rules = {"scale": 0.3, "layout": layout, **rules}
    forward, calls = _attention_cudnn.forward, []
    monkeypatch.setattr(_attention_cudnn, "forward", lambda *x: calls.append(1) or forward(*x))
    problem = AttentionProblem(**rules)
    # Slices of a projection, and tensors whose rows start anywhere.
    for q, k, v in zip(*map(places, tensors(layout, sq, sk, torch.bfloat16)), strict=True):
        out, lse = _attention_cuda.forward(q, k, v, *problem.options())
        dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        grads = _attention_cuda.backward(dout, q, k, v, out, lse, *problem.options(), False)
        assert all(x.is_contiguous() for x in (out, lse, *grads))
        wanted = exact_attention.with_gradients(q, k, v, dout, **rules)
        assert_is_exact((out, lse, *grads[:3]), wanted, torch.bfloat16)
    assert bool(calls) == expected


def test_cudnn_is_left_out_where_it_would_round_or_drop_otherwise(hopper):
    q, k, v = tensors("BNSD", 12, 12, torch.bfloat16)
    takes = _attention_cudnn.takes
    assert takes(AttentionProblem(), q, k, v)
    assert not takes(AttentionProblem(), *(x.float() for x in (q, k, v)))
    assert not takes(AttentionProblem(dropout=0.1, rng=torch.tensor([1, 2])), q, k, v)
    assert not takes(AttentionProblem(), q, k, v[..., :8])
    assert not takes(AttentionProblem(), *(x.repeat(1, 1, 1, 16) for x in (q, k, v)))
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes(AttentionProblem(), q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)


GPU_CASES = {
    **{name: (CASES[name][0], *CASES[name][1:3]) for name in CASES},
    "alibi": ({"mode": 3, "pse": torch.tensor([1.0, 0.5, 0.2, 0.1]), "pse_type": 2}, 40, 40),
    "sink": ({"mode": 3, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}, 9, 12),
    "long": ({"mode": 3}, 300, 333),
    "long-square": ({"mode": 3}, 300, 300),
    "long-full": ({}, 300, 333),
    "long-window": ({"mode": 4, "pre": 100, "next": 0}, 300, 333),
    "long-prefix": ({"mode": 6, "prefix": [5, 330]}, 300, 333),
}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@dtypes
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("name", GPU_CASES)
def test_torchs_kernels_on_a_gpu(name, size, dtype):
    """The same cases through autograd, with the kernels of this machine's torch."""
    rules, sq, sk = GPU_CASES[name]
    rules = {"scale": 0.3, **rules}
    rules = {
        key: x.to(dtype) if key == "pse" and rules["pse_type"] < 2 else x
        for key, x in rules.items()
    }
    qkv = [x.cuda() for x in tensors(rules.get("layout", "BNSD"), sq, sk, dtype, d=size, dv=size)]
    leaves = [x.requires_grad_() for x in qkv]
    on_host = ("cu_q", "cu_k")
    given = {
        key: x.cuda() if isinstance(x, torch.Tensor) and key not in on_host else x
        for key, x in rules.items()
    }
    out, lse = attention(*leaves, **given)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).cuda()
    grads = torch.autograd.grad(out, leaves, dout)
    expected = exact_attention.with_gradients(*leaves, dout, **rules)
    assert_is_exact((out, lse, *grads), expected, dtype)


def places(x):
    """``x`` with other strides and offsets."""
    return [strided.placed(x, place) for place in strided.PLACES]


@dtypes
@pytest.mark.parametrize("name", ["causal", "packed", "mask", "bias"])
def test_kernel_inputs_are_16_byte_aligned(name, dtype):
    """Slices with odd strides and offsets, in every tensor; the restated kernels assert it."""
    rules, qkv = case(name, dtype)
    problem = AttentionProblem(**rules)
    for q, k, v in zip(*map(places, qkv), strict=True):
        out, lse = _attention_cuda.forward(q, k, v, *problem.options())
        for dout in places(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)):
            grads = _attention_cuda.backward(dout, q, k, v, out, lse, *problem.options(), False)
        expected = exact_attention.with_gradients(q, k, v, dout, **rules)
        assert_is_exact((out, lse, *grads[:3]), expected, dtype)


def test_slices_of_a_projection_are_not_copied():
    """The common case, one projection that is split into q, k and v, costs nothing."""
    q, k, v = torch.zeros(2, 9, 4, 3 * 16, dtype=torch.bfloat16).chunk(3, -1)
    assert all(_attention_tiles.aligned_vectors(x) is x for x in (q, k, v))
    assert all(_attention_tiles.vectors(x) is x for x in (q, k, v))


def test_alibi_in_16_bit_is_not_rounded_to_16_bit():
    """Its distances are no bf16 numbers, so the efficient kernel, which wants that, is not used."""
    q, k, v = tensors("BNSD", 600, 600, torch.bfloat16)
    rules = {"scale": 0.3, "mode": 3, "pse": torch.tensor([1.0, 0.5, 0.2, 0.1]), "pse_type": 2}
    ours, _ = _attention_cuda.forward(q, k, v, *AttentionProblem(**rules).options())
    expected, _ = exact_attention.attend(q, k, v, **rules)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [12, 16])
def test_head_sizes_that_are_no_multiple_of_8(size):
    q, k, v = (x[..., :size] for x in tensors("BNSD", 9, 9, torch.bfloat16))
    ours, _ = _attention_cuda.forward(q, k, v, *AttentionProblem(scale=0.3, mode=2).options())
    expected, _ = exact_attention.attend(q, k, v, scale=0.3, mode=2)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["cut-behind", "cut-in-front"])
def test_dropout_differs_between_calls_and_repeats_in_the_backward(name, monkeypatch):
    rules, sq, sk, count = CASES[name]
    rng = torch.tensor([7, 8])
    problem = AttentionProblem(scale=0.3, dropout=0.5, rng=rng, **rules)
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
def test_torch_shape_kernels_accept_the_calls(name):
    rules, sq, sk, _ = CASES[name]
    problem = AttentionProblem(scale=0.3, **rules)
    q, k, v = (x.to("meta") for x in tensors(problem.layout, sq, sk, torch.bfloat16, dv=8))
    out, lse = _attention_cuda.forward(q, k, v, *problem.options())
    assert out.shape == (*q.shape[:-1], 8)
    grads = _attention_cuda.backward(out, q, k, v, out, lse, *problem.options(), False)
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
