"""Micro-batches whose activations a pipeline stage holds at once, by chunk.

A stage runs ``w`` forward passes (the warm-up), then one forward and one backward pass in turn,
then the remaining backward passes. Megatron says ``w`` and in which order the chunks come; backward
passes visit them in the opposite order (:mod:`mindspeed.memory.megatron_in_flight`).

    2 stages, 2 chunks, 4 micro-batches, first stage:   w = 4
    forward   0 0 1 1 0   0   1   1
    backward            1   1   0   0   1 1 0 0
    held, after each forward pass from the fifth on: (3, 2) (4, 1) (4, 1) (3, 2)
"""

from __future__ import annotations

from collections.abc import Sequence

Held = tuple[int, ...]


def held_at_once(forward: Sequence[int], warm_up: int) -> frozenset[Held]:
    """How many micro-batches of each chunk are held at the fullest moments of a step.

    Args:
        forward: the chunk of each forward pass of the stage, in order.
        warm_up: forward passes before the first backward pass.

    Returns:
        A tuple of one count per chunk for each moment at which no other holds as much.
    """
    chunks = max(forward) + 1
    held, moments = [0] * chunks, set()
    backward = iter(forward)
    for index, chunk in enumerate(forward):
        held[chunk] += 1
        moments.add(tuple(held))
        if index >= warm_up:
            held[chunks - 1 - next(backward)] -= 1
    return frozenset(one for one in moments if not any(_less(one, other) for other in moments))


def most_held(moments: frozenset[Held]) -> Held:
    """The largest count of each chunk, whenever it is reached: the multiplicity of its layers."""
    return tuple(map(max, zip(*moments, strict=True)))


def _less(one: Held, other: Held) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
