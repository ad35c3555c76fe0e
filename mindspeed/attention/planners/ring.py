"""Ring attention: keys and values travel from neighbour to neighbour, past every rank's queries.

With ``window`` w (``--cp-window-size``) the P ranks are P / w windows of w neighbours, and there
are two rings: inside a window a chunk goes from place p to p + 1 at every step, and once a round,
from the start of that round, to the same place of the next window. P - 1 transfers as before, of
which P / w - 1 cross windows, each with a whole round to arrive. Rank (a, p) works in round j, step
i on the chunk of rank (a - j, p - i).

The backward pass walks back from the chunk that a rank held last, which it keeps. Gradients go with
the keys: one place back at every step, and one window and one place back between rounds, so that
each arrives at home last. Keys of a rank's own need no way home: P - 2 transfers of keys, P - 1 of
gradients.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Gu et al., "LoongTrain"
(2024) for the two rings. The equal causal work of every step is the zigzag layout's.
"""

from __future__ import annotations

from mindspeed.attention.layout import Layout
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import OWN, Move, Plan, Stage, kept, work_on
from mindspeed.errors import ConfigError


def ring(mask: Mask, layout: Layout, window: int = 1) -> Plan:
    """Plan ring attention, or double ring attention.

    Args:
        mask: Any.
        layout: Any; zigzag balances a causal mask.
        window: Neighbours in a window of the inner ring; 1 for a single ring.

    Raises:
        ConfigError: The window does not divide the ranks.
    """
    ranks = layout.ranks
    if window < 1 or (window > 1 and (window >= ranks or ranks % window)):
        raise ConfigError(f"--cp-window-size {window} must be in [1, {ranks}) and divide {ranks}")
    # A single ring is one window of all ranks: every transfer goes to the next place.
    rings = _Rings(layout, window if window > 1 else ranks)
    return Plan(
        "ring" if window == 1 else f"double ring {window}",
        mask,
        layout,
        tuple(rings.forward(mask, step) for step in range(ranks)),
        tuple(rings.backward(mask, step) for step in range(ranks)),
        kept=(ranks - 1,) if ranks > 1 else (),
    )


class _Rings:
    """Ranks as windows and places; steps as rounds and steps of a round."""

    def __init__(self, layout: Layout, window: int) -> None:
        self.layout, self.window, self.ranks = layout, window, layout.ranks
        self.rounds = self.ranks // window

    def at(self, rank: int, windows: int, places: int) -> int:
        """The rank some windows and places further on."""
        window, place = divmod(rank, self.window)
        return (window + windows) % self.rounds * self.window + (place + places) % self.window

    def forward(self, mask: Mask, step: int) -> Stage:
        turn, inner = divmod(step, self.window)
        chunks = [self.at(rank, -turn, -inner) for rank in range(self.ranks)]
        # Inside a round from the last step; between rounds from the start of the last round.
        before = step - 1 if inner else step - self.window
        moves = [
            Move(
                self.at(rank, 0 if inner else -1, -1 if inner else 0),
                rank,
                self.layout.segments[chunks[rank]],
                before if before else OWN,
            )
            for rank in range(self.ranks)
        ]
        return self.stage(mask, chunks, moves if step else [], before)

    def backward(self, mask: Mask, step: int) -> Stage:
        turn, inner = divmod(step, self.window)
        chunks = [self.at(rank, turn + 1, inner + 1) for rank in range(self.ranks)]
        before = step - 1 if inner else step - self.window
        last = step == self.ranks - 1
        moves = [
            Move(
                self.at(rank, 0 if inner else 1, 1 if inner else 0),
                rank,
                self.layout.segments[chunks[rank]],
                before if before else kept(self.ranks - 1),
            )
            for rank in range(self.ranks)
        ]
        home = 0 if inner + 1 < self.window else -1
        give = [
            Move(rank, self.at(rank, home, -1), self.layout.segments[chunks[rank]])
            for rank in range(self.ranks)
        ]
        arriving = moves if step and not last else []
        return self.stage(mask, chunks, arriving, before, [] if last else give)

    def stage(
        self,
        mask: Mask,
        chunks: list[int],
        moves: list[Move],
        posted: int,
        give: list[Move] | None = None,
    ) -> Stage:
        segments = self.layout.segments
        work = tuple(
            work_on(mask, segments[rank], segments[chunk]) for rank, chunk in enumerate(chunks)
        )
        return Stage(tuple(moves), work, tuple(give or ()), max(posted, 0))
