"""The order in which two halves run through a layer, as text.

                           forward               backward, from the last sublayer to the first
    all-reduce             aI a1 a2  bI b1 b2    bI' b2 b1  aI' a2 a1
    sequence parallelism   a1 bI a2  b1 aI' b2   b2 aI' b1  a2 bI a1

for each sublayer (attention, MLP) of half ``a`` and half ``b``:

    I   in: wait for what the sublayer before has sent; bias, dropout, residual, norm; start to
        gather (sequence parallelism). I' is that of the next sublayer.
    1   up to the input of the row-parallel layer
    2   the row-parallel layer, whose reduction starts

With all-reduces a half waits as late as it can in both directions: all of the other half's sublayer
hides its reduction. With sequence parallelism a half has two collectives, a reduce-scatter and a
gather, with its norm between them. So the norm runs in the middle of the other half's sublayer, and
each collective has a half of that to hide behind.

A text whose I' belong to the next sublayer lacks the first sublayer's I, one without them what is
after the last sublayer: :func:`before` and :func:`after`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

HALVES = 2
Kind = Literal["I", "1", "2"]


@dataclass(frozen=True)
class OrderStep:
    """One step of a text.

    Attributes:
        half: 0 or 1.
        kind: See the module.
        ahead: It belongs to the next sublayer.
    """

    half: int
    kind: Kind
    ahead: bool = False

    def __str__(self) -> str:
        return "ab"[self.half] + self.kind


Steps = tuple[OrderStep, ...]


class Order(NamedTuple):
    """The steps of a sublayer in both directions."""

    forward: Steps
    backward: Steps

    @classmethod
    def of(cls, forward: str, backward: str) -> Order:
        """Read two texts."""
        return cls(_steps(forward), _steps(backward))


def _steps(text: str) -> Steps:
    return tuple(
        OrderStep("ab".index(word[0]), word[1], word.endswith("'"))  # type: ignore[arg-type]
        for word in text.split()
    )


ALL_REDUCE = Order.of("aI a1 a2 bI b1 b2", "bI' b2 b1 aI' a2 a1")
SEQUENCE_PARALLEL = Order.of("a1 bI a2 b1 aI' b2", "b2 aI' b1 a2 bI a1")


def before(steps: Sequence[OrderStep]) -> list[OrderStep]:
    """What a text lacks before the first sublayer."""
    return [OrderStep(one.half, "I") for one in steps if one.kind == "I" and one.ahead]


def after(steps: Sequence[OrderStep]) -> list[OrderStep]:
    """What a text lacks after the last sublayer."""
    return [OrderStep(one.half, "I") for one in steps if one.kind == "I" and not one.ahead]
