"""Rows of the fullest rank by recorded routing, in place of the expectation of even routing.

    load = RecordedLoad(layer, place)        # a layer of a RecordedRouting
    load(sizes)                              # in place of uniform(sizes)
    load.without(sizes, 3)                   # with three hot experts

Every rank is taken to have tokens like all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed.moe.hot_experts import choose
from mindspeed.moe.load.placement import PlacementTask, in_order, search
from mindspeed.moe.load.routing import LayerRouting
from mindspeed.moe.sizes import Load, Sizes


@dataclass(frozen=True)
class RecordedLoad:
    """The load of the fullest rank.

    Attributes:
        layer: its recorded routing.
        placed: experts are where a search has put them, else in their order.
    """

    layer: LayerRouting
    placed: bool = False

    def place(self, sizes: Sizes) -> Sequence[int]:
        """The rank of each expert."""
        question = PlacementTask(self.layer.tokens, sizes.ep)
        return (search(question) if self.placed else in_order(question)).place

    def __call__(self, sizes: Sizes, hot: Sequence[int] = ()) -> Load:
        """The load of the fullest rank.

        Args:
            sizes: of the layer.
            hot: experts whose rows stay where they are.
        """
        place, tokens = self.place(sizes), self.layer.tokens
        each = sizes.tokens * sizes.topk / max(1, sum(tokens))
        rows = [0.0] * sizes.ep
        for expert, rank in enumerate(place):
            rows[rank] += 0 if expert in hot else tokens[expert] * each
        fullest = max(range(sizes.ep), key=lambda rank: rows[rank])
        distinct = self._distinct(sizes, place, hot)
        received = (rows[fullest],) * sizes.ep
        slices = (sum(received),) * sizes.etp
        here = (distinct[fullest],) * sizes.ep
        return Load(fullest, tuple(rows), received, tuple(distinct), here, slices)

    def _distinct(self, sizes: Sizes, place: Sequence[int], hot: Sequence[int]) -> list[float]:
        """Tokens of a rank that have an expert on each rank."""
        found = [0] * sizes.ep
        for _, chosen in self.layer.chosen:
            for rank in {place[expert] for expert in chosen if expert not in hot}:
                found[rank] += 1
        return [sizes.tokens * count / max(1, len(self.layer.chosen)) for count in found]

    def hot(self, sizes: Sizes, most: int) -> list[int]:
        """The hot experts that ``--balanced-moe-experts`` chooses, by number."""
        place = self.place(sizes)
        order = sorted(range(len(place)), key=lambda expert: (place[expert], expert))
        counts = torch.tensor([[self.layer.tokens[expert] for expert in order]] * sizes.ep)
        return sorted(order[slot] for slot in choose(counts, most))

    def own_rows(self, sizes: Sizes, hot: Sequence[int]) -> float:
        """Rows of a rank's own tokens for hot experts."""
        share = sum(self.layer.tokens[expert] for expert in hot) / max(1, sum(self.layer.tokens))
        return sizes.tokens * sizes.topk * share
