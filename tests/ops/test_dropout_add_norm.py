"""Dropout, residual and normalisation against the composition of torch's own functions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed.instruments.saved import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm
from mindspeed.ops.dropout_add_rms_norm import npu_dropout_add_rms_norm
from mindspeed.testing.compare import assert_close_with_grads
from tests.ops.traffic import model_bytes, traffic

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EPS = 1e-5
FUNCTIONS = {"layer_norm": npu_dropout_add_layer_norm, "rms_norm": npu_dropout_add_rms_norm}
every_norm = pytest.mark.parametrize("norm", FUNCTIONS)


def composed(norm, x0, residual, weight, bias, rowscale=None, layerscale=None, factor=None):
    """``(out, pre)``; ``factor`` is the mask divided by 1 - p."""
    h = x0
    if rowscale is not None:
        h = h * rowscale[..., None]
    if layerscale is not None:
        h = h * layerscale
    if factor is not None:
        h = h * factor
    if residual is not None:
        h = h + residual
    if norm == "layer_norm":
        return F.layer_norm(h, h.shape[-1:], weight, bias, EPS), h
    out = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return (out if bias is None else out + bias), h


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(*shape, without=(), dtype=torch.float64):
    """x0, residual, weight, bias, rowscale, layerscale; those at ``without`` are None."""
    shapes = (shape, shape, shape[-1:], shape[-1:], shape[:-1], shape[-1:])
    given = [leaf(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    return tuple(None if i in without else x for i, x in enumerate(given))


ABSENT = [n for k in range(5) for n in itertools.combinations((1, 3, 4, 5), k)]


@every_norm
@pytest.mark.parametrize("without", ABSENT, ids=str)
def test_without_dropout_equals_the_composition(norm, without):
    def ours(x0, residual, weight, bias, *scales):
        return FUNCTIONS[norm](x0, residual, weight, bias, 0.0, EPS, *scales, prenorm=True)

    assert_close_with_grads(
        ours, lambda *args: composed(norm, *args), inputs(2, 3, 10, without=without), **EXACT
    )


@every_norm
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_returned_tensors(norm, prenorm, with_mask):
    x0, residual, weight, *_ = inputs(4, 6)
    returned = FUNCTIONS[norm](
        x0, residual, weight, None, 0.0, EPS, prenorm=prenorm, return_dropout_mask=with_mask
    )
    out, pre = composed(norm, x0, residual, weight, None)
    expected = [out] + [pre] * prenorm + [torch.ones(4, 6, dtype=torch.bool)] * with_mask
    returned = returned if isinstance(returned, tuple) else (returned,)
    torch.testing.assert_close(returned, tuple(expected))


@every_norm
def test_with_dropout_equals_the_composition_with_the_same_mask(norm):
    p, arguments = 0.3, inputs(5, 4, 12)

    def ours(x0, residual, weight, bias, *scales):
        torch.manual_seed(1)
        *results, mask = FUNCTIONS[norm](
            x0, residual, weight, bias, p, EPS, *scales, prenorm=True, return_dropout_mask=True
        )
        ours.factor = mask.double() / (1 - p)
        return tuple(results)

    ours(*arguments)
    assert 0 < (ours.factor == 0).sum() < ours.factor.numel()
    assert_close_with_grads(
        ours, lambda *args: composed(norm, *args, ours.factor), arguments, **EXACT
    )


def test_the_rate_of_kept_values():
    x0, p = torch.ones(400, 256), 0.2
    *_, mask = npu_dropout_add_layer_norm(
        x0, None, torch.ones(256), None, p, EPS, return_dropout_mask=True
    )
    sigma = math.sqrt(p * (1 - p) * x0.numel())
    assert abs(mask.sum() - (1 - p) * x0.numel()) < 4 * sigma


@every_norm
def test_checkpointing_recomputes_with_the_same_mask(norm):
    x0, residual, weight, *_ = inputs(6, 16)

    def run(x0, residual):
        return FUNCTIONS[norm](x0, residual, weight, None, 0.5, EPS).square().sum()

    gradients = []
    for call in (run, lambda *args: checkpoint(run, *args, use_reentrant=False)):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(call(x0, residual), (x0, residual, weight)))
    torch.testing.assert_close(*gradients)
    assert torch.equal(gradients[0][0] == 0, gradients[1][0] == 0)


@every_norm
def test_numerical_gradients(norm):
    x0, residual, weight, bias, rowscale, layerscale = inputs(3, 5)

    def ours(*args):
        return FUNCTIONS[norm](*args[:4], 0.0, EPS, *args[4:], prenorm=True)

    assert torch.autograd.gradcheck(ours, (x0, residual, weight, bias, rowscale, layerscale))


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_dtype_of_the_normalised_tensor(residual, in_fp32):
    x0, _, weight, *_ = inputs(3, 8, dtype=torch.bfloat16)
    stream = None if residual is None else leaf(3, 8, dtype=residual)
    out, pre = npu_dropout_add_rms_norm(
        x0, stream, weight, None, 0.0, EPS, prenorm=True, residual_in_fp32=in_fp32
    )
    assert out.dtype == torch.bfloat16
    assert pre.dtype == (torch.float32 if in_fp32 else residual or torch.bfloat16)
    (out.float().sum() + pre.float().sum()).backward()
    assert x0.grad.dtype == torch.bfloat16
    assert stream is None or stream.grad.dtype == residual


def test_bytes_saved_for_backward():
    """2 per element in bf16 and 8 per row, no mask; eager torch keeps 2 more and the mask."""
    x0, residual, weight, bias, *_ = inputs(64, 256, dtype=torch.bfloat16)
    with saved_for_backward() as saved:
        npu_dropout_add_layer_norm(x0, residual, weight, bias, 0.1, EPS).sum().backward()
    parameters, seed = 2 * weight.numel(), 2 * 8
    assert saved.bytes == 2 * x0.numel() + 8 * 64 + parameters + seed


def test_bytes_moved():
    """8 per element forward and backward; eager torch moves 24 and 22."""
    x0, residual, weight, bias, *_ = (x.detach() for x in inputs(64, 1024, dtype=torch.bfloat16))
    rng = torch.tensor([1, 0])
    with traffic() as fused:
        out, pre, mean, rstd, _ = torch.ops.mindspeed.dropout_add_norm(
            x0, residual, weight, bias, None, None, rng, 0.1, EPS, False, False, False
        )
    small = model_bytes((weight, bias, rng), (mean, rstd))
    assert (fused.kernels, fused.bytes) == (1, 8 * x0.numel() + small)
    with traffic() as fused:
        grads = torch.ops.mindspeed.dropout_add_norm_backward(
            out, None, pre, mean, rstd, weight, rng, None, None, None, 0.1, False, True
        )
    small = model_bytes((weight, rng, mean, rstd), grads[2:])
    assert (fused.kernels, fused.bytes) == (1, 8 * x0.numel() + small)


def test_one_graph():
    x0, residual, weight, *_ = inputs(4, 8, dtype=torch.float32)

    def loss(x0, residual):
        return npu_dropout_add_layer_norm(x0, residual, weight, None, 0.0, EPS).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        *(torch.autograd.grad(f(x0, residual), (x0, residual)) for f in (loss, compiled))
    )
    dropping = torch.compile(
        lambda x: npu_dropout_add_layer_norm(x, None, weight, None, 0.5, EPS),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not torch.equal(dropping(x0), dropping(x0))  # the seed is no constant of the graph


X, W = torch.zeros(3, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 1.0}, r"dropout_p: expected a number in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, r"dropout_p: expected a number in \[0, 1\), got -0.1"),
        ({"epsilon": 0.0}, "epsilon: expected a number greater than 0"),
        ({"rowscale": torch.zeros(2)}, r"rowscale: expected shape \(3,\), got \(2,\)"),
        ({"layerscale": torch.zeros(3)}, r"layerscale: expected shape \(8,\), got \(3,\)"),
        ({"weight": None}, "weight: expected a tensor, got None"),
        ({"weight": W.bfloat16()}, "weight: expected the dtype of x0, float32, got bfloat16"),
        ({"residual": X.bfloat16()}, "residual: expected dtype float32, got bfloat16"),
        ({"residual": X[:2]}, r"residual: expected shape \(3, 8\), got \(2, 8\)"),
        ({"x0": X.long()}, "x0: expected dtype float32, bfloat16, float16, got int64"),
    ],
)
@every_norm
def test_bad_input(norm, change, message):
    arguments = {
        "x0": X,
        "residual": X,
        "weight": W,
        "bias": None,
        "dropout_p": 0.0,
        "epsilon": EPS,
    }
    with pytest.raises(OperatorError, match=f"^mindspeed.ops.npu_dropout_add_{norm}: {message}"):
        FUNCTIONS[norm](**arguments | change)
