"""Attention with its log-sum-exp: one operator for all masks, layouts and position biases.

    out, lse = attention(q, k, v, layout="SBND", scale=d**-0.5, mode=CAUSAL)

:mod:`mindspeed.ops.compat.fusion_attention_v2` has the documented functions, the features of this
library and its context parallelism call this one. Rules decide what a query sees
(:mod:`mindspeed.ops.visibility`); neither they nor the scores ever become a matrix of all queries
and keys. Kept for the backward: q, k, v, out, and lse (4 bytes per query and head); a dropout mask
is drawn again from its seed.

The blocks of a longer sequence are calls of ``ATTENTION`` whose results are merged by their lse;
``ATTENTION_BACKWARD`` of a block takes out and lse of the merged result and returns that block's
part of the gradients.

Source: Dao et al., "FlashAttention" (2022); Rabe and Staats, "Self-attention Does Not Need O(n^2)
Memory" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mindspeed.ops import _attention_cpu, _attention_cuda, _attention_npu, _attention_tiles
from mindspeed.ops._numerics import WORKLOAD_ROWS, random
from mindspeed.ops.attention_problem import SCHEMA, AttentionProblem, axis, bnsd
from mindspeed.ops.philox import reserve
from mindspeed.ops.registry import Operator, plain_torch, torch_npu
from mindspeed.ops.visibility import (
    BAND,
    CAUSAL,
    CUT_BEHIND,
    MASK_ONLY,
    PREFIX,
    TOP_LEFT_CAUSAL,
    UNCUT,
)

Tensors = tuple[Tensor, ...]


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attend; arguments are taken as they are (:mod:`.fusion_attention_v2` checks them).

    Args:
        q: queries, ``[s, b, n, d]`` and so on as ``layout`` says.
        k: keys; the query heads are a multiple of theirs.
        v: values, head size at most that of the keys.
        **options: fields of :class:`mindspeed.ops.attention_problem.AttentionProblem`; the random
            numbers for dropout are drawn here unless given.

    Returns:
        ``out`` in the layout of q with the head size of v, and ``lse``, ``[b, n, s]`` (TND:
        ``[t, n]``), fp32, not differentiable.
    """
    problem = AttentionProblem(**options)
    if problem.dropout and problem.rng is None:
        problem = replace(problem, rng=reserve(q, problem.probabilities(q, k)))
    return ATTENTION(q, k, v, *problem.options())


def _with_sink(kernel: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Add the column without a value to a kernel's softmax: only the denominator grows.

    The backward needs no such step: it works with the out and lse it is given.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel(q, k, v, *options)
        problem = AttentionProblem(*options)
        if problem.sink is None:
            return out, lse
        before = _attention_tiles.lse_view(problem, lse)
        after = torch.logaddexp(before, problem.sink.to(lse.dtype).view(1, -1, 1))
        share = (before - after).exp_().unsqueeze(-1)
        bnsd(out, problem.layout).mul_(share)
        before.copy_(after)
        return out, lse

    return forward


def _reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _attention_tiles.forward(AttentionProblem(*options), None, q, k, v)


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any
) -> Tensors:  # fmt: skip
    *fields, pse_grad = options
    return _attention_tiles.backward(
        AttentionProblem(*fields), None, dout, q, k, v, out, lse, pse_grad
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _attention_tiles.empty_outputs(AttentionProblem(*options), q, v)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any
) -> Tensors:  # fmt: skip
    *fields, pse_grad = options
    pse = AttentionProblem(*fields).pse
    wanted = q.new_empty(0) if pse is None else pse.new_empty(pse.shape if pse_grad else 0)
    return (
        *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)),
        wanted,
    )


