"""Layers of a model chunk that a flag with a number of layers means.

Megatron counts the first N layers of every model chunk. With virtual pipeline stages the layers of
a rank may be counted across its chunks instead:

    8 layers, 2 stages of 2 chunks: [0 1] [2 3] [4 5] [6 7]        the first 3 of every rank
    stage 0 has [0 1] and [4 5]: r = 0 2 and 1 3                   -> 0, 1, 4
    stage 1 has [2 3] and [6 7]                                    -> 2, 3, 6

Layer ``i`` of chunk ``c`` of ``v`` has the number ``r = i v + c``, so every chunk gets its share.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from mindspeed.memory.plan import ATTENTION_SUBLAYER, LAYER, MLP_SUBLAYER, ChunkPlan, SiteAction


@dataclass(frozen=True)
class ChunkLayers:
    """The layers of one model chunk.

    Attributes:
        decoder: Path and position (from 0) of the decoder's layers in the chunk.
        numbers: Path of every layer and its number (from 0) in the model; None: multi-token
            prediction.
        others: Paths of other layers: multi-token prediction.
        chunk: Number of the chunk among those of its rank, from 0.
        chunks: Model chunks of the rank.
        post_process: Whether the loss follows: the backward of the last layer begins at once.
        recomputed_mlps: ``recompute_num_layers`` of Megatron's config where it has no granularity.
    """

    decoder: Mapping[str, int]
    numbers: Mapping[str, int | None]
    others: tuple[str, ...] = ()
    chunk: int = 0
    chunks: int = 1
    post_process: bool = True
    recomputed_mlps: int = 0

    def first(
        self, number: int | None, *, after: int = 0, of_rank: bool = False
    ) -> tuple[str, ...]:
        """Paths of the first layers.

        Args:
            number: How many; None: all, those of multi-token prediction included.
            after: Start after this many.
            of_rank: Count over the chunks of the rank instead of in each.
        """
        scale, offset = (self.chunks, self.chunk) if of_rank else (1, 0)
        ranked = {path: i * scale + offset for path, i in self.decoder.items()}
        end = float("inf") if number is None else after + number
        found = tuple(path for path, r in ranked.items() if after <= r < end)
        return found + (self.others if number is None else ())


def swap_plan(
    sites: Mapping[str, Container[str]], layers: ChunkLayers, swapped: Sequence[str]
) -> ChunkPlan:
    """Sites of every layer in host memory, and MLPs of the first layers computed again.

    The last layer before the loss is kept: its copies would be fetched at once. While its backward
    runs, those of the layer before it come back. On all other chunks the last layer has to wait for
    the pipeline, and its copies have time.
    """
    plan = {
        layer: {site: SiteAction.OFFLOAD for site in swapped if site in known}
        for layer, known in sites.items()
    }
    if layers.post_process and plan:
        plan[list(plan)[-1]] = {LAYER: SiteAction.KEEP}
    for layer in layers.first(layers.recomputed_mlps, of_rank=True):
        plan[layer] = {**plan[layer], "mlp": SiteAction.RECOMPUTE}
    return ChunkPlan({layer: actions for layer, actions in plan.items() if actions})


def regions_of(sites: Container[str], level: int) -> tuple[str, ...]:
    """The sites of a layer that is recomputed: at level 2 its halves, else the layer."""
    halves = (ATTENTION_SUBLAYER, MLP_SUBLAYER)
    return halves if level == 2 and all(half in sites for half in halves) else (LAYER,)


def plan_of(
    layers: tuple[str, ...],
    sites: Callable[[str], tuple[str, ...]],
    action: SiteAction,
) -> ChunkPlan:
    """One action for the same sites of several layers."""
    return ChunkPlan({layer: dict.fromkeys(sites(layer), action) for layer in layers})
