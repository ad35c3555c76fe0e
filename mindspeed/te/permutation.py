"""Sorting tokens by expert and back, the data movement of a mixture-of-experts layer.

A routing map ``[t, e]`` says which experts a token goes to. ``moe_permute`` writes one copy of the
token per chosen expert, sorted by expert and then by token; ``moe_unpermute`` sums the copies back,
weighted by ``merging_probs``. The map from rows to tokens (``row_id_map``) is ``[2, rows]``: token
index, and position of the pair in the flattened ``[t, e]`` map. With a ``num_out_tokens`` that is
larger than the number of pairs the tail is zero (map entry -1 is never stored: the tail has no
rows in the map); with a smaller one, rows beyond it are cut.

``moe_sort_chunks_by_index`` reorders whole chunks of rows (expert-major to rank-major).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _row_map(routing_map: torch.Tensor, num_out_tokens: int | None) -> torch.Tensor:
    """Return ``[2, rows]``: the token of each row, and its place in the flat routing map."""
    tokens, experts = routing_map.shape
    place = routing_map.bool().t().reshape(-1).nonzero().squeeze(1)
    if num_out_tokens is not None and num_out_tokens >= 0:
        place = place[:num_out_tokens]
    token, expert = place % tokens, place // tokens
    return torch.stack([token, token * experts + expert])


def _pad_rows(x: torch.Tensor, rows: int | None) -> torch.Tensor:
    if rows is None or rows <= x.shape[0]:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens sorted by expert and the row map for :func:`moe_unpermute`."""
    _check_map_type(map_type)
    rows = _row_map(routing_map, num_out_tokens)
    return _pad_rows(inp.index_select(0, rows[0]), num_out_tokens), rows


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like :func:`moe_permute`, and also return the probability of each row."""
    rows = _row_map(routing_map, num_out_tokens)
    row_probs = probs.reshape(-1).index_select(0, rows[1])
    tokens = inp.index_select(0, rows[0])
    return _pad_rows(tokens, num_out_tokens), _pad_rows(row_probs, num_out_tokens), rows


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows of each token; the sum runs in the wider of the two dtypes.

    Args:
        inp: ``[rows, h]`` expert outputs.
        row_id_map: Map returned by the permutation.
        merging_probs: ``[t, e]`` weight of each pair; None sums unweighted.
        restore_shape: ``[t, h]`` of the result; without it every row is its own token.
        map_type: Only ``"mask"``.
        probs: Old name of ``merging_probs``.
    """
    _check_map_type(map_type)
    merging_probs = probs if merging_probs is None else merging_probs
    rows = inp[: row_id_map.shape[1]]
    shape = tuple(restore_shape) if restore_shape is not None else tuple(inp.shape)
    if merging_probs is not None:
        weight = merging_probs.reshape(-1).index_select(0, row_id_map[1])
        rows = rows * weight.unsqueeze(-1)
    out = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
    return out.index_add(0, row_id_map[0], rows).to(inp.dtype)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor | Sequence[int], sorted_index: Any
) -> torch.Tensor:
    """Cut ``inp`` into chunks of ``split_sizes`` rows and order them by ``sorted_index``."""
    sizes, order = _as_list(split_sizes), _as_list(sorted_index)
    chunks = inp.split(sizes)
    return torch.cat([chunks[i] for i in order])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorder the chunks of ``inp`` and of the probabilities of its rows."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )


def _as_list(x: Any) -> list[int]:
    return list(x.reshape(-1).tolist()) if isinstance(x, torch.Tensor) else [int(i) for i in x]


def _check_map_type(map_type: str) -> None:
    if map_type != "mask":
        raise NotImplementedError(
            f"map_type {map_type!r}: only 'mask' is available (a boolean [tokens, experts] map)"
        )
