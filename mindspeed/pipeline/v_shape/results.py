"""Losses are computed on the first rank and expected on the last one.

Megatron's training loop averages the losses, counts the tokens and logs on the last pipeline rank,
where its own schedules compute them. One message per step carries them there.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist


def move_results(results: Any, source: int, target: int, group: dist.ProcessGroup) -> Any:
    """Send an object from one rank of a group to another one, with the tensors in it.

    Args:
        results: any object that can be pickled; only that of ``source`` counts. Its tensors may
            have any shape and dtype.
        source: sends.
        target: receives.
        group: a process group; ranks other than these two do nothing.

    Returns:
        On ``target`` the object, its tensors on the same kind of device as before but that of this
        rank; elsewhere ``results``.
    """
    if source == target or group.rank() not in (source, target):
        return results
    if dist.get_backend(group) == "fake":  # a modelled step, whose losses nobody reads
        return results
    if group.rank() == source:
        buffer = io.BytesIO()
        packer = _Packer(buffer)
        packer.dump(results)
        dist.send_object_list([buffer.getvalue(), packer.found], group=group, group_dst=target)
        return results
    message: list[Any] = [None, None]
    dist.recv_object_list(message, group=group, group_src=source)
    content, found = message
    return _Unpacker(io.BytesIO(content), found).load()


class _Packer(pickle.Pickler):
    """Collects tensors on the host: a pickled one would name the device of the rank it is from."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.found: list[tuple[torch.Tensor, str]] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.found.append((value.detach().cpu(), value.device.type))
        return len(self.found) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[tuple[torch.Tensor, str]]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        tensor, kind = self._tensors[number]
        return tensor.to(kind)
