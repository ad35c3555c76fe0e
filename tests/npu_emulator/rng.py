"""Random numbers of the emulated NPU: CPU generators seeded by the state of NPU generators.

An NPU generator is a seed and an offset. Each random operator takes both, moves the offset on, and
draws from a CPU generator seeded with the pair. So ``torch.npu.manual_seed``, states that are saved
and restored, and generators passed to an operator mean what they mean on the device, although the
numbers are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

OFFSET_STEP = 4  # offsets of Philox generators are multiples of four


def reserve(generator: torch.Generator | None = None) -> tuple[int, int]:
    """The (seed, offset) of the next random operator; default: the current device's generator."""
    if generator is None:
        generator = torch.npu.default_generators[torch.npu.current_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + OFFSET_STEP)
    return seed, offset


def cpu_generator(seed: int, offset: int) -> torch.Generator:
    """The same numbers for the same pair."""
    return torch.Generator().manual_seed(hash((seed, offset)) & (2**63 - 1))


@contextlib.contextmanager
def as_default(generator: torch.Generator) -> Iterator[None]:
    """Operators that take no generator, too, draw from `generator`."""
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
