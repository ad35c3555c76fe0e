"""The data movement of :mod:`mindspeed.te.permutation` by one operator in each direction.

The host is not synchronised, unless the number of rows is not given. Sums run in fp32
without a copy of the rows in fp32. The row map is ``[2, t, e]``, see
:func:`mindspeed.ops.moe_permutation.map_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed.ops.moe_permutation import MOE_PERMUTE, MOE_UNPERMUTE, chunk_rows, map_rows, pack


def permute(
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    num_out_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Sort tokens by expert; see :func:`mindspeed.te.kernels.moe_permute`.

    Args:
        tokens: ``[t, h]``, floating dtype.
        probs: ``[t, e]``, floating dtype, or None.
        routing_map: ``[t, e]``, true where a token goes to an expert.
        num_out_tokens: Rows of the result; None or negative: one per (token, expert) pair.

    Returns:
        Tokens ``[rows, h]``, probabilities ``[rows]`` or None, and the row map, int32
        ``[2, t, e]``.
    """
    row_id_map = map_rows(routing_map)
    rows = -1 if num_out_tokens is None else int(num_out_tokens)
    if rows < 0:
        rows = int(routing_map.sum())
    permuted = MOE_PERMUTE(tokens, row_id_map[0], rows, True)
    if probs is not None:
        one_each = row_id_map[1].reshape(-1, 1)
        probs = MOE_PERMUTE(probs.reshape(-1, 1), one_each, rows, True).squeeze(1)
    return permuted, probs, row_id_map


def permute_again(tokens: torch.Tensor, row_id_map: torch.Tensor, rows: int) -> torch.Tensor:
    """Sort by an earlier map; see :func:`mindspeed.te.kernels.moe_permute_again`.

    Args:
        tokens: ``[t, h]``, floating dtype.
        row_id_map: int32 ``[2, t, e]``, of :func:`permute`.
        rows: Rows of the result.

    Returns:
        ``[rows, h]``.
    """
    return MOE_PERMUTE(tokens, row_id_map[0], rows, True)  # type: ignore[no-any-return]


def unpermute(
    permuted: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    restore_shape: Sequence[int],
) -> torch.Tensor:
    """Sum the copies of each token; see :func:`mindspeed.te.kernels.moe_unpermute`.

    Args:
        permuted: ``[rows, h]``, floating dtype.
        row_id_map: int32 ``[2, t, e]``, of :func:`permute`.
        merging_probs: ``[t, e]``, floating dtype; None sums unweighted.
        restore_shape: ``[t, h]``; follows from the row map, not read.

    Returns:
        ``[t, h]`` in the dtype of ``permuted``.
    """
    packed, by_expert = row_id_map
    weights = None if merging_probs is None else pack(merging_probs, by_expert, 0.0)
    return MOE_UNPERMUTE(permuted, packed, weights, True)  # type: ignore[no-any-return]


def sort_chunks(
    tensors: Sequence[torch.Tensor], sizes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Reorder chunks of rows; see :func:`mindspeed.te.kernels.moe_sort_chunks`.

    Args:
        tensors: ``[rows, ...]`` each, floating dtypes.
        sizes: int64 ``[chunks]``, rows of each chunk.
        order: int64 ``[chunks]``, the chunk at each place of the result.

    Returns:
        Tensors with the shapes and dtypes of ``tensors``.
    """
    device, count = tensors[0].device, tensors[0].shape[0]
    # The host does not wait for the device.
    rows = chunk_rows(
        sizes.to(device, non_blocking=True), order.to(device, non_blocking=True), count
    )
    return tuple(
        # Not reshape(count, -1): without rows the size of a row would be ambiguous.
        MOE_PERMUTE(x.unsqueeze(-1).flatten(1), rows, count, False).view(x.shape)
        for x in tensors
    )
