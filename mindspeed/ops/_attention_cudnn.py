"""Attention by cuDNN: full and causal squares in 16 bit on Hopper and later.

There cuDNN's kernels use what the flash kernels in torch, written for Ampere, do not: twice their
rate on an H200 (``benchmarks/results/h200-ops.csv``). Everything else is for
:mod:`._attention_cuda`.
"""

from __future__ import annotations

import functools

import torch
from packaging.version import Version
from torch import Tensor

from mindspeed.ops._attention_tiles import Tensors, aligned_vectors
from mindspeed.ops.attention_problem import AttentionProblem, bnsd
from mindspeed.ops.visibility import Sight

_LARGEST_HEAD = 128
_HEAD_MULTIPLE = 8
_FIRST_CAPABILITY = (9, 0)
_FIRST_TORCH = Version("2.11")  # the first release that was measured


def takes(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes this call; q, k, v ``[b, n, s, d]`` in the problem's layout."""
    plain = problem.pse is None and problem.mask is None and problem.prefix is None
    sixteen = q.dtype in (torch.float16, torch.bfloat16)
    size = q.shape[-1]
    fits = v.shape[-1] == size <= _LARGEST_HEAD and size % _HEAD_MULTIPLE == 0
    if not (plain and sixteen and fits and q.numel() and k.numel() and _is_there(q.device)):
        return False
    # Its backward adds up in an order that no two runs share.
    if problem.dropout or problem.layout == "TND" or torch.are_deterministic_algorithms_enabled():
        return False
    sight = _sight(problem, [bnsd(x, problem.layout) for x in (q, k)])
    return sight.queries > 1 and (sight.is_full or _is_square(sight))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, dense: out like q, lse fp32 ``[b, n, s]``."""
    views = [aligned_vectors(bnsd(x, problem.layout)) for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *views, None, True, 0.0, not _sight(problem, views).is_full, scale=problem.scale
    )
    return _in_layout(out, problem.layout), lse.reshape(lse.shape[:3])


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
) -> Tensors:
    """Return ``(dq, dk, dv)``, dense, of the shapes of q, k, v; lse is ``[b, n, s]``."""
    views = [aligned_vectors(bnsd(x, problem.layout)) for x in (dout, q, k, v, out)]
    queries, keys = views[1].shape[2], views[2].shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *views, lse.unsqueeze(-1).contiguous(), unused, unused, None, None, None, queries, keys,
        0.0, not _sight(problem, views[1:]).is_full, scale=problem.scale,
    )  # fmt: skip
    return tuple(_in_layout(x, problem.layout) for x in grads)


def _sight(problem: AttentionProblem, views: list[Tensor]) -> Sight:
    return problem.sight(views[0].shape[2], views[1].shape[2])


def _is_square(sight: Sight) -> bool:
    """A triangle whose alignment, top left or bottom right, makes no difference."""
    return sight.is_triangle and sight.queries == sight.keys


@functools.cache
def _is_there(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
        and Version(Version(torch.__version__).base_version) >= _FIRST_TORCH
    )


def _in_layout(x: Tensor, layout: str) -> Tensor:
    return x.permute(["BNSD".index(axis) for axis in layout]).contiguous()
