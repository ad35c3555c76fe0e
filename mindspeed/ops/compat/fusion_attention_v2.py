"""Attention in the calling convention of torch_npu, on every device.

    out, softmax_max, softmax_sum, _, seed, offset, numels = npu_fusion_attention(
        q, k, v, head_num, "SBH", scale=d**-0.5, atten_mask=triangle, sparse_mode=2)

What is computed, and by whom: :mod:`mindspeed.ops.attention`. Here arguments are checked and
translated. Only ``softmax_max + log(softmax_sum)`` means something, the log-sum-exp of a row: here
the first is all of it and the second is 1. Masks say 1 or True where a key is hidden; without a
mask nothing is, whatever the mode.

Source: the documentation of ``torch_npu.npu_fusion_attention`` (Ascend Extension for PyTorch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops.attention import ATTENTION_BACKWARD, attention
from mindspeed.ops.attention_problem import AttentionProblem
from mindspeed.ops.compat._attention_arguments import MERGED_HEADS, AttentionArguments, Lengths
from mindspeed.ops.philox import reserve
from mindspeed.ops.visibility import EVERYTHING

__all__ = ["npu_fusion_attention", "npu_fusion_attention_grad"]

LANES = 8
"""How often softmax_max and softmax_sum repeat every number."""

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Any, Any, int]


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = EVERYTHING,
    next_tokens: int = EVERYTHING,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
) -> Statistics:
    """Attend: ``dropout(softmax(mask(scale * q k^T + bias))) v``.

    Args:
        query: ``[B, S, N*D]`` (BSH), ``[S, B, N*D]`` (SBH), ``[B, S, N, D]``, ``[B, N, S, D]`` or
            ``[T, N, D]``; fp32, bf16 or fp16.
        key: Same, with ``head_num`` or a divisor of that many heads.
        value: Same as key; its head size may be smaller.
        head_num: N, heads of the query.
        input_layout: BSH, SBH, BSND, BNSD or TND, in either case.
        pse: Position bias. ``pse_type`` 0 and 1: dtype of the query, broadcastable to
            ``[B, N, Sq, Skv]``. 2 and 3: fp32 slopes ``[N]`` or ``[B, N]``. Not with TND for the
            former, nor with modes 7 and 8.
        padding_mask: Must be None, as in torch_npu.
        atten_mask: bool or uint8, 1 is hidden. Modes 0, 1 and 5: ``[B, N, Sq, Skv]``,
            ``[B, 1, Sq, Skv]``, ``[1, 1, Sq, Skv]`` or ``[Sq, Skv]`` (TND: the latter, for the
            longest sequences). Other modes: the compressed mask, ``[2048, 2048]`` or for mode 6
            ``[3072, 2048]``, of which only the shape is read.
        keep_prob: Probability to keep a probability, in (0, 1].
        pre_tokens: Reach of the band before a query's own key (modes 0, 4, 7, 8).
        next_tokens: Reach after it.
        inner_precise: Without effect: rows that see nothing give 0 always.
        prefix: One number per batch entry, for modes 5 and 6.
        actual_seq_qlen: TND: ends of the sequences, as a list or tensor without a leading 0;
            trailing zeros are sequences that are not there.
        actual_seq_kvlen: Same for the keys.
        sparse_mode: 0 to 8, see :mod:`mindspeed.ops.visibility`. 5 not with TND, 7 and 8 only.
        gen_mask_parallel: Without effect.
        sync: Without effect.
        pse_type: 0: ``scale * q k^T + pse``; 1: ``scale * (q k^T + pse)``; 2: ``scale * q k^T -
            slope * |i + q_start - j - kv_start|``; 3: with the square root of that distance.
        q_start_idx: ``[q_start]``; default 0.
        kv_start_idx: ``[kv_start]``.

    Returns:
        ``(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels)``: the output
        in the query's layout, two fp32 tensors ``[B, N, Sq, 8]`` (TND: ``[T, N, 8]``), an empty
        tensor, and what :func:`npu_fusion_attention_grad` needs to draw the dropout mask again
        (two numbers, 0-d tensors under torch.compile, and the number of probabilities).

    Raises:
        OperatorError: an argument that is not as described.
    """
    del inner_precise, gen_mask_parallel, sync
    given = AttentionArguments(
        ArgumentCheck("npu_fusion_attention"), query, key, value, head_num, input_layout
    )
    given.check_numbers(padding_mask, keep_prob, scale=scale)
    options = given.options(
        sparse_mode, atten_mask, (pre_tokens, next_tokens), prefix,
        (actual_seq_qlen, actual_seq_kvlen), pse, pse_type, (q_start_idx, kv_start_idx),
    )  # fmt: skip
    q, k, v = given.q, given.k, given.v
    dropout = 1 - keep_prob
    problem = AttentionProblem(scale=scale, dropout=dropout, **options)
    rng = reserve(q, problem.probabilities(q, k)) if dropout else None
    out, lse = attention(q, k, v, scale=scale, dropout=dropout, rng=rng, **options)
    maximum = lse.unsqueeze(-1).expand(*lse.shape, LANES)
    return (
        _join_heads(out, input_layout),
        maximum,
        torch.ones_like(maximum),
        query.new_empty(0),
        *_numbers(rng),
        problem.probabilities(q, k) if dropout else 0,
    )


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = EVERYTHING,
    next_tokens: int = EVERYTHING,
    inner_precise: int = 0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`npu_fusion_attention`, whose arguments have the same meaning here.

    With the statistics and the output of a longer softmax, of which these keys are a part, it
    returns this part's share of the gradients (ring attention).

    Args:
        query: As in the forward: ``[B, S, N*D]`` (BSH) and so on, or ``[T, N, D]`` (TND).
        dy: Gradient of the output, with its shape and dtype.
        padding_mask: Must be None.
        softmax_max: Of the forward, or merged: fp32 ``[B, N, Sq, 8]`` (TND: ``[T, N, 8]``).
        softmax_sum: Same.
        softmax_in: Not read.
        attention_in: The output of the forward, or merged; shape and dtype of ``dy``.
        scale_value: ``scale`` of the forward.
        inner_precise: Without effect.
        seed: Returned by the forward: a number, or an int64 scalar tensor.
        offset: Same.
        numels: Not read; follows from the shapes.
        gen_mask_parallel: Without effect.
        sync: Without effect.

    Returns:
        ``(dq, dk, dv, dpse)``, each with shape and dtype of its tensor; dpse is None without
        ``pse`` or with slopes.

    Raises:
        OperatorError: an argument that is not as described.
    """
    check = ArgumentCheck("npu_fusion_attention_grad")
    del softmax_in, inner_precise, numels, gen_mask_parallel, sync
    given = AttentionArguments(check, query, key, value, head_num, input_layout)
    given.check_numbers(padding_mask, keep_prob, scale_value=scale_value)
    check.tensor(dy=dy, softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=attention_in)
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    check.same("dtype", query=query, dy=dy, attention_in=attention_in)
    check.same("shape", attention_in=attention_in, dy=dy)
    options = given.options(
        sparse_mode, atten_mask, (pre_tokens, next_tokens), prefix,
        (actual_seq_qlen, actual_seq_kvlen), pse, pse_type, (q_start_idx, kv_start_idx),
    )  # fmt: skip
    rng = None
    if keep_prob < 1:
        rng = torch.stack([torch.as_tensor(x, dtype=torch.int64) for x in (seed, offset)])
    problem = AttentionProblem(scale=scale_value, dropout=1 - keep_prob, rng=rng, **options)
    has_gradient = pse is not None and not problem.has_slopes
    lse = softmax_max[..., 0] + softmax_sum[..., 0].log()
    dout, out = (_split_heads(x, head_num, input_layout) for x in (dy, attention_in))
    *grads, dpse = ATTENTION_BACKWARD(
        dout, given.q, given.k, given.v, out, lse, *problem.options(), has_gradient
    )
    dq, dk, dv = (_join_heads(x, input_layout) for x in grads)
    return dq, dk, dv, dpse if has_gradient else None


def _split_heads(x: Tensor, heads: int, layout: str) -> Tensor:
    return x.unflatten(-1, (heads, -1)) if layout.upper() in MERGED_HEADS else x


def _join_heads(x: Tensor, layout: str) -> Tensor:
    return x.flatten(-2) if layout.upper() in MERGED_HEADS else x


def _numbers(rng: Tensor | None) -> tuple[Any, Any]:
    """Seed and offset; numbers cannot leave a compiled graph, tensors can."""
    if rng is None:
        return 0, 0
    if torch.compiler.is_compiling():
        return rng[0], rng[1]
    return int(rng[0]), int(rng[1])
