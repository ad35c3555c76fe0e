"""The computations that features may replace, each under its name with the plain torch formula.

    kernels.normalize(x, weight, bias, eps=1e-5, rms=True)

Modules of this package call these functions through the module, at run time. A feature replaces a
formula by a fused operator with ``seams.use_kernels(owner=..., normalize=...)``; detaching it
restores the formula. Megatron's wrappers build these modules without saying what is switched on, so
the choice holds for the process. How layers attend (mask, window, context parallelism) is decided
in :mod:`mindspeed.te.attention_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed.spmd import Passes, typed
from mindspeed.te import comm
from mindspeed.te.attention import attend as attend
from mindspeed.te.attention import attend_packed as attend_packed
from mindspeed.te.quantized_weight import QuantizedWeight


def attend_by_plan(attend: Callable[..., Tensor], *operands: Any, **options: Any) -> Tensor:
    """Attend over a sequence that ranks share, or under a user's mask.

    Args:
        attend: A function of :mod:`mindspeed.te.context_parallel`.
        operands: Of that function, whose result is returned.
    """
    return attend(*operands, **options)


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Apply LayerNorm, or RMSNorm with ``rms``, over the last dimension.

    Args:
        x: ``[..., h]``.
        weight: ``[h]``, of another dtype or that of x.
        bias: ``[h]`` or None.
        eps: Added to the variance (RMSNorm: to the mean square).
        zero_centered_gamma: The stored weight is the deviation from one.

    Returns:
        ``[..., h]`` in the dtype of x; statistics and affine part in fp32 for 16-bit x.
    """
    dtype = x.dtype
    if zero_centered_gamma:
        weight = weight.float() + 1 if weight.dtype.itemsize < 4 else weight + 1
    if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        wide = torch.promote_types(dtype, weight.dtype)
        x, weight = x.to(wide), weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    size = (x.shape[-1],)
    y = F.rms_norm(x, size, weight, eps) if rms else F.layer_norm(x, size, weight, bias, eps)
    return y.to(dtype)


def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """SwiGLU of ``x + bias``: ``silu(gate) * up``; ``[..., 2 f]`` (gate, up) to ``[..., f]``.

    ``x`` has a floating dtype, ``bias [2 f]`` likewise; the result has that of ``x + bias``.
    """
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """SwiGLU of ``x [..., 2 f]`` times ``weight [..., 1]``; ``[..., f]`` in the dtype of ``x``."""
    return (swiglu(x) * weight).to(x.dtype)


def rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of the first ``d`` channels of ``t``; the others pass through.

    Args:
        t: ``[..., n]``, any dtype, which the result has, too.
        cos: ``[..., d]``, broadcasts to ``t[..., :d]``; fp32 in training.
        interleaved: Pairs are ``(x_2i, x_2i+1)`` instead of ``(x_i, x_{i + d/2})``.
    """
    size = cos.shape[-1]
    rotated, passed = t[..., :size], t[..., size:]
    x = rotated.to(torch.promote_types(t.dtype, cos.dtype))
    if interleaved:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
    out = (x * cos + other * sin).to(t.dtype)
    return torch.cat([out, passed], dim=-1) if passed.shape[-1] else out


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    transposed: bool = True,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """Return ``x W^T + bias + addend``, or ``x W + ...`` with ``transposed=False``.

    This and the three products with a collective are all that linear layers compute, forward and
    backward (:mod:`mindspeed.te.linear_communication`). Nothing here needs a gradient.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``, or ``[k, n]`` with ``transposed=False``; in the dtype of x. It is the
            parameter itself unless autocast changed the dtype. Or a frozen one that is stored in
            fewer bits.
        bias: ``[n]``.
        addend: ``[..., n]``, contiguous; its memory may become the result's.
    """
    if isinstance(weight, QuantizedWeight):
        if bias is None and addend is None:
            return weight.product(x, transposed=transposed)
        weight = weight.dense(x.dtype)  # sums are rounded once
    matrix = weight if transposed else weight.t()
    if addend is None:
        return F.linear(x, matrix, bias)
    addend.view(-1, addend.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), matrix.t())
    return addend if bias is None else addend.add_(bias)


def gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: Any,
    *,
    transposed: bool = True,
    bias: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """All-gather x along its first dimension, then :func:`matmul`.

    Forward of a column-parallel layer with sequence parallelism, and dx of a row-parallel one.

    Args:
        x: ``[s/p, b, k]``, this rank's part of ``[s, b, k]``, dtype of the weight.
        group: The p ranks that share s.
        bias: ``[n]``.
        keep: The gathered x is needed; without it a replacement may return None.

    Returns:
        ``[s, b, n]`` and the gathered ``[s, b, k]``.
    """
    gathered, _ = comm.all_gather_first_dim(x, group)
    return matmul(gathered, weight, transposed=transposed, bias=bias), gathered if keep else None


def matmul_scatter(
    x: Tensor,
    weight: Tensor,
    group: Any,
    *,
    transposed: bool = True,
    addend: Tensor | None = None,
    async_op: bool = False,
    wgrad_follows: bool = False,
) -> tuple[Tensor, Any]:
    """:func:`matmul`, then reduce-scatter along the first dimension.

    Forward of a row-parallel layer with sequence parallelism, and dx of a column-parallel one.

    Args:
        x: ``[s, b, k]``, dtype of the weight; its product is this rank's term of a sum.
        addend: ``[s, b, n]``, added to this rank's term; overwritten.
        async_op: The caller waits for the handle; a replacement may return None for it.
        wgrad_follows: The caller computes a weight gradient before it waits, which hides the
            collective; a replacement need not hide it.

    Returns:
        ``[s/p, b, n]`` and the handle of a collective that is under way, or None.
    """
    product = matmul(x, weight, transposed=transposed, addend=addend)
    return comm.reduce_scatter_first_dim(product, group, async_op=async_op)


def matmul_reduce(
    x: Tensor,
    weight: Tensor,
    group: Any,
    *,
    transposed: bool = True,
    addend: Tensor | None = None,
    async_op: bool = False,
    wgrad_follows: bool = False,
) -> tuple[Tensor, Any]:
    """:func:`matmul`, then all-reduce: row-parallel forward, column-parallel dx.

    Arguments as in :func:`matmul_scatter`; the result is ``[s, b, n]`` on every rank, in the dtype
    of x.
    """
    product = matmul(x, weight, transposed=transposed, addend=addend)
    return product, dist.all_reduce(product, group=group, async_op=async_op)


def recompute_all_gather() -> bool:
    """Whether a layer that gathers its input gathers it again in backward, or keeps it (False)."""
    return True


def accumulate_wgrad(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add ``grad^T x`` to ``main_grad``, in the precision of ``main_grad``.

    Args:
        x: ``[tokens, in]``.
        grad: ``[tokens, out]`` in the dtype of x.
        main_grad: ``[out, in]``, fp32 or the dtype of x.
    """
    if x.shape[0]:
        main_grad.addmm_(grad.to(main_grad.dtype).t(), x.to(main_grad.dtype))


def grouped_matmul(
    x: Tensor, weights: Sequence[Tensor], splits: Sequence[int], transposed: bool
) -> Tensor:
    """Multiply each group of tokens with its matrix: ``W^T`` when ``transposed``, else ``W``.

    Args:
        x: ``[tokens, k]``, tokens of a group next to each other.
        weights: One matrix per group in the dtype of x, ``[n, k]`` when ``transposed``, else
            ``[k, n]``.

    Returns:
        ``[tokens, n]``.
    """
    size = weights[0].shape[0 if transposed else 1]
    out = x.new_empty(x.shape[0], size)
    parts = zip(weights, x.split(list(splits)), out.split(list(splits)), strict=True)
    for weight, rows, result in parts:
        if rows.shape[0]:
            torch.mm(rows, weight.t() if transposed else weight, out=result)
    return out


