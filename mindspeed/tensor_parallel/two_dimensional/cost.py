"""Bytes that a rank sends for the linear layers of a transformer layer, in one and two dimensions.

In units of s b e / p bytes (s tokens, b samples, e bytes of an element, p tensor-parallel ranks),
with q, o, f1, f2 the output width of qkv, the input width of proj, the output width of fc1 (both
halves where gated) and the input width of fc2, as measured on the layers (tests/tensor_parallel):

    forward     1D    4 h (p-1)                      2D    4 h (X-1) + (q + o + f1 + f2) (Y-1)
    backward    1D    6 h (p-1)                      2D    6 h (X-1) + (q + 2 o + f1 + 2 f2) (Y-1)

1D is sequence parallelism, which gathers inputs again in the backward pass, too. Two dimensions
send less in the forward pass where X > (q + o + f1 + f2) / 4 h, about 3 for models of today. Ring
attention over y sends keys and values in addition, which 1D does not: 2 (Y-1) h_kv forward, and
(4 Y - 6) h_kv with their gradients backward, which begins with the keys that arrived last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Widths:
    """Widths of the linear layers of a whole transformer layer.

    Attributes:
        hidden: Hidden size h.
        qkv: Output of the qkv projection, q.
        proj: Input of the output projection, o.
        fc1: Output of the first layer of the MLP, f1; both halves where it is gated.
        fc2: Input of the second layer of the MLP, f2.
    """

    hidden: int
    qkv: int
    proj: int
    fc1: int
    fc2: int

    @property
    def key_value(self) -> int:
        """Width of the keys, and of the values."""
        return (self.qkv - self.proj) // 2


@dataclass(frozen=True)
class GridTraffic:
    """Traffic of a rank on a grid; forward, backward and attention in units of s b e / p bytes."""

    x: int
    y: int
    forward: int
    backward: int
    ring: int

    @property
    def total(self) -> int:
        """Linear layers and ring attention over y."""
        return self.forward + self.backward + self.ring


def one_dimensional(widths: Widths, ranks: int) -> GridTraffic:
    """Sequence parallelism over p ranks: X = p, and nothing to exchange over y."""
    return two_dimensional(widths, ranks, 1)


def two_dimensional(widths: Widths, x: int, y: int) -> GridTraffic:
    """The grid of X x Y ranks."""
    w = widths
    return GridTraffic(
        x,
        y,
        forward=4 * w.hidden * (x - 1) + (w.qkv + w.proj + w.fc1 + w.fc2) * (y - 1),
        backward=6 * w.hidden * (x - 1) + (w.qkv + 2 * w.proj + w.fc1 + 2 * w.fc2) * (y - 1),
        ring=(6 * y - 8) * w.key_value if y > 1 else 0,
    )


def grids(widths: Widths, ranks: int) -> Iterator[GridTraffic]:
    """All grids of p ranks with X and Y > 1, large X first."""
    for y in range(2, ranks // 2 + 1):
        if ranks % y == 0:
            yield two_dimensional(widths, ranks // y, y)


def best_tp_2d(widths: Widths, ranks: int) -> GridTraffic | None:
    """The grid that sends least; None where one dimension does, or where there is no grid."""
    plain = one_dimensional(widths, ranks)
    return min(
        (cost for cost in grids(widths, ranks) if cost.total < plain.total),
        key=lambda cost: cost.total,
        default=None,
    )


def table(widths: Widths, ranks: int) -> str:
    """Every grid of p ranks against one dimension, as text."""
    plain = one_dimensional(widths, ranks)
    head = ("tp_x x tp_y", "forward", "backward", "with ring attention")
    return "\n".join("  ".join(f"{cell:>11}" for cell in row) for row in _rows(head, plain, widths))


def _rows(head: tuple[str, ...], plain: GridTraffic, widths: Widths) -> Iterable[tuple[str, ...]]:
    yield head
    for cost in (plain, *grids(widths, plain.x)):
        ratios = (
            cost.forward / plain.forward,
            cost.backward / plain.backward,
            cost.total / plain.total,
        )
        yield (f"{cost.x} x {cost.y}", *(f"{ratio:.3f}" for ratio in ratios))
