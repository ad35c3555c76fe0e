"""``npu_moe_token_unpermute``: the weighted sum of each token's copies.

The way there is :mod:`mindspeed.ops.npu_moe_token_permute`; the operators behind both, and what
they move, are in :mod:`mindspeed.ops.moe_permutation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed.ops._check import FLOATS, Check
from mindspeed.ops.moe_permutation import MOE_UNPERMUTE

__all__ = ["npu_fused_moe_token_unpermute", "npu_moe_token_unpermute"]

_check = Check("npu_moe_token_unpermute")


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sum the copies of each token, weighted with ``probs``, in fp32.

    Args:
        permuted_tokens: ``[rows, H]``, fp32, bf16 or fp16; at most ``T * k`` rows.
        sorted_indices: int32 ``[T * k]``, from :func:`npu_moe_token_permute`; copies whose row is
            beyond the last count as zero.
        probs: weight of each copy, ``[T, k]``, dtype of the tokens or fp32. Without it, k is 1.
        padded_mode: only False.
        restore_shape: not needed, as in torch_npu without padded mode; ``[T, H]`` if given.

    Returns:
        ``[T, H]`` in the dtype of ``permuted_tokens``.

    Raises:
        OperatorError: wrong dtype, shape, device or number of rows.
        NotImplementedError: padded_mode.
    """
    if padded_mode:
        raise NotImplementedError("mindspeed.ops.npu_moe_token_unpermute: padded_mode: only False")
    _check.dtype(FLOATS, permuted_tokens=permuted_tokens)
    _check.dtype((torch.int32, torch.int64), sorted_indices=sorted_indices)
    _check.same("device", permuted_tokens=permuted_tokens, sorted_indices=sorted_indices)
    _check.rank(2, permuted_tokens=permuted_tokens)
    _check.rank(1, sorted_indices=sorted_indices)
    copies = sorted_indices.numel()
    _check.require(
        permuted_tokens.shape[0] <= copies,
        "permuted_tokens", f"at most {copies} rows, one per copy", tuple(permuted_tokens.shape),
    )  # fmt: skip
    k = 1
    if probs is not None:
        _check.dtype((permuted_tokens.dtype, torch.float32), probs=probs)
        _check.same("device", permuted_tokens=permuted_tokens, probs=probs)
        _check.rank(2, probs=probs)
        _check.require(
            probs.numel() == copies, "probs", f"a weight for each of {copies} copies", probs.shape
        )
        k = probs.shape[1]
    tokens = copies // max(k, 1)
    if restore_shape is not None:
        shape = (tokens, permuted_tokens.shape[1])
        given = tuple(restore_shape) if isinstance(restore_shape, (list, tuple)) else restore_shape
        _check.require(given == shape, "restore_shape", f"{shape}", given)
    rows = sorted_indices.to(torch.int32).view(tokens, k)
    return MOE_UNPERMUTE(permuted_tokens, rows, probs, False)  # type: ignore[no-any-return]


npu_fused_moe_token_unpermute = npu_moe_token_unpermute
