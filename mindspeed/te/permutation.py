"""Sorting tokens by expert and back, the data movement of a mixture-of-experts layer.

A routing map ``[t, e]`` says which experts a token goes to. ``moe_permute`` writes one copy of the
token per chosen expert, sorted by expert and then by token; ``moe_unpermute`` sums the copies back,
weighted by ``merging_probs``. The format of ``row_id_map`` is private to the pair of kernels
(:mod:`mindspeed.te.kernels`). With a ``num_out_tokens`` larger than the number of copies the result
is padded with zeros; with a smaller one it is truncated.

``moe_sort_chunks_by_index`` reorders whole chunks of rows (expert-major to rank-major).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.te import kernels


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """Return the tokens sorted by expert and the row map for :func:`moe_unpermute`.

    Args:
        inp: ``[t, h]``, any floating dtype.
        routing_map: bool or int ``[t, e]``, true where a token goes to an expert.
        num_out_tokens: Rows of the result; None or negative: one per chosen expert.
        max_token_num: Without effect.
    """
    _check_map_type(map_type)
    tokens, _, row_id_map = kernels.moe_permute(inp, None, routing_map, num_out_tokens)
    return tokens, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`moe_permute`; also return ``[copies]`` probabilities, dtype of ``probs``."""
    tokens, row_probs, row_id_map = kernels.moe_permute(inp, probs, routing_map, num_out_tokens)
    assert row_probs is not None
    return tokens, row_probs, row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | Sequence[int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
) -> Tensor:
    """Sum the copies of each token; the sum runs in the wider of the two dtypes.

    Args:
        inp: ``[copies, h]`` expert outputs.
        merging_probs: ``[t, e]`` weight of each pair; None sums unweighted.
        restore_shape: ``[t, h]`` of the result; without it every copy is its own token.
        probs: Old name of ``merging_probs``.
    """
    _check_map_type(map_type)
    merging_probs = probs if merging_probs is None else merging_probs
    shape = tuple(inp.shape if restore_shape is None else restore_shape)
    return kernels.moe_unpermute(inp, row_id_map, merging_probs, shape)


def moe_sort_chunks_by_index(
    inp: Tensor, split_sizes: Tensor | Sequence[int], sorted_index: Any
) -> Tensor:
    """Split ``inp [rows, h]``, any dtype, into chunks of ``split_sizes`` rows, and reorder them.

    ``sorted_index`` is the chunk at each place of the result, int ``[chunks]``.
    """
    return kernels.moe_sort_chunks([inp], _flat(split_sizes), _flat(sorted_index))[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor | Sequence[int], sorted_index: Any
) -> tuple[Tensor, Tensor]:
    """Reorder the chunks of ``inp [rows, h]`` and of ``probs [rows]``; dtypes stay."""
    tokens, row_probs = kernels.moe_sort_chunks(
        [inp, probs], _flat(split_sizes), _flat(sorted_index)
    )
    return tokens, row_probs


def _flat(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int64).reshape(-1)


def _check_map_type(map_type: str) -> None:
    if map_type != "mask":
        raise NotImplementedError(
            f"map_type {map_type!r}: only 'mask' is available (a boolean [tokens, experts] map)"
        )
