"""Tokens to experts and back: the plain formulas of :mod:`mindspeed.te.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.spmd import Local, typed


def moe_permute(
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    num_out_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
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


def moe_permute_again(tokens: torch.Tensor, row_id_map: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the rows that :func:`moe_permute` has made of tokens, by the map that it returned.

    Args:
        tokens: ``[t, h]``, any dtype.
        row_id_map: Of :func:`moe_permute`.
        rows: Of its result.
    """
    return _pad_rows(tokens.index_select(0, row_id_map[0]), rows)


def _pad_rows(x: torch.Tensor, rows: int | None) -> torch.Tensor:
    if rows is None or rows <= x.shape[0]:
        return x
    return torch.cat([x, x.new_zeros(int(rows) - x.shape[0], *x.shape[1:])])


def moe_unpermute(
    permuted: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    restore_shape: Sequence[int],
) -> torch.Tensor:
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
    summed: torch.Tensor = _SumRows.apply(rows, row_id_map[0], tuple(restore_shape))
    return summed.to(permuted.dtype)


@typed(Local())
class _SumRows(torch.autograd.Function):
    """Rows added at their places; ``index_add`` of torch would keep them for its backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(shape).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


def moe_sort_chunks(
    tensors: Sequence[torch.Tensor], sizes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Split every tensor into chunks of ``sizes`` rows and concatenate them in ``order``.

    Args:
        tensors: ``[rows, ...]`` each.
        sizes: int ``[chunks]``, rows of each chunk.
        order: int ``[chunks]``, the chunk at each place of the result.
    """
    split = [x.split(sizes.tolist()) for x in tensors]
    return tuple(torch.cat([chunks[i] for i in order.tolist()]) for chunks in split)
