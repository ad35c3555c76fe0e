"""Ring attention: keys and values are passed from neighbour to neighbour, through all ranks.

With ``window`` w (``--cp-window-size``) the P ranks form P / w windows of w neighbours, and there
are two rings (double ring): inside a window a chunk is sent from place p to p + 1 at every step; at
the start of every round it is sent to the same place of the next window, and has the whole round to
arrive. There are P - 1 transfers in either case, of which P / w - 1 cross windows. In round j, step
i, rank (a, p) computes with the chunk of rank (a - j, p - i).

The backward pass starts at the chunk that a rank held last, which is saved, and goes back. The
gradients are passed along with the keys: one place back at every step, one window and one place
back between rounds, so that the last transfer reaches the owner. A rank has its own keys anyway:
P - 2 transfers of keys and values, P - 1 of gradients.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Gu et al., "LoongTrain"
(2024) for the two rings. With zigzag sharding every step of a causal mask has equal work.
"""

from __future__ import annotations

from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import OWN, Plan, Stage, Transfer, saved_buffer, work_on
from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.errors import ConfigError


def ring(mask: Mask, sharding: SequenceSharding, window: int = 1) -> Plan:
    """Plan ring attention, or double ring attention.

    Args:
        mask: Any.
        sharding: Any; zigzag balances a causal mask.
        window: Ranks of an inner ring; 1 for a single ring.

    Raises:
        ConfigError: The window does not divide the ranks.
    """
    ranks = sharding.ranks
    if window < 1 or (window > 1 and (window >= ranks or ranks % window)):
        raise ConfigError(f"--cp-window-size {window} must be in [1, {ranks}) and divide {ranks}")
    # A single ring is one window of all ranks.
    rings = _Rings(sharding, window if window > 1 else ranks)
    return Plan(
        "ring" if window == 1 else f"double ring {window}",
        mask,
        sharding,
        tuple(rings.forward(mask, step) for step in range(ranks)),
        tuple(rings.backward(mask, step) for step in range(ranks)),
        saved_kv=(ranks - 1,) if ranks > 1 else (),
    )


class _Rings:
    """Ranks as windows and places; steps as rounds and steps of a round."""

    def __init__(self, sharding: SequenceSharding, window: int) -> None:
        self.sharding, self.window, self.ranks = sharding, window, sharding.ranks
        self.rounds = self.ranks // window

    def at(self, rank: int, windows: int, places: int) -> int:
        """The rank that many windows and places ahead."""
        window, place = divmod(rank, self.window)
        return (window + windows) % self.rounds * self.window + (place + places) % self.window

    def forward(self, mask: Mask, step: int) -> Stage:
        turn, inner = divmod(step, self.window)
        chunks = [self.at(rank, -turn, -inner) for rank in range(self.ranks)]
        # Inside a round, sent at the last step; between rounds, at the start of the last round.
        before = step - 1 if inner else step - self.window
        transfers = [
            Transfer(
                self.at(rank, 0 if inner else -1, -1 if inner else 0),
                rank,
                self.sharding.segments[chunks[rank]],
                before if before else OWN,
            )
            for rank in range(self.ranks)
        ]
        return self.stage(mask, chunks, transfers if step else [], before)

    def backward(self, mask: Mask, step: int) -> Stage:
        turn, inner = divmod(step, self.window)
        chunks = [self.at(rank, turn + 1, inner + 1) for rank in range(self.ranks)]
        before = step - 1 if inner else step - self.window
        last = step == self.ranks - 1
        transfers = [
            Transfer(
                self.at(rank, 0 if inner else 1, 1 if inner else 0),
                rank,
                self.sharding.segments[chunks[rank]],
                before if before else saved_buffer(self.ranks - 1),
            )
            for rank in range(self.ranks)
        ]
        windows = 0 if inner + 1 < self.window else -1
        dkv = [
            Transfer(rank, self.at(rank, windows, -1), self.sharding.segments[chunks[rank]])
            for rank in range(self.ranks)
        ]
        arriving = transfers if step and not last else []
        return self.stage(mask, chunks, arriving, before, [] if last else dkv)

    def stage(
        self,
        mask: Mask,
        chunks: list[int],
        transfers: list[Transfer],
        posted: int,
        dkv: list[Transfer] | None = None,
    ) -> Stage:
        segments = self.sharding.segments
        work = tuple(
            work_on(mask, segments[rank], segments[chunk]) for rank, chunk in enumerate(chunks)
        )
        return Stage(tuple(transfers), work, tuple(dkv or ()), max(posted, 0))
