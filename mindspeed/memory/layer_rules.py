"""Plans as users write them: actions of sites for ranges of layers.

    all:  {input_layernorm: recompute_output, pre_mlp_layernorm: recompute_output}
    0-3:  {self_attention: offload, mlp: recompute}
    mtp:  {layer: recompute}

Layers are numbered from 0 over the whole model, whatever the pipeline stages; ``mtp`` are those of
multi-token prediction. A later entry wins over an earlier one for the same site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.memory.plan import ChunkPlan, LayerPlan, layer_plan

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
