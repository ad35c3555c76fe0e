"""``npu_moe_token_permute``: copies of tokens, sorted by expert.

The way back is :mod:`mindspeed.ops.npu_moe_token_unpermute`; the operators behind both, and what
they move, are in :mod:`mindspeed.ops.moe_permutation`.
"""

from __future__ import annotations

import torch

from mindspeed.ops._check import FLOATS, Check
from mindspeed.ops.moe_permutation import MOE_PERMUTE

__all__ = ["npu_fused_moe_token_permute", "npu_moe_token_permute"]

_check = Check("npu_moe_token_permute")


def npu_moe_token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
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
