"""A micro-batch from the leader of a tensor-parallel group to all of it, in one broadcast.

Every tensor is ``[b, s]`` and travels as 8-byte words; fp32 keeps its bits. Bytes per micro-batch
and rank: ``8 * b * s`` for each tensor, and 16 for the shape where it varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

_FLOATS = {"loss_mask"}


def broadcast_rows(
    rows: Mapping[str, torch.Tensor] | None,
    names: Sequence[str],
    shape: tuple[int, int] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Hand rows on; collective over the group.

    Args:
        rows: ``[b, s]`` tensors by name on rank 0 of the group, None on the others.
        names: Which of them the group needs.
        shape: ``(b, s)``, or None where only rank 0 knows it.
        group: The tensor-parallel group.
        device: Where they are wanted.
    """
    if not names:
        return {}
    words = None
    if rows is not None:
        words = torch.stack([_words(rows[name]) for name in names]).to(device, non_blocking=True)
    if group.size() > 1:
        if words is None:
            known = _shape(None, group, device) if shape is None else shape
            words = torch.empty((len(names), *known), dtype=torch.int64, device=device)
        elif shape is None:
            _shape(tuple(words.shape[1:]), group, device)
        dist.broadcast(words, group=group, group_src=0)
    assert words is not None
    return {name: _values(name, row) for name, row in zip(names, words.unbind(), strict=True)}


def _shape(
    shape: tuple[int, ...] | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, ...]:
    known = torch.tensor(shape or (0, 0), device=device)
    dist.broadcast(known, group=group, group_src=0)
    return tuple(known.tolist())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).to(torch.int64)


def _values(name: str, words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.float32) if name in _FLOATS else words
