"""Random numbers as arguments: a dropout op takes ``rng`` instead of drawing.

``reserve(x, count)`` takes a ``(seed, offset)`` pair for ``count`` numbers from the default
generator of ``x``'s device and returns it as an int64 tensor ``[2]`` on the CPU. An op that gets
the pair is a pure function: recomputation, a backward that regenerates the mask, CUDA graphs and
tests all see the same mask, and no mask is stored. Activation checkpointing restores the generator
before it recomputes (Megatron's RNG tracker swaps the generator's state), so the same pair is drawn
again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed.ops.registry import Operator, plain_torch


def reserve(x: Tensor, count: int) -> Tensor:
    """Return ``(seed, offset)`` for ``count`` random numbers on ``x``'s device.

    Args:
        x: any tensor on the device whose default generator is used.
        count: how many 32-bit numbers will be drawn.

    Returns:
        int64 ``[2]`` on the CPU.
    """
    return _RESERVE(x, count)


def draws(rng: Tensor, shape: torch.Size) -> Tensor:
    """The CPU's numbers of a pair: int16 ``[*shape]``, all 65,536 values equally likely.

    Args:
        rng: the pair of :func:`reserve`, int64 ``[2]``.
    """
    generator = torch.Generator().manual_seed(int(rng[0]) + int(rng[1]))
    count = math.prod(shape)
    # Four numbers from every draw of 64 bits: a sixth of the time of bernoulli_.
    drawn = torch.empty((count + 3) // 4, dtype=torch.int64)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[:count].view(shape)


def kept(numbers: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """1 where a number of :func:`draws` keeps an element and 0 where it drops it, elementwise.

    Args:
        numbers: int16.
        p: probability of dropping, met to 2^-17.
        dtype: of the result; a factor of the dtype of what it multiplies is much faster than a
            bool, which is converted first.
    """
    first_kept = min(round(p * 2**16) - 2**15, 2**15 - 1)
    return torch.ge(numbers, first_kept, out=numbers.new_empty(numbers.shape, dtype=dtype))


def _from_default_generator(x: Tensor, count: int) -> Tensor:
    seed = torch.randint(2**62, (1,), dtype=torch.int64)
    return torch.cat([seed, torch.zeros(1, dtype=torch.int64)])


def _from_device_generator(x: Tensor, count: int) -> Tensor:
    # Host only: reading and moving the offset does not synchronise with the device.
    generator = _default_generator(x)
    offset = generator.get_offset()
    generator.set_offset(offset + (count + 3) // 4 * 4)  # a multiple of 4 is required
    return torch.tensor([generator.initial_seed(), offset], dtype=torch.int64)


@contextlib.contextmanager
def default_generator_at(x: Tensor, rng: Tensor | None) -> Iterator[None]:
    """Let a kernel that draws from the default generator of ``x``'s device draw a pair's numbers.

    Args:
        x: a tensor on CUDA or NPU.
        rng: the pair of :func:`reserve`, int64 ``[2]``; None when nothing is drawn.
    """
    if rng is None:
        yield
        return
    generator = _default_generator(x)
    before = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(int(rng[0]))
    generator.set_offset(int(rng[1]))
    try:
        yield
    finally:
        generator.manual_seed(before[0])
        generator.set_offset(before[1])


def _default_generator(x: Tensor) -> torch.Generator:
    return getattr(torch, x.device.type).default_generators[x.device.index or 0]


def _fake(x: Tensor, count: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def _samples(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    return iter(())  # nothing to compare: every call returns another pair


_RESERVE = Operator(
    "reserve_philox(Tensor x, SymInt count) -> Tensor",
    reference=_from_default_generator,
    fake=_fake,
    cuda=[plain_torch(_from_device_generator)],
    npu=[plain_torch(_from_device_generator)],
    samples=_samples,
    tags=[torch.Tag.nondeterministic_seeded],
)
