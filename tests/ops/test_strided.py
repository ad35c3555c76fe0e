"""Every operator, every tensor argument, in every way to lie in memory; forward and gradients.

Kernels that compute addresses themselves are where this goes wrong, silently: they read other
numbers, or memory that is none of theirs. ``strided`` says what is tried.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.attention import Mask, context_parallel_attention, plan
from mindspeed.ops.catalog import operators
from mindspeed.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm
from mindspeed.ops.dropout_add_rms_norm import npu_dropout_add_rms_norm
from mindspeed.ops.fusion_attention_v2 import npu_fusion_attention
from mindspeed.ops.gmm import npu_gmm
from mindspeed.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed.ops.npu_moe_token_unpermute import npu_moe_token_unpermute
from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.ops.scaled_masked_softmax import scaled_masked_softmax
from mindspeed.ops.swiglu import swiglu, weighted_swiglu
from tests.ops import strided
from tests.ops import strided_jobs as jobs

WITH_SAMPLES = [one for one in operators() if any(True for _ in one.samples(one.dtypes[0]))]
every_operator = pytest.mark.parametrize("operator", WITH_SAMPLES, ids=lambda one: one.name)


def samples(operator, *, first, dtype=None):
    return list(itertools.islice(operator.samples(dtype or operator.dtypes[0]), first))


@pytest.mark.slow
@every_operator
def test_on_the_cpu(operator):
    """The first samples with each argument in turn, all samples with all arguments at once."""
    found = []
    for number, sample in enumerate(samples(operator, first=100)):
        each = number < 2
        found += strided.forward_problems(operator, operator, sample, each=each, fake=each)
        if operator.differentiable:
            found += strided.gradient_problems(operator, sample, each=each)
    assert not found, "\n".join(found)


@pytest.mark.weekly
@pytest.mark.slow
@every_operator
def test_on_the_cpu_every_argument_of_every_sample(operator):
    """Pairs in which every sample and every dtype is: strides and dtypes are independent."""
    found = []
    given = [samples(operator, first=100, dtype=dtype) for dtype in operator.dtypes]
    for number in range(max(len(given), len(given[0]))):
        of_dtype = given[number % len(given)]
        sample = of_dtype[number % len(of_dtype)]
        found += strided.forward_problems(operator, operator, sample, fake=True)
        if operator.differentiable:
            found += strided.gradient_problems(operator, sample)
    assert not found, "\n".join(found)


INTERPRETER = "tests.ops.preload_triton_interpreter"
WITH_TRITON = [one.name for one in WITH_SAMPLES if one.implementations["cuda"][0].kind == "triton"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TRITON)
def test_triton_kernels_under_the_interpreter(name, ranks, triton):
    (found,) = ranks(1, jobs.interpreted, name, 1, env=triton, setup=INTERPRETER, timeout=240)
    assert not found, "\n".join(found)


ON_NPU = [one.name for one in WITH_SAMPLES if one.implementations["npu"][0].kind == "torch_npu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_NPU)
def test_on_the_emulated_npu(name, npu):
    found = npu(jobs.emulated, name, 2, timeout=240)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_operators_that_communicate(ranks):
    assert_nothing_found(ranks(2, jobs.on_two_ranks, timeout=240))


@pytest.mark.slow
def test_operators_that_communicate_on_emulated_npus(npu_ranks):
    assert_nothing_found(npu_ranks(2, jobs.on_two_ranks, "npu", timeout=240))


def assert_nothing_found(of_ranks):
    communicating = {one.name for one in operators() if one.communicates}
    for found in of_ranks:
        assert set(found) == communicating
        assert not {name: problems for name, problems in found.items() if problems}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
CAUSAL = {"atten_mask": TRIANGLE, "sparse_mode": 3}
WINDOW = {**CAUSAL, "sparse_mode": 4, "pre_tokens": 3}
LENGTHS = {"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}


def attend(layout, **options):
    return lambda q, k, v: npu_fusion_attention(q, k, v, 4, layout, scale=0.3, **options)[0]


def qkv(*shape, groups=2):
    """Queries of the shape, keys and values with fewer heads."""
    smaller = [groups if n == 4 else n for n in shape]
    return random(*shape), random(*smaller, seed=1), random(*smaller, seed=2)


def merged(*shape):
    return tuple(x.flatten(-2) for x in qkv(*shape))


def permuted_and_back(x, indices, probs):
    moved, order = npu_moe_token_permute(x, indices)
    return npu_moe_token_unpermute(moved, order, probs)


TOKENS, WEIGHTS, ENDS = random(10, 6), random(2, 6, 5, seed=1), torch.tensor([4, 10])
NORM = (random(3, 5, 8), random(3, 5, 8, seed=1), random(8, seed=2), random(8, seed=3))
SCALES = (random(3, 5, seed=4), random(8, seed=5))
ANGLES = random(9, 1, 1, 8, seed=6)
PUBLIC = {
    "attention-BSND": (attend("BSND"), qkv(2, 9, 4, 8)),
    "attention-BNSD": (attend("BNSD", **CAUSAL), qkv(2, 4, 9, 8)),
    "attention-SBH": (attend("SBH", **WINDOW), merged(9, 2, 4, 8)),
    "attention-TND": (attend("TND", **CAUSAL, **LENGTHS), qkv(9, 4, 8)),
    "context-parallel": (
        lambda q, k, v: context_parallel_attention(q, k, v, plan(Mask.causal(9), ranks=1)),
        qkv(9, 4, 8),
    ),
    "context-parallel-sink": (
        lambda q, k, v, slopes, sink: context_parallel_attention(
            q, k, v, plan(Mask.documents([0, 4, 9]), ranks=1), slopes=slopes.detach(), sink=sink
        ),
        (*qkv(9, 4, 8), random(4, seed=3).abs(), random(4, seed=4)),
    ),
    "rms_norm": (rms_norm, (random(3, 5, 8), random(8, seed=1))),
    "swiglu": (swiglu, (random(3, 5, 8),)),
    "swiglu-rows": (lambda x: swiglu(x, 0), (random(4, 5, 8),)),
    "swiglu-bias": (lambda x, bias: swiglu(x, bias=bias), (random(3, 8), random(8, seed=1))),
    "weighted_swiglu": (weighted_swiglu, (random(3, 5, 8), random(3, 5, seed=1))),
    "rotary": (npu_rotary_position_embedding, (random(9, 2, 4, 8), ANGLES.cos(), ANGLES.sin())),
    "softmax": (
        lambda x, mask: scaled_masked_softmax(x, mask, 0.5),
        (random(2, 3, 5, 7), random(2, 1, 5, 7, seed=1) > 1),
    ),
    "layer_norm": (
        lambda *x: npu_dropout_add_layer_norm(*x[:4], 0.0, 1e-5, *x[4:], prenorm=True),
        (*NORM, *SCALES),
    ),
    "dropout_rms_norm": (
        lambda *x: npu_dropout_add_rms_norm(*x[:4], 0.0, 1e-5, *x[4:], prenorm=True),
        (*NORM, *SCALES),
    ),
    "permutation": (
        permuted_and_back,
        (random(3, 8), torch.tensor([[0, 2], [1, 0], [2, 1]]), random(3, 2, seed=1)),
    ),
    "gmm": (lambda x, w: npu_gmm(x, w, group_list=ENDS), (TOKENS, WEIGHTS)),
    "gmm-outer": (
        lambda x, w: npu_gmm(x.t(), w, group_list=ENDS, group_type=2),
        (TOKENS, random(10, 5, seed=1)),
    ),
}  # fmt: skip


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", PUBLIC)
def test_documented_functions(name):
    function, arguments = PUBLIC[name]
    found = strided.gradient_problems(function, arguments)
    assert not found, "\n".join(found)


def exact_attention(q, k, v, scale):
    """Causal attention of ``[s, n, d]`` in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "length"), [(torch.float32, 40), (torch.bfloat16, 40), (torch.bfloat16, 2048)]
)
@pytest.mark.parametrize("through", ["npu_fusion_attention", "context_parallel_attention"])
def test_attention_in_slices_of_one_projection(through, dtype, length):
    """``qkv.unbind(-1)``: every element of q is three elements from the next."""
    both = random(length, 2, 8, 3).to(dtype)
    weights = random(length, 2, 8, seed=1)
    leaf = both.clone().requires_grad_()
    q, k, v = leaf.unbind(-1)
    if through == "npu_fusion_attention":
        ends = {"actual_seq_qlen": [length], "actual_seq_kvlen": [length]}
        out = npu_fusion_attention(q, k, v, 2, "TND", scale=0.3, **CAUSAL, **ends)[0]
    else:
        causal = plan(Mask.causal(length), ranks=1)
        out = context_parallel_attention(q, k, v, causal, scale=0.3)
    (ours,) = torch.autograd.grad((out * weights.to(dtype)).sum(), leaf)
    truth = both.double().requires_grad_()
    expected = exact_attention(*truth.unbind(-1), 0.3)
    (gradient,) = torch.autograd.grad((expected * weights.to(dtype).double()).sum(), truth)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    largest = float(gradient.abs().max())
    torch.testing.assert_close(ours.double(), gradient, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "all_gather", "adaptive"])
def test_attention_over_two_ranks(algorithm, ranks):
    for found in ranks(2, jobs.context_parallel, algorithm, timeout=240):
        assert not found, "\n".join(found)
