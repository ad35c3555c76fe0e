"""Attention on the CPU: torch's flash kernel in fp32 and for long bf16, else the formula.

In 16 bit that kernel multiplies in fp32 and is slower than torch eager up to some hundred queries,
for fp16 always. The formula multiplies bf16 as bf16, as eager does, and fp16 as fp32, for which a
CPU without arithmetic for it takes a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.device.torch_versions import cpu_attention_groups_heads
from mindspeed.ops import _attention_tiles as tiles
from mindspeed.ops._attention_tiles import Fused, Tensors
from mindspeed.ops._numerics import accumulation_dtype
from mindspeed.ops.attention_problem import AttentionProblem

_LONG = 2048  # queries


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` without the sink; q, k, v ``[b, n, s, d]`` in the problem's layout.

    ``out`` has layout and dtype of q and the head size of v; ``lse`` is fp32 ``[b, n, s]`` (TND:
    ``[t, n]``). See :func:`mindspeed.ops.attention.attention`.
    """
    return tiles.forward(AttentionProblem(*options), FLASH, q, k, v, _operands)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any
) -> Tensors:  # fmt: skip
    """Return ``(dq, dk, dv, dpse)`` with shapes and dtypes of q, k, v ``[b, n, s, d]`` and pse.

    ``dout`` is like ``out``; ``out`` and ``lse [b, n, s]`` may be those of a larger softmax.
    The last option says whether dpse is required; if not, it is empty, ``[0]``.
    """
    *options_, pse_grad = options
    problem = AttentionProblem(*options_)
    return tiles.backward(problem, FLASH, dout, q, k, v, out, lse, pse_grad, _operands)


def _operands(q: Tensor) -> torch.dtype:
    return q.dtype if q.dtype == torch.bfloat16 else accumulation_dtype(q)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    keys, values = _heads_of(q, k), _heads_of(q, _widened(v, q))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, causal, attn_mask=_four(bias), scale=scale
    )
    return out[..., : v.shape[-1]], lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensors:  # fmt: skip
    keys, values = _heads_of(q, k), _heads_of(q, _widened(v, q))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _widened(dout, q), q, keys, values, _widened(out, q), lse, 0.0, causal,
        attn_mask=_four(bias), scale=scale,
    )  # fmt: skip
    heads = k.shape[1]
    return dq, _grouped_sum(dk, heads), _grouped_sum(dv, heads)[..., : v.shape[-1]]


def _heads_of(q: Tensor, k: Tensor) -> Tensor:
    """Keys ``[b, n_kv, s, d]``, repeated to the heads of q where the kernel needs as many."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 or cpu_attention_groups_heads() else k.repeat_interleave(group, 1)


def _grouped_sum(dk: Tensor, heads: int) -> Tensor:
    """Sum the gradients ``[b, n, s, d]`` of heads that were repeated, to ``[b, heads, s, d]``."""
    return dk if dk.shape[1] == heads else dk.unflatten(1, (heads, -1)).sum(2)


def _widened(v: Tensor, q: Tensor) -> Tensor:
    """The kernel has one head size: values are padded with zeros, and the output is sliced."""
    missing = q.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing else v


def _four(bias: Tensor | None) -> Tensor | None:
    """Four dimensions, the last of which torch 2.7 takes for dense without looking."""
    if bias is None:
        return None
    return tiles.vectors(bias if bias.dim() == 4 else bias.expand(1, 1, *bias.shape[-2:]))


def _fast_for(q: Tensor) -> bool:
    """Whether the flash kernel is faster than the formula for queries ``[b, n, s, d]``."""
    long = q.dtype == torch.bfloat16 and q.shape[2] >= _LONG
    return long or q.dtype == accumulation_dtype(q)


FLASH = Fused(
    forward=_forward,
    backward=_backward,
    takes=lambda q, v: _fast_for(q) and v.shape[-1] <= q.shape[-1],
    bias_dtype=accumulation_dtype,
    readable=tiles.vectors,
)
