"""Attention against a dense softmax in fp64 whose mask is written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.instruments import saved_for_backward
from mindspeed.instruments.flops import repeated_in
from mindspeed.ops import OperatorError, _attention_cpu, set_cpu_mode
from mindspeed.ops.attention import ATTENTION_BACKWARD, attention
from mindspeed.ops.attention_problem import AttentionProblem
from mindspeed.ops.fusion_attention_v2 import npu_fusion_attention, npu_fusion_attention_grad
from tests.ops import exact_attention
from tests.ops.exact_attention import INFINITE, dense, hidden

TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_MASK = torch.zeros(3072, 2048, dtype=torch.bool)

ORDERS = {"SBH": "sb(nd)", "BSH": "bs(nd)", "BSND": "bsnd", "BNSD": "bnsd"}


def to_layout(x, layout):
    x = x.permute(["bnsd".index(axis) for axis in ORDERS[layout] if axis in "bnsd"])
    return x.flatten(2) if "(" in ORDERS[layout] else x


def tensors(b=2, n=4, nk=2, sq=5, sk=7, d=8, dv=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, n, sq, d), (b, nk, sk, d), (b, nk, sk, dv))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def with_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out.double() * weight).sum(), leaves)
    return [out.detach(), *grads]


def assert_equal(ours, theirs, atol=1e-10):
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=atol)


MODES = {
    "uncut": {"sparse_mode": 0, "pre_tokens": 3, "next_tokens": 1},
    "mask-only": {"sparse_mode": 1},
    "top-left": {"sparse_mode": 2},
    "bottom-right": {"sparse_mode": 3},
    "band": {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1},
    "shifted-band": {"sparse_mode": 4, "pre_tokens": 4, "next_tokens": -1},
    "prefix": {"sparse_mode": 5, "prefix": [1, 5]},
    "prefix-compressed": {"sparse_mode": 6, "prefix": [4, 0]},
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("sizes", [(6, 6), (4, 7), (7, 4)], ids=["square", "wide", "tall"])
def test_modes_and_layouts(name, layout, sizes):
    options, (sq, sk) = MODES[name], sizes
    mode = options["sparse_mode"]
    b, heads, scale = 2, 4, 0.4
    mask = torch.rand(b, 1, sq, sk, generator=torch.Generator().manual_seed(3)) < 0.3
    prefixes = options.get("prefix", [None, None])
    band = (options.get("pre_tokens", INFINITE), options.get("next_tokens", INFINITE))
    masked = torch.stack([
        hidden(mode, sq, sk, *band, prefix=prefixes[i], mask=mask[i, 0]) for i in range(b)
    ])[:, None]  # fmt: skip
    if mode == 5:
        mask = masked
    given = {0: mask, 1: mask, 5: mask, 6: PREFIX_MASK}.get(mode, TRIANGLE)
    q, k, v = tensors(sq=sq, sk=sk, dv=6)

    def ours(*qkv):
        qkv = [to_layout(x, layout) for x in qkv]
        return npu_fusion_attention(
            *qkv, heads, layout.lower(), scale=scale, atten_mask=given, **options
        )[0]

    expected = with_gradients(lambda *x: to_layout(dense(*x, masked, scale)[0], layout), (q, k, v))
    assert_equal(with_gradients(ours, (q, k, v)), expected)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("groups", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"mode": 2}, {"mode": 4, "pre": 300, "next": 5}], ids=str)
def test_tiles_and_whole_calls_agree_with_the_formula(groups, dtype, options):
    q, k, v = tensors(1, 4, groups, 530, 600, dtype=dtype)
    table = {2: torch.ones(530, 600).triu(1).bool()}
    distance = torch.arange(600) - torch.arange(530)[:, None] - 70
    table[4] = (distance > 5) | (distance < -300)
    masked = table.get(options.get("mode"), torch.zeros(1, 1, dtype=torch.bool))
    ours = with_gradients(lambda *x: attention(*x, scale=0.3, **options)[0], (q, k, v))
    expected = with_gradients(lambda *x: dense(*x, masked, 0.3)[0], [x.double() for x in (q, k, v)])
    assert_equal(ours, expected, 1e-10 if dtype == torch.float64 else 5e-4)


def test_log_sum_exp_and_statistics():
    q, k, v = tensors(sq=6, sk=4)
    expected = dense(q, k, v, hidden(3, 6, 4), 0.3)[1]
    _, maximum, total, empty, *numbers = npu_fusion_attention(
        q, k, v, 4, "BNSD", scale=0.3, atten_mask=TRIANGLE, sparse_mode=3
    )
    assert maximum.shape == total.shape == (2, 4, 6, 8)
    assert (maximum[:, :, :2] == -torch.inf).all()  # the first two queries see nothing
    got = maximum + total.log()
    torch.testing.assert_close(got, expected[..., None].expand_as(got))
    assert empty.numel() == 0
    assert numbers == [0, 0, 0]


def test_fully_masked_rows_have_zero_output_and_gradient():
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[2] = True
    qkv = tensors()
    out, dq, dk, dv = with_gradients(
        lambda *x: npu_fusion_attention(*x, 4, "BNSD", atten_mask=mask, sparse_mode=1)[0], qkv
    )
    assert (out[:, :, 2] == 0).all()
    assert (dq[:, :, 2] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("pse_type", [0, 1])
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 1, 7)], ids=str)
def test_position_bias_and_its_gradient(pse_type, shape):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = (*tensors(), bias)

    def ours(q, k, v, pse):
        return npu_fusion_attention(
            q, k, v, 4, "BNSD", scale=0.3, pse=pse, pse_type=pse_type, atten_mask=TRIANGLE,
            sparse_mode=3,
        )[0]  # fmt: skip

    factor = 0.3 if pse_type == 1 else 1.0
    expected = with_gradients(
        lambda q, k, v, b: dense(q, k, v, hidden(3, 5, 7), 0.3, b * factor)[0], inputs
    )
    assert_equal(with_gradients(ours, inputs), expected)


@pytest.mark.parametrize("pse_type", [2, 3])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi(pse_type, per_sequence):
    qkv = tensors(sq=7)
    slopes = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.1, 0.2, 0.3]])
    slopes = slopes if per_sequence else slopes[0]
    options = {"pse": slopes, "pse_type": pse_type, "q_start_idx": [9], "kv_start_idx": [2]}
    distance = (torch.arange(7)[:, None] + 9 - torch.arange(7) - 2).abs().double()
    distance = distance.sqrt() if pse_type == 3 else distance
    bias = -slopes.double().view(-1, 4, 1, 1) * distance
    masked = hidden(2, 7, 7)
    ours = with_gradients(
        lambda *x: npu_fusion_attention(
            *x, 4, "BNSD", atten_mask=TRIANGLE, sparse_mode=2, **options
        )[0],
        qkv,
    )
    expected = with_gradients(lambda *x: dense(*x, masked, 1.0, bias)[0], qkv)
    assert_equal(ours, expected, 1e-6)  # slopes are fp32


PACKS = {
    "mode-2": ({"sparse_mode": 2}, [3, 0, 5], [4, 2, 9]),
    "mode-3": ({"sparse_mode": 3}, [3, 5, 1], [4, 9, 0]),
    "mode-4": ({"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}, [3, 5], [4, 9]),
    "mode-6": ({"sparse_mode": 6, "prefix": [2, 7]}, [3, 5], [4, 9]),
    "mode-7": ({"sparse_mode": 7, "pre_tokens": 6, "next_tokens": -2}, [3, 2], [3, 6]),
    "mode-8": ({"sparse_mode": 8, "pre_tokens": 4, "next_tokens": 1}, [3, 5, 4], [4, 5, 4]),
}


@pytest.mark.parametrize("name", PACKS)
def test_packed_sequences_equal_sequences_alone(name):
    options, q_lengths, k_lengths = PACKS[name]
    mode, band = (
        options["sparse_mode"],
        (options.get("pre_tokens", 0), options.get("next_tokens", 0)),
    )
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1, sq=sum(q_lengths), sk=sum(k_lengths)))
    ends = [list(itertools.accumulate(x)) for x in (q_lengths, k_lengths)]

    def ours(*qkv):
        return npu_fusion_attention(
            *qkv, 4, "TND", atten_mask=PREFIX_MASK if mode == 6 else TRIANGLE,
            actual_seq_qlen=ends[0], actual_seq_kvlen=torch.tensor(ends[1]), **options,
        )[0]  # fmt: skip

    def alone(q, k, v):
        parts, count = [], len(q_lengths)
        pieces = [x.split(n) for x, n in ((q, q_lengths), (k, k_lengths), (v, k_lengths))]
        for i, qkv in enumerate(zip(*pieces, strict=True)):
            prefix = options.get("prefix", [None] * count)[i]
            masked = hidden(
                mode, q_lengths[i], k_lengths[i], *band, prefix=prefix, first=i == 0,
                last=i == count - 1,
            )  # fmt: skip
            out, _ = dense(*(x.transpose(0, 1)[None] for x in qkv), masked, 1.0)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    assert_equal(with_gradients(ours, (q, k, v)), with_gradients(alone, (q, k, v)))


@pytest.mark.parametrize("mode", [0, 1])
def test_packed_sequences_with_alibi_slopes_and_with_a_mask_of_the_longest_sequence(mode):
    lengths, slopes = [3, 5], torch.tensor([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.1, 0.2, 0.3]])
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1, sq=8, sk=8))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.3

    def ours(*qkv):
        return npu_fusion_attention(
            *qkv, 4, "TND", atten_mask=mask, sparse_mode=mode, pre_tokens=3, next_tokens=1,
            pse=slopes, pse_type=2, actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8],
        )[0]  # fmt: skip

    def alone(q, k, v):
        parts = []
        for i, qkv in enumerate(zip(*(x.split(lengths) for x in (q, k, v)), strict=True)):
            n = lengths[i]
            distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
            bias = -slopes[i].double().view(1, 4, 1, 1) * distance
            masked = hidden(mode, n, n, 3, 1, mask=mask)
            out, _ = dense(*(x.transpose(0, 1)[None] for x in qkv), masked, 1.0, bias)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    assert_equal(with_gradients(ours, (q, k, v)), with_gradients(alone, (q, k, v)), 1e-6)


CUT_PACKS = {
    # (band, ends of queries, ends of keys), queries and keys of the cut sequence in the whole one
    7: ((6, -2), [3, 5], [3, 9], (slice(3, 5), slice(3, 9)), slice(2, 4)),
    8: ((4, 1), [3, 8, 12], [4, 9, 13], (slice(0, 3), slice(0, 4)), slice(2, 5)),
}


@pytest.mark.parametrize("mode", CUT_PACKS)
def test_a_sharded_sequence_attends_as_the_full_sequence(mode):
    """The worked examples: queries 2 to 4 of a causal sequence, whose keys are cut elsewhere."""
    band, q_ends, k_ends, (rows, keys), places = CUT_PACKS[mode]
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1, sq=q_ends[-1], sk=k_ends[-1]))
    out = npu_fusion_attention(
        q, k, v, 4, "TND", atten_mask=TRIANGLE, sparse_mode=mode, pre_tokens=band[0],
        next_tokens=band[1], actual_seq_qlen=q_ends, actual_seq_kvlen=k_ends,
    )[0]  # fmt: skip
    masked = torch.ones(6, keys.stop - keys.start).triu(1).bool()[places]
    alone = [x[s].transpose(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys))]
    torch.testing.assert_close(out[rows], dense(*alone, masked, 1.0)[0][0].transpose(0, 1))


@pytest.mark.parametrize("nk", [4, 2])
def test_sink(nk):
    q, k, v = tensors(nk=nk)
    sink = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    masked = hidden(3, 5, 7)
    ours = with_gradients(
        lambda q, k, v, s: attention(q, k, v, scale=0.3, mode=3, sink=s)[0], (q, k, v, sink)
    )
    expected = with_gradients(
        lambda q, k, v, s: dense(q, k, v, masked, 0.3, sink=s)[0], (q, k, v, sink)
    )
    assert_equal(ours, expected)


def test_blocks_of_keys_merge_and_their_gradients_add_up():
    """What context parallelism does: forward by blocks, backward with the merged out and lse."""
    q, k, v = tensors(sq=6, sk=9)
    masked = hidden(3, 6, 9)
    expected = with_gradients(lambda *x: dense(*x, masked, 0.3)[0], (q, k, v))
    blocks = [(slice(0, 4), {"mode": 0, "next": 3}), (slice(4, 9), {"mode": 0, "next": -1})]
    parts = [attention(q, k[:, :, s], v[:, :, s], scale=0.3, **rule) for s, rule in blocks]
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    out = sum(o * (part - lse).exp()[..., None] for o, part in parts)
    torch.testing.assert_close(out, expected[0])
    dout = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    dq, grads = torch.zeros_like(q), []
    for s, rule in blocks:
        options = AttentionProblem(scale=0.3, **rule).options()
        part = ATTENTION_BACKWARD(dout, q, k[:, :, s], v[:, :, s], out, lse, *options, False)
        dq += part[0]
        grads.append(part[1:3])
    dk, dv = (torch.cat(x, 2) for x in zip(*grads, strict=True))
    assert_equal([dq, dk, dv], expected[1:])


def dropped(keep_prob, q, k, seed, offset, **options):
    """The factors of dropout, read off with values that are unit vectors."""
    keys = k.shape[2]
    q = torch.zeros(*q.shape[:-1], keys, dtype=torch.float64)
    eye = torch.eye(keys, dtype=torch.float64).expand(q.shape[0], k.shape[1], -1, -1)
    rng = torch.tensor([seed, offset])
    out, _ = attention(q, torch.zeros_like(eye), eye, dropout=1 - keep_prob, rng=rng, **options)
    return out * keys


def test_dropout_is_reproduced_from_seed_and_offset():
    torch.manual_seed(11)
    q, k, v = tensors(1, 4, 2, 300, 64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, maximum, total, _, seed, offset, numels = npu_fusion_attention(
        *leaves, 4, "BNSD", scale=0.3, keep_prob=0.7
    )
    assert numels == 4 * 300 * 64
    kept = dropped(0.7, q, k, seed, offset)
    rate = (kept > 0).double().mean()
    assert abs(rate - 0.7) < 4 * math.sqrt(0.7 * 0.3 / numels)
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.7))
    nothing = torch.zeros(1, 1, dtype=torch.bool)
    again = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(*again, nothing, 0.3, kept=kept)[0]
    dy = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad(expected, again, dy)
    assert_equal([out, *torch.autograd.grad(out, leaves, dy)], [expected, *grads])
    by_hand = npu_fusion_attention_grad(
        q, k, v, dy, 4, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=out.detach(),
        scale_value=0.3, keep_prob=0.7, seed=seed, offset=offset, numels=numels,
    )  # fmt: skip
    assert by_hand[3] is None
    assert_equal(by_hand[:3], grads)
    assert not torch.equal(npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.7)[0], out)


def test_dropout_under_activation_checkpointing():
    q, k, v = tensors()

    def run(wrap):
        torch.manual_seed(3)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = wrap(lambda *x: attention(*x, scale=0.3, mode=3, dropout=0.4)[0], *leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    plain = run(lambda f, *x: f(*x))
    recomputed = run(lambda f, *x: checkpoint(f, *x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0)], ids=str)
def test_empty_inputs(shape):
    out, dq, dk, dv = with_gradients(
        lambda *x: attention(*x, scale=0.3, mode=2)[0], tensors(*shape)
    )
    assert out.shape == (*shape[:2], shape[3], 8)
    assert all((x == 0).all() for x in (out, dq, dk, dv))


def test_gradients_by_differences():
    inputs = [x.requires_grad_() for x in tensors(1, 2, 1, 4, 5, 3, 2)]
    bias = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, pse, sink: attention(q, k, v, scale=0.5, mode=3, pse=pse, sink=sink)[0],
        (*inputs, bias, sink),
    )


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that any torch call returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


SPARSE = {
    "full": {},
    "causal": {"mode": 2},
    "window": {"mode": 4, "pre": 50, "next": 0},
    "prefix": {"mode": 6, "prefix": [700]},
    "alibi": {"mode": 2, "pse": torch.tensor([0.5, 0.25]), "pse_type": 2},
    "dropout": {"mode": 2, "dropout": 0.5, "rng": torch.tensor([1, 0])},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_no_tensor_of_score_matrix_size_is_allocated(name):
    """Not even for a moment, within the kernels; s x s elements per head would be one each."""
    s, n = 2048, 2
    options = AttentionProblem(scale=0.3, **SPARSE[name]).options()
    q, k, v = tensors(1, n, n, s, s, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        out, lse = _attention_cpu.forward(q, k, v, *options)
        _attention_cpu.backward(out, q, k, v, out, lse, *options, False)
    assert largest.elements <= n * s * 256


def test_saved_for_backward_are_inputs_output_and_four_bytes_per_query_and_head():
    s, n, d = 512, 2, 8
    q, k, v = (x.requires_grad_() for x in tensors(1, n, n, s, s, d, d, dtype=torch.bfloat16))
    with saved_for_backward() as saved:
        attention(q, k, v, scale=0.3, mode=2, dropout=0.5)[0].sum().backward()
    assert saved.bytes == 4 * s * n * d * 2 + 4 * s * n + 16  # and the seed


def test_flops_count_unmasked_pairs():
    q, k, v = tensors(2, 4, 2, 6, 6, 8, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as counter:
        attention(*leaves, mode=2)[0].sum().backward()
    pairs = 2 * 4 * 6 * 7 // 2
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.mindspeed.attention] == 2 * pairs * (8 + 4)
    backward = torch.ops.mindspeed.attention_backward
    assert counts[backward] == 2 * pairs * (3 * 8 + 2 * 4)
    assert repeated_in(backward, (None, q, k, v), counts[backward]) == 2 * pairs * 8


def test_compiles_as_one_graph():
    def step(q, k, v):
        return npu_fusion_attention(
            q, k, v, 4, "SBH", scale=0.3, atten_mask=TRIANGLE, sparse_mode=2, keep_prob=0.5
        )[0]

    qkv = [to_layout(x, "SBH") for x in tensors(dtype=torch.float32)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = with_gradients(step, qkv)
    torch.manual_seed(1)
    assert_equal(with_gradients(compiled, qkv), expected, 1e-6)


def test_runs_in_compiled_cpu_mode():
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1))
    expected = npu_fusion_attention(q, k, v, 4, "TND", **LENGTHS)[0]
    set_cpu_mode("compile")
    try:
        assert torch.equal(npu_fusion_attention(q, k, v, 4, "TND", **LENGTHS)[0], expected)
    finally:
        set_cpu_mode("eager")


def call(**changes):
    """A correct call of BNSD or, with ``input_layout``, of another layout, and one change."""
    layout = changes.get("input_layout", "BNSD").upper()
    q, k, v = tensors(dtype=torch.float32)
    if layout == "TND":
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    elif layout in ORDERS:
        q, k, v = (to_layout(x, layout) for x in (q, k, v))
    arguments = {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": layout}
    npu_fusion_attention(**{**arguments, **changes})


LENGTHS = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [3, 7]}
PACK = {"input_layout": "TND", **LENGTHS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_layout": "NBSD"}, "input_layout: expected one of BSH, SBH, BSND, BNSD, TND"),
        ({"head_num": 3}, "head_num: expected the query's heads, 4, got 3"),
        ({"head_num": 0}, "head_num: expected a positive number"),
        ({"input_layout": "SBH", "head_num": 3}, "head_num: expected a divisor of 32, got 3"),
        ({"key": torch.randn(2, 3, 7, 8)}, "key: expected a number of heads that divides 4, got 3"),
        ({"key": torch.randn(2, 2, 7, 6)}, "key: expected head size 8, got 6"),
        ({"key": torch.randn(3, 2, 7, 8)}, "key: expected batch size 2|value: expected shape"),
        ({"value": torch.randn(2, 2, 6, 8)}, "value: expected shape"),
        ({"value": torch.randn(2, 2, 7, 9)}, "value: expected a head size of at most 8, got 9"),
        ({"query": torch.randn(2, 4, 5)}, "query: expected 4 dimensions"),
        ({"query": torch.ones(2, 4, 5, 8, dtype=torch.int32)}, "query: expected dtype"),
        ({"value": torch.randn(2, 2, 7, 8).half()}, "value: expected the dtype of query"),
        ({"keep_prob": 0.0}, r"keep_prob: expected a number in \(0, 1\], got 0.0"),
        ({"padding_mask": TRIANGLE}, "padding_mask: expected None"),
        ({"sparse_mode": 9}, "sparse_mode: expected one of 0, 1"),
        ({"sparse_mode": 2, "atten_mask": TRIANGLE[:5, :7]}, "atten_mask: expected shape .2048"),
        ({"sparse_mode": 1, "atten_mask": TRIANGLE}, "atten_mask: expected shape"),
        ({"sparse_mode": 2, "atten_mask": TRIANGLE.float()}, "atten_mask: expected dtype bool"),
        ({"sparse_mode": 6, "atten_mask": PREFIX_MASK}, "prefix: expected 2 numbers"),
        ({"sparse_mode": 7}, "input_layout: expected TND for sparse_mode 7"),
        ({"actual_seq_qlen": [5]}, "actual_seq_qlen: expected None unless the layout is TND"),
        ({"input_layout": "TND"}, "actual_seq_qlen: expected the ends of the sequences"),
        (
            {**PACK, "actual_seq_qlen": [3, 2]},
            "actual_seq_qlen: expected numbers that do not decrease",
        ),
        (
            {**PACK, "actual_seq_kvlen": [3, 6]},
            "actual_seq_kvlen: expected 7 at the end, got 6",
        ),
        (
            {**PACK, "actual_seq_kvlen": [3, 4, 7]},
            "actual_seq_kvlen: expected 2 sequences, got 3",
        ),
        (
            {**PACK, "sparse_mode": 5, "atten_mask": TRIANGLE, "prefix": [1, 2]},
            "sparse_mode: expected 6 for a prefix with TND",
        ),
        (
            {**PACK, "sparse_mode": 8, "pse": torch.ones(4), "pse_type": 2},
            "pse: expected None for sparse_mode 8",
        ),
        ({"pse": torch.ones(1, 4, 5, 7).half()}, "pse: expected the dtype of query"),
        ({"pse": torch.ones(1, 3, 5, 7)}, "pse: expected a shape that broadcasts"),
        ({"pse": torch.ones(4), "pse_type": 2}, "pse_type: expected 0 or 1 where Sq is not Skv"),
        ({"pse": torch.ones(4).half(), "pse_type": 3}, "pse: expected dtype float32"),
        ({"pse": torch.ones(3), "pse_type": 3}, "pse: expected slopes of shape"),
        ({"pse_type": 4}, "pse_type: expected one of 0, 1, 2, 3"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(OperatorError, match=r"^mindspeed\.ops\.npu_fusion_attention: " + message):
        call(**changes)


def test_absent_sequences_have_zero_output():
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1))
    ends = {"actual_seq_qlen": [2, 5, 0], "actual_seq_kvlen": [3, 7, 0]}
    out = npu_fusion_attention(q, k, v, 4, "TND", **ends)[0]
    same = npu_fusion_attention(q, k, v, 4, "TND", **LENGTHS)[0]
    assert torch.equal(out, same)


def test_a_tile_covers_the_longest_prefix_of_the_batch():
    """More queries than a tile has; one prefix ends behind the band of the first tile."""
    tensors_ = tensors(2, 2, 2, 300, 300, dtype=torch.float32)
    given = {"mode": 6, "prefix": [5, 290], "scale": 0.3}
    dout = torch.linspace(-1, 1, tensors_[0].numel()).view(tensors_[0].shape)
    leaves = [x.requires_grad_() for x in tensors_]
    out, lse = attention(*leaves, **given)
    ours = [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert_equal(ours, exact_attention.with_gradients(*leaves, dout, **given), 1e-4)
    sight = AttentionProblem(mode=6, prefix=[5, 290]).sight(300, 300)
    assert sight.reach(0, 256) == (0, 290)
    assert sight.reach(256, 300) == (0, 300)


def test_a_kernel_without_groups_of_heads_gets_keys_repeated(monkeypatch):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (6, 2, 2))
    dout = torch.randn(2, 6, 5, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), scale=0.3
    )
    monkeypatch.setattr(_attention_cpu, "cpu_attention_groups_heads", lambda: False)
    with torch.no_grad():
        out, lse = _attention_cpu.FLASH.forward(q, k, v, None, False, 0.3)
        found = _attention_cpu.FLASH.backward(dout, q, k, v, out, lse, None, False, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), dout))