_WORKLOAD_HEAD = 128
_TENSOR_OPTIONS = 6  # the first fields of Problem


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output, *options[:_TENSOR_OPTIONS])
    ctx.rules = options[_TENSOR_OPTIONS:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    behind = [None] * (_TENSOR_OPTIONS - 3 + len(ctx.rules))
    if dout is None:
        return (None,) * 6 + tuple(behind)
    q, k, v, out, lse, *options = ctx.saved_tensors
    problem = AttentionProblem(*options, *ctx.rules)
    pse_grad = problem.pse is not None and not problem.has_slopes and ctx.needs_input_grad[4]
    dq, dk, dv, dpse = ATTENTION_BACKWARD(dout, q, k, v, out, lse, *options, *ctx.rules, pse_grad)
    sink_grad = problem.sink is not None and ctx.needs_input_grad[5]
    dsink = _sink_gradient(problem, dout, out, lse) if sink_grad else None
    return dq, dk, dv, None, dpse if pse_grad else None, dsink, *behind


def _sink_gradient(problem: AttentionProblem, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """``-sum over queries of exp(sink - lse) * <dout, out>``, in fp32."""
    assert problem.sink is not None
    dout, out = (bnsd(x, problem.layout) for x in (dout, out))
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    lse = _attention_tiles.lse_view(problem, lse)
    share = (problem.sink.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(share * delta).sum((0, 2)).to(problem.sink.dtype)


def pairs(q: Tensor, k: Tensor, problem: AttentionProblem) -> int:
    """Number of (query, key) pairs inside band and prefix, over batch and query heads.

    q ``[b, n, s_q, d]`` and k ``[b, g, s_k, d]`` are in the problem's layout (TND: ``[t, n, d]``).
    """
    met = sum(piece.sight.pairs() for piece in problem.pieces(q, k))
    _, heads, *_ = bnsd(q, problem.layout).shape
    return met * heads * (1 if problem.layout == "TND" else q.shape[axis(problem.layout, "B")])


def _flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: Any = None) -> int:
    return 2 * pairs(q, k, AttentionProblem(*options)) * (q.shape[-1] + v.shape[-1])


def _flops_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any, out_val: Any = None
) -> int:  # fmt: skip
    return 2 * pairs(q, k, AttentionProblem(*options[:-1])) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _sample(
    dtype: torch.dtype, batch: int, heads: int, groups: int, queries: int, keys: int, size: int = 8,
    size_v: int = 8, **options: Any
) -> tuple[Any, ...]:  # fmt: skip
    order = options.get("layout", "BNSD")

    def tensor(n: int, s: int, d: int, seed: int) -> Tensor:
        shape = {"B": batch, "N": n, "S": s, "T": s, "D": d}
        return random([shape[name] for name in order], dtype, seed=seed)

    q, k = tensor(heads, queries, size, 0), tensor(groups, keys, size, 1)
    problem = AttentionProblem(**{"scale": size**-0.5, **options})
    return q, k, tensor(groups, keys, size_v, 2), *problem.options()


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield _sample(dtype, 2, 4, 2, 9, 9, mode=TOP_LEFT_CAUSAL)
    yield _sample(dtype, 2, 4, 1, 3, 7, size_v=4, layout="SBND", mode=CAUSAL)
    yield _sample(dtype, 1, 2, 2, 7, 3, layout="BSND", mode=CAUSAL, sink=random([2], wide))
    yield _sample(dtype, 1, 2, 2, 300, 517, mode=BAND, pre=100, next=3)
    yield _sample(dtype, 2, 2, 2, 6, 6, mode=PREFIX, prefix=[2, 5])
    hidden = random([2, 1, 5, 6], torch.float64) > 0
    yield _sample(dtype, 2, 2, 1, 5, 6, mode=UNCUT, mask=hidden, pre=4, next=2)
    yield _sample(dtype, 2, 4, 2, 5, 6, pse=random([1, 4, 5, 6], dtype, seed=3), pse_type=0)
    slopes = random([4], wide).abs()
    yield _sample(dtype, 1, 4, 4, 6, 6, pse=slopes, pse_type=2, q_start=9, mode=CAUSAL)
    cu_q, cu_k = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 6, 12])
    packed: dict[str, Any] = {"layout": "TND", "cu_q": cu_q, "cu_k": cu_k}
    yield _sample(dtype, 1, 4, 2, 8, 12, mode=CUT_BEHIND, pre=3, next=1, **packed)
    yield _sample(dtype, 2, 4, 2, 0, 5, mode=MASK_ONLY)
    yield _sample(dtype, 2, 4, 2, 5, 0, mode=MASK_ONLY)


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for q, k, v, *options in _samples(dtype):
        problem = AttentionProblem(*options)
        out, lse = _with_sink(_reference)(q, k, v, *options)
        grads = problem.pse is not None and not problem.has_slopes
        yield random(out.shape, dtype, seed=4), q, k, v, out, lse, *options, grads


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    # The scores grow with the square of the rows: a small workload is a short sequence, too.
    rows = WORKLOAD_ROWS if hidden >= 1024 else WORKLOAD_ROWS // 4
    shape = (rows, 1, max(hidden // _WORKLOAD_HEAD, 1), _WORKLOAD_HEAD)
    qkv = (torch.ones(shape, dtype=dtype, device=device) for _ in range(3))
    problem = AttentionProblem(layout="SBND", scale=_WORKLOAD_HEAD**-0.5, mode=TOP_LEFT_CAUSAL)
    return *qkv, *problem.options()


def _workload_backward(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    q, k, v, *options = _workload(hidden, dtype, device)
    out, lse = ATTENTION(q, k, v, *options)
    return torch.ones_like(out), q, k, v, out, lse, *options, False


_ON_HOST = [3, 4, 5]  # rng, cu_q, cu_k among the options

ATTENTION_BACKWARD = Operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}, bool pse_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_reference_backward,
    fake=_fake_backward,
    cpu=[plain_torch(_attention_cpu.backward)],
    cuda=[plain_torch(_attention_cuda.backward)],
    npu=[
        torch_npu(
            _attention_npu.backward,
            "npu_fusion_attention_grad",
            "npu_fusion_attention_grad_v2",
            note=_attention_npu.NOTE,
        )
    ],
    samples=_samples_backward,
    workload=_workload_backward,
    on_host=[6 + i for i in _ON_HOST],
)

ATTENTION = Operator(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)",
    reference=_with_sink(_reference),
    fake=_fake,
    cpu=[plain_torch(_with_sink(_attention_cpu.forward))],
    cuda=[plain_torch(_with_sink(_attention_cuda.forward))],
    npu=[
        torch_npu(
            _with_sink(_attention_npu.forward),
            "npu_fusion_attention",
            "npu_fusion_attention_v2",
            note=_attention_npu.NOTE,
        )
    ],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    on_host=[3 + i for i in _ON_HOST],
    public="mindspeed.ops.fusion_attention_v2.npu_fusion_attention",
)

register_flop_formula(torch.ops.mindspeed.attention, get_raw=True)(_flops)
register_flop_formula(torch.ops.mindspeed.attention_backward, get_raw=True)(_flops_backward)
