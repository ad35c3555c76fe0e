"""The scan of the gated delta rule over chunks: a program per document, head and tile of values.

A program walks over the chunks of its document, backwards for the gradient. The memory of a chunk
is written once and read back from the cache in blocks of rows, so that no tile is larger than 16
KiB; A is read once per tile of values. Products run on tensor cores as three of TF32, about as
exact as fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch

_VALUES, _ROWS = 32, 32


def scan(
    carry: Tensor, added: Tensor, state: Tensor | None, bounds: Sequence[int], reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the memory before each chunk, and behind each document.

    Args:
        carry: ``[chunks, n, d, d]``, fp32 like all others.
        added: ``[chunks, n, d, d_v]``.
        state: ``[documents, n, d, d_v]`` or None.
        bounds: first chunk of each document, and the number of chunks.
        reverse: from the last chunk to the first, with ``carry`` transposed.
    """
    _, heads, channels, values = added.shape
    documents = len(bounds) - 1
    states, last = torch.empty_like(added), added.new_empty(documents, *added.shape[1:])
    width = min(max(triton.next_power_of_2(values), 16), _VALUES)
    starts = torch.tensor(list(bounds), dtype=torch.int32).to(added.device, non_blocking=True)
    _launch.launch(
        _scan, (triton.cdiv(values, width), heads, documents), carry, added, state, starts, states,
        last, heads, channels, values, REVERSE=reverse, V=width, K=_ROWS,
        D=max(triton.next_power_of_2(channels), 16), num_warps=4, num_stages=2,
    )  # fmt: skip
    return states, last


@triton.jit
def _scan(
    carry_ptr, added_ptr, state_ptr, bounds_ptr, states_ptr, last_ptr, heads, channels, values,
    REVERSE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    head, document = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel, row = tl.arange(0, D), tl.arange(0, K)
    value = tl.program_id(0) * V + tl.arange(0, V)
    inside = (channel < channels)[:, None] & (value < values)[None, :]
    square = channel[:, None] * values + value[None, :]
    memory = tl.zeros([D, V], tl.float32)
    own = (document * heads + head) * channels * values + square
    if state_ptr is not None:
        memory += tl.load(state_ptr + own, mask=inside, other=0.0)
    first, end = tl.load(bounds_ptr + document), tl.load(bounds_ptr + document + 1)
    for step in range(0, end - first):
        chunk = end - 1 - step if REVERSE else first + step
        at = (chunk * heads + head) * channels
        tl.store(states_ptr + at * values + square, memory, mask=inside)
        tl.debug_barrier()  # the block's rows are read by other threads than wrote them
        memory = tl.load(added_ptr + at * values + square, mask=inside, other=0.0)
        for begin in range(0, channels, K):
            k = begin + row
            if REVERSE:
                place = k[None, :] * channels + channel[:, None]
            else:
                place = channel[:, None] * channels + k[None, :]
            both = (channel < channels)[:, None] & (k < channels)[None, :]
            a = tl.load(carry_ptr + at * channels + place, mask=both, other=0.0)
            before = tl.load(
                states_ptr + at * values + k[:, None] * values + value[None, :],
                mask=(k < channels)[:, None] & (value < values)[None, :], other=0.0,
            )  # fmt: skip
            memory = tl.dot(a, before, memory, input_precision="tf32x3")
    tl.store(last_ptr + own, memory, mask=inside)
