"""Copies of tokens, sorted by expert, and back: the weighted sum of each token's copies.

The operators behind both, and what they move, are in :mod:`mindspeed.ops.moe_permutation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops.moe_permutation import MOE_PERMUTE, MOE_UNPERMUTE

__all__ = [
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
]

_check = ArgumentCheck("npu_moe_token_permute")


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy each token once per expert and sort the copies by expert, then by token.

    Args:
        tokens: ``[T, H]``, fp32, bf16 or fp16.
        indices: experts of each token, ``[T, k]`` or ``[T]``, int64 or int32.
        num_out_tokens: rows to keep; the rest is dropped. None and 0 keep all, a negative number
            drops that many.
        padded_mode: only False.

    Returns:
        ``(permuted, sorted_indices)``: the sorted copies, ``[rows, H]``, and the int32 row of each
        copy in the order of ``indices.flatten()``, ``[T * k]``.

    Raises:
        OperatorError: wrong dtype, shape, device or number of rows.
        NotImplementedError: padded_mode.
    """
    if padded_mode:
        raise NotImplementedError("mindspeed.ops.npu_moe_token_permute: padded_mode: only False")
    _check.dtype(FLOATS, tokens=tokens)
    _check.dtype((torch.int64, torch.int32), indices=indices)
    _check.same("device", tokens=tokens, indices=indices)
    _check.rank(2, tokens=tokens)
    _check.rank(1, 2, indices=indices)
    _check.require(
        indices.shape[0] == tokens.shape[0],
        "indices", f"a row for each of the {tokens.shape[0]} tokens", tuple(indices.shape),
    )  # fmt: skip
    copies = indices.numel()
    _check.integer(num_out_tokens=num_out_tokens or 0)
    wanted = num_out_tokens or copies
    rows = wanted if wanted > 0 else copies + wanted
    _check.require(
        0 <= rows <= copies, "num_out_tokens", f"at most the {copies} copies", num_out_tokens
    )
    # Where each copy goes: the inverse of the order that sorts them.
    order = indices.flatten().argsort(stable=True)
    place = torch.arange(copies, dtype=torch.int32, device=order.device)
    sorted_indices = torch.empty_like(place).scatter_(0, order, place)
    shape = (tokens.shape[0], indices.shape[1] if indices.dim() == 2 else 1)
    return MOE_PERMUTE(tokens, sorted_indices.view(shape), rows, False), sorted_indices


npu_fused_moe_token_permute = npu_moe_token_permute


_check_unpermute = ArgumentCheck("npu_moe_token_unpermute")


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
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
    _check_unpermute.dtype(FLOATS, permuted_tokens=permuted_tokens)
    _check_unpermute.dtype((torch.int32, torch.int64), sorted_indices=sorted_indices)
    _check_unpermute.same("device", permuted_tokens=permuted_tokens, sorted_indices=sorted_indices)
    _check_unpermute.rank(2, permuted_tokens=permuted_tokens)
    _check_unpermute.rank(1, sorted_indices=sorted_indices)
    copies = sorted_indices.numel()
    _check_unpermute.require(
        permuted_tokens.shape[0] <= copies,
        "permuted_tokens", f"at most {copies} rows, one per copy", tuple(permuted_tokens.shape),
    )  # fmt: skip
    k = 1
    if probs is not None:
        _check_unpermute.dtype((permuted_tokens.dtype, torch.float32), probs=probs)
        _check_unpermute.same("device", permuted_tokens=permuted_tokens, probs=probs)
        _check_unpermute.rank(2, probs=probs)
        _check_unpermute.require(
            probs.numel() == copies, "probs", f"a weight for each of {copies} copies", probs.shape
        )
        k = probs.shape[1]
    tokens = copies // max(k, 1)
    if restore_shape is not None:
        shape = (tokens, permuted_tokens.shape[1])
        given = tuple(restore_shape) if isinstance(restore_shape, (list, tuple)) else restore_shape
        _check_unpermute.require(given == shape, "restore_shape", f"{shape}", given)
    rows = sorted_indices.to(torch.int32).view(tokens, k)
    return MOE_UNPERMUTE(permuted_tokens, rows, probs, False)  # type: ignore[no-any-return]


npu_fused_moe_token_unpermute = npu_moe_token_unpermute
