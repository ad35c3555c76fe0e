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
) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Hand rows on; collective over the group. Returns them and their shape.

    Args:
        rows: ``[b, s]`` tensors by name on rank 0 of the group, None on the others.
        names: Which of them the group needs.
        shape: ``(b, s)``, or None where only rank 0 knows it.
        group: The tensor-parallel group.
        device: Where they are wanted.
    """
    if shape is None:
        shape = _shape(None if rows is None else rows["tokens"].shape, group, device)
    if not names:
        return {}, shape
    if rows is not None:
        words = torch.stack([_words(rows[name]) for name in names]).to(device, non_blocking=True)
    else:
        words = torch.empty((len(names), *shape), dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(words, group=group, group_src=0)
    values = {name: _values(name, row) for name, row in zip(names, words.unbind(), strict=True)}
    return values, shape


def _shape(
    shape: Sequence[int] | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, int]:
    if group.size() > 1:
        known = torch.tensor(shape or (0, 0), device=device)
        dist.broadcast(known, group=group, group_src=0)
        shape = shape or known.tolist()
    assert shape is not None
    return shape[0], shape[1]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).to(torch.int64)


def _values(name: str, words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.float32) if name in _FLOATS else words


def without_tail(rows: Mapping[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Rows cut behind the last token that is trained in one of them.

    Behind it nothing is looked at by a causal model: losses and gradients stay the same.

    Args:
        rows: ``[b, s]`` tensors by name, with ``loss_mask``.
        multiple: The new length is one of this, or the old one.
    """
    size = rows["loss_mask"].shape[1]
    trained = torch.nonzero(rows["loss_mask"].amax(0)).flatten()
    needed = int(trained[-1]) + 1 if len(trained) else 1
    width = min(-(-needed // multiple) * multiple, size)
    return {
        name: x[:, :width] if x.dim() == 2 and x.shape[1] == size else x for name, x in rows.items()
    }