def grouped_wgrad(left: Tensor, right: Tensor, splits: Sequence[int]) -> Tensor:
    """Return ``left^T right`` of each group of tokens, ``[groups, m, n]``; zero for an empty one.

    Args:
        left: ``[tokens, m]``.
        right: ``[tokens, n]`` in the dtype of ``left``.
    """
    out = left.new_empty(len(splits), left.shape[1], right.shape[1])
    for part, a, b in zip(out, left.split(list(splits)), right.split(list(splits)), strict=True):
        torch.mm(a.t(), b, out=part)
    return out


def accumulate_grouped_wgrad(
    left: Tensor, right: Tensor, splits: Sequence[int], main_grads: Sequence[Tensor]
) -> None:
    """Add ``left^T right`` of each group of tokens to the group's buffer.

    Args:
        left: ``[tokens, m]``.
        right: ``[tokens, n]`` in the dtype of ``left``.
        main_grads: One ``[m, n]`` per group, fp32 or the dtype of ``left``.
    """
    parts = zip(left.split(list(splits)), right.split(list(splits)), main_grads, strict=True)
    for a, b, main_grad in parts:
        accumulate_wgrad(b, a, main_grad)


def moe_permute(
    tokens: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the tokens sorted by expert and by token, their probabilities, and a map back.

    Args:
        tokens: ``[t, h]``, any dtype.
        probs: ``[t, e]``, any floating dtype, or None.
        routing_map: ``[t, e]``, true where a token goes to an expert.
        num_out_tokens: Rows of the result, truncated or padded with zeros; None or negative: one
            per (token, expert) pair.
    """
    count, experts = routing_map.shape
    place = routing_map.bool().t().reshape(-1).nonzero().squeeze(1)
    if num_out_tokens is not None and num_out_tokens >= 0:
        place = place[:num_out_tokens]
    token, expert = place % count, place // count
    pair = token * experts + expert
    permuted = _pad_rows(tokens.index_select(0, token), num_out_tokens)
    if probs is not None:
        probs = _pad_rows(probs.reshape(-1).index_select(0, pair), num_out_tokens)
    return permuted, probs, torch.stack([token, pair])


def moe_permute_again(tokens: Tensor, row_id_map: Tensor, rows: int) -> Tensor:
    """Return the rows that :func:`moe_permute` has made of tokens, by the map that it returned.

    Args:
        tokens: ``[t, h]``, any dtype.
    """
    return _pad_rows(tokens.index_select(0, row_id_map[0]), rows)


def _pad_rows(x: Tensor, rows: int | None) -> Tensor:
    if rows is None or rows <= x.shape[0]:
        return x
    return torch.cat([x, x.new_zeros(int(rows) - x.shape[0], *x.shape[1:])])


def moe_unpermute(
    permuted: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, restore_shape: Sequence[int]
) -> Tensor:
    """Sum the copies of each token, weighted, in the wider of the two dtypes.

    Args:
        permuted: ``[copies, h]`` in the order of :func:`moe_permute`.
        row_id_map: The map that :func:`moe_permute` returned.
        merging_probs: ``[t, e]`` weights; None sums unweighted.
        restore_shape: ``[t, h]``.

    Returns:
        ``[t, h]`` in the dtype of ``permuted``.
    """
    rows = permuted[: row_id_map.shape[1]]
    if merging_probs is not None:
        rows = rows * merging_probs.reshape(-1).index_select(0, row_id_map[1]).unsqueeze(-1)
    summed: Tensor = _SumRows.apply(rows, row_id_map[0], tuple(restore_shape))
    return summed.to(permuted.dtype)


@typed(Passes())
class _SumRows(torch.autograd.Function):
    """Rows added at their places; ``index_add`` of torch would keep them for its backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(shape).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


def moe_sort_chunks(tensors: Sequence[Tensor], sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Split every tensor into chunks of ``sizes`` rows and concatenate them in ``order``.

    Args:
        tensors: ``[rows, ...]`` each.
        sizes: int ``[chunks]``, rows of each chunk.
        order: int ``[chunks]``, the chunk at each place of the result.
    """
    split = [x.split(sizes.tolist()) for x in tensors]
    return tuple(torch.cat([chunks[i] for i in order.tolist()]) for chunks in split)
