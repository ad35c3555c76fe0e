"""Plans as users write them: actions of sites for ranges or numbers of layers.

    all:  {input_layernorm: recompute_output, pre_mlp_layernorm: recompute_output}
    0-3:  {self_attention: offload, mlp: recompute}
    mtp:  {layer: recompute}

Layers are numbered from 0 over the whole model, whatever the pipeline stages; ``mtp`` are those of
multi-token prediction. A later entry wins over an earlier one for the same site.

Where a flag has a number of layers, Megatron counts the first N layers of every model chunk. With
virtual pipeline stages the layers of a rank may be counted across its chunks instead:

    8 layers, 2 stages of 2 chunks: [0 1] [2 3] [4 5] [6 7]        the first 3 of every rank
    stage 0 has [0 1] and [4 5]: r = 0 2 and 1 3                   -> 0, 1, 4
    stage 1 has [2 3] and [6 7]                                    -> 2, 3, 6

Layer ``i`` of chunk ``c`` of ``v`` has the number ``r = i v + c``, so every chunk gets its share.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.memory.plan import (
    ATTENTION_SUBLAYER,
    LAYER,
    MLP_SUBLAYER,
    ChunkPlan,
    LayerPlan,
    SiteAction,
    layer_plan,
)


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


ALL, MTP = "all", "mtp"


@dataclass(frozen=True)
class LayerRule:
    """Actions for some layers.

    Attributes:
        selector: As it was written.
        numbers: The layers; None: all, those of multi-token prediction included.
        mtp: The layers of multi-token prediction.
        sites: Their actions.
    """

    selector: str
    numbers: frozenset[int] | None
    mtp: bool
    sites: LayerPlan

    def selects(self, number: int | None) -> bool:
        """Whether the rule is for a layer, by its number; None: one of multi-token prediction."""
        if self.numbers is None:
            return True
        return self.mtp if number is None else number in self.numbers


def rules_of(value: Any) -> tuple[LayerRule, ...]:
    """The rules of a file's content.

    Raises:
        ValueError: What it holds is no plan; says where.
    """
    if not isinstance(value, dict) or not value:
        raise ValueError("a mapping of layers (all, mtp, 0-3) to {site: action} is needed")
    return tuple(_rule(str(selector), sites) for selector, sites in value.items())


def largest(rules: tuple[LayerRule, ...]) -> int:
    """The largest number of a layer that a rule names; -1 if none does."""
    return max((max(rule.numbers) for rule in rules if rule.numbers), default=-1)


def plan_for(rules: tuple[LayerRule, ...], layers: Mapping[str, int | None]) -> ChunkPlan:
    """The plan of a model chunk.

    Args:
        rules: In the order of the file.
        layers: Path of each layer of the chunk -> its number; None: multi-token prediction.
    """
    found: dict[str, LayerPlan] = {}
    for path, number in layers.items():
        sites: dict[str, Any] = {}
        for rule in rules:
            sites |= rule.sites if rule.selects(number) else {}
        if sites:
            found[path] = sites
    return ChunkPlan(found)


def _rule(selector: str, sites: Any) -> LayerRule:
    actions = layer_plan(sites, f"layers {selector}")
    if selector == ALL:
        return LayerRule(selector, None, True, actions)
    if selector == MTP:
        return LayerRule(selector, frozenset(), True, actions)
    numbers: set[int] = set()
    for part in selector.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"layers {selector!r}: write all, mtp, or numbers such as 0-3,7")
        end = int(last) if dash else int(first)
        if end < int(first) or end > 100_000:
            raise ValueError(f"layers {selector!r}: {part.strip()} is no range of layers")
        numbers |= set(range(int(first), end + 1))
    return LayerRule(selector, frozenset(numbers), False, actions)
