"""Collectives that are started by the original's functions: ``(input, output, work)``.

    _, gathered, work = async_all_gather(x, group)
    ...                                              # computes meanwhile
    work.wait()

Without a communication stream of their own: an ``event`` or ``stream`` that the input depends on is
waited for on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.moe.collectives import AllToAll, GatherRows, SumRows

_Started = tuple[torch.Tensor, torch.Tensor, Any]


def async_all_gather(
    input_: torch.Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: Sequence[int] | None = None,
    event: Any = None,
    stream: Any = None,
    is_use_get_global_memory_buffer: bool = False,
) -> _Started:
    """Start to concatenate the rows of all ranks.

    Args:
        input_: ``[n, ...]``, any dtype.
        group: The P ranks.
        output_split_sizes: Rows of each rank; n of each when None.
        event: Waited for before the input is read.
        stream: Likewise.
        is_use_get_global_memory_buffer: Ignored: the output is memory of its own.
    """
    _wait(event, stream)
    sizes = output_split_sizes or [len(input_)] * group.size()
    return input_, *GatherRows(group, sizes).launch(input_)


def async_reduce_scatter(
    input_: torch.Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: Sequence[int] | None = None,
    event: Any = None,
    stream: Any = None,
    is_use_get_global_memory_buffer: bool = False,
) -> _Started:
    """Start to sum ``[P n, ...]`` over the ranks, of which each gets its rows.

    ``input_split_sizes`` are the rows of each rank; other arguments as in :func:`async_all_gather`.
    """
    _wait(event, stream)
    sizes = input_split_sizes or [len(input_) // group.size()] * group.size()
    return input_, *SumRows(group, sizes).launch(input_)


def async_all_to_all(
    input_: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    event: Any = None,
    stream: Any = None,
) -> _Started:
    """Start to send each rank its rows of ``[sum(input_split_sizes), ...]``; equal parts for None.

    Other arguments as in :func:`async_all_gather`.
    """
    _wait(event, stream)
    equal = [len(input_) // group.size()] * group.size()
    sent, received = input_split_sizes or equal, output_split_sizes or equal
    return input_, *AllToAll(group, sent, received).launch(input_)


def _wait(event: Any, stream: Any) -> None:
    if event is not None:
        event.wait()
    if stream is not None:
        device.current().current_stream().wait_stream(stream)
