"""Broadcast a micro-batch from tensor-parallel rank 0 to its group, in one collective.

Every tensor is ``[b, s]`` and is sent as int64; fp32 keeps its bits. Bytes per micro-batch and
rank: ``8 * b * s`` for each tensor, and 16 for the shape where it varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

_FLOATS = {"loss_mask"}


def broadcast_batch(
    tensors: Mapping[str, torch.Tensor] | None,
    names: Sequence[str],
    shape: tuple[int, int] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Broadcast tensors by name. Collective over the group.

    Args:
        tensors: int64, fp32 (``loss_mask``) or bool ``[b, s]`` on rank 0 of the group, None on the
            others.
        names: Which of them the group needs.
        shape: ``(b, s)``, or None where only rank 0 knows it.
        group: The tensor-parallel group.
        device: Of the results.

    Returns:
        The tensors, int64 or fp32 ``[b, s]``, and ``(b, s)``.
    """
    if shape is None:
        shape = _shape(None if tensors is None else tensors["tokens"].shape, group, device)
    if not names:
        return {}, shape
    if tensors is not None:
        words = torch.stack([_words(tensors[name]) for name in names]).to(device, non_blocking=True)
    else:
        words = torch.empty((len(names), *shape), dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(words, group=group, group_src=0)
    values = {name: _values(name, word) for name, word in zip(names, words.unbind(), strict=True)}
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
